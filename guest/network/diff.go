package network

import (
	"fmt"
	"maps"
	"slices"

	"klimax/guest/facts"
	"klimax/shared/api"
)

// Change is the difference between what is wanted and what is there.
type Change struct {
	// Rebuild: the own table is missing or not as it must be, it is made anew as a whole.
	Rebuild bool
	// Sets whose elements differ.
	Sets []string
	// Chains whose rules differ.
	Chains []Chain
	// Missing and Extra count rules, for people.
	Missing, Extra int
	// IPForward has to be switched on.
	IPForward bool

	want Ruleset
	have State
	head map[Chain]bool // chains of others in which ours must be the first
}

// Empty reports whether nothing has to be done.
func (c Change) Empty() bool {
	return !c.Rebuild && !c.IPForward && len(c.Sets) == 0 && len(c.Chains) == 0
}

// String says in a few words what differs.
func (c Change) String() string {
	if c.Empty() {
		return "nothing"
	}
	var parts []string
	if c.IPForward {
		parts = append(parts, "ip_forward is off")
	}
	if c.Rebuild {
		parts = append(parts, "table "+TableName+" is missing")
		if c.have.Leftover {
			parts[len(parts)-1] = "table " + TableName + " is damaged"
		}
	}
	for _, s := range c.Sets {
		parts = append(parts, "set "+s+" differs")
	}
	for _, ch := range c.Chains {
		parts = append(parts, "rules in "+string(ch)+" differ")
	}
	if c.Missing > 0 {
		parts = append(parts, fmt.Sprintf("%d rules missing", c.Missing))
	}
	if c.Extra > 0 {
		parts = append(parts, fmt.Sprintf("%d rules too many", c.Extra))
	}
	out := parts[0]
	for _, p := range parts[1:] {
		out += ", " + p
	}
	return out
}

// Diff compares. It is pure.
func Diff(want Ruleset, have State, f facts.Facts) Change {
	c := Change{Rebuild: !have.Table, IPForward: want.IPForward && !f.IPForward, want: want, have: have, head: map[Chain]bool{}}
	if !c.Rebuild {
		for _, name := range slices.Sorted(maps.Keys(want.Sets)) {
			if !slices.Equal(want.Sets[name], have.Sets[name]) {
				c.Sets = append(c.Sets, name)
			}
		}
	}
	for _, ch := range slices.Sorted(maps.Keys(ownChains())) {
		c.count(want.Rules[ch], have.Rules[ch])
		if !c.Rebuild && !sameRules(want.Rules[ch], have.Rules[ch]) {
			c.Chains = append(c.Chains, ch)
		}
	}
	for _, ch := range sharedChains {
		rules, exists := have.Rules[ch]
		if !exists {
			continue
		}
		ours := slices.DeleteFunc(slices.Clone(rules), func(p Placed) bool { return !p.Ours })
		c.count(want.Rules[ch], ours)
		c.head[ch] = headOnly(ch, f)
		if !sameRules(want.Rules[ch], ours) || !wellPlaced(rules, len(want.Rules[ch]), c.head[ch]) {
			c.Chains = append(c.Chains, ch)
		}
	}
	return c
}

func (c *Change) count(want []Rule, have []Placed) {
	left := slices.Clone(have)
	for _, w := range want {
		i := slices.IndexFunc(left, func(p Placed) bool { return p.Exact && p.Rule == w })
		if i < 0 {
			c.Missing++
			continue
		}
		left = slices.Delete(left, i, i+1)
	}
	c.Extra += len(left)
}

func sameRules(want []Rule, have []Placed) bool {
	return slices.EqualFunc(want, have, func(w Rule, p Placed) bool { return p.Exact && p.Ours && p.Rule == w })
}

// wellPlaced: ours come first where they must; elsewhere they come before the
// first rule of others that ends the chain for everything.
func wellPlaced(rules []Placed, n int, head bool) bool {
	if n == 0 {
		return true
	}
	seen := 0
	for _, p := range rules {
		switch {
		case p.Ours:
			if seen++; seen == n {
				return true
			}
		case head || p.terminal:
			return false
		}
	}
	return false
}

// Summary tells per purpose how many rules are wanted and present and what
// they matched, in the order of the API's list.
func Summary(want Ruleset, have State, f facts.Facts) []api.Rule {
	order := []api.RuleID{
		api.RuleIPForward, api.RuleSNATExempt, api.RuleGuardLocal, api.RuleGuardAllow, api.RuleGuard, api.RuleGuardAPI,
		api.RuleGuardMirrors, api.RuleDirectMark, api.RuleRawAccept, api.RuleForwardAccept, api.RuleForwardReturn,
	}
	sum := map[api.RuleID]*api.Rule{}
	get := func(id api.RuleID) *api.Rule {
		if sum[id] == nil {
			sum[id] = &api.Rule{ID: id}
		}
		return sum[id]
	}
	fw := get(api.RuleIPForward)
	fw.Wanted = 1
	if f.IPForward {
		fw.Present = 1
	}
	for _, r := range want.All() {
		s := get(r.ID)
		n, packets := have.Count(r)
		s.Wanted++
		s.Present += n
		s.Packets += packets
	}
	var out []api.Rule
	for _, id := range order {
		if s := sum[id]; s != nil {
			out = append(out, *s)
		}
	}
	return out
}
