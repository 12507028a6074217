package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"klimax/guest/facts"
	"klimax/shared/api"
)

// Placed is a rule as it stands in a chain.
type Placed struct {
	ID      api.RuleID // of ours; empty for rules of others
	Ours    bool
	Rule    Rule // what was understood of it
	Exact   bool // Rule is all of it
	Packets uint64
	handle  uint64
	// final without conditions: nothing behind it is reached
	terminal bool
}

// State is what the kernel has, as far as klimax cares.
type State struct {
	// Table: the own table is there with its chains and sets as they must be.
	Table bool
	// Leftover: a table of that name is there, whatever it looks like.
	Leftover   bool
	Sets       map[string]Set
	Rules      map[Chain][]Placed // of own chains, and of those shared chains that exist
	generation uint32             // of the ruleset when reading began
}

// Count tells, for one rule that is wanted, how often it is there and what it
// has matched.
func (s State) Count(r Rule) (present int, packets uint64) {
	for _, p := range s.Rules[r.Chain] {
		if p.Ours && p.Exact && p.Rule == r {
			present++
			packets += p.Packets
		}
	}
	return min(present, 1), packets
}

func ownTable() *nftables.Table {
	return &nftables.Table{Name: TableName, Family: nftables.TableFamilyIPv4}
}

// baseChain is how an own base chain must look.
type baseChain struct {
	hook     *nftables.ChainHook
	priority nftables.ChainPriority
	kind     nftables.ChainType
}

func ownChains() map[Chain]baseChain {
	return map[Chain]baseChain{
		OwnPostrouting: {nftables.ChainHookPostrouting, priorityExempt, nftables.ChainTypeNAT},
		OwnGuard:       {nftables.ChainHookPrerouting, priorityGuard, nftables.ChainTypeFilter},
	}
}

func ownSets() map[string]*nftables.Set {
	addr := func(name string, interval bool) *nftables.Set {
		return &nftables.Set{Table: ownTable(), Name: name, KeyType: nftables.TypeIPAddr, Interval: interval}
	}
	return map[string]*nftables.Set{
		setAllow: addr(setAllow, true), setRanges: addr(setRanges, true),
		setNodes: addr(setNodes, true), setMirrors: addr(setMirrors, true),
		setAPIPorts: {Table: ownTable(), Name: setAPIPorts, KeyType: nftables.TypeInetService, Interval: true},
	}
}

// attempts bounds how often the ruleset is read again because others changed
// it meanwhile.
const attempts = 8

// Current reads the own table and the shared chains of the current network
// namespace, and what others have in the packet filters. bridge is the range
// whose drops matter.
func Current(ctx context.Context, bridge netip.Prefix) (State, facts.Firewall, error) {
	r, err := newReader(bridge)
	if err != nil {
		return State{}, facts.Firewall{}, fmt.Errorf("read nftables: %w", err)
	}
	defer r.close()
	for range attempts {
		if err = ctx.Err(); err != nil {
			break
		}
		var before, after uint32
		if before, err = generation(r.raw); err == nil {
			err = r.read()
			r.state.generation = before
		}
		if err == nil {
			after, err = generation(r.raw)
		}
		if err == nil && before == after {
			break
		}
	}
	if err != nil {
		return State{}, facts.Firewall{}, fmt.Errorf("read nftables: %w", err)
	}
	return r.state, r.fw, nil
}

type reader struct {
	conn   *nftables.Conn
	raw    *netlink.Conn // for what google/nftables cannot read
	bridge netip.Prefix
	state  State
	fw     facts.Firewall
}

func newReader(bridge netip.Prefix) (*reader, error) {
	raw, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, err
	}
	conn, err := nftables.New(nftables.AsLasting())
	if err != nil {
		_ = raw.Close()
		return nil, err
	}
	return &reader{conn: conn, raw: raw, bridge: bridge}, nil
}

func (r *reader) close() {
	_ = r.conn.CloseLasting()
	_ = r.raw.Close()
}

func (r *reader) read() error {
	r.state, r.fw = State{Sets: map[string]Set{}, Rules: map[Chain][]Placed{}}, facts.Firewall{}
	chains, err := r.conn.ListChains()
	if err != nil {
		return err
	}
	if err := r.readOwn(chains); err != nil {
		return err
	}
	for _, c := range chains {
		if err := r.readForeign(c); err != nil {
			return err
		}
	}
	r.fw.LegacyTables, r.fw.LegacyDocker, r.fw.LegacyForwardDrop, err = readLegacy()
	return err
}

func (r *reader) readOwn(chains []*nftables.Chain) error {
	t, err := r.conn.ListTableOfFamily(TableName, nftables.TableFamilyIPv4)
	if errors.Is(err, unix.ENOENT) || t == nil {
		return nil
	}
	if err != nil {
		return err
	}
	r.state.Leftover = true
	want, found := ownChains(), 0
	for _, c := range chains {
		if c.Table.Family != nftables.TableFamilyIPv4 || c.Table.Name != TableName {
			continue
		}
		name := Chain(TableName + "/" + c.Name)
		w, ok := want[name]
		if !ok || c.Hooknum == nil || *c.Hooknum != *w.hook || c.Priority == nil || *c.Priority != w.priority ||
			c.Type != w.kind || c.Policy == nil || *c.Policy != nftables.ChainPolicyAccept {
			return nil // not as it must be: it is made anew
		}
		found++
		if r.state.Rules[name], err = r.rules(c, name); err != nil {
			return err
		}
	}
	sets, err := r.conn.GetSets(ownTable())
	if err != nil {
		return err
	}
	wantSets, foundSets := ownSets(), 0
	for _, s := range sets {
		w, ok := wantSets[s.Name]
		if !ok || s.Interval != w.Interval || s.IsMap || s.KeyType.Name != w.KeyType.Name {
			return nil
		}
		foundSets++
		elems, err := r.conn.GetSetElements(s)
		if err != nil {
			return err
		}
		r.state.Sets[s.Name] = intervals(elems)
	}
	// Flags 1 is NFT_TABLE_F_DORMANT: the table is there and does nothing.
	r.state.Table = t.Flags&1 == 0 && found == len(want) && foundSets == len(wantSets)
	return nil
}

func (r *reader) rules(c *nftables.Chain, name Chain) ([]Placed, error) {
	rules, err := dumpRules(r.raw, c)
	if err != nil {
		return nil, err
	}
	out := make([]Placed, 0, len(rules))
	for _, rule := range rules {
		d := decode(rule.exprs)
		id, ours := decodeComment(rule.userData, rule.exprs)
		out = append(out, Placed{
			ID: id, Ours: ours, Exact: d.exact, Packets: d.packets, handle: rule.handle,
			Rule:     Rule{ID: id, Chain: name, Match: d.match, Verdict: d.verdict},
			terminal: d.final && !d.matches,
		})
		if !ours {
			r.note(name, d)
		}
	}
	return out, nil
}

// note draws facts from a rule of somebody else in a shared chain.
func (r *reader) note(name Chain, d decoded) {
	switch name {
	case FilterForward:
		r.fw.UserJump = r.fw.UserJump || d.jump == "DOCKER-USER" && !d.matches
		r.fw.DockerForward = r.fw.DockerForward || d.jump == "DOCKER-FORWARD" || d.jump == "DOCKER" || d.jump == "DOCKER-ISOLATION-STAGE-1"
	case RawPrerouting:
		r.fw.RawDrop = r.fw.RawDrop || d.drops && d.match.Dst.IsValid() && r.bridge.Overlaps(d.match.Dst)
	}
}

func (r *reader) readForeign(c *nftables.Chain) error {
	v4 := c.Table.Family == nftables.TableFamilyIPv4
	if v4 && c.Table.Name == TableName {
		return nil
	}
	name := Chain(c.Table.Name + "/" + c.Name)
	switch {
	case v4 && slices.Contains(sharedChains[:], name):
		var err error
		if r.state.Rules[name], err = r.rules(c, name); err != nil {
			return err
		}
		switch name {
		case FilterForward:
			r.fw.ForwardChain = true
			r.fw.ForwardDrop = c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop
		case DockerUser:
			r.fw.UserChain = true
		case RawPrerouting:
			r.fw.RawChain = true
		}
		return nil
	case v4 && c.Table.Name == "nat" && c.Name == "PREROUTING":
		return r.readDockerNAT(c)
	case v4 && c.Table.Name == dockerTable:
		return r.readDockerTable(c)
	case c.Hooknum != nil && *c.Hooknum == *nftables.ChainHookForward &&
		(v4 || c.Table.Family == nftables.TableFamilyINet):
		return r.readBlocker(c)
	}
	return nil
}

// readDockerNAT looks for the jump by which published ports reach Docker's
// chain: a flush of the table leaves the chain and takes the jump.
func (r *reader) readDockerNAT(c *nftables.Chain) error {
	rules, err := dumpRules(r.raw, c)
	for _, rule := range rules {
		r.fw.DockerNAT = r.fw.DockerNAT || decode(rule.exprs).jump == "DOCKER"
	}
	return err
}

// dockerTable is the table of engine 29's nftables backend for IPv4.
const dockerTable = "docker-bridges"

func (r *reader) readDockerTable(c *nftables.Chain) error {
	raw := false
	if c.Hooknum != nil {
		r.fw.DockerTable = true
		raw = *c.Hooknum == *nftables.ChainHookPrerouting && c.Type == nftables.ChainTypeFilter
	}
	// One chain per bridge decides on what goes into it, by the mark as well.
	if !raw && !strings.HasPrefix(c.Name, "filter-forward-in__") {
		return nil
	}
	rules, err := dumpRules(r.raw, c)
	if err != nil {
		return err
	}
	for _, rule := range rules {
		d := decode(rule.exprs)
		r.fw.DockerMark = r.fw.DockerMark || d.loadsMark
		r.fw.DockerRawDrop = r.fw.DockerRawDrop || raw && d.drops && d.match.Dst.IsValid() && r.bridge.Overlaps(d.match.Dst)
	}
	return nil
}

// maxBlockerRules bounds how much of somebody else's chain is looked at.
const maxBlockerRules = 2000

// readBlocker looks whether a base chain of others on the forward hook ends in
// a drop: by its policy, or by a last rule without conditions as firewalld has.
func (r *reader) readBlocker(c *nftables.Chain) error {
	family := "ip"
	if c.Table.Family == nftables.TableFamilyINet {
		family = "inet"
	}
	if c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop {
		r.fw.Blockers = append(r.fw.Blockers, facts.Blocker{Family: family, Table: c.Table.Name, Chain: c.Name, Why: "policy drop"})
		return nil
	}
	rules, err := dumpRules(r.raw, c)
	if err != nil || len(rules) == 0 || len(rules) > maxBlockerRules {
		return err
	}
	if d := decode(rules[len(rules)-1].exprs); d.drops && !d.matches {
		r.fw.Blockers = append(r.fw.Blockers, facts.Blocker{Family: family, Table: c.Table.Name, Chain: c.Name, Why: "ends in drop"})
	}
	return nil
}

// intervals turns set elements into sorted inclusive intervals. The kernel
// returns the two ends of each interval as elements of their own.
func intervals(elems []nftables.SetElement) Set {
	slices.SortStableFunc(elems, func(a, b nftables.SetElement) int {
		if x, y := key(a.Key), key(b.Key); x != y {
			if x < y {
				return -1
			}
			return 1
		}
		// an end and a start at the same value: the end comes first
		switch {
		case a.IntervalEnd && !b.IntervalEnd:
			return -1
		case b.IntervalEnd && !a.IntervalEnd:
			return 1
		}
		return 0
	})
	out := Set{}
	open := false
	for _, e := range elems {
		k := key(e.Key)
		if e.IntervalEnd {
			if open {
				out[len(out)-1].To = k - 1
			}
			open = false
			continue
		}
		if open { // a neighbour's start serves as an end as well
			out[len(out)-1].To = k - 1
		}
		top := uint32(1)<<(8*len(e.Key)&31) - 1 // largest key: an interval without an end reaches it
		if len(e.Key) == 4 {
			top = ^uint32(0)
		}
		out = append(out, Interval{k, top})
		open = true
	}
	return merge(out)
}

func key(b []byte) uint32 {
	var v uint32
	for _, x := range b {
		v = v<<8 | uint32(x)
	}
	return v
}

// elements is the inverse of intervals.
func elements(s Set, keyLen int) []nftables.SetElement {
	enc := func(v uint32) []byte {
		b := make([]byte, keyLen)
		for i := keyLen - 1; i >= 0; i-- {
			b[i] = byte(v)
			v >>= 8
		}
		return b
	}
	var out []nftables.SetElement
	for _, i := range s {
		out = append(out, nftables.SetElement{Key: enc(i.From)})
		if end := uint64(i.To) + 1; end < 1<<(8*keyLen) {
			out = append(out, nftables.SetElement{Key: enc(uint32(end)), IntervalEnd: true})
		}
	}
	return out
}
