package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// The two ends of the link. The names are those that Lima gives them: lima0 in
// the guest, and the guest takes its uplink by that name.
const (
	guestLink = "lima0"
	macLink   = "en0"
)

var (
	guestAddr = netip.MustParsePrefix("192.168.64.2/24")
	macAddr   = netip.MustParsePrefix("192.168.64.1/24")
)

// mac is the namespace that plays the Mac.
type mac struct{ name string }

func (m mac) path() string { return filepath.Join("/run/netns", m.name) }

// alias marks lima0 as made by this command, so that another lima0 is never taken for it.
func (m mac) alias() string { return "klimax test: other end in " + m.name }

// up makes namespace and link, or what is missing of them, and reports
// whether anything was. It changes nothing when the network is in use already.
func (m mac) up() (changed bool, err error) {
	if os.Geteuid() != 0 {
		return false, errors.New("making network interfaces needs root: run it with sudo")
	}
	link, err := netlink.LinkByName(guestLink)
	switch {
	case err == nil && link.Attrs().Alias != m.alias():
		return false, fmt.Errorf("this machine already has an interface %s: it looks like a Lima guest, where no Mac needs to be played", guestLink)
	case err != nil && !errors.As(err, &netlink.LinkNotFoundError{}):
		return false, err
	}
	if err := unused(guestAddr.Masked()); err != nil {
		return false, err
	}
	ns, err := netns.GetFromPath(m.path())
	if errors.Is(err, os.ErrNotExist) {
		ns, err = m.create()
		changed = true
	}
	if err != nil {
		return changed, fmt.Errorf("namespace %s: %w", m.name, err)
	}
	defer ns.Close()
	inside, err := netlink.NewHandleAt(ns)
	if err != nil {
		return changed, err
	}
	defer inside.Close()
	if link == nil {
		// An end that was left alone would be in the way of the new one's name.
		if old, err := inside.LinkByName(macLink); err == nil {
			if err := inside.LinkDel(old); err != nil {
				return changed, err
			}
		}
		changed = true
		attrs := netlink.NewLinkAttrs()
		attrs.Name = guestLink
		veth := &netlink.Veth{LinkAttrs: attrs, PeerName: macLink, PeerNamespace: netlink.NsFd(int(ns))}
		if err := netlink.LinkAdd(veth); err != nil {
			return changed, fmt.Errorf("adding %s: %w", guestLink, err)
		}
		if link, err = netlink.LinkByName(guestLink); err != nil {
			return changed, err
		}
		if err := netlink.LinkSetAlias(link, m.alias()); err != nil {
			return changed, err
		}
	}
	here, err := netlink.NewHandle()
	if err != nil {
		return changed, err
	}
	defer here.Close()
	for _, end := range []struct {
		handle *netlink.Handle
		name   string
		addr   netip.Prefix
	}{{inside, "lo", netip.Prefix{}}, {here, guestLink, guestAddr}, {inside, macLink, macAddr}} {
		did, err := configure(end.handle, end.name, end.addr)
		changed = changed || did
		if err != nil {
			return changed, fmt.Errorf("configuring %s: %w", end.name, err)
		}
	}
	return changed, nil
}

// create makes the named namespace and comes back to the caller's.
func (m mac) create() (netns.NsHandle, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	here, err := netns.Get()
	if err != nil {
		return netns.None(), err
	}
	defer here.Close()
	ns, err := netns.NewNamed(m.name)
	if back := netns.Set(here); back != nil {
		panic(fmt.Sprintf("cannot come back from the new namespace: %v", back))
	}
	return ns, err
}

// configure gives an interface its address, unless addr is zero, and turns it on.
func configure(h *netlink.Handle, name string, addr netip.Prefix) (changed bool, err error) {
	link, err := h.LinkByName(name)
	if err != nil {
		return false, err
	}
	if addr.IsValid() {
		have, err := h.AddrList(link, netlink.FAMILY_V4)
		if err != nil {
			return false, err
		}
		there := false
		for _, a := range have {
			there = there || a.IPNet.String() == addr.String()
		}
		if !there {
			changed = true
			ip := &net.IPNet{IP: addr.Addr().AsSlice(), Mask: net.CIDRMask(addr.Bits(), 32)}
			if err := h.AddrAdd(link, &netlink.Addr{IPNet: ip}); err != nil {
				return changed, err
			}
		}
	}
	if link.Attrs().Flags&net.FlagUp == 0 {
		changed = true
		err = h.LinkSetUp(link)
	}
	return changed, err
}

// unused returns an error when this machine reaches or is part of a network
// that overlaps p, lima0 excepted.
func unused(p netip.Prefix) error {
	clash := func(n *net.IPNet) (netip.Prefix, bool) {
		if n == nil {
			return netip.Prefix{}, false
		}
		a, ok := netip.AddrFromSlice(n.IP)
		bits, _ := n.Mask.Size()
		q := netip.PrefixFrom(a.Unmap(), bits).Masked()
		return q, ok && bits > 0 && q.Overlaps(p) // the default route overlaps everything
	}
	const advice = "the Mac cannot be played on a machine that uses that network"
	name := func(index int) string {
		if l, err := netlink.LinkByIndex(index); err == nil {
			return l.Attrs().Name
		}
		return fmt.Sprintf("interface %d", index)
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		if q, yes := clash(a.IPNet); yes && name(a.LinkIndex) != guestLink {
			return fmt.Errorf("%v is in use here: %s has %v of %v; %s", p, name(a.LinkIndex), a.IP, q, advice)
		}
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	for _, r := range routes {
		if q, yes := clash(r.Dst); yes && name(r.LinkIndex) != guestLink {
			return fmt.Errorf("%v is in use here: there is a route to %v by %s; %s", p, q, name(r.LinkIndex), advice)
		}
	}
	return nil
}

// down removes the link and the namespace, and reports whether they were there.
func (m mac) down() (changed bool, err error) {
	if link, err := netlink.LinkByName(guestLink); err == nil && link.Attrs().Alias == m.alias() {
		if err := netlink.LinkDel(link); err != nil {
			return false, fmt.Errorf("removing %s: %w (root is needed)", guestLink, err)
		}
		changed = true
	}
	if _, err := os.Stat(m.path()); err == nil {
		if err := netns.DeleteNamed(m.name); err != nil {
			return changed, fmt.Errorf("removing namespace %s: %w (root is needed)", m.name, err)
		}
		changed = true
	}
	return changed, nil
}

// enter moves the calling goroutine's thread into the namespace for good.
func (m mac) enter() error {
	runtime.LockOSThread()
	ns, err := netns.GetFromPath(m.path())
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("there is no namespace %s: run `make up` first", m.name)
	}
	if err != nil {
		return err
	}
	defer ns.Close()
	if err := unix.Setns(int(ns), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("entering namespace %s: %w (root is needed)", m.name, err)
	}
	return nil
}
