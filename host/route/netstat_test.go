package route

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"klimax/shared/netplan"
)

func plan(t testing.TB) netplan.Plan {
	t.Helper()
	p, err := netplan.New(netip.MustParsePrefix("172.30.0.0/16"), netip.MustParseAddr("10.100.0.0"))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func table(t testing.TB, name string) []Route {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name+".txt"))
	if err != nil {
		t.Fatal(err)
	}
	rs, err := ParseNetstat(string(data), plan(t), netip.Prefix{})
	if err != nil {
		t.Fatal(err)
	}
	return rs
}

func listing(rs []Route) string {
	var b strings.Builder
	for _, r := range rs {
		own := ""
		if r.Own {
			own = " own"
		}
		fmt.Fprintf(&b, "%v%s\n", r, own)
	}
	return b.String()
}

func TestParseNetstat(t *testing.T) {
	for name, want := range map[string]string{
		"plain": `
0.0.0.0/0 via 192.168.1.1 dev en0
0.0.0.0/0 dev bridge100
127.0.0.0/8 dev lo0
127.0.0.1/32 dev lo0
169.254.0.0/16 dev en0
192.168.1.0/24 dev en0
192.168.1.1/32 dev en0
192.168.1.20/32 dev en0
192.168.64.0/24 dev bridge100
255.255.255.255/32 dev en0
255.255.255.255/32 dev bridge100
`,
		"routed": `
0.0.0.0/0 via 192.168.1.1 dev en0
0.0.0.0/0 dev bridge100
10.101.0.0/16 via 192.168.64.3 dev bridge100 own
10.102.0.0/16 via 192.168.64.3 dev bridge100 own
10.103.0.0/16 via 10.8.0.1 dev utun3
127.0.0.0/8 dev lo0
127.0.0.1/32 dev lo0
172.30.0.0/16 via 192.168.64.3 dev bridge100 own
192.168.1.0/24 dev en0
192.168.64.0/24 dev bridge100
`,
		"tailscale": `
0.0.0.0/0 via 192.168.1.1 dev en0
0.0.0.0/0 dev bridge100
0.0.0.0/0 dev utun4
10.0.0.0/8 dev utun4
100.64.0.0/10 dev utun4
100.64.0.1/32 dev utun5
100.87.112.117/32 dev utun4
100.100.100.100/32 dev utun4
127.0.0.0/8 dev lo0
127.0.0.1/32 dev lo0
169.254.0.0/16 dev en0
192.168.1.0/24 dev en0
192.168.64.0/24 dev bridge100
`,
		"high-sierra": `
0.0.0.0/0 via 10.10.10.1 dev en0
10.10.10.0/24 dev en0
10.10.10.1/32 dev en0
10.10.10.104/32 dev en0
127.0.0.0/8 dev lo0
127.0.0.1/32 dev lo0
169.254.0.0/16 dev en0
172.16.111.0/24 dev vmnet1
172.30.0.0/16 via 192.168.64.3 dev bridge100 own
192.168.64.0/24 dev bridge100
255.255.255.255/32 dev en0
`,
		"openvpn-def1": `
0.0.0.0/1 via 10.33.0.1 dev utun3
0.0.0.0/0 via 192.168.43.1 dev en0
10.33.0.0/16 via 10.33.0.5 dev utun3
10.33.0.1/32 dev utun3
127.0.0.0/8 dev lo0
127.0.0.1/32 dev lo0
128.0.0.0/1 via 10.33.0.1 dev utun3
169.254.0.0/16 dev en0
192.168.43.0/24 dev en0
192.168.64.0/24 dev bridge100
203.0.113.9/32 via 192.168.43.1 dev en0
`,
	} {
		t.Run(name, func(t *testing.T) {
			if got := listing(table(t, name)); got != want[1:] {
				t.Errorf("got\n%s\nwant%s", got, want)
			}
		})
	}
}

func TestNetstatDest(t *testing.T) {
	for _, c := range []struct{ in, flags, want string }{
		{"default", "UGSc", "0.0.0.0/0"},
		{"0/1", "UGSc", "0.0.0.0/1"},
		{"10", "UCS", "10.0.0.0/8"},
		{"10/9", "UGSc", "10.0.0.0/9"},
		{"10/24", "UGSc", "10.0.0.0/24"},
		{"10.101/16", "UGSc", "10.101.0.0/16"},
		{"10.101", "UGSc", "10.0.0.0/8"}, // class A's own length
		{"100.64/10", "UCS", "100.64.0.0/10"},
		{"128.0/1", "UGSc", "128.0.0.0/1"},
		{"172.16/12", "UGSc", "172.16.0.0/12"},
		{"172.30", "UGSc", "172.30.0.0/16"},
		{"172.30.99/24", "UGSc", "172.30.99.0/24"},
		{"192.168.0/16", "UGSc", "192.168.0.0/16"},
		{"192.168.64", "UC", "192.168.64.0/24"},
		{"224.0.0/4", "UCS", "224.0.0.0/4"},
		{"172.24.33.143", "UGHS", "172.24.33.143/32"},
		{"255.255.255.255/32", "UCS", "255.255.255.255/32"},
	} {
		got, ok, err := netstatDest(c.in, c.flags)
		if err != nil || !ok || got.String() != c.want {
			t.Errorf("%s %s: got %v %v %v, want %s", c.in, c.flags, got, ok, err, c.want)
		}
	}
	if _, ok, err := netstatDest("10.1.2.3&0xff00ff", "UGSc"); ok || err != nil {
		t.Errorf("a mask with gaps: ok %v, error %v", ok, err)
	}
	for _, bad := range []string{"", "x", "1.2.3.4.5", "10/33", "10/-1", "300.1", "10.1/x", "fe80::1"} {
		if p, ok, err := netstatDest(bad, "UGSc"); err == nil {
			t.Errorf("%q: got %v %v, want an error", bad, p, ok)
		}
	}
}

func TestParseNetstatRefusesWhatItDoesNotKnow(t *testing.T) {
	for name, in := range map[string]string{
		"empty":       "",
		"error text":  "netstat: sysctl: net.routetable: Operation not permitted\n",
		"linux":       "Kernel IP routing table\nDestination     Gateway         Genmask         Flags   MSS Window  irtt Iface\n0.0.0.0         10.0.0.1        0.0.0.0         UG        0 0          0 eth0\n",
		"inet6 only":  "Internet6:\nDestination Gateway Flags Netif Expire\n::1 ::1 UHL lo0\n",
		"cut off":     "Internet:\nDestination Gateway Flags Netif Expire\ndefault 10.0.0.1\n",
		"no octet":    "Internet:\nDestination Gateway Flags Netif Expire\nmachine 10.0.0.1 UGH en0\n",
		"new columns": "Internet:\nDestination Gateway Zone Flags Netif Expire\ndefault 10.0.0.1 a UGSc en0\n",
	} {
		if rs, err := ParseNetstat(in, plan(t), netip.Prefix{}); err == nil {
			t.Errorf("%s: got %v, want an error", name, rs)
		}
	}
}

// A guest that is reached over an ordinary network has no bridge100: its
// network tells that a route is ours, but not one through a tunnel.
func TestParseNetstatUplink(t *testing.T) {
	in := "Internet:\nDestination Gateway Flags Netif Expire\n172.30 192.168.1.77 UGSc en0\n10.101/16 192.168.1.77 UGSc utun3\n"
	for uplink, want := range map[string]int{"192.168.1.0/24": 1, "192.168.64.0/24": 0} {
		rs, err := ParseNetstat(in, plan(t), netip.MustParsePrefix(uplink))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, r := range rs {
			if r.Own {
				n++
			}
		}
		if n != want {
			t.Errorf("uplink %s: %d own routes, want %d: %v", uplink, n, want, rs)
		}
	}
}

func FuzzParseNetstat(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.txt")
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(data))
	}
	f.Fuzz(func(t *testing.T, in string) {
		rs, err := ParseNetstat(in, plan(t), netip.Prefix{})
		if err != nil {
			return
		}
		for _, r := range rs {
			if !r.Dest.IsValid() || r.Dest != r.Dest.Masked() {
				t.Errorf("destination %v of %q", r.Dest, in)
			}
			if r.Own && (!candidate(plan(t), r.Dest) || strings.HasPrefix(r.Dev, "utun")) {
				t.Errorf("%v counts as own", r)
			}
		}
	})
}
