//go:build lab

package routing

import (
	"context"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"klimax/shared/api"
	"klimax/test/lab"
)

func TestZZMark(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Nftables})
	l.CreateNetwork(network1, "172.30.0.0/16", nil)
	directRouting(t, l)
	g := newGuest(t, l, "")
	g.up()
	c := workload(t, l, network1)
	g.waitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
	expect(t, "at first", l, c)
	g.stop()
	if err := l.Docker().Stop(context.Background(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	expect(t, "docker down", l, c)
	g.start()
	g.waitFor("insync", 5*time.Second, func(s api.Status) bool { return s.Network.InSync })
	time.Sleep(time.Second)
	expect(t, "agent started while docker is down", l, c)
	t.Log(l.VM.MustRun("nft", "list", "table", "ip", "klimax"))
}

func TestZZChangeCIDR(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Iptables})
	g := newGuest(t, l, "")
	g.up()
	c := workload(t, l, network1)
	g.waitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
	l.RouteFromLAN("172.30.0.0/16")
	expect(t, "at first", l, c)
	unreachable(t, l, l.LAN, node1+":8080", "at first")
	g.writeConfig("network:\n  kindBridgeCIDR: 172.31.0.0/16\n")
	g.signal(syscall.SIGHUP)
	g.waitCondition(api.CondDockerNetwork, api.False, "OtherSubnet")
	unreachable(t, l, l.LAN, node1+":8080", "other CIDR")
	g.writeConfig("network:\n  kindBridgeCIDR: 172.31.0.0/16\n  dockerNetwork: klimax\n")
	g.signal(syscall.SIGHUP)
	g.waitFor("healthy", 5*time.Second, func(s api.Status) bool { return s.Healthy() && s.Docker.Network == "klimax" })
	unreachable(t, l, l.LAN, node1+":8080", "other name and CIDR")
}

func TestZZIPv6(t *testing.T) {
	lab.Each(t, func(t *testing.T, s lab.Setup) {
		l := lab.New(t, lab.Options{Setup: s})
		l.VM.MustRun("ip", "address", "add", "fd00::2/64", "dev", "eth1", "nodad")
		l.LAN.MustRun("ip", "address", "add", "fd00::1/64", "dev", "eth0", "nodad")
		g := newGuest(t, l, "")
		g.up()
		l.Run(lab.Spec{Name: "cp", Network: network1, IP: node1, Labels: clusterLabels(), Publish: map[string]string{"7001": "8080", "18080": "8080"}})
		g.waitFor("both", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
		t.Log(l.VM.MustRun("ss", "-ltn"))
		for _, p := range []string{"7001", "18080"} {
			out, err := l.LAN.Run(context.Background(), "timeout", "2", "bash", "-c", "exec 3<>/dev/tcp/fd00::2/"+p+"; head -1 <&3")
			t.Log(p, out, err)
		}
	})
}

func TestZZUser(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Debian, ForwardDrop: true})
	l.VM.MustRun("iptables", "-I", "DOCKER-USER", "-s", l.MacAddr(), "-p", "tcp", "--dport", "8080", "-j", "DROP")
	g := newGuest(t, l, "")
	g.up()
	c := workload(t, l, network1)
	_ = c
	t.Log(l.VM.MustRun("iptables", "-S"))
	unreachable(t, l, l.Mac, node1+":8080", "user's own drop")
}

func TestZZPaths(t *testing.T) {
	lab.Each(t, func(t *testing.T, s lab.Setup) {
		l := lab.New(t, lab.Options{Setup: s})
		l.CreateNetwork("second", "172.25.0.0/16", nil)
		g := newGuest(t, l, "network:\n  allowFrom: [192.168.64.1]\n")
		g.up()
		c := workload(t, l, network1)
		cp := l.Run(lab.Spec{Name: "cp", Network: network1, IP: "172.30.1.3", Labels: clusterLabels(), Publish: map[string]string{"7001": "8080", "18080": "8080"}})
		_ = cp
		l.Run(lab.Spec{Name: "hub", Network: network1, IP: "172.30.0.9", Labels: map[string]string{"klimax.role": "mirror"}, Publish: map[string]string{"5030": "8080"}})
		user := l.RunServer("user", network1, "172.30.0.77", nil)
		d0 := l.RunServer("d0", "bridge", "", nil)
		d1 := l.RunServer("d1", "second", "", nil)
		pod(t, l, c)
		g.waitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && len(s.Mirrors) == 1 && s.Healthy() })
		l.RouteFromLAN("172.30.0.0/16", "10.101.0.0/16")
		l.RouteFromNeighbour("172.30.0.0/16", "10.101.0.0/16")
		l.RouteFromMac("172.30.0.0/16", "10.101.0.0/16")
		l.LAN.MustRun("ip", "address", "add", "192.168.64.1/32", "dev", "lo")
		froms := map[string]*lab.NS{"mac": l.Mac, "lan": l.LAN, "neighbour": l.Neighbour, "vm": l.VM, "docker0": d0.NS(), "second": d1.NS(), "node": c.NS(), "user": user.NS()}
		for name, ns := range froms {
			for _, to := range []string{node1 + ":8080", "172.30.1.3:8080", vip1 + ":8080", podAddr + ":8080", "172.30.0.9:8080", "172.30.0.77:8080",
				"192.168.64.3:7001", "10.99.0.2:7001", "172.30.0.1:7001", "172.17.0.1:7001",
				"192.168.64.3:18080", "10.99.0.2:18080", "172.30.0.1:18080", "192.168.64.3:5030", "10.99.0.2:5030", "172.30.0.1:5030", "127.0.0.1:5030"} {
				peer, err := l.Get(ns, to, 400*time.Millisecond)
				if err == nil {
					t.Logf("%-9s → %-20s ok, seen as %s", name, to, peer)
				} else {
					t.Logf("%-9s → %-20s -", name, to)
				}
			}
		}
		_ = exec.Command
	})
}
