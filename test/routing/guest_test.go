//go:build lab

package routing

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"klimax/test/guestrun"
	"klimax/test/lab"
)

// binary is klimax-guest, built once for all tests.
var binary string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "klimax-guest-")
	if err != nil {
		panic(err)
	}
	binary = filepath.Join(dir, "klimax-guest")
	code := 1
	if err := guestrun.Build(context.Background(), binary); err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = m.Run()
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// Addresses of the workload in most tests: node and VIP of cluster 1.
const (
	network1 = "kind"
	node1    = "172.30.1.2"
	vip1     = "172.30.1.200"
	macPort  = "9000"
)

// newGuest prepares an agent with this configuration; empty means no file.
func newGuest(t *testing.T, l *lab.Lab, config string) *guestrun.Guest {
	t.Helper()
	g := guestrun.New(t, l, binary)
	g.WriteConfig(config)
	return g
}

// clusterLabels are those of a node of cluster 1.
func clusterLabels() map[string]string {
	return map[string]string{"klimax.role": "node", "klimax.cluster": "dev", "klimax.cluster-number": "1",
		"io.x-k8s.kind.cluster": "dev", "io.x-k8s.kind.role": "control-plane"}
}

// work is a container and its namespace, found while Docker can be asked.
type work struct {
	*lab.Container
	ns *lab.NS
}

func (w work) NS() *lab.NS { return w.ns }

// workload runs the usual container with its VIP and the Mac's server.
func workload(t *testing.T, l *lab.Lab, network string) work {
	t.Helper()
	c := l.RunServer("c1", network, node1, clusterLabels())
	c.AddVIP(vip1)
	l.RouteFromMac()
	l.Serve(l.Mac, l.MacAddr()+":"+macPort)
	w := work{c, c.NS()}
	if _, err := l.WaitGet(w.ns, "127.0.0.1:8080", 5*time.Second); err != nil {
		t.Fatalf("the container does not serve: %v", err)
	}
	return w
}

// probes are the connections that must always work, with the peer to be seen.
func probes(l *lab.Lab, c work) map[string]func() error {
	get := func(n *lab.NS, target, want string) func() error {
		return func() error {
			peer, err := l.Get(n, target, time.Second)
			if err == nil && peer != want {
				err = fmt.Errorf("%s saw %s, want %s", target, peer, want)
			}
			return err
		}
	}
	return map[string]func() error{
		"mac to container": get(l.Mac, node1+":8080", l.MacAddr()),
		"mac to VIP":       get(l.Mac, vip1+":8080", l.MacAddr()),
		"container to mac": get(c.NS(), l.MacAddr()+":"+macPort, node1),
	}
}

// expect runs probes and says which of them failed.
func expect(t *testing.T, when string, l *lab.Lab, c work, failing ...string) {
	t.Helper()
	for name, probe := range probes(l, c) {
		err := probe()
		wantFail := strings.Contains(strings.Join(failing, ","), name)
		switch {
		case err != nil && !wantFail:
			t.Errorf("%s: %s: %v", when, name, err)
		case err == nil && wantFail:
			t.Errorf("%s: %s works, it must not", when, name)
		}
	}
}

// unreachable expects that nobody answers.
func unreachable(t *testing.T, l *lab.Lab, from *lab.NS, target, why string) {
	t.Helper()
	if peer, err := l.Get(from, target, 700*time.Millisecond); err == nil {
		t.Errorf("%s: %s answers %s (seen as %s)", why, target, from.Name, peer)
	}
}

func mustContain(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("%q is not in:\n%s", p, text)
		}
	}
}

func ruleset(l *lab.Lab) string { return l.VM.MustRun("nft", "list", "ruleset") }
