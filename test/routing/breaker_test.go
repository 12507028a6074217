//go:build lab

package routing

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"klimax/shared/api"
	"klimax/test/lab"
)

// TestEngineUpgraded: from the distribution's engine to a much newer one with
// another backend, under a running agent: the API version is negotiated anew,
// or the newer engine would not tell its backend.
func TestEngineUpgraded(t *testing.T) {
	for _, to := range []lab.Setup{lab.Iptables, lab.Nftables} {
		t.Run(string(to), func(t *testing.T) {
			l := lab.New(t, lab.Options{Setup: lab.Debian})
			g := newGuest(t, l, "")
			g.Up()
			c := workload(t, l, network1)
			expect(t, "20.10", l, c)
			if err := l.Docker().Stop(context.Background(), syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := l.Docker().Use(to); err != nil {
				t.Fatal(err)
			}
			if err := l.Docker().Start(context.Background()); err != nil {
				t.Fatal(err)
			}
			// the network was made by an engine that did not know nat-unprotected
			if to == lab.Iptables {
				g.WaitFor("all well", 15*time.Second, func(s api.Status) bool {
					return s.Healthy() && s.Docker.Access == "first-rules"
				})
				expect(t, "29", l, c)
				return
			}
			g.WaitFor("the other backend", 15*time.Second, func(s api.Status) bool {
				return s.Docker.Running && s.Docker.FirewallBackend == "nftables"
			})
			m := g.WaitCondition(api.CondBackend, api.False, "DirectRoutingOff")
			mustContain(t, m.Message, "older engine", "bridge-accept-fwmark")
		})
	}
}

// TestAgentStartsWithoutEngine: what a network of somebody else needs stays
// while an agent that starts cannot ask the engine (live-restore).
func TestAgentStartsWithoutEngine(t *testing.T) {
	for _, s := range []lab.Setup{lab.Iptables, lab.Nftables} {
		t.Run(string(s), func(t *testing.T) {
			l := lab.New(t, lab.Options{Setup: s, ForwardDrop: s.Iptables()})
			l.CreateNetwork(network1, "172.30.0.0/16", nil)
			if s == lab.Nftables {
				directRouting(t, l)
			}
			g := newGuest(t, l, "")
			g.Up()
			c := workload(t, l, network1)
			g.WaitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
			expect(t, "at first", l, c)
			g.Stop()
			if err := l.Docker().Stop(context.Background(), syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			tr := startTraffic(t, l, c)
			if out, code := g.Network("apply"); code != 0 || out != "unchanged\n" {
				t.Errorf("network apply: %d %s", code, out)
			}
			g.Start()
			g.WaitFor("rules in sync", 5*time.Second, func(s api.Status) bool { return s.Network.InSync })
			time.Sleep(300 * time.Millisecond)
			tr.stop("agent started without an engine")
		})
	}
}

// TestRangeChanged: a network that klimax made for another configuration is
// still there, and Docker drops nothing on its way: the guard stays.
func TestRangeChanged(t *testing.T) {
	lab.Each(t, func(t *testing.T, s lab.Setup) {
		l := lab.New(t, lab.Options{Setup: s})
		g := newGuest(t, l, "")
		g.Up()
		l.Run(lab.Spec{Name: "cp", Network: network1, IP: "172.30.1.3", Labels: clusterLabels(), Publish: map[string]string{"7001": "8080"}})
		c := workload(t, l, network1)
		g.WaitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && len(s.Clusters[0].Nodes) == 2 && s.Healthy() })
		l.RouteFromLAN("172.30.0.0/16")
		leak := l.Loop(l.LAN, node1+":8080", 5*time.Millisecond)
		keep := l.Loop(l.Mac, node1+":8080", interval)
		closed := func(when string) {
			t.Helper()
			time.Sleep(300 * time.Millisecond)
			unreachable(t, l, l.LAN, lab.VMLANAddr+":7001", "API of the cluster, "+when)
		}
		closed("at first")
		g.WriteConfig("network:\n  kindBridgeCIDR: 172.31.0.0/16\n")
		g.Signal(syscall.SIGHUP)
		g.WaitCondition(api.CondDockerNetwork, api.False, "OtherSubnet")
		closed("with another range")
		g.WriteConfig("network:\n  kindBridgeCIDR: 172.31.0.0/16\n  dockerNetwork: klimax\n")
		g.Signal(syscall.SIGHUP)
		g.WaitFor("the other network", 10*time.Second, func(s api.Status) bool { return s.Healthy() && s.Docker.Network == "klimax" })
		closed("with another network")
		expect(t, "the former network", l, c)
		if r := leak.Stop(); r.Lost != r.Total || r.Total == 0 {
			t.Errorf("a third network reached the container: %v", r)
		}
		if r := keep.Stop(); r.Lost > 0 || r.Total == 0 {
			t.Errorf("the mac lost the container: %v", r)
		}
	})
}

// TestUsersOwnRules: where nothing else is needed, ours in DOCKER-USER do not
// go past those of the user.
func TestUsersOwnRules(t *testing.T) {
	for _, s := range []lab.Setup{lab.Debian, lab.Iptables} {
		t.Run(string(s), func(t *testing.T) {
			l := lab.New(t, lab.Options{Setup: s})
			l.VM.MustRun("iptables", "-I", "DOCKER-USER", "-s", l.MacAddr(), "-p", "tcp", "--dport", "8080", "-j", "DROP")
			g := newGuest(t, l, "")
			g.Up()
			workload(t, l, network1)
			unreachable(t, l, l.Mac, node1+":8080", "dropped by the user")
			l.VM.MustRun("iptables", "-D", "DOCKER-USER", "-s", l.MacAddr(), "-p", "tcp", "--dport", "8080", "-j", "DROP")
			l.MustGet(l.Mac, node1+":8080", l.MacAddr())
		})
	}
}

// TestHangingEngine: one that takes connections and never answers is named,
// and costs neither the rules nor the agent's quick end; nor does a lock that
// somebody holds.
func TestHangingEngine(t *testing.T) {
	l := lab.New(t, lab.Options{NoDocker: true})
	hang, err := net.Listen("unix", l.Docker().Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer hang.Close()
	go func() {
		for {
			c, err := hang.Accept()
			if err != nil {
				return
			}
			defer c.Close()
		}
	}()
	g := newGuest(t, l, "")
	g.Start()
	g.WaitFor("rules", 5*time.Second, func(s api.Status) bool { return s.Network.InSync })
	g.WaitCondition(api.CondDocker, api.False, "NotAnswering")
	f, err := os.OpenFile(filepath.Join(g.StateDir, "network.lock"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	l.VM.MustRun("nft", "delete", "table", "ip", "klimax")
	time.Sleep(50 * time.Millisecond)
	if d := g.Stop(); d > time.Second {
		t.Errorf("SIGTERM took %v", d)
	}
}

// TestBootWithoutConfig: at boot the guard of the defaults is better than none,
// whatever is wrong with the configuration.
func TestBootWithoutConfig(t *testing.T) {
	l := lab.New(t, lab.Options{NoDocker: true})
	g := newGuest(t, l, "")
	if err := os.Mkdir(g.Config, 0o755); err != nil {
		t.Fatal(err)
	}
	out, code := g.Network("apply")
	if code != api.ExitDegraded {
		t.Errorf("exit %d: %s", code, out)
	}
	out, code = g.Network("apply", "--boot")
	mustContain(t, out, "is a directory", "using the defaults", "changed: ")
	if code != api.ExitOK {
		t.Errorf("exit %d", code)
	}
	mustContain(t, ruleset(l), "klimax:guard", "172.30.0.0/16")
}
