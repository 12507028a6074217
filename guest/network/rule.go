package network

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"klimax/shared/api"
)

// Chain names a chain that may hold rules of ours.
type Chain string

// The chains. The first two are in the own table, the others belong to iptables.
const (
	OwnPostrouting Chain = "klimax/postrouting"
	OwnGuard       Chain = "klimax/guard"
	RawPrerouting  Chain = "raw/PREROUTING"
	FilterForward  Chain = "filter/FORWARD"
	DockerUser     Chain = "filter/DOCKER-USER"
)

// sharedChains are the chains of others in which rules of ours may stand.
var sharedChains = [...]Chain{RawPrerouting, FilterForward, DockerUser}

// Own reports whether the chain is in the own table.
func (c Chain) Own() bool { return strings.HasPrefix(string(c), TableName+"/") }

func (c Chain) split() (table, chain string) {
	table, chain, _ = strings.Cut(string(c), "/")
	return table, chain
}

// Names in the own table.
const (
	TableName   = "klimax"
	setAllow    = "allow"
	setRanges   = "ranges"
	setNodes    = "nodes"
	setMirrors  = "mirrors"
	setAPIPorts = "api-ports"
)

// CommentPrefix marks rules of ours; the rule's ID follows.
const CommentPrefix = "klimax:"

// DirectMark is the mark bit, with itself as mask, that lets a packet pass
// Docker's drops when the daemon runs with bridge-accept-fwmark=0x10000/0x10000.
const DirectMark uint32 = 0x10000

// Priorities of the own base chains.
const (
	// before Docker's MASQUERADE, which stands at 100 (srcnat) on both
	// backends; at 100 the order of creation would decide.
	priorityExempt = 90
	// before iptables' raw table and Docker's raw chain (-300): the mark must
	// be there when Docker looks for it.
	priorityGuard = -310
)

// Verdict is what a rule does with a packet.
type Verdict string

// The verdicts.
const (
	Accept   Verdict = "accept"
	Drop     Verdict = "drop"
	SNATSelf Verdict = "snat to ip saddr" // translate the source to itself: claims the packet before Docker's MASQUERADE
	Mark     Verdict = "mark"             // set DirectMark and go on
)

// Match is a conjunction; zero fields match everything.
type Match struct {
	In, Out        string       // interface names
	Src, Dst       netip.Prefix // one network each
	SrcSet, DstSet string       // or a set of the own table
	TCPPortSet     string       // TCP destination port in a set of the own table
	Local          bool         // the destination is an address of the guest
	Established    bool         // conntrack state established or related
}

// Rule is one packet rule. It is comparable: two equal rules do the same.
type Rule struct {
	ID      api.RuleID
	Chain   Chain
	Match   Match
	Verdict Verdict
}

// String is the rule in nft's words.
func (r Rule) String() string {
	var b strings.Builder
	m := r.Match
	add := func(format string, a ...any) { fmt.Fprintf(&b, format+" ", a...) }
	if m.In != "" {
		add("iifname %q", m.In)
	}
	if m.Out != "" {
		add("oifname %q", m.Out)
	}
	if m.Src.IsValid() {
		add("ip saddr %v", m.Src)
	}
	if m.SrcSet != "" {
		add("ip saddr @%s", m.SrcSet)
	}
	if m.Dst.IsValid() {
		add("ip daddr %v", m.Dst)
	}
	if m.DstSet != "" {
		add("ip daddr @%s", m.DstSet)
	}
	if m.TCPPortSet != "" {
		add("tcp dport @%s", m.TCPPortSet)
	}
	if m.Local {
		add("fib daddr type local")
	}
	if m.Established {
		add("ct state established,related")
	}
	v := string(r.Verdict)
	if r.Verdict == Mark {
		v = fmt.Sprintf("meta mark set meta mark | %#x", DirectMark)
	}
	add("counter %s comment %q", v, CommentPrefix+string(r.ID))
	return strings.TrimSuffix(b.String(), " ")
}

// Interval is an inclusive range of unsigned numbers: IPv4 addresses in
// host order, or ports.
type Interval struct{ From, To uint32 }

// Set is the content of a set in the own table, sorted and merged.
type Set []Interval

// Ruleset is everything klimax wants in the kernel.
type Ruleset struct {
	// IPForward: the kernel has to forward.
	IPForward bool
	Sets      map[string]Set
	Rules     map[Chain][]Rule
}

// All lists the rules of all chains in a fixed order.
func (r Ruleset) All() []Rule {
	var out []Rule
	for _, c := range slices.Sorted(keys(r.Rules)) {
		out = append(out, r.Rules[c]...)
	}
	return out
}

func keys[K cmp.Ordered, V any](m map[K]V) func(func(K) bool) {
	return func(yield func(K) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// String lists sets and rules, as goldens and `network show` print them.
func (r Ruleset) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "ip_forward %v\n", r.IPForward)
	for _, name := range slices.Sorted(keys(r.Sets)) {
		fmt.Fprintf(&b, "set %s { %s }\n", name, r.Sets[name].Format(name))
	}
	for _, c := range slices.Sorted(keys(r.Rules)) {
		fmt.Fprintf(&b, "chain %s\n", c)
		for _, rule := range r.Rules[c] {
			fmt.Fprintf(&b, "  %s\n", rule)
		}
	}
	return b.String()
}

// Format lists the elements of the set of that name: ports as numbers,
// everything else as addresses.
func (s Set) Format(name string) string {
	ports := name == setAPIPorts
	out := make([]string, 0, len(s))
	for _, i := range s {
		switch {
		case ports && i.From == i.To:
			out = append(out, fmt.Sprint(i.From))
		case ports:
			out = append(out, fmt.Sprintf("%d-%d", i.From, i.To))
		default:
			out = append(out, i.addresses())
		}
	}
	return strings.Join(out, ", ")
}

// addresses prints an interval of addresses as a prefix where it is one.
func (i Interval) addresses() string {
	from, to := fromUint(i.From), fromUint(i.To)
	for bits := range 33 {
		if p := netip.PrefixFrom(from, bits); p.Masked() == p && prefixInterval(p) == i {
			if bits == 32 {
				return from.String()
			}
			return p.String()
		}
	}
	return from.String() + "-" + to.String()
}

func toUint(a netip.Addr) uint32 {
	b := a.As4()
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}

func fromUint(u uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(u >> 24), byte(u >> 16), byte(u >> 8), byte(u)})
}

func prefixInterval(p netip.Prefix) Interval {
	from := toUint(p.Masked().Addr())
	return Interval{from, from | uint32(uint64(1)<<(32-p.Bits())-1)}
}

// merge sorts intervals and joins those that overlap, which the kernel refuses.
// Neighbours stay apart: a cluster that comes or goes is then one element more
// or less, and the element of its neighbour, which is in use, is not replaced.
func merge(in []Interval) Set {
	s := slices.Clone(in)
	slices.SortFunc(s, func(a, b Interval) int { return cmp.Compare(a.From, b.From) })
	out := Set{}
	for _, i := range s {
		if n := len(out); n > 0 && i.From <= out[n-1].To {
			out[n-1].To = max(out[n-1].To, i.To)
			continue
		}
		out = append(out, i)
	}
	return out
}
