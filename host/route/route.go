// Package route keeps this computer's routes to a guest: one for the bridge of
// the Docker network and one per cluster for its pods and services.
//
// Desired is pure and says which routes are wanted, Diff compares them with
// what there is, and System reads and changes the kernel's table.
package route

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"klimax/shared/netplan"
)

// Protocol is the routing protocol number that marks klimax's routes on Linux
// (`ip route show proto 107`). Numbers above 4 (RTPROT_STATIC in
// linux/rtnetlink.h) mean nothing to the kernel; 107 is used by no routing
// daemon that iproute2's rt_protos lists.
const Protocol = 107

// Route is one entry of the kernel's IPv4 routing tables.
type Route struct {
	Dest    netip.Prefix // 0.0.0.0/0 for a default route
	Gateway netip.Addr   // invalid when the destination is attached directly
	Dev     string       // interface, where known
	Table   string       // empty for the main table
	// Own is true when the entry carries klimax's mark. Linux has one
	// (Protocol); macOS has none, see ParseNetstat for what takes its place.
	Own bool
}

// String names a route the way `ip route` does.
func (r Route) String() string {
	var b strings.Builder
	b.WriteString(r.Dest.String())
	if r.Gateway.IsValid() {
		b.WriteString(" via " + r.Gateway.String())
	}
	if r.Dev != "" {
		b.WriteString(" dev " + r.Dev)
	}
	if r.Table != "" {
		b.WriteString(" table " + r.Table)
	}
	return b.String()
}

// onLink reports whether what lies behind the route is attached directly.
func (r Route) onLink() bool { return !r.Gateway.IsValid() && r.Dev != "" }

// isDefault reports whether the route stands for "everything else". The two
// halves 0.0.0.0/1 and 128.0.0.0/1 are what VPN clients set in place of a
// default route, so that they need not remove the real one.
func (r Route) isDefault() bool { return r.Dest.Bits() <= 1 }

// State is what the kernel says at one moment.
type State struct {
	Routes []Route
	Addrs  []netip.Addr // this computer's own IPv4 addresses
}

// ownAddr reports whether a is one of this computer's addresses.
func (s State) ownAddr(a netip.Addr) bool { return slices.Contains(s.Addrs, a.Unmap()) }

// candidate reports whether dest is a destination that the plan can ask for:
// the bridge's network or the one range of a cluster.
func candidate(p netplan.Plan, dest netip.Prefix) bool {
	if dest == p.Bridge {
		return true
	}
	_, ok := clusterOf(p, dest)
	return ok
}

// clusterOf returns the number of the cluster whose routed range dest is.
func clusterOf(p netplan.Plan, dest netip.Prefix) (int, bool) {
	for n := netplan.MinCluster; n <= netplan.MaxCluster; n++ {
		if c, err := p.Cluster(n); err == nil && c.Routed == dest {
			return n, true
		}
	}
	return 0, false
}

// mine says which of the marked routes belong to this plan and guest. Several
// guests may be in use on one computer and share the mark, so that alone is
// not enough: the route to the plan's bridge is this guest's, and so is
// everything that leads to the gateway of that route or to the guest's present
// address. guest may be invalid when it is not known.
func mine(p netplan.Plan, guest netip.Addr, routes []Route) []Route {
	gateways := map[netip.Addr]bool{guest: guest.IsValid()}
	for _, r := range routes {
		if r.Own && r.Dest == p.Bridge && r.Gateway.IsValid() {
			gateways[r.Gateway] = true
		}
	}
	var out []Route
	for _, r := range routes {
		if r.Own && r.Gateway.IsValid() && gateways[r.Gateway] {
			out = append(out, r)
		}
	}
	return out
}

// sortRoutes orders by destination, then gateway.
func sortRoutes(rs []Route) {
	slices.SortFunc(rs, func(a, b Route) int {
		return cmp.Or(a.Dest.Addr().Compare(b.Dest.Addr()), cmp.Compare(a.Dest.Bits(), b.Dest.Bits()),
			a.Gateway.Compare(b.Gateway), cmp.Compare(a.Table, b.Table))
	})
}

// what names a destination of the plan for a person.
func what(p netplan.Plan, dest netip.Prefix) string {
	if dest == p.Bridge {
		return "containers, nodes and load balancer addresses"
	}
	if n, ok := clusterOf(p, dest); ok {
		return fmt.Sprintf("pods and services of cluster %d", n)
	}
	return "a range of an earlier configuration"
}
