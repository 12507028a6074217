//go:build lab

package routing

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"

	"klimax/shared/api"
	"klimax/shared/config"
	"klimax/test/guestrun"
	"klimax/test/lab"
)

// TestAgentKilled: rules stay, and the next agent finds everything in order,
// the socket file of the dead one included.
func TestAgentKilled(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Iptables})
	g := newGuest(t, l, "")
	g.Up()
	w := workload(t, l, network1)
	g.WaitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
	tr := startTraffic(t, l, w)
	g.Kill()
	if _, err := os.Stat(g.Socket); err != nil {
		t.Fatalf("no socket left behind, the test is wrong: %v", err)
	}
	out, code := g.Run("status", "--socket", g.Socket)
	if code != api.ExitUnreachable {
		t.Errorf("status of a dead agent: exit %d\n%s", code, out)
	}
	before := ruleset(l)
	g.Up()
	if r := g.Status().Network; r.Repairs != 0 || !r.LastApplied.IsZero() {
		t.Errorf("the next agent changed something: %+v", r)
	}
	if withoutCounters(before) != withoutCounters(ruleset(l)) {
		t.Error("the ruleset is another one")
	}
	tr.stop("agent killed and started")
}

func withoutCounters(s string) string {
	var b strings.Builder
	for f := range strings.FieldsSeq(s) {
		if f[0] < '0' || f[0] > '9' {
			b.WriteString(f + " ")
		}
	}
	return b.String()
}

// TestTwoAgents: the second one says who holds the lock, and changes nothing.
func TestTwoAgents(t *testing.T) {
	l := lab.New(t, lab.Options{NoDocker: true})
	g := newGuest(t, l, "")
	g.Start()
	g.WaitFor("rules", 5*time.Second, func(s api.Status) bool { return s.Network.InSync })
	out, code := g.Run("run", "--config", g.Config, "--socket", g.Socket+"2", "--state-dir", g.StateDir)
	if code != api.ExitDegraded {
		t.Errorf("exit %d", code)
	}
	mustContain(t, out, fmt.Sprintf("PID %d", g.PID()), "--state-dir")
	out, code = g.Run("run", "--config", g.Config, "--socket", g.Socket, "--state-dir", g.StateDir+"2")
	if code != api.ExitDegraded {
		t.Errorf("exit %d", code)
	}
	mustContain(t, out, g.Socket, "listening")
	// removing rules under a running agent would be undone at once
	out, code = g.Network("remove")
	if code != api.ExitDegraded {
		t.Errorf("exit %d", code)
	}
	mustContain(t, out, "agent is running", "stop it first")
	if s := g.Status(); !s.Network.InSync {
		t.Errorf("%+v", s.Network)
	}
}

// TestForwardingIsRaisedAndPutBack: ip_forward is on before Docker starts, so
// that Docker leaves FORWARD at ACCEPT, and off again after `network remove`.
func TestForwardingIsRaisedAndPutBack(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Iptables, NoDocker: true})
	g := newGuest(t, l, "")
	sysctl := func() string { return strings.TrimSpace(l.VM.MustRun("cat", "/proc/sys/net/ipv4/ip_forward")) }
	if err := l.VM.Sysctl("ipv4/ip_forward", "0"); err != nil {
		t.Fatal(err)
	}
	if out, code := g.Network("apply", "--boot"); code != 0 || !strings.HasPrefix(out, "changed") {
		t.Errorf("%d %s", code, out)
	}
	if sysctl() != "1" {
		t.Error("ip_forward is not on")
	}
	if err := l.Docker().Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	if out := l.VM.MustRun("iptables", "-S", "FORWARD"); !strings.Contains(out, "-P FORWARD ACCEPT") {
		t.Errorf("Docker set the policy:\n%s", out)
	}
	g.Up()
	// somebody switches it off: noticed by notification, put back
	if err := l.VM.Sysctl("ipv4/ip_forward", "0"); err != nil {
		t.Fatal(err)
	}
	g.WaitFor("ip_forward back", 3*time.Second, func(api.Status) bool { return sysctl() == "1" })
	g.Stop()
	if out, code := g.Network("remove"); code != 0 || !strings.Contains(out, "Docker is running") {
		t.Errorf("remove with Docker running: %d %s", code, out)
	}
	if err := l.Docker().Stop(context.Background(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if out, code := g.Network("remove"); code != 0 || !strings.Contains(out, "off again") || sysctl() != "0" {
		t.Errorf("remove: %d %s, ip_forward %s", code, out, sysctl())
	}
}

// TestBrokenConfig: nothing is changed, the problem is told with line and key,
// a running agent keeps its rules and takes the next valid configuration.
func TestBrokenConfig(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Nftables})
	g := newGuest(t, l, "")
	g.Up()
	w := workload(t, l, network1)
	g.WaitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
	for text, want := range map[string][]string{
		"network:\n  kindBridgeCIDER: 172.30.0.0/16\n": {"klimax.yaml:3", "kindBridgeCIDER", "kindBridgeCIDR"},
		"network:\n  kindBridgeCIDR: 172.30.0.0/33\n":  {"klimax.yaml:3", "172.30.0.0/33"},
		"network:\n  kindBridgeCIDR: 172.30.0.0/24\n":  {"klimax.yaml:3", "/16"},
		"network: [\n": {"klimax.yaml:2", "YAML"},
	} {
		g.WriteConfig(text)
		for _, verb := range []string{"apply", "check", "show", "remove"} {
			out, code := g.Network(verb)
			if code != api.ExitUsage {
				t.Errorf("%s: exit %d\n%s", verb, code, out)
			}
			mustContain(t, out, want...)
		}
		g.Signal(syscall.SIGHUP)
		g.WaitFor("the problem in the status", 5*time.Second, func(s api.Status) bool {
			c := guestrun.Condition(s, api.CondConfig)
			return c.Status == api.False && strings.Contains(c.Message, want[0]) && strings.Contains(c.Message, want[1])
		})
		expect(t, "with a broken configuration", l, w)
	}
	g.Stop()
	g.Start()
	g.WaitCondition(api.CondConfig, api.False, "Invalid")
	expect(t, "agent started with a broken configuration", l, w)
	// the API takes a valid one
	put, err := g.Client.PutConfig(context.Background(), config.Default(), "")
	if err != nil || !put.Changed {
		t.Fatalf("put: %+v %v", put, err)
	}
	g.WaitFor("the new configuration", 5*time.Second, func(s api.Status) bool {
		return s.Generation.Reconciled >= put.Generation && s.Healthy()
	})
	put2, err := g.Client.PutConfig(context.Background(), config.Default(), put.ETag)
	if err != nil || put2.Changed || put2.Generation != put.Generation {
		t.Errorf("the same again: %+v %v", put2, err)
	}
	if _, err := g.Client.PutConfig(context.Background(), config.Default(), "stale"); err == nil {
		t.Error("a stale If-Match was accepted")
	}
	if c, err := os.ReadFile(g.Config); err != nil || !strings.Contains(string(c), "kindBridgeCIDR: 172.30.0.0/16") {
		t.Errorf("file: %s %v", c, err)
	}
}

// TestRouteOverlap: a route of the guest that collides with the bridge's
// range is named, and no network is made over it.
func TestRouteOverlap(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Iptables})
	l.VM.MustRun("ip", "route", "add", "172.16.0.0/12", "via", lab.LANAddr)
	g := newGuest(t, l, "")
	g.Start()
	c := g.WaitCondition(api.CondDockerNetwork, api.False, "RouteOverlap")
	mustContain(t, c.Message, "172.16.0.0/12", "172.30.0.0/16", "network.kindBridgeCIDR", "eth1")
	l.VM.MustRun("ip", "route", "del", "172.16.0.0/12")
	g.WaitFor("all well", 15*time.Second, api.Status.Healthy)
}

// TestOddEngines: no permission, no socket, a remote engine.
func TestOddEngines(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Debian})
	g := newGuest(t, l, "")
	sock := filepath.Join(l.Dir, "plain-file")
	if err := os.WriteFile(sock, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	demo := func(host string) string {
		c := l.VM.Command(context.Background(), binary, "demo", "start", "--config", g.Config)
		c.Env = append(os.Environ(), "DOCKER_HOST="+host)
		out, err := c.CombinedOutput()
		if err == nil {
			t.Errorf("%s: the demo started", host)
		}
		return string(out)
	}
	mustContain(t, demo("tcp://192.0.2.1:2375"), "remote engine", "unix:///var/run/docker.sock")
	mustContain(t, demo("unix://"+l.Dir+"/none.sock"), "does not exist", "apt-get install docker.io")
	mustContain(t, demo("unix://"+sock), "not a socket")
	dead, err := net.Listen("unix", l.Dir+"/dead.sock")
	if err != nil {
		t.Fatal(err)
	}
	dead.(*net.UnixListener).SetUnlinkOnClose(false)
	_ = dead.Close()
	mustContain(t, demo("unix://"+l.Dir+"/dead.sock"), "not running", "systemctl start docker")
}

// TestFullDisk: rules matter more than files; the condition says what failed.
func TestFullDisk(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Iptables})
	g := newGuest(t, l, "")
	g.Up()
	g.Stop()
	// a file system of the agent's own, then full
	mount := exec.Command("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", g.StateDir)
	if out, err := mount.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	defer func() { _ = syscall.Unmount(g.StateDir, syscall.MNT_DETACH) }()
	g.Config = filepath.Join(g.StateDir, "klimax.yaml")
	g.Up()
	_ = os.WriteFile(filepath.Join(g.StateDir, "big"), make([]byte, 1<<20), 0o600)
	if _, err := g.Client.PutConfig(context.Background(), other(), ""); err == nil {
		t.Error("a configuration was stored on a full disk")
	}
	c := g.WaitCondition(api.CondState, api.False, "WriteFailed")
	mustContain(t, c.Message, "no space left", g.StateDir)
	before := g.Status().Network.Repairs
	l.VM.MustRun("nft", "delete", "table", "ip", "klimax")
	g.WaitFor("the repair on a full disk", 3*time.Second, func(s api.Status) bool { return s.Network.InSync && s.Network.Repairs > before })
	if err := os.Remove(filepath.Join(g.StateDir, "big")); err != nil {
		t.Fatal(err)
	}
	if _, err := g.Client.PutConfig(context.Background(), other(), ""); err != nil {
		t.Error(err)
	}
	g.WaitFor("all well", 5*time.Second, api.Status.Healthy)
	g.Stop() // before its file system goes
}

func other() config.Config {
	c := config.Default()
	c.Network.RoutePods = false
	return c
}

// TestManyEvents: a thousand events of Docker in about a second are one or two
// reconciles; a commit of 20,000 rules by somebody else is survived.
func TestManyEvents(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Debian})
	g := newGuest(t, l, "")
	g.Start()
	g.WaitFor("all well", 20*time.Second, api.Status.Healthy)
	g.Stop()
	// with --debug each look is a line of the log
	g.Start("--debug")
	g.WaitFor("all well", 20*time.Second, api.Status.Healthy)
	d := l.Docker().Client()
	if err := l.Docker().LoadImage(context.Background()); err != nil {
		t.Fatal(err)
	}
	for i := range 8 {
		_, err := d.ContainerCreate(context.Background(), &container.Config{Image: lab.Image},
			&container.HostConfig{NetworkMode: network1}, nil, nil, fmt.Sprintf("c%d", i))
		if err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(2 * time.Second)
	looks := func() int {
		b, err := os.ReadFile(g.Log)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(b), "msg=looked")
	}
	before, start := looks(), time.Now()
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			name := fmt.Sprintf("c%d", w)
			for i := range 125 {
				next := fmt.Sprintf("c%d-%d", w, i)
				if err := d.ContainerRename(context.Background(), name, next); err != nil {
					t.Error(err)
					return
				}
				name = next
			}
		})
	}
	wg.Wait()
	took := time.Since(start)
	time.Sleep(1500 * time.Millisecond)
	n := looks() - before
	t.Logf("a thousand events in %v: %d looks", took, n)
	if limit := 2 + int(took/time.Second); n > limit {
		t.Errorf("%d looks, want at most %d", n, limit)
	}

	var b strings.Builder
	b.WriteString("add table ip huge\nadd chain ip huge c\n")
	for i := range 20000 {
		fmt.Fprintf(&b, "add rule ip huge c ip saddr 10.%d.%d.1 tcp dport %d counter accept\n", i/250%250, i%250, i%60000+1)
	}
	file := filepath.Join(l.Dir, "huge.nft")
	if err := os.WriteFile(file, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	l.VM.MustRun("nft", "-f", file)
	start = time.Now()
	repairs := g.Status().Network.Repairs
	l.VM.MustRun("nft", "delete", "table", "ip", "klimax")
	g.WaitFor("a repair after 20,000 rules", 5*time.Second, func(s api.Status) bool { return s.Network.InSync && s.Network.Repairs > repairs })
	t.Logf("repair beside 20,000 rules of others: seen after %v", time.Since(start))
}

// TestDockerKilledWhileReconciling: kill -9 of dockerd at any moment leaves
// whole rules and a Docker that comes up.
func TestDockerKilledWhileReconciling(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Iptables})
	g := newGuest(t, l, "")
	g.Up()
	w := workload(t, l, network1)
	g.WaitFor("the cluster", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // damage without a pause, so that there is always a reconcile
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = l.VM.Run(context.Background(), "nft", "flush", "chain", "ip", "klimax", "guard")
				time.Sleep(5 * time.Millisecond)
			}
		}
	})
	for range 5 {
		if err := l.Docker().Restart(context.Background(), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	wg.Wait()
	g.WaitFor("all well", 10*time.Second, api.Status.Healthy)
	expect(t, "after five kills", l, w)
}
