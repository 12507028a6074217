//go:build lab

package routing

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"klimax/shared/api"
	"klimax/test/lab"
)

// TestDamageIsRepaired: whatever somebody does to the rules, they come back,
// and traffic with them.
func TestDamageIsRepaired(t *testing.T) {
	lab.Each(t, func(t *testing.T, s lab.Setup) {
		l := lab.New(t, lab.Options{Setup: s, ForwardDrop: s.Iptables()})
		g := newGuest(t, l, "")
		g.Up()
		c := workload(t, l, network1)
		g.WaitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
		expect(t, "at first", l, c)
		damages := []string{
			"nft delete table ip klimax",
			"nft flush table ip klimax",
			"nft flush chain ip klimax postrouting",
			"nft flush set ip klimax allow",
			"nft insert rule ip klimax guard drop",
		}
		if s.Iptables() {
			damages = append(damages, "iptables -F DOCKER-USER", "iptables -F", "iptables -F FORWARD; iptables -I DOCKER-USER -j DROP; iptables -A FORWARD -j DOCKER-USER")
		}
		for _, damage := range damages {
			before := g.Status().Network.Repairs
			start := time.Now()
			l.VM.MustRun("sh", "-c", damage)
			st := g.WaitFor("the repair of "+damage, 3*time.Second, func(s api.Status) bool {
				return s.Network.InSync && s.Network.Repairs > before
			})
			t.Logf("%s: noticed and repaired in %.1f ms, seen after %v", damage, st.Network.LastRepairMillis, time.Since(start))
			expect(t, damage, l, c)
		}
		if s.Iptables() {
			// Docker's own rules are another matter: said, not mended
			g.WaitCondition(api.CondDockerRules, api.False, "Lost")
		} else {
			l.VM.MustRun("nft", "flush", "ruleset")
			g.WaitCondition(api.CondDockerRules, api.False, "Lost")
		}
		if err := l.Docker().Restart(context.Background(), 15); err != nil {
			t.Fatal(err)
		}
		g.WaitFor("all well after Docker's restart", 10*time.Second, api.Status.Healthy)
		expect(t, "after Docker's restart", l, c)
	})
}

// TestRepairTime: from the deleting command's start to the rules being back.
func TestRepairTime(t *testing.T) {
	l := lab.New(t, lab.Options{})
	g := newGuest(t, l, "")
	g.Up()
	var took []time.Duration
	for i := range 40 {
		damage := []string{"delete", "table", "ip", "klimax"}
		if i%2 == 1 {
			damage = []string{"flush", "chain", "ip", "klimax", "guard"}
		}
		cmd := l.VM.Command(context.Background(), "nft", damage...)
		start := time.Now()
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for {
			out, err := l.VM.Run(context.Background(), "nft", "list", "chain", "ip", "klimax", "guard")
			if err == nil && strings.Contains(out, "klimax:guard\"") {
				break
			}
			if time.Since(start) > 3*time.Second {
				t.Fatal("not repaired within 3 s")
			}
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	t.Logf("median %v, slowest %v", took[len(took)/2], took[len(took)-1])
	// generous: this machine is shared; the benchmark has the hard line
	if took[len(took)/2] > 100*time.Millisecond {
		t.Errorf("median %v", took[len(took)/2])
	}
}

// TestProbesCanFail takes out the exemption, the accepts, the guard and the
// watch one by one, with no agent to put them back, and expects the probes of
// this suite to notice each.
func TestProbesCanFail(t *testing.T) {
	lab.Each(t, func(t *testing.T, s lab.Setup) {
		l := lab.New(t, lab.Options{Setup: s, ForwardDrop: s.Iptables()})
		if s.Moby29() {
			// a network that somebody else made, which needs accepts of ours
			l.CreateNetwork(network1, "172.30.0.0/16", nil)
			if s == lab.Nftables {
				directRouting(t, l)
			}
		}
		g := newGuest(t, l, "")
		g.Up()
		c := workload(t, l, network1)
		g.WaitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
		l.RouteFromLAN("172.30.0.0/16")
		expect(t, "whole", l, c)
		guarded := func() error {
			if _, err := l.Get(l.LAN, node1+":8080", 700*time.Millisecond); err != nil {
				return nil
			}
			return fmt.Errorf("a third network gets an answer")
		}
		if err := guarded(); err != nil {
			t.Error("whole:", err)
		}

		g.Stop() // the watch
		l.VM.MustRun("nft", "delete", "table", "ip", "klimax")
		time.Sleep(300 * time.Millisecond)
		if err := probes(l, c)["container to mac"](); err == nil {
			t.Error("without the watch a deleted table came back")
		}
		restore := func() {
			if out, code := g.Network("apply"); code != 0 {
				t.Fatalf("network apply: %s", out)
			}
			expect(t, "restored", l, c)
		}
		restore()

		l.VM.MustRun("nft", "flush", "chain", "ip", "klimax", "postrouting") // the exemption
		expect(t, "without the exemption", l, c, "container to mac")
		restore()

		// the guard: everything that is to be forwarded from elsewhere passes.
		// Docker drops some of it itself; opening its part shows that it is
		// the guard that holds the rest.
		l.VM.MustRun("nft", "flush", "chain", "ip", "klimax", "guard")
		openForEverybody(l, s)
		if err := guarded(); err == nil {
			t.Error("without the guard a third network still gets no answer: the probe cannot fail")
		}
		restore()
		if err := guarded(); err != nil {
			t.Error("guard restored:", err)
		}
		closeForEverybody(l, s)

		// the accepts
		removeAccepts(l, s)
		switch s {
		case lab.Debian:
			expect(t, "without the accepts", l, c, "mac to container", "mac to VIP")
		default:
			// engine 29 drops by address in its raw table, which a VIP has no rule in;
			// replies to what the container asked are dropped there as well
			err := probes(l, c)["mac to container"]()
			if err == nil {
				t.Error("without the accepts the container still answers: the probe cannot fail")
			}
		}
		restore()
	})
}

// openForEverybody makes Docker's part let all forwarded packets pass.
func openForEverybody(l *lab.Lab, s lab.Setup) {
	if s.Iptables() {
		l.VM.MustRun("sh", "-c", "iptables -I FORWARD 1 -m comment --comment everybody -j ACCEPT; iptables -t raw -I PREROUTING 1 -m comment --comment everybody -j ACCEPT")
		return
	}
	l.VM.MustRun("nft", "add table ip everybody; add chain ip everybody pre { type filter hook prerouting priority -305; }; add rule ip everybody pre meta mark set meta mark | 0x10000")
}

func closeForEverybody(l *lab.Lab, s lab.Setup) {
	if s.Iptables() {
		l.VM.MustRun("sh", "-c", "iptables -D FORWARD -m comment --comment everybody -j ACCEPT; iptables -t raw -D PREROUTING -m comment --comment everybody -j ACCEPT")
		return
	}
	l.VM.MustRun("nft", "delete", "table", "ip", "everybody")
}

// removeAccepts takes out the rules of ours in chains of others, or the mark.
func removeAccepts(l *lab.Lab, s lab.Setup) {
	if s.Iptables() {
		l.VM.MustRun("sh", "-c", "iptables-save | grep -v klimax: | iptables-restore")
		return
	}
	out := l.VM.MustRun("nft", "-a", "list", "chain", "ip", "klimax", "guard")
	for _, line := range strings.Split(out, "\n") {
		if strings.Contains(line, "klimax:direct-mark") {
			_, handle, _ := strings.Cut(line, "# handle ")
			l.VM.MustRun("nft", "delete", "rule", "ip", "klimax", "guard", "handle", strings.TrimSpace(handle))
		}
	}
}

// directRouting gives the engine the options that case B of docs/network.md needs.
func directRouting(t *testing.T, l *lab.Lab) {
	t.Helper()
	if err := l.Docker().SetConfig(map[string]any{"allow-direct-routing": true, "bridge-accept-fwmark": "0x10000/0x10000"}); err != nil {
		t.Fatal(err)
	}
	if err := l.Docker().Restart(context.Background(), 15); err != nil {
		t.Fatal(err)
	}
}
