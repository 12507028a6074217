// Package facts describes the part of the world that the network rules depend
// on, and reads what the kernel knows of it.
package facts

import (
	"net/netip"
	"slices"
)

// Facts is one consistent look at the guest. It is plain data: everything that
// is computed from it can be tested without a kernel.
type Facts struct {
	Uplink    Uplink
	Bridge    Bridge
	IPForward bool
	Engine    Engine
	Firewall  Firewall
	// Overlaps are routes of the guest that collide with the address plan.
	Overlaps []Overlap
}

// Uplink is the interface towards the host.
type Uplink struct {
	Name    string // empty when no candidate exists
	Found   bool   // the interface exists
	Up      bool
	Address netip.Addr   // its first IPv4 address; invalid while it has none
	Network netip.Prefix // the connected network, as the kernel has it
}

// Ready reports whether the uplink can carry traffic.
func (u Uplink) Ready() bool { return u.Found && u.Address.IsValid() }

// Bridge is the interface of the Docker network.
type Bridge struct {
	Name    string // as found, else as it will be called
	Present bool
}

// Overlap is a route of the guest that collides with a range of the plan.
type Overlap struct {
	Route  netip.Prefix
	Device string
	Range  netip.Prefix
	Key    string // the configuration key to change
}

// Engine is what was last learned from the Docker engine. While the engine is
// down it keeps its last known values, with Running false.
type Engine struct {
	Known       bool // the engine told everything at least once
	Running     bool
	Version     string
	API         string
	Backend     string // "iptables" or "nftables"
	LiveRestore bool
	Problem     string // why it does not answer, or why it can't be used; for a person
	Reason      string // one CamelCase word for Problem
	Network     DockerNetwork
	// Former are networks that klimax made for another configuration and that
	// are still there.
	Former   []DockerNetwork
	Clusters []Cluster
	Mirrors  []Mirror
}

// DockerNetwork is the network that klimax routes.
type DockerNetwork struct {
	Found       bool
	ID          string
	Bridge      string
	Subnet      netip.Prefix
	Gateway     netip.Addr
	GatewayMode string // the option com.docker.network.bridge.gateway_mode_ipv4; empty means nat
	Ours        bool   // klimax created it
	Problem     string // why it can't be used
	Reason      string
}

// Cluster is a cluster, or the demo workload, found by the labels of its containers.
type Cluster struct {
	Name    string
	Number  int // 0: a kind cluster without a number, made by somebody else
	Nodes   []netip.Addr
	VIP     netip.Addr // of the demo workload
	Demo    bool
	HasAPI  bool // a control-plane node publishes 700N
	Foreign bool
}

// Mirror is a registry mirror's container.
type Mirror struct {
	Name    string
	Address netip.Addr
}

// Equal reports whether two engines mean the same rules and the same status.
func (e Engine) Equal(o Engine) bool {
	return e.Known == o.Known && e.Running == o.Running && e.Version == o.Version && e.API == o.API &&
		e.Backend == o.Backend && e.LiveRestore == o.LiveRestore && e.Problem == o.Problem && e.Reason == o.Reason &&
		e.Network == o.Network && slices.Equal(e.Former, o.Former) && slices.Equal(e.Mirrors, o.Mirrors) &&
		slices.EqualFunc(e.Clusters, o.Clusters, func(a, b Cluster) bool {
			return a.Name == b.Name && a.Number == b.Number && a.VIP == b.VIP && a.Demo == b.Demo &&
				a.HasAPI == b.HasAPI && a.Foreign == b.Foreign && slices.Equal(a.Nodes, b.Nodes)
		})
}

// Firewall is what others have in the kernel's packet filters.
type Firewall struct {
	// ForwardChain: iptables' filter table with its FORWARD chain exists in nf_tables.
	ForwardChain bool
	// ForwardDrop: that chain's policy is DROP.
	ForwardDrop bool
	// UserChain: the chain DOCKER-USER exists.
	UserChain bool
	// UserJump: FORWARD jumps to DOCKER-USER.
	UserJump bool
	// RawChain: iptables' raw table with its PREROUTING chain exists.
	RawChain bool
	// RawDrop: that chain drops packets to addresses of the bridge's range,
	// as engines from 28.2 on do for networks in gateway mode nat.
	RawDrop bool
	// DockerNAT: nat PREROUTING leads to Docker's chain.
	DockerNAT bool
	// DockerForward: FORWARD leads to Docker's chains.
	DockerForward bool
	// DockerTable: Docker's own table for the nftables backend is there with its base chains.
	DockerTable bool
	// DockerMark: Docker's own table accepts packets by a mark (daemon option bridge-accept-fwmark).
	DockerMark bool
	// DockerRawDrop: Docker's own table drops direct traffic to addresses of the bridge's range.
	DockerRawDrop bool
	// LegacyTables are the tables that iptables-legacy has in use here.
	LegacyTables []string
	// LegacyDocker: Docker's chains live in iptables-legacy.
	LegacyDocker bool
	// LegacyForwardDrop: the FORWARD policy of iptables-legacy is DROP.
	LegacyForwardDrop bool
	// Blockers are base chains of others on the forward hook that end in a drop.
	Blockers []Blocker
}

// Blocker is a base chain of somebody else that drops forwarded packets.
type Blocker struct {
	Family, Table, Chain string
	Why                  string // "policy drop" or "ends in drop"
}
