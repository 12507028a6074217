package route

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"klimax/shared/netplan"
)

// ParseNetstat reads what `netstat -rn -f inet` prints on macOS.
//
// The format is that of netstat/route.c in Apple's network_cmds: a heading,
// then a line of column names (Refs and Use were dropped in macOS 10.15), then
// one entry per line. Networks are abbreviated: trailing zero bytes are left
// out down to the address's class (10, 172.30, 192.168.64), and the prefix
// length is left out where it is that of the class (A /8, B /16, else /24). A
// gateway is an address, link#N, an interface's name or a MAC address.
//
// Entries that the kernel made from others are skipped: clones (flag W), link
// layer entries (L), multicast (m) and broadcast (b).
//
// A route on macOS carries no mark of who made it. One is taken for klimax's
// own when it has a destination that the plan can ask for, was set by hand
// (flag S) to a gateway's address, and leads to a virtual machine's network
// (bridge100 and up, which is how macOS names them) or to a gateway within
// uplink, the guest's network, through no tunnel.
func ParseNetstat(out string, p netplan.Plan, uplink netip.Prefix) ([]Route, error) {
	var routes []Route
	var cols []string // nil outside a table of IPv4 routes
	inet, tables := true, 0
	for i, line := range strings.Split(out, "\n") {
		f := strings.Fields(line)
		switch {
		case len(f) == 0:
			continue
		case len(f) == 1 && strings.HasPrefix(f[0], "Internet"):
			inet, cols = f[0] == "Internet:", nil
			continue
		case f[0] == "Destination":
			if cols = nil; inet {
				cols = f
				tables++
			}
			continue
		case cols == nil:
			continue
		}
		flags, netif := slices.Index(cols, "Flags"), slices.Index(cols, "Netif")
		if flags != 2 || netif < 3 {
			return nil, fmt.Errorf("netstat -rn -f inet: unknown columns %q", strings.Join(cols, " "))
		}
		if len(f) <= netif {
			return nil, fmt.Errorf("netstat -rn -f inet: line %d has too few columns: %q", i+1, line)
		}
		if strings.ContainsAny(f[flags], "WLmb") {
			continue
		}
		dest, ok, err := netstatDest(f[0], f[flags])
		if err != nil {
			return nil, fmt.Errorf("netstat -rn -f inet: line %d: %w", i+1, err)
		}
		if !ok {
			continue
		}
		r := Route{Dest: dest, Dev: f[netif]}
		if strings.Contains(f[flags], "G") {
			if gw, err := netip.ParseAddr(f[1]); err == nil && gw.Is4() {
				r.Gateway = gw
			}
		}
		r.Own = candidate(p, dest) && strings.Contains(f[flags], "S") && r.Gateway.IsValid() &&
			(vmBridge(r.Dev) || uplink.IsValid() && uplink.Contains(r.Gateway) && !tunnel(r.Dev))
		routes = append(routes, r)
	}
	if tables == 0 {
		return nil, fmt.Errorf("netstat -rn -f inet: no table of IPv4 routes in its output")
	}
	return routes, nil
}

// netstatDest undoes netstat's abbreviation of a destination. ok is false for
// the one form that no prefix can express, a mask with gaps (1.2.3.4&0xff00ff).
func netstatDest(s, flags string) (p netip.Prefix, ok bool, err error) {
	if s == "default" {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0), true, nil
	}
	if strings.Contains(s, "&") {
		return p, false, nil
	}
	addr, length, hasLength := strings.Cut(s, "/")
	addr, _, _ = strings.Cut(addr, "%") // 224.0.0.251%en0
	var b [4]byte
	parts := strings.Split(addr, ".")
	if len(parts) > 4 {
		return p, false, fmt.Errorf("%q is no destination", s)
	}
	for i, part := range parts {
		n, err := strconv.ParseUint(part, 10, 8)
		if err != nil {
			return p, false, fmt.Errorf("%q is no destination", s)
		}
		b[i] = byte(n)
	}
	bits := 24
	switch {
	case hasLength:
		if bits, err = strconv.Atoi(length); err != nil || bits < 0 || bits > 32 {
			return p, false, fmt.Errorf("%q is no destination", s)
		}
	case strings.Contains(flags, "H"):
		bits = 32
	case b[0] < 128:
		bits = 8
	case b[0] < 192:
		bits = 16
	}
	return netip.PrefixFrom(netip.AddrFrom4(b), bits).Masked(), true, nil
}

// vmBridge reports whether an interface is one that macOS's vmnet makes for
// virtual machines: bridge100 and up. bridge0 is the Thunderbolt bridge.
func vmBridge(dev string) bool {
	n, err := strconv.Atoi(strings.TrimPrefix(dev, "bridge"))
	return err == nil && strings.HasPrefix(dev, "bridge") && n >= 100
}

// tunnel reports whether an interface is one of those that VPN clients use on
// macOS.
func tunnel(dev string) bool {
	name := strings.TrimRight(dev, "0123456789")
	return name == "utun" || name == "ppp" || name == "ipsec" || name == "tun" || name == "tap"
}
