//go:build lab

package routing

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"klimax/shared/api"
	"klimax/shared/client"
	"klimax/shared/version"
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
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", binary, "klimax/cmd/klimax-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build klimax-guest: %v\n%s", err, out)
		os.Exit(1)
	}
	code := m.Run()
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

// guest is an agent in the VM's namespace of a lab.
type guest struct {
	t        *testing.T
	l        *lab.Lab
	config   string
	socket   string
	stateDir string
	log      string
	cmd      *exec.Cmd
	done     chan struct{}
	client   *client.Client
}

// newGuest prepares an agent with this configuration; empty means no file.
func newGuest(t *testing.T, l *lab.Lab, config string) *guest {
	t.Helper()
	g := &guest{t: t, l: l, config: filepath.Join(l.Dir, "klimax.yaml"), socket: filepath.Join(l.Dir, "guest.sock"),
		stateDir: filepath.Join(l.Dir, "state"), log: filepath.Join(l.Dir, "guest.log")}
	g.writeConfig(config)
	g.client = client.Unix(g.socket, version.Version)
	t.Cleanup(func() {
		g.stop()
		if t.Failed() {
			b, _ := os.ReadFile(g.log)
			lines := strings.Split(string(b), "\n")
			t.Logf("agent's log:\n%s", strings.Join(lines[max(0, len(lines)-40):], "\n"))
		}
	})
	return g
}

func (g *guest) writeConfig(text string) {
	g.t.Helper()
	if text == "" {
		_ = os.Remove(g.config)
		return
	}
	if err := os.WriteFile(g.config, []byte("apiVersion: klimax/v1\n"+text), 0o644); err != nil {
		g.t.Fatal(err)
	}
}

// command is klimax-guest in the VM's namespace.
func (g *guest) command(args ...string) *exec.Cmd {
	c := g.l.VM.Command(context.Background(), binary, args...)
	c.Env = append(os.Environ(), "DOCKER_HOST="+g.l.Docker().Host)
	return c
}

// run runs klimax-guest to its end.
func (g *guest) run(args ...string) (string, int) {
	g.t.Helper()
	c := g.command(args...)
	out, err := c.CombinedOutput()
	if err != nil && c.ProcessState == nil {
		g.t.Fatalf("%v: %v", args, err)
	}
	return string(out), c.ProcessState.ExitCode()
}

// network runs `klimax-guest network VERB` with this guest's paths.
func (g *guest) network(verb string, args ...string) (string, int) {
	return g.run(append([]string{"network", verb, "--config", g.config, "--state-dir", g.stateDir}, args...)...)
}

// start starts the agent without waiting for anything.
func (g *guest) start() {
	g.t.Helper()
	f, err := os.OpenFile(g.log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		g.t.Fatal(err)
	}
	defer f.Close()
	g.cmd = g.command("run", "--config", g.config, "--socket", g.socket, "--state-dir", g.stateDir)
	g.cmd.Stdout, g.cmd.Stderr = f, f
	if err := g.cmd.Start(); err != nil {
		g.t.Fatal(err)
	}
	g.done = make(chan struct{})
	go func(c *exec.Cmd, done chan struct{}) { _ = c.Wait(); close(done) }(g.cmd, g.done)
}

// up starts the agent and waits until all is well.
func (g *guest) up() api.Status {
	g.t.Helper()
	g.start()
	return g.waitFor("all well", 20*time.Second, api.Status.Healthy)
}

func (g *guest) signal(s syscall.Signal) {
	if g.cmd != nil {
		_ = g.cmd.Process.Signal(s)
	}
}

// stop ends the agent with SIGTERM and returns how long that took.
func (g *guest) stop() time.Duration { return g.end(syscall.SIGTERM) }

func (g *guest) kill() { g.end(syscall.SIGKILL) }

func (g *guest) end(s syscall.Signal) time.Duration {
	if g.cmd == nil {
		return 0
	}
	begin := time.Now()
	g.signal(s)
	select {
	case <-g.done:
	case <-time.After(5 * time.Second):
		g.t.Errorf("the agent did not end within 5 s after %v", s)
		_ = g.cmd.Process.Kill()
		<-g.done
	}
	g.cmd = nil
	return time.Since(begin)
}

// waitFor polls the status until ok, and returns it.
func (g *guest) waitFor(what string, limit time.Duration, ok func(api.Status) bool) api.Status {
	g.t.Helper()
	var s api.Status
	var err error
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if s, err = g.client.Status(context.Background()); err == nil && ok(s) {
			return s
		}
	}
	b, _ := json.MarshalIndent(s, "", " ")
	g.t.Fatalf("waited %v for %s: %v\n%s", limit, what, err, b)
	return s
}

func (g *guest) status() api.Status {
	g.t.Helper()
	s, err := g.client.Status(context.Background())
	if err != nil {
		g.t.Fatal(err)
	}
	return s
}

func condition(s api.Status, kind string) api.Condition {
	for _, c := range s.Conditions {
		if c.Type == kind {
			return c
		}
	}
	return api.Condition{}
}

// waitCondition waits for a condition to have a status and, unless empty, a reason.
func (g *guest) waitCondition(kind string, want api.ConditionStatus, reason string) api.Condition {
	g.t.Helper()
	s := g.waitFor(fmt.Sprintf("%s=%s %s", kind, want, reason), 15*time.Second, func(s api.Status) bool {
		c := condition(s, kind)
		return c.Status == want && (reason == "" || c.Reason == reason)
	})
	return condition(s, kind)
}

func rule(s api.Status, id api.RuleID) api.Rule {
	for _, r := range s.Network.Rules {
		if r.ID == id {
			return r
		}
	}
	return api.Rule{ID: id}
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
