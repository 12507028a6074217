//go:build linux

package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"klimax/shared/api"
	"klimax/test/guestrun"
	"klimax/test/lab"
)

// The workload: node and VIP of cluster 1, a container that calls the Mac, and
// the Mac's server.
const (
	dockerNetwork = "kind"
	bridgeCIDR    = "172.30.0.0/16"
	bridgeAddr    = "172.30.0.1"
	hostNetwork   = "192.168.64.0/24"
	nodeAddr      = "172.30.1.2"
	vipAddr       = "172.30.1.200"
	callerAddr    = "172.30.1.3"
	macPort       = "9000"
)

func port(addr string, p int) string { return fmt.Sprintf("%s:%d", addr, p) }

// clusterLabels are those of a node of cluster 1.
func clusterLabels() map[string]string {
	return map[string]string{"klimax.role": "node", "klimax.cluster": "dev", "klimax.cluster-number": "1",
		"io.x-k8s.kind.cluster": "dev", "io.x-k8s.kind.role": "control-plane"}
}

// world is a lab with the workload in it.
type world struct {
	t    *bed
	l    *lab.Lab
	g    *guestrun.Guest // nil without an agent
	node *lab.NS         // the workload's namespace
}

// withAgent starts the agent, which makes the Docker network, and the workload.
func (b *bench) withAgent(t *bed, l *lab.Lab, s lab.Spec) *world {
	g := guestrun.New(t, l, b.guest)
	g.Up()
	w := &world{t: t, l: l, g: g}
	w.workload(s)
	g.WaitFor("the cluster", 10*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
	return w
}

// workload runs the node with its VIP, the Mac's route and server. s may add
// to what the node's container is.
func (w *world) workload(s lab.Spec) {
	s.Name, s.Network, s.IP, s.Labels = "node", dockerNetwork, nodeAddr, clusterLabels()
	c := w.l.Run(s)
	c.AddVIP(vipAddr)
	w.node = c.NS()
	w.l.RouteFromMac()
	w.l.Serve(w.l.Mac, w.l.MacAddr()+":"+macPort)
}

// ways are the directions that must survive a restart.
func (w *world) ways() []way {
	l := w.l
	return []way{
		{name: "mac to container", from: l.Mac, target: port(nodeAddr, lab.Port), want: l.MacAddr(), flow: true},
		{name: "mac to VIP", from: l.Mac, target: port(vipAddr, lab.Port), want: l.MacAddr()},
		{name: "container to mac", from: w.node, target: l.MacAddr() + ":" + macPort, want: nodeAddr, flow: true},
	}
}

// works makes one connection each way before anything is measured.
func (w *world) works() {
	for _, x := range w.ways() {
		peer, err := w.l.WaitGet(x.from, x.target, 5*time.Second)
		if err != nil || peer != x.want {
			w.t.Fatalf("before anything was measured: %s: seen from %q, want %s: %v", x.name, peer, x.want, err)
		}
	}
}

// memory is the agent's resident set in bytes.
func memory(pid int) (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kB, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
			return kB << 10, err
		}
	}
	return 0, fmt.Errorf("process %d has no VmRSS", pid)
}

func megabytes(n int64) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }
