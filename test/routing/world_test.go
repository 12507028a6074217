//go:build lab

package routing

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/docker/docker/api/types/network"

	"klimax/shared/api"
	"klimax/test/guestrun"
	"klimax/test/lab"
)

// TestForeignNetwork: a network of the right name and subnet that somebody
// else made is used as it is, and restarts cost nothing there either.
func TestForeignNetwork(t *testing.T) {
	lab.Each(t, func(t *testing.T, s lab.Setup) {
		l := lab.New(t, lab.Options{Setup: s, ForwardDrop: s.Iptables()})
		id := l.CreateNetwork(network1, "172.30.0.0/16", nil)
		g := newGuest(t, l, "")
		if s == lab.Nftables {
			g.Start()
			c := g.WaitCondition(api.CondBackend, api.False, "DirectRoutingOff")
			mustContain(t, c.Message, "allow-direct-routing", "bridge-accept-fwmark", "0x10000/0x10000")
			directRouting(t, l)
			g.WaitFor("all well", 10*time.Second, api.Status.Healthy)
		} else {
			g.Up()
		}
		c := workload(t, l, network1)
		g.WaitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
		mustContain(t, guestrun.Condition(g.Status(), api.CondDockerNetwork).Message, "made by somebody else")
		expect(t, "foreign network", l, c)
		if s == lab.Iptables {
			// a DOCKER-USER accept alone does not help: the raw drop is earlier
			if r := guestrun.Rule(g.Status(), api.RuleRawAccept); r.Packets == 0 {
				t.Errorf("the raw accept has not matched: %+v", r)
			}
			g.Stop()
			l.VM.MustRun("iptables", "-t", "raw", "-D", "PREROUTING", "1")
			if out := l.VM.MustRun("iptables", "-S", "DOCKER-USER"); !strings.Contains(out, "klimax:forward-accept") {
				t.Errorf("the accept in DOCKER-USER is gone too: %s", out)
			}
			expect(t, "with the accept in DOCKER-USER alone", l, c, "mac to container", "container to mac")
			g.Up()
			expect(t, "with both again", l, c)
		}
		for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
			tr := startTraffic(t, l, c)
			time.Sleep(300 * time.Millisecond)
			if err := l.Docker().Restart(context.Background(), sig); err != nil {
				t.Fatal(err)
			}
			time.Sleep(700 * time.Millisecond)
			tr.stop(fmt.Sprint("foreign network, ", sig))
		}
		n, err := l.Docker().Client().NetworkInspect(context.Background(), network1, network.InspectOptions{})
		if err != nil || n.ID != id || len(n.Labels) != 0 {
			t.Errorf("the network was touched: %+v %v", n, err)
		}
	})
}

// TestOtherSubnet: a network of that name with another subnet is never
// touched; klimax runs beside it under another name.
func TestOtherSubnet(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Iptables})
	id := l.CreateNetwork(network1, "172.18.0.0/16", nil)
	theirs := l.RunServer("theirs", network1, "172.18.0.5", nil)
	g := newGuest(t, l, "")
	g.Start()
	c := g.WaitCondition(api.CondDockerNetwork, api.False, "OtherSubnet")
	mustContain(t, c.Message, "172.18.0.0/16", "172.30.0.0/16", "theirs", "network.dockerNetwork")
	g.WriteConfig("network:\n  dockerNetwork: klimax\n")
	g.Signal(syscall.SIGHUP)
	g.WaitFor("all well beside it", 10*time.Second, func(s api.Status) bool { return s.Healthy() && s.Docker.Network == "klimax" })
	w := workload(t, l, "klimax")
	g.WaitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
	expect(t, "beside a foreign kind network", l, w)
	l.MustGet(l.VM, theirs.Addr(), "")
	n, err := l.Docker().Client().NetworkInspect(context.Background(), network1, network.InspectOptions{})
	if err != nil || n.ID != id {
		t.Errorf("the network was touched: %+v %v", n, err)
	}
	// the two networks are kept apart
	unreachable(t, l, work{theirs, theirs.NS()}.ns, node1+":8080", "a container on another Docker network")
}

// TestUplinkAddress: lima0 without an address is a named state; it gets one,
// then another one in a /20 where the host is not .1.
func TestUplinkAddress(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Nftables, NoUplinkAddr: true})
	g := newGuest(t, l, "")
	g.Start()
	c := g.WaitCondition(api.CondUplink, api.False, "NoAddress")
	mustContain(t, c.Message, "lima0")
	if s := g.WaitFor("rules", 5*time.Second, func(s api.Status) bool { return s.Network.InSync }); len(s.Network.Allow) != 0 || guestrun.Rule(s, api.RuleGuard).Present != 1 {
		t.Errorf("without an address: %+v", s.Network)
	}
	if err := l.VM.AddAddr("lima0", "192.168.64.3/24"); err != nil {
		t.Fatal(err)
	}
	g.WaitFor("the address", 5*time.Second, func(s api.Status) bool {
		return s.Uplink.Address == "192.168.64.3" && s.Healthy() && len(s.Network.Allow) == 1 && s.Network.Allow[0] == "192.168.64.0/24"
	})
	w := workload(t, l, network1)
	g.WaitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
	expect(t, "first address", l, w)

	for _, change := range []func() error{
		func() error { return l.VM.AddAddr("lima0", "10.66.20.9/20") },
		func() error { return l.VM.DelAddr("lima0", "192.168.64.3/24") },
		func() error { return l.Mac.AddAddr("en0", "10.66.31.77/20") },
	} {
		if err := change(); err != nil {
			t.Fatal(err)
		}
	}
	g.WaitFor("another address", 5*time.Second, func(s api.Status) bool {
		return s.Uplink.Address == "10.66.20.9" && s.Healthy() && len(s.Network.Allow) == 1 && s.Network.Allow[0] == "10.66.16.0/20"
	})
	l.Mac.MustRun("ip", "route", "replace", "172.30.0.0/16", "via", "10.66.20.9", "src", "10.66.31.77")
	l.MustGet(l.Mac, node1+":8080", "10.66.31.77")
	l.Serve(l.Mac, "10.66.31.77:9001")
	l.MustGet(w.NS(), "10.66.31.77:9001", node1)
	// the old network is nobody now
	l.Mac.MustRun("ip", "route", "replace", "172.30.0.0/16", "via", "10.66.20.9", "src", l.MacAddr())
	unreachable(t, l, l.Mac, node1+":8080", "an address outside of the new network")
}

// TestPlainHost: on an uplink of another name nobody is the host until the
// configuration says so; a neighbour who is not is masqueraded to, and kept out.
func TestPlainHost(t *testing.T) {
	lab.Each(t, func(t *testing.T, s lab.Setup) {
		l := lab.New(t, lab.Options{Setup: s, UplinkName: "enp1s0"})
		g := newGuest(t, l, "network:\n  uplink: enp1s0\n")
		g.Up()
		w := workload(t, l, network1)
		g.WaitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
		c := guestrun.Condition(g.Status(), api.CondUplink)
		if c.Reason != "NobodyAllowed" {
			t.Errorf("condition: %+v", c)
		}
		mustContain(t, c.Message, "network.allowFrom")
		unreachable(t, l, l.Mac, node1+":8080", "nobody is the host")
		g.WriteConfig("network:\n  uplink: enp1s0\n  allowFrom: [" + l.MacAddr() + "]\n")
		g.Signal(syscall.SIGHUP)
		g.WaitFor("the mac allowed", 5*time.Second, func(s api.Status) bool { return s.Healthy() && len(s.Network.Allow) == 1 })
		expect(t, "allowed", l, w)
		// a neighbour on the same wire has no route back: it is masqueraded to
		nb := l.Serve(l.Neighbour, l.NeighbourAddr()+":9000")
		if _, err := l.Get(w.NS(), l.NeighbourAddr()+":9000", time.Second); err != nil {
			t.Errorf("container to a neighbour without a route: %v", err)
		}
		if p := nb.Peers(); p[l.VMAddr()] == 0 || len(p) != 1 {
			t.Errorf("the neighbour must see the guest only: %v", p)
		}
		// and even with a route it gets nowhere, pods and services included
		l.RouteFromNeighbour("172.30.0.0/16", "10.101.0.0/16")
		unreachable(t, l, l.Neighbour, node1+":8080", "a neighbour who is not allowed")
		unreachable(t, l, l.Neighbour, vip1+":8080", "a neighbour who is not allowed")
		pod(t, l, w)
		l.Mac.MustRun("ip", "route", "replace", "10.101.0.0/16", "via", l.VMAddr())
		l.MustGet(l.Mac, podAddr+":8080", l.MacAddr())
		unreachable(t, l, l.Neighbour, podAddr+":8080", "a neighbour to a pod")
	})
}

const podAddr = "10.101.0.5"

// pod gives the node an address in the pods' range and the guest a route to
// it, as a cluster's node has pods behind it.
func pod(t *testing.T, l *lab.Lab, w work) {
	t.Helper()
	w.NS().MustRun("ip", "address", "replace", podAddr+"/32", "dev", "lo")
	l.VM.MustRun("ip", "route", "replace", "10.101.0.0/24", "via", node1)
}

// TestAPIAndMirrorGuards: 700N answers the host and the guest, mirrors answer
// nodes and the guest; a published port that is neither stays as Docker made it.
func TestAPIAndMirrorGuards(t *testing.T) {
	lab.Each(t, func(t *testing.T, s lab.Setup) {
		l := lab.New(t, lab.Options{Setup: s})
		g := newGuest(t, l, "")
		g.Up()
		l.Run(lab.Spec{Name: "cp", Network: network1, IP: node1, Labels: clusterLabels(), Publish: map[string]string{"7001": "8080", "18080": "8080"}})
		l.Run(lab.Spec{Name: "hub", Network: network1, IP: "172.30.0.9", Labels: map[string]string{"klimax.role": "mirror"}})
		g.WaitFor("both", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && len(s.Mirrors) == 1 && s.Healthy() })
		l.RouteFromMac()
		if _, err := l.WaitGet(l.Mac, l.VMAddr()+":7001", 5*time.Second); err != nil {
			t.Errorf("API from the mac: %v", err)
		}
		if _, err := l.Get(l.VM, "127.0.0.1:7001", time.Second); err != nil {
			t.Errorf("API from the guest: %v", err)
		}
		unreachable(t, l, l.LAN, lab.VMLANAddr+":7001", "API from a third network")
		if _, err := l.Get(l.LAN, lab.VMLANAddr+":18080", time.Second); err != nil {
			t.Errorf("a port that the user published: %v", err)
		}
		unreachable(t, l, l.Mac, "172.30.0.9:8080", "a mirror from the mac")
		if _, err := l.Get(l.VM, "172.30.0.9:8080", time.Second); err != nil {
			t.Errorf("a mirror from the guest: %v", err)
		}
		for _, id := range []api.RuleID{api.RuleGuardAPI, api.RuleGuardMirrors} {
			if r := guestrun.Rule(g.Status(), id); r.Packets == 0 {
				t.Errorf("%s has not matched: %+v", id, r)
			}
		}
	})
}

// TestOtherFirewalls: chains of others that drop are named; a missing jump to
// DOCKER-USER and rules of iptables-legacy are lived with.
func TestOtherFirewalls(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Debian, ForwardDrop: true})
	g := newGuest(t, l, "")
	g.Up()
	w := workload(t, l, network1)
	g.WaitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })

	l.VM.MustRun("nft", "add table inet firewalld; add chain inet firewalld filter_FORWARD { type filter hook forward priority 10; }; add rule inet firewalld filter_FORWARD ct state established,related accept; add rule inet firewalld filter_FORWARD reject with icmpx admin-prohibited")
	c := g.WaitCondition(api.CondForeignFirewall, api.False, "DropsForwarded")
	mustContain(t, c.Message, "filter_FORWARD", "inet firewalld", "firewall-cmd")
	if err := probes(l, w)["mac to container"](); err == nil {
		t.Error("the foreign firewall does not drop: the test is wrong")
	}
	l.VM.MustRun("nft", "delete", "table", "inet", "firewalld")
	g.WaitFor("all well without it", 5*time.Second, api.Status.Healthy)
	l.VM.MustRun("nft", "add table inet strict; add chain inet strict drops { type filter hook forward priority 5; policy drop; }")
	c = g.WaitCondition(api.CondForeignFirewall, api.False, "DropsForwarded")
	mustContain(t, c.Message, "inet strict", "policy drop")
	l.VM.MustRun("nft", "delete", "table", "inet", "strict")

	l.VM.MustRun("iptables", "-D", "FORWARD", "-j", "DOCKER-USER")
	time.Sleep(200 * time.Millisecond)
	expect(t, "without the jump to DOCKER-USER", l, w)

	l.VM.MustRun("iptables-legacy", "-P", "FORWARD", "DROP")
	l.VM.MustRun("nft", "add table ip nudge; delete table ip nudge") // legacy has no notifications
	c = g.WaitCondition(api.CondBackend, api.False, "LegacyIPTables")
	mustContain(t, c.Message, "iptables-legacy")
	l.VM.MustRun("iptables-legacy", "-P", "FORWARD", "ACCEPT")
	l.VM.MustRun("nft", "add table ip nudge; delete table ip nudge")
	g.WaitFor("all well", 5*time.Second, api.Status.Healthy)

	// saving and restoring iptables changes nothing that klimax would mend
	before := g.Status().Network.Repairs
	saved := l.VM.MustRun("iptables-save")
	mustContain(t, saved, "-s 192.168.64.0/24 -i lima0 -o br-kind", "klimax:forward-accept")
	l.VM.MustRun("sh", "-c", "iptables-save > "+l.Dir+"/saved; iptables-restore < "+l.Dir+"/saved")
	time.Sleep(300 * time.Millisecond)
	if after := l.VM.MustRun("iptables-save"); rules(after) != rules(saved) {
		t.Errorf("restoring changed\n%s\nto\n%s", saved, after)
	}
	if n := g.Status().Network.Repairs; n != before {
		t.Errorf("the restore made %d repairs", n-before)
	}
	expect(t, "after iptables-restore", l, w)
}

// rules is iptables-save without comments and counters.
func rules(save string) string {
	var out []string
	for _, line := range strings.Split(save, "\n") {
		if !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, ":") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "\n")
}
