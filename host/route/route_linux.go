package route

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"klimax/shared/netplan"
)

// netlinkKernel works on the network namespace of the calling thread.
type netlinkKernel struct{}

func newKernel(Runner) kernel { return netlinkKernel{} }

// dumpTries is how often a listing that the kernel says changed meanwhile
// (NLM_F_DUMP_INTR) is read again.
const dumpTries = 5

// routes lists every table but the local one: policy rules of VPN clients
// (Tailscale's table 52, for one) come before the main table, so what is in
// theirs collides as well.
func (netlinkKernel) routes(ctx context.Context, _ netplan.Plan, _ netip.Prefix) ([]Route, error) {
	var list []netlink.Route
	var err error
	for range dumpTries {
		if err = ctx.Err(); err != nil {
			return nil, err
		}
		list, err = netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	names := map[int]string{}
	links, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	for _, l := range links {
		names[l.Index] = l.Name
	}
	out := make([]Route, 0, len(list))
	for _, n := range list {
		switch {
		case n.Table == unix.RT_TABLE_LOCAL, n.Type == unix.RTN_BROADCAST, n.Type == unix.RTN_LOCAL, n.Type == unix.RTN_MULTICAST:
			continue
		}
		r := Route{Dest: netip.PrefixFrom(netip.IPv4Unspecified(), 0), Dev: names[n.LinkIndex]}
		if n.Dst != nil {
			if r.Dest, err = prefix(n.Dst); err != nil {
				return nil, err
			}
		}
		gw := n.Gw
		if len(n.MultiPath) > 0 {
			gw, r.Dev = n.MultiPath[0].Gw, names[n.MultiPath[0].LinkIndex]
		}
		if a, ok := netip.AddrFromSlice(gw); ok {
			r.Gateway = a.Unmap()
		}
		if n.Table != unix.RT_TABLE_MAIN {
			r.Table = strconv.Itoa(n.Table)
		}
		r.Own = int(n.Protocol) == Protocol && r.Table == ""
		out = append(out, r)
	}
	return out, nil
}

func prefix(n *net.IPNet) (netip.Prefix, error) {
	a, ok := netip.AddrFromSlice(n.IP)
	bits, size := n.Mask.Size()
	if !ok || size == 0 {
		return netip.Prefix{}, fmt.Errorf("the kernel lists a route to %v, which is no network", n)
	}
	return netip.PrefixFrom(a.Unmap(), bits), nil
}

func (netlinkKernel) apply(ctx context.Context, changes []Change) error {
	var errs []error
	for _, c := range changes {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		r := &netlink.Route{
			Dst:      &net.IPNet{IP: c.Dest.Addr().AsSlice(), Mask: net.CIDRMask(c.Dest.Bits(), 32)},
			Gw:       c.Gateway.AsSlice(),
			Protocol: Protocol,
			Table:    unix.RT_TABLE_MAIN,
		}
		var err error
		switch c.Op {
		case Add:
			err = netlink.RouteAdd(r)
		case Replace:
			err = netlink.RouteReplace(r)
		case Remove:
			// The kernel compares the protocol too: what is not ours stays.
			err = netlink.RouteDel(r)
		default:
			err = fmt.Errorf("unknown operation %q", c.Op)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", netlinkKernel{}.command(c), err))
		}
	}
	return errors.Join(errs...)
}

func (k netlinkKernel) commands(changes []Change) []string {
	var out []string
	for _, c := range changes {
		out = append(out, k.command(c))
	}
	return out
}

func (netlinkKernel) command(c Change) string {
	verb := map[Op]string{Add: "add", Replace: "replace", Remove: "del"}[c.Op]
	return fmt.Sprintf("ip route %s %v via %v proto %d", verb, c.Dest, c.Gateway, Protocol)
}
