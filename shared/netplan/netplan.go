// Package netplan computes the address plan: which range, address and port
// belongs to the bridge, to each cluster and to the host's routes. It is pure.
package netplan

import (
	"fmt"
	"net/netip"
)

// Limits of the plan.
const (
	MinCluster = 1  // lowest cluster number
	MaxCluster = 99 // highest cluster number
	// DemoCluster is the number that the demo workload borrows while it runs.
	DemoCluster = 99
	// APIPortBase plus a cluster's number is the port of its API server on the guest.
	APIPortBase = 7000
)

// Plan is the address plan of one guest. Make it with New.
type Plan struct {
	Bridge      netip.Prefix // the Docker network's subnet, always a /16
	ClusterBase netip.Addr   // first address of "cluster 0"; cluster N has the /16 N above it
}

// Cluster holds everything the plan fixes for one cluster.
type Cluster struct {
	Number    int
	FirstNode netip.Addr   // x.y.N.2
	LastNode  netip.Addr   // x.y.N.99
	Nodes     netip.Prefix // x.y.N.0/24: nodes and VIPs
	VIPManual Range        // handed out on request only
	VIPAuto   Range        // handed out automatically; its first address goes to the first Service
	Pods      netip.Prefix // lower half of Routed
	Services  netip.Prefix // upper half of Routed
	Routed    netip.Prefix // the one /16 that the host routes for pods and services
	APIPort   int          // on the guest
}

// Range is an inclusive range of IPv4 addresses.
type Range struct{ From, To netip.Addr }

func (r Range) String() string { return r.From.String() + "-" + r.To.String() }

// Contains reports whether a lies in the range.
func (r Range) Contains(a netip.Addr) bool { return r.From.Compare(a) <= 0 && a.Compare(r.To) <= 0 }

// New checks the two values of the configuration that the plan is made from
// and returns the plan. Errors name the configuration key to change.
func New(bridge netip.Prefix, clusterBase netip.Addr) (Plan, error) {
	switch {
	case !bridge.IsValid() || !bridge.Addr().Is4():
		return Plan{}, fmt.Errorf("network.kindBridgeCIDR: %v is not an IPv4 network", bridge)
	case bridge.Bits() != 16:
		return Plan{}, fmt.Errorf("network.kindBridgeCIDR: %v has a /%d prefix, it must be a /16 (for example %v)",
			bridge, bridge.Bits(), netip.PrefixFrom(bridge.Addr(), 16).Masked())
	case bridge != bridge.Masked():
		return Plan{}, fmt.Errorf("network.kindBridgeCIDR: %v has host bits set, write %v", bridge, bridge.Masked())
	case !clusterBase.IsValid() || !clusterBase.Is4():
		return Plan{}, fmt.Errorf("kind.clusterCIDRBase: %v is not an IPv4 address", clusterBase)
	}
	b := clusterBase.As4()
	if b[2] != 0 || b[3] != 0 {
		return Plan{}, fmt.Errorf("kind.clusterCIDRBase: %v must end in .0.0 (for example %d.%d.0.0)", clusterBase, b[0], b[1])
	}
	if int(b[1])+MaxCluster > 255 {
		return Plan{}, fmt.Errorf("kind.clusterCIDRBase: %v leaves no room for %d clusters: the second number may be at most %d",
			clusterBase, MaxCluster, 255-MaxCluster)
	}
	p := Plan{Bridge: bridge, ClusterBase: clusterBase}
	if all := p.ClusterSpan(); all.From.Compare(lastAddr(bridge)) <= 0 && bridge.Addr().Compare(all.To) <= 0 {
		return Plan{}, fmt.Errorf("kind.clusterCIDRBase: the clusters' ranges %v overlap network.kindBridgeCIDR %v", all, bridge)
	}
	return p, nil
}

// Gateway is the bridge's own address.
func (p Plan) Gateway() netip.Addr { return p.at(0, 1) }

// Containers is the range Docker hands out by itself (its --ip-range):
// containers that are no cluster nodes.
func (p Plan) Containers() netip.Prefix { return netip.PrefixFrom(p.at(0, 0), 24) }

// NodeDNS is the address of the agent's resolver for nodes.
func (p Plan) NodeDNS() netip.Addr { return p.at(255, 53) }

// NodeRange spans the node networks of all clusters.
func (p Plan) NodeRange() Range { return Range{From: p.at(MinCluster, 0), To: p.at(MaxCluster, 255)} }

// ClusterSpan spans the pod and service ranges of all clusters.
func (p Plan) ClusterSpan() Range {
	b := p.ClusterBase.As4()
	return Range{
		From: netip.AddrFrom4([4]byte{b[0], b[1] + MinCluster, 0, 0}),
		To:   netip.AddrFrom4([4]byte{b[0], b[1] + MaxCluster, 255, 255}),
	}
}

// Cluster returns what the plan fixes for cluster number n, an error when n is
// outside MinCluster…MaxCluster.
func (p Plan) Cluster(n int) (Cluster, error) {
	if n < MinCluster || n > MaxCluster {
		return Cluster{}, fmt.Errorf("cluster number %d is outside %d-%d", n, MinCluster, MaxCluster)
	}
	b := p.ClusterBase.As4()
	routed := netip.AddrFrom4([4]byte{b[0], b[1] + byte(n), 0, 0})
	return Cluster{
		Number:    n,
		FirstNode: p.at(n, 2),
		LastNode:  p.at(n, 99),
		Nodes:     netip.PrefixFrom(p.at(n, 0), 24),
		VIPManual: Range{p.at(n, 100), p.at(n, 199)},
		VIPAuto:   Range{p.at(n, 200), p.at(n, 254)},
		Pods:      netip.PrefixFrom(routed, 17),
		Services:  netip.PrefixFrom(netip.AddrFrom4([4]byte{b[0], b[1] + byte(n), 128, 0}), 17),
		Routed:    netip.PrefixFrom(routed, 16),
		APIPort:   APIPortBase + n,
	}, nil
}

func (p Plan) at(third, fourth int) netip.Addr {
	b := p.Bridge.Addr().As4()
	return netip.AddrFrom4([4]byte{b[0], b[1], byte(third), byte(fourth)})
}

func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Addr().As4()
	for i := range b {
		for bit := range 8 {
			if i*8+bit >= p.Bits() {
				b[i] |= 1 << (7 - bit)
			}
		}
	}
	return netip.AddrFrom4(b)
}
