//go:build lab && linux

package lab

import (
	"context"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// kindNet makes the network that most tests use; on engines that know the option the container can be reached from
// outside without any rule.
func kindNet(l *Lab) {
	o := map[string]string{}
	if l.Setup().Moby29() {
		o["com.docker.network.bridge.gateway_mode_ipv4"] = "nat-unprotected"
	}
	l.CreateNetwork("kind", "172.30.0.0/16", o)
}

// exempt writes the rule that keeps a container's own address towards the Mac (and the drop of the third network is
// not this package's business).
func exempt(l *Lab) {
	l.VM.MustRun("nft", `table ip klx { chain post { type nat hook postrouting priority srcnat - 10;
		ip saddr 172.30.0.0/16 ip daddr 192.168.64.1 oifname "lima0" counter snat to ip saddr; }; }`)
}

// TestUp brings a lab up, measures its parts, and sends traffic every way there is.
func TestUp(t *testing.T) {
	Each(t, func(t *testing.T, s Setup) {
		begin := time.Now()
		step := func(what string) {
			t.Logf("%-20s %v", what, time.Since(begin).Round(time.Millisecond))
			begin = time.Now()
		}
		l := New(t, Options{Setup: s})
		step("namespaces, dockerd")
		v, err := l.Docker().Client().ServerVersion(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if s.Moby29() != strings.HasPrefix(v.Version, "29.") {
			t.Errorf("setup %s runs version %s", s, v.Version)
		}
		kindNet(l)
		step("network")
		c := l.RunServer("c1", "kind", "172.30.5.2", map[string]string{"klimax.role": "node"})
		step("image, container")
		l.MustGet(l.VM, c.Addr(), "172.30.0.1")
		step("first answer")
		c2 := l.Run(Spec{Name: "c2", Network: "kind", Publish: map[string]string{"18080": "8080"}})
		step("second container")
		if c.IP != "172.30.5.2" || c2.IP == "" || c2.IP == c.IP {
			t.Errorf("addresses %s and %s", c.IP, c2.IP)
		}
		i, err := l.Docker().Client().ContainerInspect(t.Context(), c.ID)
		if err != nil {
			t.Fatal(err)
		}
		if i.Config.Labels["klimax.role"] != "node" || i.State.Pid != c.PID() {
			t.Errorf("labels %v, process %d and %d", i.Config.Labels, i.State.Pid, c.PID())
		}

		// Without a route nobody outside reaches the container; with one the Mac does, and is seen.
		if peer, err := l.Get(l.Mac, c.Addr(), 300*time.Millisecond); err == nil {
			t.Errorf("the Mac reached the container without a route, seen as %s", peer)
		}
		l.RouteFromMac()
		l.MustGet(l.Mac, c.Addr(), l.MacAddr())
		c.AddVIP("172.30.1.200")
		l.MustGet(l.Mac, "172.30.1.200:8080", l.MacAddr())
		l.MustGet(l.Mac, l.VMAddr()+":18080", "") // published
		out, err := l.Mac.Run(t.Context(), l.Prober(), "get", c.Addr())
		if err != nil || strings.TrimSpace(out) != l.MacAddr() {
			t.Errorf("prober get: %q, %v", out, err)
		}
		l.RouteFromLAN()
		l.MustGet(l.LAN, c.Addr(), LANAddr)

		// From the container: masqueraded by Docker everywhere, with the exemption to the Mac not.
		mac, lan, nb := l.Serve(l.Mac, l.MacAddr()+":9000"), l.Serve(l.LAN, LANAddr+":9000"), l.Serve(l.Neighbour, l.NeighbourAddr()+":9000")
		l.MustGet(c.NS(), mac.Addr(), l.VMAddr())
		l.MustGet(c.NS(), lan.Addr(), VMLANAddr)
		l.MustGet(c.NS(), nb.Addr(), l.VMAddr())
		exempt(l)
		l.MustGet(c.NS(), mac.Addr(), c.IP)
		l.MustGet(c.NS(), nb.Addr(), l.VMAddr())
		if p := mac.Peers(); p[c.IP] != 1 || p[l.VMAddr()] != 1 || len(p) != 2 {
			t.Errorf("the Mac's server saw %v", p)
		}
		// The neighbour shares the wire but has no route back.
		l.MustGet(l.VM, nb.Addr(), l.VMAddr())
		l.MustGet(l.Neighbour, mac.Addr(), l.NeighbourAddr())
		if _, err := l.Get(l.Neighbour, c.Addr(), 200*time.Millisecond); err == nil {
			t.Error("the neighbour reached the container without a route")
		}
		if out, err := l.Mac.Run(t.Context(), "sh", "-c",
			"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | timeout 2 bash -c 'exec 3<>/dev/tcp/172.30.5.2/80; cat >&3; cat <&3'"); err != nil || !strings.HasSuffix(out, "\r\n\r\n"+l.MacAddr()+"\n") {
			t.Errorf("HTTP: %q, %v", out, err)
		}
		h := l.AddHost("extra", "192.168.64.5/24")
		l.MustGet(h, mac.Addr(), "192.168.64.5")
		step("traffic")
		rate, err := l.Throughput(l.Mac, "172.30.5.2:8081", 200*time.Millisecond)
		if err != nil || rate < 1e6 {
			t.Errorf("throughput %.0f bytes/s: %v", rate, err)
		}
		t.Logf("throughput %.1f Gbit/s", rate*8/1e9)
	})
}

// TestTraffic breaks and mends paths under loops and flows: they must see it.
func TestTraffic(t *testing.T) {
	l := New(t, Options{NoDocker: true})
	s, s2 := l.Serve(l.VM, l.VMAddr()+":9000"), l.Serve(l.VM, VMLANAddr+":9000")
	whole, broken := l.Flow(l.Mac, s.Addr()), l.Flow(l.LAN, s2.Addr())
	loop := l.Loop(l.Mac, s.Addr(), 20*time.Millisecond)
	quiet := l.Loop(l.LAN, s2.Addr(), 20*time.Millisecond)
	time.Sleep(500 * time.Millisecond)
	l.VM.MustRun("nft", "table ip t { chain c { type filter hook input priority 0; iifname lima0 tcp flags & (syn|ack) == syn drop; }; }")
	time.Sleep(200 * time.Millisecond)
	l.VM.MustRun("nft", "delete table ip t")
	time.Sleep(300 * time.Millisecond)
	r := loop.Stop()
	t.Log(r)
	if r.Lost < 5 || r.Lost > 40 || r.Errors["timeout"] != r.Lost || r.Peers[l.MacAddr()] != r.Total-r.Lost ||
		r.FirstLost < 400*time.Millisecond || r.LastLost <= r.FirstLost || r.MaxGap < 150*time.Millisecond {
		t.Errorf("a gap of 200 ms in the loop: %v", r)
	}
	r = quiet.Stop()
	t.Log(r)
	if r.Lost != 0 || r.Total < 40 || r.MaxGap > 500*time.Millisecond {
		t.Errorf("nothing happened to this loop: %v", r)
	}
	if err := whole.Stop(); err != nil || whole.Peer() != l.MacAddr() {
		t.Errorf("peer %s: %v", whole.Peer(), err)
	}
	l.VM.MustRun("nft", "table ip t { chain c { type filter hook input priority 0; iifname eth1 tcp dport 9000 reject with tcp reset; }; }")
	time.Sleep(100 * time.Millisecond)
	if err := broken.Stop(); err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("a flow that was reset: %v", err)
	}
	refused := l.Loop(l.Mac, l.VMAddr()+":9", 10*time.Millisecond)
	time.Sleep(100 * time.Millisecond)
	if r := refused.Stop(); r.Lost != r.Total || r.Errors["refused"] != r.Total || r.Total < 8 {
		t.Errorf("a closed port: %v", r)
	}
	if _, err := l.Get(l.Mac, "203.0.113.1:80", time.Second); err == nil || !strings.Contains(err.Error(), "unreachable") {
		t.Errorf("no route: %v", err)
	}
}

// TestRestart restarts dockerd in both ways with and without live-restore, under traffic.
func TestRestart(t *testing.T) {
	Each(t, func(t *testing.T, s Setup) {
		t.Run("live-restore", func(t *testing.T) {
			l := New(t, Options{Setup: s})
			kindNet(l)
			c := l.RunServer("c1", "kind", "172.30.5.2", nil)
			c.AddVIP("172.30.1.200")
			l.RouteFromMac()
			exempt(l)
			mac := l.Serve(l.Mac, l.MacAddr()+":9000")
			pid, daemon := c.PID(), l.Docker().PID()
			for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
				begin := time.Now()
				loops := []*Loop{
					l.Loop(l.Mac, c.Addr(), 20*time.Millisecond),
					l.Loop(l.Mac, "172.30.1.200:8080", 20*time.Millisecond),
					l.Loop(c.NS(), mac.Addr(), 20*time.Millisecond),
				}
				flow := l.Flow(c.NS(), mac.Addr())
				if err := l.Docker().Restart(t.Context(), sig); err != nil {
					t.Fatal(err)
				}
				t.Logf("restart by %v: %v", sig, time.Since(begin).Round(time.Millisecond))
				if got := l.Docker().PID(); got == daemon || got == 0 {
					t.Errorf("after %v dockerd is process %d, was %d", sig, got, daemon)
				} else {
					daemon = got
				}
				if got := c.PID(); got != pid {
					t.Errorf("after %v the container's process is %d, was %d", sig, got, pid)
				}
				for _, p := range loops {
					r := p.Stop()
					t.Log(r)
					if r.Total < 10 || len(r.Peers) != 1 {
						t.Errorf("%v", r)
					}
				}
				if err := flow.Stop(); err != nil {
					t.Error(err)
				}
			}
		})
		t.Run("without", func(t *testing.T) {
			l := New(t, Options{Setup: s, NoLiveRestore: true})
			kindNet(l)
			c := l.RunServer("c1", "kind", "172.30.5.2", nil)
			// A container that calls the Mac from its first moment on: with the exemption no call may come masqueraded.
			exempt(l)
			mac := l.Serve(l.Mac, l.MacAddr()+":9000")
			l.RouteFromMac()
			l.Run(Spec{Name: "caller", Network: "kind", IP: "172.30.5.3", Args: []string{"loop", "--for", "0", mac.Addr()}})
			for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
				pid, begin := c.PID(), time.Now()
				if err := l.Docker().Restart(t.Context(), sig); err != nil {
					t.Fatal(err)
				}
				if err := c.WaitRunning(10 * time.Second); err != nil {
					t.Fatal(err)
				}
				if _, err := l.WaitGet(l.VM, c.Addr(), 5*time.Second); err != nil {
					t.Fatalf("after %v: %v", sig, err)
				}
				t.Logf("restart by %v, container answers again: %v", sig, time.Since(begin).Round(time.Millisecond))
				if got := c.PID(); got == pid {
					t.Errorf("after %v the container still is process %d", sig, got)
				}
				n := len(mac.Seen())
				if !wait(t.Context(), 5*time.Second, func() bool { return len(mac.Seen()) > n+5 }) {
					t.Errorf("after %v the caller does not call", sig)
				}
			}
			if p := mac.Peers(); len(p) != 1 || p["172.30.5.3"] == 0 {
				t.Errorf("the Mac saw %v", p)
			}
		})
	})
}

// TestLegacy: with iptables-legacy Docker's chains are where the nf_tables variant does not see them.
func TestLegacy(t *testing.T) {
	for _, s := range Setups(t) {
		if !s.Iptables() {
			continue
		}
		l := New(t, Options{Setup: s, Legacy: true})
		if out := l.VM.MustRun("iptables-legacy", "-S"); !strings.Contains(out, "-N DOCKER") {
			t.Errorf("%s: no chain of Docker in iptables-legacy:\n%s", s, out)
		}
		if out := l.VM.MustRun("nft", "list", "ruleset"); strings.Contains(out, "DOCKER") {
			t.Errorf("%s: Docker's chains in nf_tables:\n%s", s, out)
		}
		kindNet(l)
		c := l.RunServer("c1", "kind", "172.30.5.2", nil)
		l.MustGet(l.VM, c.Addr(), "172.30.0.1")
	}
}

// TestForwardPolicy: Docker sets FORWARD to DROP exactly when it turned forwarding on itself.
func TestForwardPolicy(t *testing.T) {
	for _, s := range Setups(t) {
		if !s.Iptables() {
			continue
		}
		for drop, want := range map[bool]string{false: "-P FORWARD ACCEPT", true: "-P FORWARD DROP"} {
			l := New(t, Options{Setup: s, ForwardDrop: drop})
			rules := l.VM.MustRun("iptables", "-S", "FORWARD")
			if got, _, _ := strings.Cut(rules, "\n"); got != want {
				t.Errorf("%s, ForwardDrop %v: %q, want %q", s, drop, got, want)
			}
			if v := strings.TrimSpace(l.VM.MustRun("sysctl", "-n", "net.ipv4.ip_forward")); v != "1" {
				t.Errorf("%s: ip_forward is %s", s, v)
			}
		}
	}
}

// TestNoDocker starts the engine late, changes its configuration and replaces it by another version.
func TestNoDocker(t *testing.T) {
	l := New(t, Options{NoDocker: true, NoUplinkAddr: true, UplinkPrefix: "192.168.80.9/20", MacAddr: "192.168.95.7", NeighbourAddr: "192.168.90.1"})
	d := l.Docker()
	if _, err := d.Client().Ping(t.Context()); err == nil || d.PID() != 0 {
		t.Fatalf("dockerd answers before its start (process %d)", d.PID())
	}
	if _, err := l.Get(l.Mac, l.VMAddr()+":1", 200*time.Millisecond); err == nil || !strings.Contains(err.Error(), "timeout") {
		t.Errorf("the VM has an address already: %v", err)
	}
	if err := l.VM.AddAddr("lima0", "192.168.80.9/20"); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Get(l.Mac, l.VMAddr()+":1", time.Second); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("the VM has an address now, a closed port answers: %v", err)
	}
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context()); err == nil {
		t.Error("a second start of the running engine succeeded")
	}
	if err := d.Stop(t.Context(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := d.SetConfig(map[string]any{"no-such-key": 1}); err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "no-such-key") {
		t.Errorf("start with a broken configuration: %v", err)
	}
	if err := d.SetConfig(map[string]any{"no-such-key": nil}); err != nil {
		t.Fatal(err)
	}
	if err := d.Use(Nftables); err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	v, err := d.Client().ServerVersion(t.Context())
	if err != nil || !strings.HasPrefix(v.Version, "29.") {
		t.Errorf("after the replacement: %v, %v", v.Version, err)
	}
}

// TestTwo runs two labs with the same addresses and names at once; one ends before the other.
func TestTwo(t *testing.T) {
	one := func(t *testing.T) (*Lab, *Container) {
		l := New(t, Options{})
		kindNet(l)
		c := l.RunServer("c1", "kind", "172.30.5.2", nil)
		l.MustGet(l.VM, c.Addr(), "172.30.0.1")
		return l, c
	}
	l, c := one(t)
	loop := l.Loop(l.VM, c.Addr(), 20*time.Millisecond)
	var other *Lab
	t.Run("other", func(t *testing.T) {
		t.Run("made", func(t *testing.T) { other, _ = one(t) })
	})
	if other == nil || other.Name == l.Name {
		t.Fatalf("names %q and %v", l.Name, other)
	}
	if left := other.Place().Left(); len(left) > 0 {
		t.Errorf("left of the other: %v", left)
	}
	if r := loop.Stop(); r.Lost > 0 {
		t.Errorf("the other lab disturbed this one: %v", r)
	}
}

// TestPrivileged: privileged containers run even where CAP_SYS_RESOURCE is not to be had.
func TestPrivileged(t *testing.T) {
	Each(t, func(t *testing.T, s Setup) {
		l := New(t, Options{Setup: s})
		c := l.Run(Spec{Name: "priv", Privileged: true})
		if err := c.WaitRunning(time.Second); err != nil {
			t.Fatal(err)
		}
	})
}

// TestCommandEnds: a command in a namespace is stopped with its context.
func TestCommandEnds(t *testing.T) {
	l := New(t, Options{NoDocker: true})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if err := l.Mac.Command(ctx, "sleep", "60").Run(); err == nil || time.Since(begin) > 5*time.Second {
		t.Errorf("%v after %v", err, time.Since(begin))
	}
	if _, err := l.Mac.Run(t.Context(), "sh", "-c", "echo why >&2; exit 3"); err == nil || !strings.Contains(err.Error(), "why") {
		t.Errorf("error without the command's own words: %v", err)
	}
	links := l.Mac.MustRun("ip", "-o", "link")
	if !slices.ContainsFunc(strings.Split(links, "\n"), func(s string) bool { return strings.Contains(s, " en0: ") }) {
		t.Errorf("links of mac: %s", links)
	}
}
