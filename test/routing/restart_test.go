//go:build lab

package routing

import (
	"context"
	"fmt"
	"syscall"
	"testing"
	"time"

	"klimax/shared/api"
	"klimax/test/guestrun"
	"klimax/test/lab"
)

const interval = 20 * time.Millisecond

// traffic is everything that must survive a restart, both ways, short
// connections and long ones.
type traffic struct {
	t     *testing.T
	loops map[string]*lab.Loop
	want  map[string]string // the peer each loop must see
	flows map[string]*lab.Flow
}

func startTraffic(t *testing.T, l *lab.Lab, c work) *traffic {
	t.Helper()
	mac := l.MacAddr() + ":" + macPort
	return &traffic{t: t,
		loops: map[string]*lab.Loop{
			"mac to container": l.Loop(l.Mac, node1+":8080", interval),
			"mac to VIP":       l.Loop(l.Mac, vip1+":8080", interval),
			"container to mac": l.Loop(c.NS(), mac, interval),
		},
		want: map[string]string{"mac to container": l.MacAddr(), "mac to VIP": l.MacAddr(), "container to mac": node1},
		flows: map[string]*lab.Flow{
			"mac to container": l.Flow(l.Mac, node1+":8080"),
			"container to mac": l.Flow(c.NS(), mac),
		},
	}
}

// stop ends the traffic and expects that nothing was lost, nothing came from
// a foreign address and no long connection broke.
func (tr *traffic) stop(when string) {
	tr.t.Helper()
	for name, loop := range tr.loops {
		r := loop.Stop()
		if r.Lost > 0 || r.Peers[tr.want[name]] != r.Total-r.Lost || r.Total == 0 {
			tr.t.Errorf("%s: %s: %v", when, name, r)
		}
	}
	for name, flow := range tr.flows {
		if err := flow.Stop(); err != nil {
			tr.t.Errorf("%s: the long connection %s broke: %v", when, name, err)
		}
	}
}

// TestRestartLosesNothing: with live-restore, on every engine, by SIGTERM and
// by kill -9. The benchmark does the same fifty times over.
func TestRestartLosesNothing(t *testing.T) {
	lab.Each(t, func(t *testing.T, s lab.Setup) {
		l := lab.New(t, lab.Options{Setup: s})
		g := newGuest(t, l, "")
		g.Up()
		c := workload(t, l, network1)
		g.WaitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
		for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
			for i := range 2 {
				before := g.Status().Docker.Restarts
				tr := startTraffic(t, l, c)
				time.Sleep(300 * time.Millisecond)
				begin := time.Now()
				if err := l.Docker().Stop(context.Background(), sig); err != nil {
					t.Fatal(err)
				}
				// the agent's connections must not make dockerd wait
				if d := time.Since(begin); d > 2*time.Second {
					t.Errorf("%v: dockerd took %v to stop", sig, d)
				}
				if err := l.Docker().Start(context.Background()); err != nil {
					t.Fatal(err)
				}
				time.Sleep(700 * time.Millisecond)
				tr.stop(fmt.Sprintf("%v %d", sig, i))
				g.WaitFor("the restart in the status", 5*time.Second, func(s api.Status) bool {
					return s.Docker.Restarts == before+1 && s.Docker.Running && s.Healthy()
				})
			}
		}
	})
}

// TestRestartWithoutLiveRestore: only the container's own down time, and the
// very first connection after it comes from the container's own address.
func TestRestartWithoutLiveRestore(t *testing.T) {
	lab.Each(t, func(t *testing.T, s lab.Setup) {
		l := lab.New(t, lab.Options{Setup: s, NoLiveRestore: true})
		g := newGuest(t, l, "")
		g.Up()
		l.RunServer("c1", network1, node1, clusterLabels())
		l.RouteFromMac()
		caller := l.Run(lab.Spec{Name: "caller", Network: network1, IP: "172.30.1.3",
			Args: []string{"loop", "--for", "0", l.MacAddr() + ":" + macPort}})
		mac := l.Serve(l.Mac, l.MacAddr()+":"+macPort)
		if _, err := l.WaitGet(l.Mac, node1+":8080", 5*time.Second); err != nil {
			t.Fatal(err)
		}
		loop := l.Loop(l.Mac, node1+":8080", interval)
		for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
			if err := l.Docker().Restart(context.Background(), sig); err != nil {
				t.Fatal(err)
			}
			if err := caller.WaitRunning(15 * time.Second); err != nil {
				t.Fatal(err)
			}
			if _, err := l.WaitGet(l.Mac, node1+":8080", 10*time.Second); err != nil {
				t.Errorf("%v: the container does not come back: %v", sig, err)
			}
			time.Sleep(500 * time.Millisecond)
		}
		r := loop.Stop()
		if len(r.Peers) != 1 || r.Peers[l.MacAddr()] == 0 {
			t.Errorf("mac to container: a foreign source address: %v", r)
		}
		peers := mac.Peers()
		if len(peers) != 1 || peers["172.30.1.3"] == 0 {
			t.Errorf("container to mac: want its own address only: %v", peers)
		}
		t.Logf("%v; container to mac: %v", r, peers)
	})
}

// TestEngineReplaced: the agent lives through an engine of another version
// and backend on the same data, and through one that is away for a while.
func TestEngineReplaced(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Iptables, NoDocker: true})
	g := newGuest(t, l, "")
	g.Start()
	// no Docker at the start: named, and the own table is there all the same
	if c := g.WaitCondition(api.CondDocker, api.False, "NotFound"); c.Message == "" {
		t.Errorf("no message: %+v", c)
	}
	s := g.WaitFor("rules without Docker", 5*time.Second, func(s api.Status) bool { return s.Network.InSync })
	if guestrun.Rule(s, api.RuleGuard).Present != 1 {
		t.Errorf("no guard: %+v", s.Network.Rules)
	}
	if out, code := g.Run("status", "--socket", g.Socket); code != api.ExitDegraded {
		t.Errorf("status without Docker: exit %d\n%s", code, out)
	}
	start := time.Now()
	if err := l.Docker().Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	g.WaitFor("the engine", 10*time.Second, api.Status.Healthy)
	t.Logf("healthy %v after dockerd was started", time.Since(start))
	c := workload(t, l, network1)
	expect(t, "29 with iptables", l, c)
	if err := l.Docker().Stop(context.Background(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	g.WaitCondition(api.CondDocker, api.False, "")
	time.Sleep(2 * time.Second)
	expect(t, "while Docker is away", l, c)
	if st := g.Status(); !st.Network.InSync || st.Docker.Running {
		t.Errorf("while Docker is away: %+v %+v", st.Network, st.Docker)
	}
	if err := l.Docker().Use(lab.Nftables); err != nil {
		t.Fatal(err)
	}
	if err := l.Docker().Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	g.WaitFor("the other backend", 10*time.Second, func(s api.Status) bool {
		return s.Docker.FirewallBackend == "nftables" && s.Healthy()
	})
	expect(t, "29 with nftables", l, c)
}
