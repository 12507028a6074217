//go:build linux

package lab

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Addresses on the third network.
const (
	LANAddr   = "10.99.0.1" // lan, the VM's default gateway
	VMLANAddr = "10.99.0.2" // the VM
)

// VMAddr is the VM's address on the uplink.
func (l *Lab) VMAddr() string {
	return netip.MustParsePrefix(l.opts.UplinkPrefix).Addr().String()
}

// MacAddr is the Mac's address on the uplink.
func (l *Lab) MacAddr() string { return l.opts.MacAddr }

// NeighbourAddr is the neighbour's address on the uplink.
func (l *Lab) NeighbourAddr() string { return l.opts.NeighbourAddr }

// Uplink is the name of the VM's interface to the Mac.
func (l *Lab) Uplink() string { return l.opts.UplinkName }

// makeNetwork makes the namespaces and what connects them.
func (l *Lab) makeNetwork() error {
	uplink, err := netip.ParsePrefix(l.opts.UplinkPrefix)
	if err != nil {
		return fmt.Errorf("UplinkPrefix: %w", err)
	}
	bits := uplink.Bits()
	for _, n := range []struct {
		to   **NS
		word string
	}{{&l.Mac, "mac"}, {&l.VM, "vm"}, {&l.LAN, "lan"}, {&l.Neighbour, "nb"}} {
		if *n.to, err = l.AddNS(n.word); err != nil {
			return err
		}
	}
	// As on a real Mac, where VMs and the host meet on a bridge of the host.
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "en0"
	if err := l.Mac.h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		return fmt.Errorf("make bridge en0: %w", err)
	}
	// An address of its own: else a bridge takes the lowest of its ports', and changes it when one is added.
	en0, err := l.Mac.link("en0")
	if err != nil {
		return err
	}
	if err := l.Mac.h.LinkSetHardwareAddr(en0, []byte{0x02, 0x6b, 0x6c, 0, 0, 1}); err != nil {
		return err
	}
	forward := "1"
	if l.opts.ForwardDrop {
		forward = "0"
	}
	for _, f := range []func() error{
		func() error { return l.VM.Sysctl("ipv4.ip_forward", forward) },
		func() error { return l.JoinUplink(l.VM, l.opts.UplinkName) },
		func() error { return l.JoinUplink(l.Neighbour, "eth0") },
		func() error { return l.Mac.AddAddr("en0", fmt.Sprintf("%s/%d", l.opts.MacAddr, bits)) },
		func() error { return l.Mac.Up("en0") },
		func() error { return l.Neighbour.AddAddr("eth0", fmt.Sprintf("%s/%d", l.opts.NeighbourAddr, bits)) },
		func() error { return Connect(l.VM, "eth1", l.LAN, "eth0") },
		func() error { return l.VM.AddAddr("eth1", VMLANAddr+"/24") },
		func() error { return l.LAN.AddAddr("eth0", LANAddr+"/24") },
		func() error { return l.VM.AddRoute("default", LANAddr) },
	} {
		if err := f(); err != nil {
			return err
		}
	}
	if l.opts.NoUplinkAddr {
		return nil
	}
	return l.VM.AddAddr(l.opts.UplinkName, l.opts.UplinkPrefix)
}

// Connect joins two namespaces with a veth pair, up at both ends and without addresses.
func Connect(a *NS, aName string, b *NS, bName string) error {
	h, err := netns.GetFromPath(b.Path)
	if err != nil {
		return fmt.Errorf("connect %s and %s: %w", a.Name, b.Name, err)
	}
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = aName
	v := &netlink.Veth{LinkAttrs: attrs, PeerName: bName, PeerNamespace: netlink.NsFd(int(h))}
	if err := a.h.LinkAdd(v); err != nil {
		return fmt.Errorf("connect %s %s and %s %s: %w", a.Name, aName, b.Name, bName, err)
	}
	if err := a.Up(aName); err != nil {
		return err
	}
	return b.Up(bName)
}

// JoinUplink connects a namespace to the uplink's network, by an interface that is up and has no address.
func (l *Lab) JoinUplink(n *NS, link string) error {
	port := "p-" + n.Name[len(l.Name)+1:]
	if err := Connect(l.Mac, port, n, link); err != nil {
		return err
	}
	p, err := l.Mac.link(port)
	if err != nil {
		return err
	}
	en0, err := l.Mac.link("en0")
	if err != nil {
		return err
	}
	if err := l.Mac.h.LinkSetMaster(p, en0); err != nil {
		return fmt.Errorf("join %s to the uplink: %w", n.Name, err)
	}
	return nil
}

// AddHost makes a further host on the uplink's network, with an address ("192.168.64.5/24") on its eth0 and no routes.
func (l *Lab) AddHost(word, prefix string) *NS {
	l.t.Helper()
	n, err := l.AddNS(word)
	if err == nil {
		err = l.JoinUplink(n, "eth0")
	}
	if err == nil {
		err = n.AddAddr("eth0", prefix)
	}
	if err != nil {
		l.t.Fatalf("lab: host %s: %v", word, err)
	}
	return n
}

// RouteFromMac gives the Mac routes over the VM; without prefixes to 172.30.0.0/16.
func (l *Lab) RouteFromMac(prefixes ...string) { l.route(l.Mac, l.VMAddr(), prefixes) }

// RouteFromLAN gives lan routes over the VM, as somebody may have set them who should not get in.
func (l *Lab) RouteFromLAN(prefixes ...string) { l.route(l.LAN, VMLANAddr, prefixes) }

// RouteFromNeighbour gives the neighbour routes over the VM.
func (l *Lab) RouteFromNeighbour(prefixes ...string) { l.route(l.Neighbour, l.VMAddr(), prefixes) }

func (l *Lab) route(n *NS, via string, prefixes []string) {
	l.t.Helper()
	if len(prefixes) == 0 {
		prefixes = []string{"172.30.0.0/16"}
	}
	for _, p := range prefixes {
		if err := n.AddRoute(p, via); err != nil {
			l.t.Fatal(err)
		}
	}
}
