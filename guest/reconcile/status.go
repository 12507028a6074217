package reconcile

import (
	"fmt"
	"strings"
	"time"

	"klimax/guest/facts"
	"klimax/guest/network"
	"klimax/shared/api"
	"klimax/shared/config"
	"klimax/shared/netplan"
)

// describe fills the facts of the status.
func describe(s *api.Status, cfg config.Config, plan netplan.Plan, f facts.Facts, want network.Ruleset, have network.State, restarts int) {
	s.Uplink = api.Uplink{Name: f.Uplink.Name}
	if f.Uplink.Address.IsValid() {
		s.Uplink.Address, s.Uplink.Network = f.Uplink.Address.String(), f.Uplink.Network.String()
	}
	s.Docker = api.Docker{
		Running: f.Engine.Running, Version: f.Engine.Version, FirewallBackend: f.Engine.Backend,
		LiveRestore: f.Engine.LiveRestore, Restarts: restarts, Network: cfg.Network.DockerNetwork,
		Bridge: f.Bridge.Name, Access: string(network.AccessFor(f.Engine)),
	}
	if f.Engine.Network.Subnet.IsValid() {
		s.Docker.Subnet = f.Engine.Network.Subnet.String()
	}
	s.Network.Allow, s.Network.Ranges = []string{}, []string{}
	for _, p := range network.Allowed(cfg, f.Uplink) {
		s.Network.Allow = append(s.Network.Allow, p.String())
	}
	for _, p := range network.Ranges(plan, f.Engine) {
		s.Network.Ranges = append(s.Network.Ranges, p.String())
	}
	s.Network.Rules = network.Summary(want, have, f)
	s.Clusters = make([]api.Cluster, 0, len(f.Engine.Clusters))
	for _, c := range f.Engine.Clusters {
		out := api.Cluster{Name: c.Name, Number: c.Number, Demo: c.Demo, Nodes: []string{}}
		for _, n := range c.Nodes {
			out.Nodes = append(out.Nodes, n.String())
		}
		if c.VIP.IsValid() {
			out.VIP = c.VIP.String()
		}
		if pc, err := plan.Cluster(c.Number); err == nil && !c.Demo {
			out.Routed = pc.Routed.String()
		}
		s.Clusters = append(s.Clusters, out)
	}
	s.Mirrors = make([]api.Mirror, 0, len(f.Engine.Mirrors))
	for _, m := range f.Engine.Mirrors {
		s.Mirrors = append(s.Mirrors, api.Mirror{Name: m.Name, Address: m.Address.String()})
	}
	if s.Callers == nil {
		s.Callers = []api.Caller{}
	}
}

// oddity is what is wrong with Docker's own rules.
type oddity int

const (
	oddNone    oddity = iota
	oddWaiting        // they are missing, but the engine has only just started
	oddLost           // they are missing
)

// dockerRulesOdd: an engine that runs has its own chains in the kernel. When
// somebody flushed them Docker does not notice, and only its restart puts them
// back; while it starts, they come a moment after it answers.
func (l *Loop) dockerRulesOdd(f facts.Facts) oddity {
	since, running := l.dockerState.runningSince()
	if !running || !dockerRulesMissing(f) {
		l.dockerOddAt = time.Time{}
		return oddNone
	}
	if l.dockerOddAt.IsZero() {
		l.dockerOddAt = time.Now()
	}
	if time.Since(since) < l.timing.Grace || time.Since(l.dockerOddAt) < l.timing.Grace {
		return oddWaiting
	}
	return oddLost
}

func dockerRulesMissing(f facts.Facts) bool {
	switch {
	case f.Engine.Backend == "nftables":
		return !f.Firewall.DockerTable
	case f.Firewall.LegacyDocker:
		return false
	}
	return !f.Firewall.DockerNAT || !f.Firewall.DockerForward
}

// conditions derives every condition from facts. It is pure but for s.
func conditions(s *api.Status, cfg config.Config, f facts.Facts, odd oddity) {
	set := func(kind string, ok bool, reason, good, bad string) {
		if ok {
			setCondition(s, kind, api.True, "OK", good)
		} else {
			setCondition(s, kind, api.False, reason, bad)
		}
	}
	setCondition(s, api.CondConfig, api.True, "OK", "the configuration is valid")
	e, n := f.Engine, f.Engine.Network
	set(api.CondDocker, e.Running && e.Problem == "", e.Reason, "the engine answers", e.Problem)
	if !e.Known {
		setCondition(s, api.CondDockerNetwork, api.Unknown, "NoEngine", "unknown until the engine answers")
	} else {
		how := "made by klimax"
		if !n.Ours {
			how = "made by somebody else, used as it is"
		}
		set(api.CondDockerNetwork, n.Found, n.Reason, fmt.Sprintf("network %s, %v, %s", cfg.Network.DockerNetwork, n.Subnet, how), n.Problem)
	}
	uplinkCondition(s, cfg, f)
	set(api.CondForwarding, f.IPForward, "Off", "net.ipv4.ip_forward is on", "net.ipv4.ip_forward is off: sysctl -w net.ipv4.ip_forward=1")

	switch odd {
	case oddLost:
		setCondition(s, api.CondDockerRules, api.False, "Lost", "Docker's own packet rules are gone (a flush of the firewall?): containers have no way out and published ports do not work until Docker is restarted (systemctl restart docker)")
	default:
		setCondition(s, api.CondDockerRules, api.True, "OK", "Docker's own packet rules are there, or the engine is not running")
	}
	blockers := make([]string, 0, len(f.Firewall.Blockers))
	for _, b := range f.Firewall.Blockers {
		blockers = append(blockers, fmt.Sprintf("chain %s of table %s %s (%s)", b.Chain, b.Family, b.Table, b.Why))
	}
	set(api.CondForeignFirewall, len(blockers) == 0, "DropsForwarded", "no other firewall drops forwarded packets",
		strings.Join(blockers, ", ")+" may drop what klimax forwards: an accept elsewhere cannot undo that; allow "+f.Bridge.Name+" and "+f.Uplink.Name+" there (firewalld: firewall-cmd --permanent --zone=trusted --add-interface="+f.Bridge.Name+")")
	backendCondition(s, cfg, f)
	overlap := make([]string, 0, len(f.Overlaps))
	for _, o := range f.Overlaps {
		overlap = append(overlap, overlapText(o))
	}
	set(api.CondAddressPlan, len(overlap) == 0, "RouteOverlap", "no route of this machine overlaps the address plan", strings.Join(overlap, "; "))
	if !hasCondition(s, api.CondState) {
		setCondition(s, api.CondState, api.True, "OK", "the state directory is writable")
	}
}

func hasCondition(s *api.Status, kind string) bool {
	for _, c := range s.Conditions {
		if c.Type == kind {
			return true
		}
	}
	return false
}

func uplinkCondition(s *api.Status, cfg config.Config, f facts.Facts) {
	u := f.Uplink
	switch {
	case u.Name == "":
		setCondition(s, api.CondUplink, api.False, "NoInterface", "no interface "+facts.LimaUplink+" and no default route: set network.uplink to the interface towards the host")
	case !u.Found:
		setCondition(s, api.CondUplink, api.False, "NoInterface", "the interface "+u.Name+" (network.uplink) does not exist")
	case !u.Address.IsValid():
		setCondition(s, api.CondUplink, api.False, "NoAddress", "waiting for an IPv4 address on "+u.Name)
	case len(network.Allowed(cfg, u)) == 0:
		setCondition(s, api.CondUplink, api.True, "NobodyAllowed", "nobody counts as the host on "+u.Name+": list addresses or networks in network.allowFrom")
	default:
		setCondition(s, api.CondUplink, api.True, "OK", u.Name+" has "+u.Address.String())
	}
}

func backendCondition(s *api.Status, cfg config.Config, f facts.Facts) {
	fw := f.Firewall
	access := network.AccessFor(f.Engine)
	switch {
	case fw.LegacyDocker && fw.LegacyForwardDrop:
		setCondition(s, api.CondBackend, api.False, "LegacyIPTables", "Docker's rules are in iptables-legacy, whose FORWARD policy is DROP: klimax works with nf_tables; update-alternatives --set iptables /usr/sbin/iptables-nft, then restart Docker")
	case fw.LegacyDocker && (fw.UserChain || fw.DockerNAT):
		setCondition(s, api.CondBackend, api.False, "MixedIPTables", "Docker's chains are in iptables-legacy and in nf_tables: one of them is a leftover; choose with update-alternatives --config iptables, then reboot")
	case len(fw.LegacyTables) > 0 && !fw.LegacyDocker && fw.LegacyForwardDrop:
		setCondition(s, api.CondBackend, api.False, "LegacyIPTables", "iptables-legacy has a FORWARD policy of DROP beside Docker's nf_tables rules: iptables-legacy -P FORWARD ACCEPT")
	case access == network.AccessDaemonMark && (!fw.DockerMark || fw.DockerRawDrop):
		by := "by somebody else"
		if f.Engine.Network.Ours {
			by = "with an older engine"
		}
		setCondition(s, api.CondBackend, api.False, "DirectRoutingOff", fmt.Sprintf("the network %s was made %s, and Docker's nftables backend drops direct traffic to it: set \"allow-direct-routing\": true and \"bridge-accept-fwmark\": \"%#x/%#x\" in /etc/docker/daemon.json and restart Docker, or remove the network and let klimax make it", cfg.Network.DockerNetwork, by, network.DirectMark, network.DirectMark))
	case fw.LegacyDocker:
		setCondition(s, api.CondBackend, api.True, "LegacyIPTables", "Docker's rules are in iptables-legacy; klimax's own table in nf_tables works beside them")
	default:
		setCondition(s, api.CondBackend, api.True, "OK", "the firewall backend is supported")
	}
}
