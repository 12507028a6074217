package route

import (
	"bufio"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"klimax/shared/api"
	"klimax/shared/netplan"
)

// ipRoute reads the output of `ip -4 route show table all`.
func ipRoute(t testing.TB, name string) []Route {
	t.Helper()
	f, err := os.Open(filepath.Join("testdata", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var out []Route
	for sc := bufio.NewScanner(f); sc.Scan(); {
		w := strings.Fields(sc.Text())
		var r Route
		switch {
		case w[0] == "default":
			r.Dest = netip.MustParsePrefix("0.0.0.0/0")
		case strings.Contains(w[0], "/"):
			r.Dest = netip.MustParsePrefix(w[0])
		default:
			r.Dest = netip.PrefixFrom(netip.MustParseAddr(w[0]), 32)
		}
		for i := 1; i+1 < len(w); i++ {
			switch w[i] {
			case "via":
				r.Gateway = netip.MustParseAddr(w[i+1])
			case "dev":
				r.Dev = w[i+1]
			case "table":
				r.Table = w[i+1]
			case "proto":
				r.Own = w[i+1] == "107"
			}
		}
		out = append(out, r)
	}
	return out
}

func anyTable(t testing.TB, name string) []Route {
	if strings.HasPrefix(name, "linux-") {
		return ipRoute(t, name)
	}
	return table(t, name)
}

func addr(s string) netip.Addr {
	if s == "" {
		return netip.Addr{}
	}
	return netip.MustParseAddr(s)
}

var (
	one  = []api.Cluster{{Name: "dev", Number: 1, Routed: "10.101.0.0/16"}}
	two  = append(slices.Clone(one), api.Cluster{Name: "web", Number: 2, Routed: "10.102.0.0/16"})
	demo = []api.Cluster{{Name: "demo", Number: 99, Demo: true}}
)

// describe lists an answer: routes, changes, conditions.
func describe(w Wanted, st State) string {
	var b strings.Builder
	if w.Local {
		b.WriteString("local\n")
	}
	for _, r := range w.Routes {
		b.WriteString("want " + r.String() + "\n")
	}
	for _, c := range Diff(w, st) {
		b.WriteString(string(c.Op) + " " + c.Dest.String() + " via " + c.Gateway.String())
		if c.Old.IsValid() {
			b.WriteString(" was " + c.Old.String())
		}
		b.WriteString("\n")
	}
	for _, c := range w.Conditions {
		if c.Status != api.True {
			b.WriteString(c.Type + " " + c.Reason + ": " + c.Message + "\n")
		}
	}
	return b.String()
}

func TestDesired(t *testing.T) {
	for _, c := range []struct {
		name, table string
		guest       string
		clusters    []api.Cluster
		noPods      bool
		addrs       []string
		want        string
	}{
		{name: "first up", table: "plain", guest: "192.168.64.3", clusters: two, want: `
want 10.101.0.0/16 via 192.168.64.3
want 10.102.0.0/16 via 192.168.64.3
want 172.30.0.0/16 via 192.168.64.3
add 10.101.0.0/16 via 192.168.64.3
add 10.102.0.0/16 via 192.168.64.3
add 172.30.0.0/16 via 192.168.64.3
`},
		{name: "first up on linux", table: "linux-laptop", guest: "192.168.64.3", clusters: one, want: `
want 10.101.0.0/16 via 192.168.64.3
want 172.30.0.0/16 via 192.168.64.3
add 10.101.0.0/16 via 192.168.64.3
add 172.30.0.0/16 via 192.168.64.3
`},
		{name: "pods not routed", table: "plain", guest: "192.168.64.3", clusters: two, noPods: true, want: `
want 172.30.0.0/16 via 192.168.64.3
add 172.30.0.0/16 via 192.168.64.3
`},
		{name: "the demo has no pods", table: "plain", guest: "192.168.64.3", clusters: demo, want: `
want 172.30.0.0/16 via 192.168.64.3
add 172.30.0.0/16 via 192.168.64.3
`},
		{name: "nothing to do", table: "routed", guest: "192.168.64.3", clusters: two, want: `
want 10.101.0.0/16 via 192.168.64.3
want 10.102.0.0/16 via 192.168.64.3
want 172.30.0.0/16 via 192.168.64.3
`},
		{name: "removed cluster", table: "routed", guest: "192.168.64.3", clusters: one, want: `
want 10.101.0.0/16 via 192.168.64.3
want 172.30.0.0/16 via 192.168.64.3
remove 10.102.0.0/16 via 192.168.64.3
`},
		{name: "pods no longer routed", table: "routed", guest: "192.168.64.3", clusters: two, noPods: true, want: `
want 172.30.0.0/16 via 192.168.64.3
remove 10.101.0.0/16 via 192.168.64.3
remove 10.102.0.0/16 via 192.168.64.3
`},
		{name: "the guest moved and lost a cluster", table: "moved", guest: "192.168.64.3", clusters: one, want: `
want 10.101.0.0/16 via 192.168.64.3
want 172.30.0.0/16 via 192.168.64.3
replace 10.101.0.0/16 via 192.168.64.3 was 192.168.64.9
replace 172.30.0.0/16 via 192.168.64.3 was 192.168.64.9
remove 10.102.0.0/16 via 192.168.64.9
`},
		{name: "a vpn has the cluster's range", table: "routed", guest: "192.168.64.3",
			clusters: []api.Cluster{{Name: "c", Number: 3, Routed: "10.103.0.0/16"}}, want: `
want 172.30.0.0/16 via 192.168.64.3
remove 10.101.0.0/16 via 192.168.64.3
remove 10.102.0.0/16 via 192.168.64.3
ClusterRoutes RouteTaken: cluster c: pods and services get no route from here. kind.clusterCIDRBase: 10.103.0.0/16 overlaps the route 10.103.0.0/16 via 10.8.0.1 dev utun3 that this computer already has
  set kind.clusterCIDRBase to a range that is free here, for example 10.150.0.0, or disconnect what made that route
`},
		{name: "a vpn has 10/8", table: "tailscale", guest: "192.168.64.3", clusters: one, want: `
want 172.30.0.0/16 via 192.168.64.3
add 172.30.0.0/16 via 192.168.64.3
ClusterRoutes RouteTaken: cluster dev: pods and services get no route from here. kind.clusterCIDRBase: 10.101.0.0/16 overlaps the route 10.0.0.0/8 dev utun4 that this computer already has
  set kind.clusterCIDRBase to a range that is free here, or disconnect what made that route
`},
		{name: "a vpn has both halves of 10/8", table: "full-tunnel", guest: "192.168.64.3", clusters: one, want: `
want 172.30.0.0/16 via 192.168.64.3
add 172.30.0.0/16 via 192.168.64.3
ClusterRoutes RouteTaken: cluster dev: pods and services get no route from here. kind.clusterCIDRBase: 10.101.0.0/16 overlaps the route 10.0.0.0/9 via 172.20.12.27 dev utun2 that this computer already has
  set kind.clusterCIDRBase to a range that is free here, or disconnect what made that route
`},
		{name: "a vpn took 10/8 later, in its own table", table: "linux-vpn", guest: "192.168.64.3", clusters: one, want: `
want 172.30.0.0/16 via 192.168.64.3
remove 10.101.0.0/16 via 192.168.64.3
ClusterRoutes RouteTaken: cluster dev: pods and services get no route from here. kind.clusterCIDRBase: 10.101.0.0/16 overlaps the route 10.0.0.0/8 dev tailscale0 table 52 that this computer already has
  set kind.clusterCIDRBase to a range that is free here, or disconnect what made that route
`},
		{name: "a replaced default route is no overlap", table: "openvpn-def1", guest: "192.168.64.3", clusters: one, want: `
want 10.101.0.0/16 via 192.168.64.3
want 172.30.0.0/16 via 192.168.64.3
add 10.101.0.0/16 via 192.168.64.3
add 172.30.0.0/16 via 192.168.64.3
`},
		{name: "refs and use columns", table: "high-sierra", guest: "192.168.64.3", want: `
want 172.30.0.0/16 via 192.168.64.3
`},
		{name: "another guest's routes stay", table: "linux-two-guests", guest: "192.168.64.3", clusters: one, want: `
want 172.30.0.0/16 via 192.168.64.3
ClusterRoutes RouteTaken: cluster dev: pods and services get no route from here. kind.clusterCIDRBase: 10.101.0.0/16 overlaps the route 10.101.0.0/16 via 192.168.64.7 dev virbr1 that this computer already has
  set kind.clusterCIDRBase to a range that is free here, for example 10.150.0.0, or disconnect what made that route
`},
		{name: "a guest on this computer", table: "plain", guest: "192.168.1.20", clusters: two,
			addrs: []string{"127.0.0.1", "192.168.1.20"}, want: "\nlocal\n"},
		{name: "and routes from before go", table: "moved", guest: "192.168.1.20", addrs: []string{"192.168.1.20"}, want: `
local
remove 10.101.0.0/16 via 192.168.64.9
remove 10.102.0.0/16 via 192.168.64.9
remove 172.30.0.0/16 via 192.168.64.9
`},
		{name: "the same cluster twice, and nonsense", table: "plain", guest: "192.168.64.3",
			clusters: append(slices.Clone(one), one[0], api.Cluster{Name: "x", Routed: "10.7.0.0/16"},
				api.Cluster{Name: "y", Routed: "0.0.0.0/0"}, api.Cluster{Name: "z", Routed: "nowhere"}), want: `
want 10.101.0.0/16 via 192.168.64.3
want 172.30.0.0/16 via 192.168.64.3
add 10.101.0.0/16 via 192.168.64.3
add 172.30.0.0/16 via 192.168.64.3
ClusterRoutes UnknownRange: cluster x: its range 10.7.0.0/16 is none of those of kind.clusterCIDRBase 10.100.0.0: it was made with another value; no route is set
ClusterRoutes UnknownRange: cluster y: its range 0.0.0.0/0 is none of those of kind.clusterCIDRBase 10.100.0.0: it was made with another value; no route is set
ClusterRoutes UnknownRange: cluster z: the guest reports the range "nowhere", which is no network
`},
	} {
		t.Run(c.name, func(t *testing.T) {
			st := State{Routes: anyTable(t, c.table)}
			for _, a := range c.addrs {
				st.Addrs = append(st.Addrs, addr(a))
			}
			w, err := Desired(Input{Plan: plan(t), Guest: addr(c.guest), Clusters: c.clusters, RoutePods: !c.noPods, State: st})
			if err != nil {
				t.Fatal(err)
			}
			if got := "\n" + describe(w, st); got != c.want {
				t.Errorf("got%s\nwant%s", got, c.want)
			}
		})
	}
}

func TestDesiredErrors(t *testing.T) {
	extra := func(lines ...string) []Route {
		rs := table(t, "plain")
		for _, l := range lines {
			dest, dev, _ := strings.Cut(l, " ")
			rs = append(rs, Route{Dest: netip.MustParsePrefix(dest), Dev: dev})
		}
		return rs
	}
	for _, c := range []struct {
		name   string
		routes []Route
		addrs  []netip.Addr
		guest  string
		want   string
	}{
		{"larger", table(t, "vpn-bridge"), nil, "192.168.64.3",
			"network.kindBridgeCIDR: 172.30.0.0/16 overlaps the route 172.16.0.0/12 via 10.8.0.1 dev utun3 that this computer already has\n" +
				"  set network.kindBridgeCIDR to a range that is free here, for example 10.240.0.0/16, or disconnect what made that route"},
		{"smaller", extra("172.30.5.0/24 en7"), nil, "192.168.64.3",
			"network.kindBridgeCIDR: 172.30.0.0/16 overlaps the route 172.30.5.0/24 dev en7 that this computer already has\n" +
				"  set network.kindBridgeCIDR to a range that is free here, for example 172.31.0.0/16, or disconnect what made that route"},
		{"one host", extra("172.16.0.0/12 utun3", "172.30.255.255/32 utun3"), nil, "192.168.64.3",
			"network.kindBridgeCIDR: 172.30.0.0/16 overlaps the route 172.30.255.255/32 dev utun3 that this computer already has\n" +
				"  set network.kindBridgeCIDR to a range that is free here, for example 10.240.0.0/16, or disconnect what made that route"},
		{"equal", extra("172.30.0.0/16 br-1234"), nil, "192.168.64.3",
			"network.kindBridgeCIDR: 172.30.0.0/16 overlaps the route 172.30.0.0/16 dev br-1234 that this computer already has\n" +
				"  set network.kindBridgeCIDR to a range that is free here, for example 172.31.0.0/16, or disconnect what made that route"},
		{"own address", extra(), []netip.Addr{addr("172.30.9.9")}, "192.168.64.3",
			"network.kindBridgeCIDR: 172.30.0.0/16 contains 172.30.9.9, an address of this computer\n" +
				"  set network.kindBridgeCIDR to a range that is free here, for example 172.31.0.0/16"},
		{"no address yet", extra(), nil, "",
			"the guest has no IPv4 address on lima0 yet, so there is nothing to route to\n  in the guest, see: ip -4 addr; klimax-guest status"},
		{"another network", extra(), nil, "10.99.0.5",
			"the guest's address 10.99.0.5 on lima0 is in no network that this computer is attached to: a route needs a next hop on the same network\n" +
				"  set network.uplink to the guest's interface that shares a network with this computer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w, err := Desired(Input{Plan: plan(t), Guest: addr(c.guest), GuestDev: "lima0", RoutePods: true,
				State: State{Routes: c.routes, Addrs: c.addrs}})
			if err == nil || err.Error() != c.want {
				t.Errorf("got error %v\nwant %s", err, c.want)
			}
			if len(w.Routes) != 0 {
				t.Errorf("routes beside an error: %v", w.Routes)
			}
		})
	}
	// What is next to the range, and default routes of every kind, do not count.
	w, err := Desired(Input{Plan: plan(t), Guest: addr("192.168.64.3"), State: State{
		Routes: extra("172.29.0.0/16 a", "172.31.0.0/16 b", "0.0.0.0/0 c", "128.0.0.0/1 d")}})
	if err != nil || len(w.Routes) != 1 {
		t.Errorf("neighbours of the range: %v, %v", w.Routes, err)
	}
}

// Off line the guest has no uplink; its bridge tells that it is this computer.
func TestLocalGuestOffline(t *testing.T) {
	in := Input{Plan: plan(t), BridgeDev: "br-kind", State: State{
		Routes: []Route{{Dest: plan(t).Bridge, Dev: "br-kind"}}, Addrs: []netip.Addr{addr("172.30.0.1")}}}
	if w, err := Desired(in); err != nil || !w.Local || len(w.Routes) != 0 {
		t.Errorf("%+v, %v", w, err)
	}
	for name, edit := range map[string]func(*Input){
		"another bridge": func(in *Input) { in.BridgeDev = "br-other" },
		"no bridge":      func(in *Input) { in.BridgeDev = "" },
		"no address":     func(in *Input) { in.State.Addrs = nil },
		"a route to it": func(in *Input) {
			in.State.Routes = []Route{{Dest: plan(t).Bridge, Gateway: addr("10.0.0.1"), Dev: "br-kind"}}
		},
	} {
		in := in
		edit(&in)
		var e *NoUplinkError
		if w, err := Desired(in); !errors.As(err, &e) || w.Local {
			t.Errorf("%s: %+v, %v", name, w, err)
		}
	}
}

// A route that somebody set by hand to the right place is used and left alone.
func TestForeignRouteThatFits(t *testing.T) {
	st := State{Routes: append(table(t, "plain"),
		Route{Dest: netip.MustParsePrefix("172.30.0.0/16"), Gateway: addr("192.168.64.3"), Dev: "virbr1"})}
	w, err := Desired(Input{Plan: plan(t), Guest: addr("192.168.64.3"), State: st})
	if err != nil {
		t.Fatal(err)
	}
	if c := Diff(w, st); len(c) != 0 {
		t.Errorf("changes: %v", c)
	}
	if c := RemoveAll(plan(t), addr("192.168.64.3"), st); len(c) != 0 {
		t.Errorf("removal of a stranger's route: %v", c)
	}
}

func TestRemoveAll(t *testing.T) {
	for _, c := range []struct {
		table, guest string
		want         []string
	}{
		{"routed", "192.168.64.3", []string{"10.101.0.0/16", "10.102.0.0/16", "172.30.0.0/16"}},
		{"routed", "", []string{"10.101.0.0/16", "10.102.0.0/16", "172.30.0.0/16"}}, // agent not reachable
		{"plain", "192.168.64.3", nil},
		{"linux-two-guests", "192.168.64.3", []string{"172.30.0.0/16"}},
		{"linux-two-guests", "", []string{"172.30.0.0/16"}},
	} {
		var got []string
		for _, ch := range RemoveAll(plan(t), addr(c.guest), State{Routes: anyTable(t, c.table)}) {
			if ch.Op != Remove {
				t.Errorf("%s: %v", c.table, ch)
			}
			got = append(got, ch.Dest.String())
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s %s: got %v, want %v", c.table, c.guest, got, c.want)
		}
	}
}

func TestLines(t *testing.T) {
	st := State{Routes: table(t, "moved")}
	w, err := Desired(Input{Plan: plan(t), Guest: addr("192.168.64.3"), RoutePods: true, State: st,
		Clusters: []api.Cluster{one[0], {Name: "c", Number: 3, Routed: "10.103.0.0/16"}}})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, l := range Lines(w, st) {
		got = append(got, l.Dest.String()+" "+l.State)
	}
	want := []string{"10.101.0.0/16 wrong-gateway", "10.103.0.0/16 missing", "172.30.0.0/16 wrong-gateway", "10.102.0.0/16 leftover"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Whatever the table is, applying the diff leads to what is wanted, touches no
// route of others, and a second diff is empty.
func TestDiffConverges(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal(err)
	}
	for _, f := range files {
		name := strings.TrimSuffix(filepath.Base(f), ".txt")
		for _, guest := range []string{"192.168.64.3", "192.168.64.9", "192.168.64.7"} {
			before := State{Routes: anyTable(t, name)}
			w, err := Desired(Input{Plan: plan(t), Guest: addr(guest), Clusters: two, RoutePods: true, State: before})
			var c *Conflict
			if errors.As(err, &c) {
				continue
			}
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			after := State{Routes: play(before.Routes, Diff(w, before))}
			if again := Diff(w, after); len(again) != 0 {
				t.Errorf("%s via %s: second diff %v", name, guest, again)
			}
			for _, r := range before.Routes {
				if !r.Own && !slices.Contains(after.Routes, r) {
					t.Errorf("%s via %s: %v is gone", name, guest, r)
				}
			}
			for _, r := range w.Routes {
				if !slices.ContainsFunc(after.Routes, func(x Route) bool { return x.Dest == r.Dest && x.Gateway == r.Gateway }) {
					t.Errorf("%s via %s: %v is missing", name, guest, r)
				}
			}
		}
	}
}

// play does to a list of routes what a kernel would.
func play(rs []Route, changes []Change) []Route {
	rs = slices.Clone(rs)
	for _, c := range changes {
		old := c.Gateway
		if c.Op == Replace {
			old = c.Old
		}
		if c.Op != Add {
			rs = slices.DeleteFunc(rs, func(r Route) bool { return r.Own && r.Dest == c.Dest && r.Gateway == old })
		}
		if c.Op != Remove {
			rs = append(rs, Route{Dest: c.Dest, Gateway: c.Gateway, Dev: "bridge100", Own: true})
		}
	}
	return rs
}

func TestCandidate(t *testing.T) {
	p := plan(t)
	for s, want := range map[string]bool{
		"172.30.0.0/16": true, "10.101.0.0/16": true, "10.199.0.0/16": true,
		"10.100.0.0/16": false, "10.200.0.0/16": false, "10.101.0.0/17": false, "172.30.1.0/24": false, "0.0.0.0/0": false, "172.0.0.0/8": false,
	} {
		if got := candidate(p, netip.MustParsePrefix(s)); got != want {
			t.Errorf("%s: %v", s, got)
		}
	}
	if n, ok := clusterOf(p, netip.MustParsePrefix("10.107.0.0/16")); n != 7 || !ok || netplan.MaxCluster != 99 {
		t.Errorf("cluster %d %v", n, ok)
	}
}
