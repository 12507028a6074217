package facts

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func link(index int, name string) netlink.Link {
	a := netlink.NewLinkAttrs()
	a.Index, a.Name = index, name
	return &netlink.Dummy{LinkAttrs: a}
}

func ipNet(s string) *net.IPNet {
	ip, n, err := net.ParseCIDR(s)
	if err != nil {
		panic(err)
	}
	n.IP = ip
	return n
}

func TestChooseUplink(t *testing.T) {
	eth0, eth1, lima := link(2, "eth0"), link(3, "eth1"), link(4, "lima0")
	byIndex := map[int]netlink.Link{2: eth0, 3: eth1, 4: lima}
	defaults := []netlink.Route{{LinkIndex: 2, Priority: 200}, {LinkIndex: 3, Priority: 100, Dst: ipNet("0.0.0.0/0")}, {LinkIndex: 4, Dst: ipNet("10.0.0.0/8")}}
	for _, c := range []struct {
		configured string
		links      []netlink.Link
		routes     []netlink.Route
		want       string
	}{
		{"", []netlink.Link{eth0, eth1, lima}, defaults, "lima0"},
		{"eth0", []netlink.Link{eth0, eth1, lima}, defaults, "eth0"},
		{"wlan9", []netlink.Link{eth0}, defaults, "wlan9"},
		{"", []netlink.Link{eth0, eth1}, defaults, "eth1"},
		{"", []netlink.Link{eth0}, nil, ""},
	} {
		if got := chooseUplink(c.configured, c.links, c.routes, byIndex); got != c.want {
			t.Errorf("%q: got %q, want %q", c.configured, got, c.want)
		}
	}
}

func TestPrimary(t *testing.T) {
	addrs := []netlink.Addr{
		{LinkIndex: 9, IPNet: ipNet("1.2.3.4/24")},
		{LinkIndex: 2, IPNet: ipNet("10.0.0.9/8"), Flags: unix.IFA_F_SECONDARY},
		{LinkIndex: 2, IPNet: ipNet("10.66.20.9/20")},
	}
	a, n := primary(addrs, 2)
	if a.String() != "10.66.20.9" || n.String() != "10.66.16.0/20" {
		t.Errorf("%v %v", a, n)
	}
	if a, n := primary(addrs[:2], 2); a.String() != "10.0.0.9" || n.String() != "10.0.0.0/8" {
		t.Errorf("only a secondary address: %v %v", a, n)
	}
	if a, n := primary(addrs, 5); a.IsValid() || n.IsValid() {
		t.Errorf("no address: %v %v", a, n)
	}
}

func TestOverlaps(t *testing.T) {
	byIndex := map[int]netlink.Link{2: link(2, "tun0"), 3: link(3, "br-kind")}
	plan := []PlannedUse{{netip.MustParsePrefix("172.30.0.0/16"), "network.kindBridgeCIDR"}, {netip.MustParsePrefix("10.101.0.0/16"), "kind.clusterCIDRBase"}}
	routes := []netlink.Route{
		{LinkIndex: 2}, // a default route
		{LinkIndex: 3, Dst: ipNet("172.30.0.0/16")},
		{LinkIndex: 2, Dst: ipNet("0.0.0.0/1")},
		{LinkIndex: 2, Dst: ipNet("128.0.0.0/1")},
		{LinkIndex: 2, Dst: ipNet("10.0.0.0/8")},
		{LinkIndex: 2, Dst: ipNet("172.30.5.0/24")},
		{LinkIndex: 2, Dst: ipNet("192.168.0.0/16")},
	}
	got := overlaps(routes, byIndex, "br-kind", plan)
	if len(got) != 2 || got[0].Key != "kind.clusterCIDRBase" || got[0].Device != "tun0" || got[1].Route.String() != "172.30.5.0/24" {
		t.Errorf("%+v", got)
	}
}

func TestReadKernelHere(t *testing.T) {
	if _, err := ReadKernel(t.Context(), KernelQuery{Gateway: netip.MustParseAddr("172.30.0.1"), Bridge: "br-kind"}); err != nil {
		t.Error(err)
	}
}
