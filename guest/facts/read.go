package facts

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// LimaUplink is the name Lima gives to a VM's interface towards the Mac.
const LimaUplink = "lima0"

// KernelQuery says what to look for.
type KernelQuery struct {
	Uplink  string       // network.uplink; empty: find it
	Gateway netip.Addr   // the bridge's address by the plan
	Bridge  string       // the bridge's name when nothing with Gateway exists
	Plan    []PlannedUse // ranges that no route of the guest may overlap
}

// PlannedUse is a range of the plan and the configuration key that sets it.
type PlannedUse struct {
	Range netip.Prefix
	Key   string
}

// ReadKernel reads links, addresses, routes and sysctls of the current network
// namespace. Missing interfaces are facts, not errors.
func ReadKernel(_ context.Context, q KernelQuery) (Facts, error) {
	var f Facts
	links, err := retryDump(netlink.LinkList)
	if err != nil {
		return f, fmt.Errorf("list network interfaces: %w", err)
	}
	byIndex := make(map[int]netlink.Link, len(links))
	for _, l := range links {
		byIndex[l.Attrs().Index] = l
	}
	addrs, err := retryDump(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return f, fmt.Errorf("list addresses: %w", err)
	}
	routes, err := retryDump(func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return f, fmt.Errorf("list routes: %w", err)
	}

	f.Uplink.Name = chooseUplink(q.Uplink, links, routes, byIndex)
	f.Bridge = Bridge{Name: q.Bridge}
	for _, l := range links {
		if l.Attrs().Name == f.Uplink.Name && f.Uplink.Name != "" {
			f.Uplink.Found = true
			f.Uplink.Up = l.Attrs().Flags&unix.IFF_UP != 0
			f.Uplink.Address, f.Uplink.Network = primary(addrs, l.Attrs().Index)
		}
	}
	for _, a := range addrs {
		if ip, ok := netip.AddrFromSlice(a.IP.To4()); ok && ip == q.Gateway {
			if l := byIndex[a.LinkIndex]; l != nil {
				f.Bridge = Bridge{Name: l.Attrs().Name, Present: true}
			}
		}
	}
	if !f.Bridge.Present {
		for _, l := range links {
			if l.Attrs().Name == q.Bridge {
				f.Bridge.Present = true
			}
		}
	}
	f.Overlaps = overlaps(routes, byIndex, f.Bridge.Name, q.Plan)
	f.IPForward, err = readBool("/proc/sys/net/ipv4/ip_forward")
	return f, err
}

// chooseUplink takes the configured name, else lima0 when there is one, else
// the interface of the default route with the lowest metric.
func chooseUplink(configured string, links []netlink.Link, routes []netlink.Route, byIndex map[int]netlink.Link) string {
	if configured != "" {
		return configured
	}
	for _, l := range links {
		if l.Attrs().Name == LimaUplink {
			return LimaUplink
		}
	}
	best, name := -1, ""
	for _, r := range routes {
		if r.Dst != nil && !isDefault(r) {
			continue
		}
		l := byIndex[r.LinkIndex]
		if l == nil {
			continue
		}
		if best < 0 || r.Priority < best {
			best, name = r.Priority, l.Attrs().Name
		}
	}
	return name
}

func isDefault(r netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	ones, _ := r.Dst.Mask.Size()
	return ones == 0
}

// primary returns the first address that is not a secondary one.
func primary(addrs []netlink.Addr, index int) (addr netip.Addr, network netip.Prefix) {
	for _, secondary := range []bool{false, true} {
		for _, a := range addrs {
			if a.LinkIndex != index || (a.Flags&unix.IFA_F_SECONDARY != 0) != secondary {
				continue
			}
			ip, ok := netip.AddrFromSlice(a.IP.To4())
			ones, _ := a.Mask.Size()
			if ok {
				return ip, netip.PrefixFrom(ip, ones).Masked()
			}
		}
	}
	return netip.Addr{}, netip.Prefix{}
}

// overlaps finds routes of others that collide with planned ranges. The
// bridge's own route and default routes do not count, nor do the two halves of
// a default route by which a VPN takes all traffic: the bridge's route and
// those of clusters are narrower and win.
func overlaps(routes []netlink.Route, byIndex map[int]netlink.Link, bridge string, plan []PlannedUse) []Overlap {
	var out []Overlap
	for _, r := range routes {
		if isDefault(r) {
			continue
		}
		ip, ok := netip.AddrFromSlice(r.Dst.IP.To4())
		if !ok {
			continue
		}
		ones, _ := r.Dst.Mask.Size()
		if ones <= 1 {
			continue
		}
		dst := netip.PrefixFrom(ip, ones)
		dev := ""
		if l := byIndex[r.LinkIndex]; l != nil {
			dev = l.Attrs().Name
		}
		if dev == bridge && dev != "" {
			continue
		}
		for _, p := range plan {
			if p.Range.Overlaps(dst) {
				out = append(out, Overlap{Route: dst, Device: dev, Range: p.Range, Key: p.Key})
			}
		}
	}
	return out
}

// retryDump repeats a netlink dump that the kernel says was changed while it
// was read; the library returns the partial list with ErrDumpInterrupted.
func retryDump[T any](f func() ([]T, error)) ([]T, error) {
	for range 5 {
		v, err := f()
		if !errors.Is(err, netlink.ErrDumpInterrupted) && !errors.Is(err, unix.EINTR) {
			return v, err
		}
	}
	return f()
}

func readBool(path string) (bool, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return false, fmt.Errorf("read sysctl: %w", err)
	}
	return strings.TrimSpace(string(b)) == "1", nil
}
