package network

import (
	"flag"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"klimax/guest/facts"
	"klimax/shared/api"
	"klimax/shared/config"
)

var update = flag.Bool("update", false, "write the goldens anew")

// world is a VM with engine 29, the iptables backend and klimax's own network.
func world() facts.Facts {
	return facts.Facts{
		Uplink: facts.Uplink{Name: "lima0", Found: true, Up: true, Address: netip.MustParseAddr("192.168.64.3"),
			Network: netip.MustParsePrefix("192.168.64.0/24")},
		Bridge:    facts.Bridge{Name: "br-kind", Present: true},
		IPForward: true,
		Engine: facts.Engine{Known: true, Running: true, Version: "29.0.0", Backend: "iptables",
			Network: facts.DockerNetwork{Found: true, Bridge: "br-kind", GatewayMode: "nat-unprotected", Ours: true}},
		Firewall: facts.Firewall{ForwardChain: true, UserChain: true, UserJump: true, RawChain: true, DockerNAT: true, DockerForward: true},
	}
}

func TestDesired(t *testing.T) {
	cases := []struct {
		name   string
		config func(*config.Config)
		facts  func(*facts.Facts)
	}{
		{name: "own-network-29-iptables"},
		{name: "own-network-29-nftables", facts: func(f *facts.Facts) {
			f.Engine.Backend, f.Firewall = "nftables", facts.Firewall{DockerTable: true}
		}},
		{name: "own-network-20", facts: func(f *facts.Facts) { f.Engine.Version = "20.10.24+dfsg1" }},
		{name: "own-network-20-forward-drop", facts: func(f *facts.Facts) {
			f.Engine.Version, f.Firewall.ForwardDrop = "20.10.24+dfsg1", true
		}},
		{name: "foreign-network-29-iptables", facts: func(f *facts.Facts) {
			f.Engine.Network.GatewayMode, f.Engine.Network.Ours, f.Firewall.RawDrop = "", false, true
		}},
		{name: "foreign-network-29-nftables", facts: func(f *facts.Facts) {
			f.Engine.Network.GatewayMode, f.Engine.Network.Ours = "", false
			f.Engine.Backend, f.Firewall = "nftables", facts.Firewall{DockerTable: true, DockerMark: true}
		}},
		{name: "no-jump-to-docker-user", facts: func(f *facts.Facts) { f.Firewall.UserJump = false }},
		{name: "boot", facts: func(f *facts.Facts) {
			*f = facts.Facts{Bridge: facts.Bridge{Name: "br-kind"}, Uplink: facts.Uplink{Name: "lima0", Found: true}}
		}},
		{name: "no-uplink", facts: func(f *facts.Facts) { f.Uplink = facts.Uplink{} }},
		{name: "plain-host-nobody", facts: func(f *facts.Facts) { f.Uplink.Name = "eth0" }},
		{name: "plain-host-allowed", config: func(c *config.Config) {
			c.Network.AllowFrom = []netip.Prefix{netip.MustParsePrefix("10.1.2.3/32"), netip.MustParsePrefix("10.9.0.0/16")}
		}, facts: func(f *facts.Facts) { f.Uplink.Name = "eth0" }},
		{name: "engine-down-raw-drop", facts: func(f *facts.Facts) {
			f.Engine = facts.Engine{}
			f.Firewall.RawDrop = true
		}},
		{name: "engine-down-daemon-mark", facts: func(f *facts.Facts) {
			f.Engine, f.Firewall = facts.Engine{}, facts.Firewall{DockerTable: true, DockerMark: true}
		}},
		{name: "former-networks", config: func(c *config.Config) {
			c.Network.KindBridgeCIDR = netip.MustParsePrefix("172.31.0.0/16")
		}, facts: func(f *facts.Facts) {
			ours := func(bridge, subnet string) facts.DockerNetwork {
				return facts.DockerNetwork{Bridge: bridge, Subnet: netip.MustParsePrefix(subnet), Ours: true}
			}
			f.Engine.Network = ours("br-kind", "172.30.0.0/16") // known before the range was changed
			f.Engine.Former = []facts.DockerNetwork{ours("br-old", "172.29.0.0/16"), ours("br-kind", "172.30.0.0/16")}
		}},
		{name: "clusters-and-mirrors", facts: func(f *facts.Facts) {
			f.Engine.Clusters = []facts.Cluster{{Name: "dev", Number: 1, HasAPI: true}, {Name: "qa", Number: 2, HasAPI: true},
				{Name: "demo", Number: 99, Demo: true}, {Name: "foreign", Foreign: true}}
			f.Engine.Mirrors = []facts.Mirror{{Name: "hub", Address: netip.MustParseAddr("172.30.0.9")}}
		}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			cfg, f := config.Default(), world()
			if c.config != nil {
				c.config(&cfg)
			}
			if c.facts != nil {
				c.facts(&f)
			}
			plan, err := cfg.Plan()
			if err != nil {
				t.Fatal(err)
			}
			got := Desired(cfg, plan, f).String()
			file := filepath.Join("testdata", c.name+".golden")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}

// TestInvariants: whatever the facts, the guard is there and comes last, and
// nothing is accepted from an interface that is not the uplink.
func TestInvariants(t *testing.T) {
	cfg := config.Default()
	plan, _ := cfg.Plan()
	for bits := range 1 << 8 {
		on := func(i int) bool { return bits>>i&1 == 1 }
		f := world()
		f.Firewall = facts.Firewall{ForwardChain: on(0), ForwardDrop: on(1), UserChain: on(2), UserJump: on(3), RawChain: on(4), RawDrop: on(5)}
		f.Engine.Known = on(6)
		if on(7) {
			f.Engine.Network.GatewayMode = ""
		}
		rs := Desired(cfg, plan, f)
		guard := rs.Rules[OwnGuard]
		if last := guard[len(guard)-1]; last.ID != api.RuleGuard || last.Verdict != Drop || last.Match != (Match{DstSet: "ranges"}) {
			t.Fatalf("%b: the guard's last rule is %v", bits, last)
		}
		for _, r := range rs.All() {
			trusted := r.Match.In == "lo" || r.Match.In == "br-kind" || r.Match.In == "lima0" && (r.Match.SrcSet == "allow" || r.Match.Src.IsValid())
			if r.Verdict == Accept && !trusted {
				t.Errorf("%b: accepts too much: %v", bits, r)
			}
			if !r.Chain.Own() && (r.Match.SrcSet != "" || r.Match.DstSet != "" || r.Match.TCPPortSet != "" || r.Match.Local) {
				t.Errorf("%b: not iptables' own words: %v", bits, r)
			}
		}
		for ch, rules := range rs.Rules {
			exists := map[Chain]bool{OwnGuard: true, OwnPostrouting: true, FilterForward: on(0), DockerUser: on(2), RawPrerouting: on(4)}[ch]
			if len(rules) > 0 && !exists {
				t.Errorf("%b: rules in %s, which does not exist", bits, ch)
			}
		}
	}
}

func TestAllowed(t *testing.T) {
	p := netip.MustParsePrefix
	for _, c := range []struct {
		uplink string
		from   []netip.Prefix
		want   []netip.Prefix
	}{
		{"lima0", nil, []netip.Prefix{p("192.168.64.0/24")}},
		{"lima0", []netip.Prefix{}, nil},
		{"lima0", []netip.Prefix{p("10.0.0.1/32")}, []netip.Prefix{p("10.0.0.1/32")}},
		{"eth0", nil, nil},
		{"eth0", []netip.Prefix{p("10.1.0.0/16"), p("10.1.2.0/24"), p("10.1.0.0/16"), p("9.9.9.9/32")}, []netip.Prefix{p("9.9.9.9/32"), p("10.1.0.0/16")}},
	} {
		cfg := config.Default()
		cfg.Network.AllowFrom = c.from
		got := Allowed(cfg, facts.Uplink{Name: c.uplink, Network: p("192.168.64.0/24")})
		if !slices.Equal(got, c.want) {
			t.Errorf("%s %v: got %v, want %v", c.uplink, c.from, got, c.want)
		}
	}
}

func TestAccessFor(t *testing.T) {
	for _, c := range []struct {
		version, backend, mode string
		want                   Access
	}{
		{"20.10.24+dfsg1", "iptables", "", AccessUserChain},
		{"20.10.24+dfsg1", "iptables", "nat-unprotected", AccessUserChain},
		{"27.5.1", "iptables", "", AccessUserChain},
		{"28.0.0", "iptables", "", AccessFirstRules},
		{"28.5.2", "iptables", "nat-unprotected", AccessUnprotected},
		{"29.0.0", "iptables", "routed", AccessUnprotected},
		{"29.0.0", "nftables", "", AccessDaemonMark},
		{"29.0.0", "nftables", "nat-unprotected", AccessUnprotected},
		{"not a version", "iptables", "", AccessUserChain},
	} {
		e := facts.Engine{Known: true, Version: c.version, Backend: c.backend, Network: facts.DockerNetwork{Found: true, GatewayMode: c.mode}}
		if got := AccessFor(e); got != c.want {
			t.Errorf("%+v: got %q", c, got)
		}
	}
	if AccessFor(facts.Engine{}) != AccessUnknown {
		t.Error("an engine that was never asked")
	}
}

func TestDiff(t *testing.T) {
	cfg, f := config.Default(), world()
	plan, _ := cfg.Plan()
	want := Desired(cfg, plan, f)
	inSync := func() State {
		s := State{Table: true, Leftover: true, Sets: want.Sets, Rules: map[Chain][]Placed{}}
		for ch, rules := range want.Rules {
			for i, r := range rules {
				s.Rules[ch] = append(s.Rules[ch], Placed{ID: r.ID, Ours: true, Rule: r, Exact: true, handle: uint64(i + 1)})
			}
		}
		s.Rules[FilterForward] = []Placed{{}}
		return s
	}
	if d := Diff(want, inSync(), f); !d.Empty() || d.String() != "nothing" {
		t.Errorf("in sync: %v", d)
	}
	theirs := Placed{Rule: Rule{Verdict: Drop}, terminal: true}
	for name, c := range map[string]struct {
		change func(*State)
		says   string
	}{
		"table gone":       {func(s *State) { *s = State{Rules: map[Chain][]Placed{}} }, "missing"},
		"rule gone":        {func(s *State) { s.Rules[OwnGuard] = s.Rules[OwnGuard][1:] }, "klimax/guard"},
		"rule changed":     {func(s *State) { s.Rules[OwnGuard][0].Rule.Match.In = "eth9" }, "1 rules missing, 1 rules too many"},
		"foreign in own":   {func(s *State) { s.Rules[OwnGuard] = append(s.Rules[OwnGuard], theirs) }, "too many"},
		"not understood":   {func(s *State) { s.Rules[OwnGuard][0].Exact = false }, "klimax/guard"},
		"order":            {func(s *State) { slices.Reverse(s.Rules[OwnGuard]) }, "klimax/guard"},
		"behind a drop":    {func(s *State) { s.Rules[DockerUser] = slices.Insert(s.Rules[DockerUser], 0, theirs) }, "DOCKER-USER"},
		"double":           {func(s *State) { s.Rules[DockerUser] = append(s.Rules[DockerUser], s.Rules[DockerUser][0]) }, "too many"},
		"not wanted there": {func(s *State) { s.Rules[FilterForward] = []Placed{s.Rules[DockerUser][0]} }, "FORWARD"},
		"set":              {func(s *State) { s.Sets = map[string]Set{} }, "set allow"},
	} {
		s := inSync()
		c.change(&s)
		d := Diff(want, s, f)
		if d.Empty() || !strings.Contains(d.String(), c.says) {
			t.Errorf("%s: %v", name, d)
		}
	}
	// rules of others that do not end the chain may stand before ours
	s := inSync()
	s.Rules[DockerUser] = slices.Insert(s.Rules[DockerUser], 0, Placed{Rule: Rule{Verdict: Drop, Match: Match{In: "eth9"}}})
	if d := Diff(want, s, f); !d.Empty() {
		t.Errorf("a rule of the user: %v", d)
	}
	f.IPForward = false
	if d := Diff(want, inSync(), f); d.Empty() || !d.IPForward {
		t.Errorf("ip_forward: %v", d)
	}
}

func TestSets(t *testing.T) {
	for _, c := range []struct {
		in   []Interval
		want string
	}{
		{nil, ""},
		{[]Interval{{10, 20}, {5, 12}, {30, 31}}, "0.0.0.5-0.0.0.20, 0.0.0.30/31"},
		{[]Interval{{10, 20}, {5, 9}, {21, 21}}, "0.0.0.5-0.0.0.9, 0.0.0.10-0.0.0.20, 0.0.0.21"}, // neighbours
		{[]Interval{prefixInterval(netip.MustParsePrefix("10.0.0.0/8")), prefixInterval(netip.MustParsePrefix("10.1.0.0/16"))}, "10.0.0.0/8"},
		{[]Interval{prefixInterval(netip.MustParsePrefix("255.255.255.255/32"))}, "255.255.255.255"},
		{[]Interval{prefixInterval(netip.MustParsePrefix("128.0.0.0/1")), {0, 1}}, "0.0.0.0/31, 128.0.0.0/1"},
	} {
		s := merge(c.in)
		if got := s.Format("allow"); got != c.want {
			t.Errorf("%v: %q, want %q", c.in, got, c.want)
		}
		if back := intervals(elements(s, 4)); !slices.Equal(back, s) {
			t.Errorf("%v comes back from the kernel's form as %v", s, back)
		}
	}
	ports := merge([]Interval{{7001, 7001}, {7003, 7005}, {65535, 65535}})
	if got := ports.Format("api-ports"); got != "7001, 7003-7005, 65535" {
		t.Error(got)
	}
	if back := intervals(elements(ports, 2)); !slices.Equal(back, ports) {
		t.Errorf("ports come back as %v", back)
	}
}

func TestKeep(t *testing.T) {
	cfg, f := config.Default(), world()
	f.Engine.Clusters = []facts.Cluster{{Name: "dev", Number: 1, HasAPI: true}}
	plan, _ := cfg.Plan()
	have := State{Sets: Desired(cfg, plan, f).Sets}
	f.Engine = facts.Engine{}
	want := Desired(cfg, plan, f)
	kept := Keep(want, have)
	if got := kept.Sets["ranges"].Format("ranges"); got != "10.101.0.0/16, 172.30.0.0/16" {
		t.Errorf("ranges: %s", got)
	}
	if got := kept.Sets["api-ports"].Format("api-ports"); got != "7001" {
		t.Errorf("ports: %s", got)
	}
	if want.Sets["ranges"].Format("ranges") != "172.30.0.0/16" {
		t.Error("the given ruleset was changed")
	}
	// what stands in chains of others stays as well, in its order
	old := Rule{ID: api.RuleForwardAccept, Chain: FilterForward, Match: Match{In: "lima0"}, Verdict: Accept}
	have.Rules = map[Chain][]Placed{
		FilterForward: {{Rule: Rule{Verdict: Drop}, Exact: true}, {Rule: old, Ours: true, Exact: true}, {Ours: true}},
		DockerUser:    {{Rule: want.Rules[DockerUser][1], Ours: true, Exact: true}},
	}
	kept = Keep(want, have)
	if !slices.Equal(kept.Rules[FilterForward], []Rule{old}) || len(want.Rules[FilterForward]) != 0 {
		t.Errorf("FORWARD: %v", kept.Rules[FilterForward])
	}
	if got := kept.Rules[DockerUser]; len(got) != 2 || got[0] != want.Rules[DockerUser][1] || got[1] != want.Rules[DockerUser][0] {
		t.Errorf("DOCKER-USER: %v", got)
	}
}
