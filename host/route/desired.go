package route

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"klimax/shared/api"
	"klimax/shared/netplan"
)

// Types of the conditions that Desired reports.
const (
	CondBridgeRoute   = "BridgeRoute"   // the route to the bridge's network
	CondClusterRoutes = "ClusterRoutes" // the routes to pods and services
)

// Input is everything that Desired looks at.
type Input struct {
	Plan      netplan.Plan
	Guest     netip.Addr    // the guest's address on its uplink; invalid while it has none
	GuestDev  string        // the name of that uplink, for messages
	BridgeDev string        // the guest's bridge interface
	Clusters  []api.Cluster // as the guest reports them
	RoutePods bool          // network.routePods
	State     State
}

// Wanted is the answer of Desired.
type Wanted struct {
	// Local is true when the guest is this very computer: its own bridge is
	// attached here and nothing needs a route.
	Local      bool
	Guest      netip.Addr
	Routes     []Route
	Conditions []api.Condition
	plan       netplan.Plan
}

// Conflict says that a range of the plan is taken on this computer.
type Conflict struct {
	Key     string       // the configuration key that decides the range
	Range   netip.Prefix // what klimax would route
	Taken   Route        // what is there already; its Dest may be larger or smaller
	Address netip.Addr   // set instead of Taken when an own address lies in Range
	Suggest string       // a value for Key that collides with nothing here, or empty
}

func (e *Conflict) Error() string {
	var b strings.Builder
	if e.Address.IsValid() {
		fmt.Fprintf(&b, "%s: %v contains %v, an address of this computer", e.Key, e.Range, e.Address)
	} else {
		fmt.Fprintf(&b, "%s: %v overlaps the route %v that this computer already has", e.Key, e.Range, e.Taken)
	}
	if e.Suggest != "" {
		fmt.Fprintf(&b, "\n  set %s to a range that is free here, for example %s", e.Key, e.Suggest)
	} else {
		fmt.Fprintf(&b, "\n  set %s to a range that is free here", e.Key)
	}
	if !e.Address.IsValid() {
		b.WriteString(", or disconnect what made that route")
	}
	return b.String()
}

// NoUplinkError says that the guest has no address to route to yet.
type NoUplinkError struct{ Dev string }

func (e *NoUplinkError) Error() string {
	dev := e.Dev
	if dev == "" {
		dev = "its uplink"
	}
	return fmt.Sprintf("the guest has no IPv4 address on %s yet, so there is nothing to route to\n"+
		"  in the guest, see: ip -4 addr; klimax-guest status", dev)
}

// NotAttachedError says that the guest's address lies in no network that this
// computer is attached to, so that no route can lead there.
type NotAttachedError struct {
	Guest netip.Addr
	Dev   string
}

func (e *NotAttachedError) Error() string {
	on := ""
	if e.Dev != "" {
		on = " on " + e.Dev
	}
	return fmt.Sprintf("the guest's address %v%s is in no network that this computer is attached to: a route needs a next hop on the same network\n"+
		"  set network.uplink to the guest's interface that shares a network with this computer", e.Guest, on)
}

// Desired computes the routes that this computer should have for the guest.
//
// A range of the bridge that is taken is an error (*Conflict); a cluster's
// range that is taken is left out and reported as a condition, because a VPN
// may come and go while nodes and load balancer addresses go on working. A
// route of the same destination and gateway that somebody else made is as good
// as an own one. Default routes, and the halves that stand in for one, never
// collide with anything.
func Desired(in Input) (Wanted, error) {
	w := Wanted{Guest: in.Guest.Unmap(), plan: in.Plan}
	if !in.Guest.IsValid() {
		// A computer that is off line has no uplink, and is still the guest
		// when the guest's bridge is here.
		if w.Local = bridgeIsHere(in); w.Local {
			return w, nil
		}
		return w, &NoUplinkError{Dev: in.GuestDev}
	}
	in.Guest = w.Guest
	if in.State.ownAddr(in.Guest) {
		w.Local = true
		return w, nil
	}
	if c := conflict(in, in.Plan.Bridge); c != nil {
		c.Key, c.Suggest = "network.kindBridgeCIDR", freeBridge(in)
		return w, c
	}
	if !attached(in.State.Routes, in.Guest) {
		return w, &NotAttachedError{Guest: in.Guest, Dev: in.GuestDev}
	}
	w.Routes = append(w.Routes, Route{Dest: in.Plan.Bridge, Gateway: in.Guest})
	w.Conditions = append(w.Conditions, api.Condition{Type: CondBridgeRoute, Status: api.True, Reason: "Free",
		Message: fmt.Sprintf("%v is free on this computer", in.Plan.Bridge)})
	if in.RoutePods {
		w.addClusters(in)
	}
	sortRoutes(w.Routes)
	return w, nil
}

// bridgeIsHere reports whether the guest's bridge is an interface of this
// computer.
func bridgeIsHere(in Input) bool {
	return in.BridgeDev != "" && in.State.ownAddr(in.Plan.Gateway()) &&
		slices.ContainsFunc(in.State.Routes, func(r Route) bool {
			return r.Dest == in.Plan.Bridge && r.Dev == in.BridgeDev && r.onLink()
		})
}

// addClusters adds a route for each cluster's range, or a condition that says
// why there is none.
func (w *Wanted) addClusters(in Input) {
	bad := func(reason, format string, args ...any) {
		w.Conditions = append(w.Conditions, api.Condition{Type: CondClusterRoutes, Status: api.False,
			Reason: reason, Message: fmt.Sprintf(format, args...)})
	}
	seen := map[netip.Prefix]bool{}
	for _, cl := range in.Clusters {
		if cl.Routed == "" {
			continue // the demo workload has neither pods nor services
		}
		dest, err := netip.ParsePrefix(cl.Routed)
		if err != nil {
			bad("UnknownRange", "cluster %s: the guest reports the range %q, which is no network", cl.Name, cl.Routed)
			continue
		}
		if _, ok := clusterOf(in.Plan, dest); !ok {
			bad("UnknownRange", "cluster %s: its range %v is none of those of kind.clusterCIDRBase %v: it was made with another value; no route is set",
				cl.Name, dest, in.Plan.ClusterBase)
			continue
		}
		if seen[dest] {
			continue
		}
		seen[dest] = true
		if c := conflict(in, dest); c != nil {
			c.Key, c.Suggest = "kind.clusterCIDRBase", freeBase(in)
			bad("RouteTaken", "cluster %s: pods and services get no route from here. %v", cl.Name, c)
			continue
		}
		w.Routes = append(w.Routes, Route{Dest: dest, Gateway: in.Guest})
	}
}

// conflict finds what collides with dest on this computer, the most specific
// first; nil when nothing does.
func conflict(in Input, dest netip.Prefix) *Conflict {
	for _, a := range in.State.Addrs {
		if dest.Contains(a) {
			return &Conflict{Range: dest, Address: a}
		}
	}
	ours := mine(in.Plan, in.Guest, in.State.Routes)
	var found *Conflict
	for _, r := range in.State.Routes {
		switch {
		case r.isDefault(), !r.Dest.Overlaps(dest), slices.Contains(ours, r):
			continue
		case r.Dest == dest && r.Gateway == in.Guest && r.Table == "":
			continue // what we want, made by somebody else
		}
		if found == nil || r.Dest.Bits() > found.Taken.Dest.Bits() {
			found = &Conflict{Range: dest, Taken: r}
		}
	}
	return found
}

// attached reports whether a lies in a network on one of this computer's links.
func attached(routes []Route, a netip.Addr) bool {
	for _, r := range routes {
		if r.onLink() && !r.isDefault() && r.Dest.Contains(a) {
			return true
		}
	}
	return false
}

// free reports whether nothing on this computer overlaps p.
func free(in Input, p netip.Prefix) bool {
	return conflict(in, p) == nil && !p.Contains(in.Guest)
}

// freeBridge proposes a value for network.kindBridgeCIDR.
func freeBridge(in Input) string {
	try := func(a, b byte) (string, bool) {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{a, b, 0, 0}), 16)
		if _, err := netplan.New(p, in.Plan.ClusterBase); err != nil || !free(in, p) {
			return "", false
		}
		return p.String(), true
	}
	for b := 31; b >= 18; b-- { // 172.17 is docker0's by default
		if s, ok := try(172, byte(b)); ok {
			return s
		}
	}
	for b := 240; b >= 200; b-- {
		if s, ok := try(10, byte(b)); ok {
			return s
		}
	}
	return ""
}

// freeBase proposes a value for kind.clusterCIDRBase: one where no cluster at
// all collides.
func freeBase(in Input) string {
	for _, b := range []byte{100, 150, 50, 0} {
		base := netip.AddrFrom4([4]byte{10, b, 0, 0})
		p, err := netplan.New(in.Plan.Bridge, base)
		if err != nil {
			continue
		}
		ok := true
		for n := netplan.MinCluster; ok && n <= netplan.MaxCluster; n++ {
			c, err := p.Cluster(n)
			ok = err == nil && free(in, c.Routed)
		}
		if ok {
			return base.String()
		}
	}
	return ""
}
