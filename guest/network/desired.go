package network

import (
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"klimax/guest/facts"
	"klimax/shared/api"
	"klimax/shared/config"
	"klimax/shared/netplan"
)

// Access says by which means the host's packets get past Docker's own rules.
type Access string

// The means, see docs/network.md.
const (
	AccessUnknown     Access = ""
	AccessUnprotected Access = "nat-unprotected" // the network was made that way; nothing to do
	AccessUserChain   Access = "user-chain"      // engines before 28: DOCKER-USER decides
	AccessFirstRules  Access = "first-rules"     // accepts kept first in raw PREROUTING, FORWARD and DOCKER-USER
	AccessDaemonMark  Access = "daemon-mark"     // nftables backend: a mark and daemon options
)

// AccessFor decides by the engine and the network as they are.
func AccessFor(e facts.Engine) Access {
	switch {
	case !e.Known || !e.Network.Found:
		return AccessUnknown
	case e.Network.GatewayMode == "nat-unprotected" || e.Network.GatewayMode == "routed":
		if Major(e.Version) >= 28 {
			return AccessUnprotected
		}
		return AccessUserChain // older engines store the option and ignore it
	case e.Backend == "nftables":
		return AccessDaemonMark
	case Major(e.Version) < 28:
		return AccessUserChain
	}
	return AccessFirstRules
}

// Major is the first number of an engine version, 0 when there is none.
func Major(version string) int {
	n, _, _ := strings.Cut(version, ".")
	v, err := strconv.Atoi(n)
	if err != nil {
		return 0
	}
	return v
}

// Allowed lists who counts as the host: network.allowFrom where it is given,
// else on an uplink named lima0 its connected network, where only the Mac and
// its VMs are, and on any other uplink nobody.
func Allowed(c config.Config, u facts.Uplink) []netip.Prefix {
	out := slices.Clone(c.Network.AllowFrom)
	if c.Network.AllowFrom == nil && u.Name == facts.LimaUplink && u.Network.IsValid() {
		out = append(out, u.Network)
	}
	for i, p := range out {
		out[i] = p.Masked()
	}
	slices.SortFunc(out, func(a, b netip.Prefix) int {
		if d := a.Addr().Compare(b.Addr()); d != 0 {
			return d
		}
		return a.Bits() - b.Bits()
	})
	out = slices.Compact(out)
	// a network inside another one of the list adds nothing
	return slices.DeleteFunc(slices.Clone(out), func(p netip.Prefix) bool {
		return slices.ContainsFunc(out, func(q netip.Prefix) bool { return q != p && q.Bits() < p.Bits() && q.Contains(p.Addr()) })
	})
}

// Ranges lists what the host reaches: the bridge's range, those of former
// networks and, per cluster, its pods and services.
func Ranges(p netplan.Plan, e facts.Engine) []netip.Prefix {
	out := []netip.Prefix{p.Bridge}
	for _, n := range former(p, e) {
		out = append(out, n.Subnet)
	}
	for _, c := range e.Clusters {
		if pc, err := p.Cluster(c.Number); err == nil && !c.Demo {
			out = append(out, pc.Routed)
		}
	}
	return out
}

// former lists the networks that klimax made with another range than the
// plan's. Docker drops nothing on its way to them, so the guard has to stay,
// from the moment of the change on: until the engine is asked again the network
// that was in use is one of them.
func former(p netplan.Plan, e facts.Engine) []facts.DockerNetwork {
	var out []facts.DockerNetwork
	for _, n := range append(slices.Clone(e.Former), e.Network) {
		if n.Ours && n.Subnet.IsValid() && n.Subnet != p.Bridge && !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	return out
}

// Desired computes everything klimax wants in the kernel. It is pure.
func Desired(c config.Config, p netplan.Plan, f facts.Facts) Ruleset {
	allow := Allowed(c, f.Uplink)
	var ranges, allowed, mirrors, ports []Interval
	for _, r := range Ranges(p, f.Engine) {
		ranges = append(ranges, prefixInterval(r))
	}
	for _, a := range allow {
		allowed = append(allowed, prefixInterval(a))
	}
	for _, m := range f.Engine.Mirrors {
		mirrors = append(mirrors, Interval{toUint(m.Address), toUint(m.Address)})
	}
	for _, cl := range f.Engine.Clusters {
		if pc, err := p.Cluster(cl.Number); err == nil && cl.HasAPI {
			ports = append(ports, Interval{uint32(pc.APIPort), uint32(pc.APIPort)})
		}
	}
	nodes := p.NodeRange()
	rs := Ruleset{
		IPForward: true,
		Sets: map[string]Set{
			setAllow:    merge(allowed),
			setRanges:   merge(ranges),
			setNodes:    {{toUint(nodes.From), toUint(nodes.To)}},
			setMirrors:  merge(mirrors),
			setAPIPorts: merge(ports),
		},
		Rules: map[Chain][]Rule{OwnGuard: nil, OwnPostrouting: nil},
	}
	add := func(id api.RuleID, ch Chain, m Match, v Verdict) {
		rs.Rules[ch] = append(rs.Rules[ch], Rule{ID: id, Chain: ch, Match: m, Verdict: v})
	}
	up, br := f.Uplink.Name, f.Bridge.Name

	// The guard. Its drops are final, whatever Docker accepts later. The
	// guest's own traffic arrives on lo. A container's replies from elsewhere
	// carry the guest's address here: the guard runs before conntrack. Every
	// packet passes here, so what most of them match comes as early as it may.
	add(api.RuleGuardLocal, OwnGuard, Match{In: "lo"}, Accept)
	add(api.RuleGuardMirrors, OwnGuard, Match{In: br, SrcSet: setNodes, DstSet: setMirrors}, Accept)
	add(api.RuleGuardMirrors, OwnGuard, Match{DstSet: setMirrors}, Drop)
	if up != "" {
		if wantMark(f) {
			add(api.RuleDirectMark, OwnGuard, Match{In: up, SrcSet: setAllow, DstSet: setRanges}, Mark)
		}
		add(api.RuleGuardAllow, OwnGuard, Match{In: up, SrcSet: setAllow, DstSet: setRanges}, Accept)
		add(api.RuleGuardAPI, OwnGuard, Match{In: up, SrcSet: setAllow, TCPPortSet: setAPIPorts, Local: true}, Accept)
		add(api.RuleSNATExempt, OwnPostrouting, Match{Out: up, SrcSet: setRanges, DstSet: setAllow}, SNATSelf)
	}
	add(api.RuleGuardAPI, OwnGuard, Match{TCPPortSet: setAPIPorts, Local: true}, Drop)
	add(api.RuleGuardLocal, OwnGuard, Match{In: br}, Accept)
	for _, n := range former(p, f.Engine) {
		if n.Bridge != br {
			add(api.RuleGuardLocal, OwnGuard, Match{In: n.Bridge}, Accept)
		}
	}
	add(api.RuleGuard, OwnGuard, Match{DstSet: setRanges}, Drop)

	if up != "" {
		sharedRules(p, f, allow, add)
	}
	return rs
}

// wantMark: on Docker's nftables backend a network in gateway mode nat opens
// by a mark only. The mark does nothing for networks that need none. While the
// engine is unknown, rules of Docker that look at the mark tell that it is used.
func wantMark(f facts.Facts) bool {
	if a := AccessFor(f.Engine); a != AccessUnknown {
		return a == AccessDaemonMark
	}
	return f.Firewall.DockerRawDrop || f.Firewall.DockerMark
}

// sharedRules adds what has to stand in chains of iptables. What is wanted
// there follows from what the kernel has, so that it is right as well while
// the engine is down.
func sharedRules(p netplan.Plan, f facts.Facts, allow []netip.Prefix, add func(api.RuleID, Chain, Match, Verdict)) {
	up, br, fw := f.Uplink.Name, f.Bridge.Name, f.Firewall
	for _, a := range allow {
		if fw.RawChain && (fw.RawDrop || AccessFor(f.Engine) == AccessFirstRules) {
			add(api.RuleRawAccept, RawPrerouting, Match{In: up, Src: a, Dst: p.Bridge}, Accept)
		}
		if fw.ForwardChain && wantForwardHead(f) {
			add(api.RuleForwardAccept, FilterForward, Match{In: up, Out: br, Src: a}, Accept)
			add(api.RuleForwardReturn, FilterForward, Match{In: br, Out: up, Dst: a}, Accept)
		}
		if fw.UserChain {
			add(api.RuleForwardAccept, DockerUser, Match{In: up, Out: br, Src: a}, Accept)
			add(api.RuleForwardReturn, DockerUser, Match{In: br, Out: up, Dst: a, Established: true}, Accept)
		}
	}
}

// wantForwardHead: accepts at the head of FORWARD carry the traffic while
// Docker has its own jumps down (it takes them down for half a second at a
// restart, which matters when the policy is DROP), and where the jump to
// DOCKER-USER is missing.
func wantForwardHead(f facts.Facts) bool {
	fw := f.Firewall
	return fw.ForwardDrop || fw.UserChain && !fw.UserJump || AccessFor(f.Engine) == AccessFirstRules || fw.RawDrop
}

// headOnly reports whether rules of ours in a shared chain must be the first
// ones. In DOCKER-USER that goes past the user's own rules for this traffic,
// and is done only where nothing else opens the way.
func headOnly(ch Chain, f facts.Facts) bool {
	return ch != DockerUser || AccessFor(f.Engine) == AccessFirstRules
}

// Keep adds to a wanted ruleset what the kernel has for clusters and mirrors,
// and what stands in chains of others. It is for an engine that was never
// asked: its containers may be alive and in use (live-restore), and what they
// need must not go before it can be asked.
func Keep(want Ruleset, have State) Ruleset {
	sets := maps.Clone(want.Sets)
	for _, name := range []string{setRanges, setMirrors, setAPIPorts} {
		sets[name] = merge(slices.Concat(want.Sets[name], have.Sets[name]))
	}
	rules := maps.Clone(want.Rules)
	for _, ch := range sharedChains {
		var kept []Rule
		for _, p := range have.Rules[ch] {
			if p.Ours && p.Exact && !slices.Contains(kept, p.Rule) {
				kept = append(kept, p.Rule)
			}
		}
		for _, r := range want.Rules[ch] {
			if !slices.Contains(kept, r) {
				kept = append(kept, r)
			}
		}
		if len(kept) > 0 {
			rules[ch] = kept
		}
	}
	want.Sets, want.Rules = sets, rules
	return want
}
