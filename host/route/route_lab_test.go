//go:build lab && linux

package route

import (
	"log/slog"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"klimax/shared/api"
)

// inNamespace puts the test into a network namespace of its own, with a link
// "vm0" that has 192.168.64.1/24. The thread is never unlocked, so the Go
// runtime ends it, and the namespace with it, when the test is over.
func inNamespace(t *testing.T) *System {
	t.Helper()
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatalf("a network namespace: %v", err)
	}
	link(t, "vm0", "192.168.64.1/24")
	return NewSystem("/no/such/klimax", slog.New(slog.DiscardHandler))
}

func link(t *testing.T, name, cidr string) {
	t.Helper()
	// A veth pair with both ends here: some kernels have no dummy device.
	d := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"}
	a, err := netlink.ParseAddr(cidr)
	for _, f := range []func() error{
		func() error { return err },
		func() error { return netlink.LinkAdd(d) },
		func() error { return netlink.AddrAdd(d, a) },
		func() error { return netlink.LinkSetUp(d) },
		func() error { return netlink.LinkSetUp(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: name + "p"}}) },
	} {
		if err := f(); err != nil {
			t.Fatalf("link %s: %v", name, err)
		}
	}
}

func addRoute(t *testing.T, dest, gw, dev string, table, proto int) {
	t.Helper()
	p := netip.MustParsePrefix(dest)
	r := &netlink.Route{Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)},
		Table: table, Protocol: netlink.RouteProtocol(proto)}
	if gw != "" {
		r.Gw = net.ParseIP(gw)
	}
	if dev != "" {
		l, err := netlink.LinkByName(dev)
		if err != nil {
			t.Fatal(err)
		}
		r.LinkIndex = l.Attrs().Index
		if gw == "" {
			r.Scope = netlink.SCOPE_LINK
		}
	}
	if err := netlink.RouteAdd(r); err != nil {
		t.Fatalf("route %s: %v", dest, err)
	}
}

// up does what `klimax up` does with routes and returns the changes made.
func up(t *testing.T, s *System, guest string, clusters []api.Cluster) ([]Change, Wanted) {
	t.Helper()
	st, err := s.Current(t.Context(), plan(t), netip.Prefix{})
	if err != nil {
		t.Fatal(err)
	}
	w, err := Desired(Input{Plan: plan(t), Guest: addr(guest), Clusters: clusters, RoutePods: true, State: st})
	if err != nil {
		t.Fatal(err)
	}
	c := Diff(w, st)
	if err := s.Apply(t.Context(), request(t, guest, c...)); err != nil {
		t.Fatal(err)
	}
	return c, w
}

func current(t *testing.T, s *System) State {
	t.Helper()
	st, err := s.Current(t.Context(), plan(t), netip.Prefix{})
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func TestLabApply(t *testing.T) {
	s := inNamespace(t)
	link(t, "lan0", "10.99.0.2/24")
	addRoute(t, "0.0.0.0/0", "10.99.0.1", "", 0, unix.RTPROT_STATIC)
	addRoute(t, "172.29.0.0/16", "192.168.64.3", "", 0, unix.RTPROT_STATIC) // a stranger's, same gateway
	addRoute(t, "192.0.2.0/24", "192.168.64.77", "", 0, Protocol)           // another guest's
	before := listing(current(t, s).Routes)

	if c, _ := up(t, s, guest, two); len(c) != 3 {
		t.Fatalf("first: %v", c)
	}
	got := listing(current(t, s).Routes)
	for _, want := range []string{"172.30.0.0/16 via 192.168.64.3 dev vm0 own\n", "10.101.0.0/16 via 192.168.64.3 dev vm0 own\n",
		"10.102.0.0/16 via 192.168.64.3 dev vm0 own\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %qin\n%s", want, got)
		}
	}
	if c, _ := up(t, s, guest, two); len(c) != 0 {
		t.Errorf("second: %v", c)
	}
	c, _ := up(t, s, "192.168.64.9", one)
	if len(c) != 3 {
		t.Errorf("moved: %v", c)
	}
	st := current(t, s)
	if got := listing(mine(plan(t), addr("192.168.64.9"), st.Routes)); got !=
		"10.101.0.0/16 via 192.168.64.9 dev vm0 own\n172.30.0.0/16 via 192.168.64.9 dev vm0 own\n" {
		t.Errorf("after the move:\n%s", got)
	}
	if err := s.Apply(t.Context(), request(t, "", RemoveAll(plan(t), netip.Addr{}, st)...)); err != nil {
		t.Fatal(err)
	}
	if after := listing(current(t, s).Routes); after != before {
		t.Errorf("not as before:\n%s\nbut\n%s", before, after)
	}
}

// A VPN's own table comes before the main one by its policy rule.
func TestLabOtherTables(t *testing.T) {
	s := inNamespace(t)
	link(t, "tun0", "100.64.7.3/32")
	addRoute(t, "10.0.0.0/8", "", "tun0", 52, unix.RTPROT_STATIC)
	c, w := up(t, s, guest, one)
	if len(c) != 1 || c[0].Dest != plan(t).Bridge {
		t.Errorf("changes %v", c)
	}
	if len(w.Conditions) != 2 || !strings.Contains(w.Conditions[1].Message, "10.0.0.0/8 dev tun0 table 52") {
		t.Errorf("conditions %v", w.Conditions)
	}
	addRoute(t, "172.16.0.0/12", "", "tun0", 53, unix.RTPROT_STATIC)
	_, err := Desired(Input{Plan: plan(t), Guest: addr(guest), State: current(t, s)})
	if err == nil || !strings.Contains(err.Error(), "172.16.0.0/12 dev tun0 table 53") {
		t.Errorf("got %v", err)
	}
}

func TestLabLocalGuest(t *testing.T) {
	s := inNamespace(t)
	link(t, "br-kind", "172.30.0.1/16")
	st := current(t, s)
	w, err := Desired(Input{Plan: plan(t), Guest: addr("192.168.64.1"), Clusters: two, RoutePods: true, State: st})
	if err != nil || !w.Local || len(w.Routes) != 0 || len(Diff(w, st)) != 0 {
		t.Errorf("%+v, %v", w, err)
	}
	// Seen from a namespace without that address the same bridge is a conflict.
	if _, err := Desired(Input{Plan: plan(t), Guest: addr("192.168.64.2"), State: st}); err == nil {
		t.Error("no conflict with the bridge of this computer")
	}
}

// What root is asked for is checked against the kernel's table again.
func TestLabRefusals(t *testing.T) {
	s := inNamespace(t)
	addRoute(t, "172.30.0.0/16", "192.168.64.50", "", 0, unix.RTPROT_STATIC)
	before := listing(current(t, s).Routes)
	for name, c := range map[string]Change{
		"over a stranger's": change(Add, "172.30.0.0/16", guest, ""),
		"replace it":        change(Replace, "172.30.0.0/16", guest, "192.168.64.50"),
		"remove it":         change(Remove, "172.30.0.0/16", "192.168.64.50", ""),
		"to itself":         change(Add, "10.101.0.0/16", "192.168.64.1", ""),
		"nowhere":           change(Add, "10.101.0.0/16", "10.1.2.3", ""),
	} {
		q := request(t, c.Gateway.String(), c)
		if err := s.Apply(t.Context(), q); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if after := listing(current(t, s).Routes); after != before {
		t.Errorf("changed to\n%s", after)
	}
	// The kernel itself keeps a stranger's route when only the mark differs.
	if err := (netlinkKernel{}).apply(t.Context(), []Change{change(Remove, "172.30.0.0/16", "192.168.64.50", "")}); err == nil {
		t.Error("removed a route without the mark")
	}
	if !slices.ContainsFunc(current(t, s).Routes, func(r Route) bool { return r.Dest == plan(t).Bridge }) {
		t.Error("the stranger's route is gone")
	}
}

func BenchmarkLabNothingToDo(b *testing.B) {
	s := NewSystem("/no/such/klimax", slog.New(slog.DiscardHandler))
	for b.Loop() {
		st, err := s.Current(b.Context(), plan(b), netip.Prefix{})
		if err != nil {
			b.Fatal(err)
		}
		_, _ = Desired(Input{Plan: plan(b), Guest: addr(guest), Clusters: two, RoutePods: true, State: st})
	}
}
