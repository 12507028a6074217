//go:build lab

package routing

import (
	"strings"
	"testing"
	"time"

	"klimax/shared/api"
	"klimax/test/guestrun"
	"klimax/test/lab"
)

// TestRouted is the product in one test, on every engine and backend.
func TestRouted(t *testing.T) {
	lab.Each(t, func(t *testing.T, s lab.Setup) {
		l := lab.New(t, lab.Options{Setup: s})
		g := newGuest(t, l, "")
		st := g.Up()
		if st.Docker.Bridge != "br-kind" || st.Docker.Subnet != "172.30.0.0/16" {
			t.Errorf("network: %+v", st.Docker)
		}
		c := workload(t, l, network1)
		st = g.WaitFor("the cluster in the status", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
		expect(t, "at first", l, c)

		// the counters are those of the rules that did it
		st = g.Status()
		for _, id := range []api.RuleID{api.RuleSNATExempt, api.RuleGuardAllow} {
			if r := guestrun.Rule(st, id); r.Packets == 0 || r.Present != r.Wanted {
				t.Errorf("rule %s has not matched: %+v", id, r)
			}
		}

		// nobody else
		l.RouteFromLAN("172.30.0.0/16", "10.101.0.0/16")
		unreachable(t, l, l.LAN, node1+":8080", "a third network")
		unreachable(t, l, l.LAN, vip1+":8080", "a third network")
		if r := guestrun.Rule(g.Status(), api.RuleGuard); r.Packets == 0 {
			t.Errorf("the guard has not matched: %+v", r)
		}
		// a LAN host gets answers to what a container asks, from the guest's address
		lan := l.Serve(l.LAN, lab.LANAddr+":9000")
		if _, err := l.Get(c.NS(), lab.LANAddr+":9000", time.Second); err != nil {
			t.Errorf("container to the third network: %v", err)
		}
		if lan.Peers()[node1] != 0 {
			t.Errorf("the third network sees the container's own address: %v", lan.Peers())
		}

		// a container outside of any cluster, made later, by Docker's choice of address
		other := l.RunServer("other", network1, "", nil)
		if !strings.HasPrefix(other.IP, "172.30.0.") {
			t.Errorf("Docker's own choice is %s, want one of 172.30.0.0/24", other.IP)
		}
		l.MustGet(l.Mac, other.Addr(), l.MacAddr())

		// doing it again changes nothing and says so
		if out, code := g.Network("apply"); code != 0 || strings.TrimSpace(out) != "unchanged" {
			t.Errorf("network apply: %d %s", code, out)
		}
		if out, code := g.Network("check"); code != 0 || !strings.Contains(out, "in sync") {
			t.Errorf("network check: %d %s", code, out)
		}
		out, code := g.Network("show")
		if code != 0 {
			t.Errorf("network show: %d", code)
		}
		mustContain(t, out, "klimax:snat-exempt", "klimax:guard", "yes     yes")
		out, code = g.Run("status", "--socket", g.Socket)
		if code != 0 {
			t.Errorf("status: %d", code)
		}
		mustContain(t, out, "in sync", "lima0", "192.168.64.3", "192.168.64.0/24", "172.30.0.0/16", "snat-exempt")
		t.Log("\n" + out)

		// SIGTERM ends the agent within a second; the rules stay and work
		if d := g.Stop(); d > time.Second {
			t.Errorf("SIGTERM took %v", d)
		}
		expect(t, "after the agent's end", l, c)
		// without an agent, removing leaves nothing
		if out, code := g.Network("remove"); code != 0 || !strings.Contains(out, "changed") {
			t.Errorf("network remove: %d %s", code, out)
		}
		if left := ruleset(l); strings.Contains(left, "klimax") {
			t.Errorf("left in the kernel:\n%s", left)
		}
		if out, _ := g.Network("remove"); !strings.Contains(out, "unchanged") {
			t.Errorf("second remove: %s", out)
		}
		if err := probes(l, c)["container to mac"](); err == nil {
			t.Error("without rules the mac still sees the container's own address: the probe cannot fail")
		}
		// and from nothing, the one-shot command brings it all back
		if out, code := g.Network("apply"); code != 0 || !strings.HasPrefix(out, "changed: ") {
			t.Errorf("network apply: %d %s", code, out)
		}
		expect(t, "after network apply alone", l, c)
	})
}
