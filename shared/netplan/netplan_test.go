package netplan

import (
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
)

func plan(t *testing.T, bridge, base string) Plan {
	t.Helper()
	p, err := New(netip.MustParsePrefix(bridge), netip.MustParseAddr(base))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestNew(t *testing.T) {
	for _, tc := range []struct {
		bridge, base string
		err          string // part of the error, "" for none
	}{
		{"172.30.0.0/16", "10.100.0.0", ""},
		{"10.0.0.0/16", "10.0.0.0", ""},     // the bridge is just below the first cluster
		{"10.200.0.0/16", "10.100.0.0", ""}, // just above the last
		{"172.30.0.0/16", "10.156.0.0", ""}, // the highest base there is
		{"172.30.0.0/24", "10.100.0.0", "network.kindBridgeCIDR: 172.30.0.0/24 has a /24 prefix, it must be a /16 (for example 172.30.0.0/16)"},
		{"172.30.5.0/15", "10.100.0.0", "must be a /16 (for example 172.30.0.0/16)"},
		{"172.30.0.1/16", "10.100.0.0", "write 172.30.0.0/16"},
		{"fd00::/16", "10.100.0.0", "network.kindBridgeCIDR: fd00::/16 is not an IPv4 network"},
		{"172.30.0.0/16", "fd00::", "kind.clusterCIDRBase: fd00:: is not an IPv4 address"},
		{"172.30.0.0/16", "10.100.1.0", "kind.clusterCIDRBase: 10.100.1.0 must end in .0.0 (for example 10.100.0.0)"},
		{"172.30.0.0/16", "10.157.0.0", "at most 156"},
		{"10.101.0.0/16", "10.100.0.0", "kind.clusterCIDRBase: the clusters' ranges 10.101.0.0-10.199.255.255 overlap network.kindBridgeCIDR 10.101.0.0/16"},
		{"10.199.0.0/16", "10.100.0.0", "overlap"},
	} {
		_, err := New(netip.MustParsePrefix(tc.bridge), netip.MustParseAddr(tc.base))
		switch {
		case tc.err == "" && err != nil:
			t.Errorf("New(%s, %s) = %v", tc.bridge, tc.base, err)
		case tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)):
			t.Errorf("New(%s, %s) = %v, want %q in it", tc.bridge, tc.base, err, tc.err)
		}
	}
	if _, err := New(netip.Prefix{}, netip.Addr{}); err == nil {
		t.Error("New of nothing succeeds")
	}
}

// The values of the design's table, written out.
func TestPlan(t *testing.T) {
	p := plan(t, "172.30.0.0/16", "10.100.0.0")
	for _, tc := range []struct {
		what      string
		got, want any
	}{
		{"gateway", p.Gateway(), netip.MustParseAddr("172.30.0.1")},
		{"containers", p.Containers(), netip.MustParsePrefix("172.30.0.0/24")},
		{"node DNS", p.NodeDNS(), netip.MustParseAddr("172.30.255.53")},
		{"node range", p.NodeRange().String(), "172.30.1.0-172.30.99.255"},
		{"cluster span", p.ClusterSpan().String(), "10.101.0.0-10.199.255.255"},
	} {
		if tc.got != tc.want {
			t.Errorf("%s is %v, want %v", tc.what, tc.got, tc.want)
		}
	}
	for _, tc := range []struct {
		n                                               int
		first, last, nodes, manual, auto, pods, svc, rt string
		port                                            int
	}{
		{1, "172.30.1.2", "172.30.1.99", "172.30.1.0/24", "172.30.1.100-172.30.1.199", "172.30.1.200-172.30.1.254", "10.101.0.0/17", "10.101.128.0/17", "10.101.0.0/16", 7001},
		{42, "172.30.42.2", "172.30.42.99", "172.30.42.0/24", "172.30.42.100-172.30.42.199", "172.30.42.200-172.30.42.254", "10.142.0.0/17", "10.142.128.0/17", "10.142.0.0/16", 7042},
		{DemoCluster, "172.30.99.2", "172.30.99.99", "172.30.99.0/24", "172.30.99.100-172.30.99.199", "172.30.99.200-172.30.99.254", "10.199.0.0/17", "10.199.128.0/17", "10.199.0.0/16", 7099},
	} {
		c, err := p.Cluster(tc.n)
		if err != nil {
			t.Fatal(err)
		}
		got := []any{c.Number, c.FirstNode.String(), c.LastNode.String(), c.Nodes.String(), c.VIPManual.String(), c.VIPAuto.String(), c.Pods.String(), c.Services.String(), c.Routed.String(), c.APIPort}
		want := []any{tc.n, tc.first, tc.last, tc.nodes, tc.manual, tc.auto, tc.pods, tc.svc, tc.rt, tc.port}
		for i := range want {
			if got[i] != want[i] {
				t.Errorf("cluster %d: %v, want %v", tc.n, got[i], want[i])
			}
		}
	}
	for _, n := range []int{-1, 0, 100, 255, 256} {
		if c, err := p.Cluster(n); err == nil {
			t.Errorf("Cluster(%d) = %+v, want an error", n, c)
		}
	}
}

func TestRangeContains(t *testing.T) {
	r := Range{From: netip.MustParseAddr("172.30.1.200"), To: netip.MustParseAddr("172.30.1.254")}
	for a, want := range map[string]bool{"172.30.1.199": false, "172.30.1.200": true, "172.30.1.230": true, "172.30.1.254": true, "172.30.1.255": false, "::1": false} {
		if got := r.Contains(netip.MustParseAddr(a)); got != want {
			t.Errorf("%v.Contains(%s) = %v", r, a, got)
		}
	}
}

// span is an inclusive range of addresses as numbers.
type span struct {
	what     string
	from, to uint32
}

func number(a netip.Addr) uint32 {
	b := a.As4()
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}

// The test's own arithmetic, not netplan's.
func ofPrefix(what string, p netip.Prefix) span {
	from := number(p.Addr())
	return span{what, from, from | (uint32(1)<<(32-p.Bits()) - 1)}
}

func (s span) overlaps(o span) bool { return s.from <= o.to && o.from <= s.to }
func (s span) within(o span) bool   { return o.from <= s.from && s.to <= o.to }

// For any bridge and base that New accepts, no two ranges with different
// owners share an address, and each lies where the host's routes and the
// firewall's sets expect it.
func TestNoRangesOverlap(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2)) // fixed: a failure must be repeatable
	accepted := 0
	for range 60 {
		bridge := netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(1 + random.IntN(222)), byte(random.IntN(256))}), 16)
		base := netip.AddrFrom4([4]byte{byte(1 + random.IntN(222)), byte(random.IntN(157))})
		if random.IntN(3) == 0 { // near each other, on purpose
			base = netip.AddrFrom4([4]byte{bridge.Addr().As4()[0], base.As4()[1]})
		}
		p, err := New(bridge, base)
		if err != nil {
			continue
		}
		accepted++
		checkPlan(t, p)
	}
	if accepted < 20 {
		t.Errorf("only %d of 60 plans were accepted, too few to say anything", accepted)
	}
}

func checkPlan(t *testing.T, p Plan) {
	t.Helper()
	all := ofPrefix("bridge", p.Bridge)
	inBridge := []span{
		{"gateway", number(p.Gateway()), number(p.Gateway())},
		{"node DNS", number(p.NodeDNS()), number(p.NodeDNS())},
		// .0 is the network's and .1 the gateway's own address.
		{"containers", number(p.Containers().Addr()) + 2, ofPrefix("", p.Containers()).to},
	}
	var routed []span
	ports := map[int]bool{}
	for n := MinCluster; n <= MaxCluster; n++ {
		c, err := p.Cluster(n)
		if err != nil {
			t.Fatal(err)
		}
		if c.APIPort < 1024 || c.APIPort > 65535 || ports[c.APIPort] {
			t.Errorf("cluster %d: port %d is bad or taken", n, c.APIPort)
		}
		ports[c.APIPort] = true
		nodes := ofPrefix("nodes", c.Nodes)
		parts := []span{
			{"node addresses", number(c.FirstNode), number(c.LastNode)},
			{"VIPs on request", number(c.VIPManual.From), number(c.VIPManual.To)},
			{"automatic VIPs", number(c.VIPAuto.From), number(c.VIPAuto.To)},
		}
		for _, s := range parts {
			if s.from > s.to || !s.within(nodes) {
				t.Errorf("cluster %d: %+v is not within %v", n, s, c.Nodes)
			}
		}
		if number(c.VIPAuto.To) == nodes.to {
			t.Errorf("cluster %d: the last VIP %v is a broadcast address for a /24", n, c.VIPAuto.To)
		}
		inBridge = append(inBridge, parts...)

		whole := ofPrefix("routed", c.Routed)
		pods, services := ofPrefix("pods", c.Pods), ofPrefix("services", c.Services)
		if pods.from != whole.from || pods.to+1 != services.from || services.to != whole.to {
			t.Errorf("cluster %d: pods %v and services %v are not the halves of %v", n, c.Pods, c.Services, c.Routed)
		}
		if cs := p.ClusterSpan(); !whole.within(span{from: number(cs.From), to: number(cs.To)}) {
			t.Errorf("cluster %d: %v is outside %v", n, c.Routed, cs)
		}
		if nr := p.NodeRange(); !nodes.within(span{from: number(nr.From), to: number(nr.To)}) {
			t.Errorf("cluster %d: %v is outside %v", n, c.Nodes, nr)
		}
		routed = append(routed, whole)
	}
	for i, a := range inBridge {
		if !a.within(all) {
			t.Errorf("%+v is outside the bridge %v", a, p.Bridge)
		}
		for _, b := range inBridge[i+1:] {
			if a.overlaps(b) {
				t.Errorf("bridge %v: %+v overlaps %+v", p.Bridge, a, b)
			}
		}
	}
	for i, a := range routed {
		if a.overlaps(all) {
			t.Errorf("%+v overlaps the bridge %v", a, p.Bridge)
		}
		for _, b := range routed[i+1:] {
			if a.overlaps(b) {
				t.Errorf("%+v overlaps %+v", a, b)
			}
		}
	}
}
