package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"klimax/guest/docker"
	"klimax/guest/facts"
	"klimax/guest/network"
	"klimax/shared/api"
	"klimax/shared/config"
	"klimax/shared/netplan"
)

// fakeKernel is a kernel that does what it is told. What is in it is what was
// applied last, until damaged.
type fakeKernel struct {
	mu      sync.Mutex
	facts   facts.Facts
	synced  bool // the state read is what Desired wants
	looks   int
	applies int
	fail    []error // of the next applies
	failing error   // of every reading
	reading func()  // called at the start of each look
}

func (k *fakeKernel) Facts(context.Context, facts.KernelQuery) (facts.Facts, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.looks++
	if k.reading != nil {
		k.reading()
	}
	return k.facts, k.failing
}

func (k *fakeKernel) Rules(context.Context, netip.Prefix) (network.State, facts.Firewall, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := network.State{Rules: map[network.Chain][]network.Placed{}}
	if k.synced {
		cfg := config.Default()
		plan, _ := cfg.Plan()
		want := network.Desired(cfg, plan, k.facts)
		s.Table, s.Sets = true, want.Sets
		for ch, rules := range want.Rules {
			for _, r := range rules {
				s.Rules[ch] = append(s.Rules[ch], network.Placed{ID: r.ID, Ours: true, Exact: true, Rule: r})
			}
		}
	}
	return s, facts.Firewall{DockerNAT: true, DockerForward: true}, nil
}

func (k *fakeKernel) Apply(context.Context, network.Change) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.applies++
	if len(k.fail) > 0 {
		err := k.fail[0]
		k.fail = k.fail[1:]
		return err
	}
	k.synced = true
	return nil
}

func (k *fakeKernel) EnableForwarding(context.Context) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.facts.IPForward = true
	return nil
}

func (k *fakeKernel) damage(fail ...error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.synced, k.fail = false, fail
}

func (k *fakeKernel) set(f func(*fakeKernel)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f(k)
}

func (k *fakeKernel) counts() (looks, applies int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.looks, k.applies
}

// fakeEngine answers with what it holds.
type fakeEngine struct {
	mu      sync.Mutex
	engine  facts.Engine
	reads   int
	created int
	notify  chan docker.Signal
}

func (e *fakeEngine) Read(context.Context, config.Config, netplan.Plan) facts.Engine {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.reads++
	return e.engine
}

func (e *fakeEngine) EnsureNetwork(context.Context, config.Config, netplan.Plan) (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.created++
	e.engine.Network = facts.DockerNetwork{Found: true, Bridge: "br-kind", Subnet: netip.MustParsePrefix("172.30.0.0/16"), GatewayMode: "nat-unprotected", Ours: true}
	return true, nil
}

func (e *fakeEngine) Follow(ctx context.Context, notify func(docker.Signal)) {
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-e.notify:
			notify(s)
		}
	}
}

type world struct {
	*Loop
	kernel *fakeKernel
	engine *fakeEngine
	board  *Board
	logged *lines
}

func start(t *testing.T) *world {
	t.Helper()
	w := &world{
		kernel: &fakeKernel{facts: facts.Facts{
			Uplink: facts.Uplink{Name: "lima0", Found: true, Address: netip.MustParseAddr("192.168.64.3"), Network: netip.MustParsePrefix("192.168.64.0/24")},
			Bridge: facts.Bridge{Name: "br-kind"},
		}},
		engine: &fakeEngine{notify: make(chan docker.Signal), engine: facts.Engine{Known: true, Running: true, Version: "29.0.0", Backend: "iptables",
			Network: facts.DockerNetwork{Reason: "Missing", Problem: "none"}}},
		board: NewBoard(api.Status{}), logged: &lines{},
	}
	timing := Defaults()
	timing.Retry, timing.DockerSettle, timing.Grace = 5*time.Millisecond, 30*time.Millisecond, 50*time.Millisecond
	w.Loop = New(Options{Engine: w.engine, Kernel: w.kernel, Log: slog.New(slog.NewTextHandler(w.logged, nil)), Timing: timing, Board: w.board})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); w.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

func (w *world) wait(t *testing.T, what string, ok func(api.Status) bool) api.Status {
	t.Helper()
	var s api.Status
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if s = w.board.Status(); ok(s) {
			return s
		}
	}
	t.Fatalf("waited for %s: %+v", what, s)
	return s
}

func cond(s api.Status, kind string) api.Condition {
	for _, c := range s.Conditions {
		if c.Type == kind {
			return c
		}
	}
	return api.Condition{}
}

func TestLoopConverges(t *testing.T) {
	w := start(t)
	gen := w.SetConfig(config.Default(), nil)
	s := w.wait(t, "the configuration", func(s api.Status) bool { return s.Generation.Reconciled == gen && s.Healthy() })
	if w.engine.created != 1 || s.Docker.Bridge != "br-kind" || s.Network.Repairs != 0 {
		t.Errorf("network made %d times, %+v", w.engine.created, s)
	}
	// damage is a repair, and counted
	w.kernel.damage()
	w.Kick("test")
	s = w.wait(t, "the repair", func(s api.Status) bool { return s.Network.Repairs == 1 && s.Network.InSync })
	if s.Network.LastReason == "" || s.Network.LastRepairMillis <= 0 {
		t.Errorf("%+v", s.Network)
	}
	// a kernel that changed between reading and applying: at once again
	w.kernel.damage(unix.ENOENT, unix.ENOENT)
	w.Kick("test")
	w.wait(t, "the second repair", func(s api.Status) bool { return s.Network.Repairs == 2 && s.Network.InSync })
	// an apply that fails: said, and tried again
	w.kernel.damage(unix.EPERM)
	w.Kick("test")
	w.wait(t, "the third repair", func(s api.Status) bool { return s.Network.Repairs == 3 && s.Network.InSync })
	if _, applies := w.kernel.counts(); applies < 1+1+3+2 {
		t.Errorf("%d applies", applies)
	}
}

func TestLoopSaysWhatFails(t *testing.T) {
	w := start(t)
	w.SetConfig(config.Default(), nil)
	w.wait(t, "sync", api.Status.Healthy)
	fails := make([]error, 10000)
	for i := range fails {
		fails[i] = errors.New("operation not permitted")
	}
	w.kernel.damage(fails...)
	w.Kick("test")
	s := w.wait(t, "OutOfSync", func(s api.Status) bool { return !s.Network.InSync })
	if c := cond(s, api.CondRules); c.Status != api.False || c.Message != "operation not permitted" {
		t.Errorf("%+v", c)
	}
	w.kernel.damage()
	w.wait(t, "sync without further news", api.Status.Healthy)
}

func TestInvalidConfigLeavesRules(t *testing.T) {
	w := start(t)
	w.SetConfig(config.Default(), nil)
	w.wait(t, "sync", api.Status.Healthy)
	_, before := w.kernel.counts()
	w.SetConfig(config.Config{}, errors.New("klimax.yaml:3: nonsense"))
	s := w.wait(t, "ConfigValid=False", func(s api.Status) bool { return cond(s, api.CondConfig).Status == api.False })
	if cond(s, api.CondConfig).Message != "klimax.yaml:3: nonsense" || s.Healthy() {
		t.Errorf("%+v", s)
	}
	w.kernel.damage()
	w.Kick("test")
	time.Sleep(50 * time.Millisecond)
	if _, after := w.kernel.counts(); after != before {
		t.Error("rules were changed with an invalid configuration")
	}
	w.SetConfig(config.Default(), nil)
	w.wait(t, "sync again", api.Status.Healthy)
}

func TestManyNewsAreFewLooks(t *testing.T) {
	w := start(t)
	w.SetConfig(config.Default(), nil)
	w.wait(t, "sync", api.Status.Healthy)
	time.Sleep(100 * time.Millisecond)
	looks, _ := w.kernel.counts()
	reads := w.engine.reads
	for range 1000 {
		w.engine.notify <- docker.Changed
	}
	time.Sleep(300 * time.Millisecond)
	w.engine.mu.Lock()
	n := w.engine.reads - reads
	w.engine.mu.Unlock()
	after, _ := w.kernel.counts()
	if n == 0 || n > 2 || after-looks > 2 {
		t.Errorf("1,000 events: the engine was asked %d times, %d looks", n, after-looks)
	}
	for range 1000 {
		w.Kick("nftables changed")
	}
	time.Sleep(200 * time.Millisecond)
	if again, _ := w.kernel.counts(); again == after || again-after > 3 {
		t.Errorf("1,000 kicks: %d looks", again-after)
	}
}

func TestEngineStopsAndStarts(t *testing.T) {
	w := start(t)
	w.SetConfig(config.Default(), nil)
	w.engine.notify <- docker.Connected
	w.wait(t, "sync", api.Status.Healthy)
	w.engine.notify <- docker.Lost
	s := w.wait(t, "the stop", func(s api.Status) bool { return !s.Docker.Running && cond(s, api.CondDocker).Status == api.False })
	if s.Docker.Version != "29.0.0" || !s.Network.InSync || s.Docker.Restarts != 0 {
		t.Errorf("%+v", s)
	}
	w.engine.notify <- docker.Connected
	w.wait(t, "the start", func(s api.Status) bool { return s.Docker.Running && s.Docker.Restarts == 1 && s.Healthy() })
}

// TestNoNetworkOverARoute: a route of the guest in the bridge's range.
func TestNoNetworkOverARoute(t *testing.T) {
	w := start(t)
	w.kernel.mu.Lock()
	w.kernel.facts.Overlaps = []facts.Overlap{{Route: netip.MustParsePrefix("172.16.0.0/12"), Device: "tun0", Range: netip.MustParsePrefix("172.30.0.0/16"), Key: "network.kindBridgeCIDR"}}
	w.kernel.mu.Unlock()
	w.SetConfig(config.Default(), nil)
	w.wait(t, "the overlap", func(s api.Status) bool { return cond(s, api.CondDockerNetwork).Reason == "RouteOverlap" })
	if w.engine.created != 0 {
		t.Error("the network was made")
	}
}

func TestDockerRulesLost(t *testing.T) {
	w := start(t)
	w.SetConfig(config.Default(), nil)
	w.wait(t, "sync", api.Status.Healthy)
	l := &Loop{timing: Timing{Grace: 20 * time.Millisecond}}
	f := facts.Facts{Engine: facts.Engine{Running: true, Backend: "nftables"}}
	l.dockerState.learn(f.Engine, 1)
	if got := l.dockerRulesOdd(f); got != oddWaiting {
		t.Errorf("at first: %v", got)
	}
	time.Sleep(30 * time.Millisecond)
	if got := l.dockerRulesOdd(f); got != oddLost {
		t.Errorf("later: %v", got)
	}
	f.Firewall.DockerTable = true
	if got := l.dockerRulesOdd(f); got != oddNone {
		t.Errorf("back: %v", got)
	}
}

func TestTrigger(t *testing.T) {
	now := time.Unix(100, 0)
	tr := NewTrigger(func() time.Time { return now })
	tr.Set("a")
	now = now.Add(time.Second)
	for range 10 {
		tr.Set("b")
	}
	tr.Set("c")
	tr.Set("d")
	reason, since := tr.Take()
	if reason != "a; b; c" || since != time.Unix(100, 0) {
		t.Errorf("%q %v", reason, since)
	}
	if reason, _ = tr.Take(); reason != "" {
		t.Errorf("taken twice: %q", reason)
	}
	select {
	case <-tr.C():
		t.Error("still signalled")
	default:
	}
}

func TestBoardFollow(t *testing.T) {
	b := NewBoard(api.Status{Version: "1"})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	got := make(chan string, 10)
	go func() {
		_ = b.Follow(ctx, func(reason string, s api.Status) error { got <- reason + s.Version; return nil })
	}()
	if v := <-got; v != "1" {
		t.Errorf("at first %q", v)
	}
	b.Update("x", func(s *api.Status) { s.Version = "2" })
	if v := <-got; v != "x2" {
		t.Errorf("then %q", v)
	}
	b.SetCondition(api.Condition{Type: "A", Status: api.False})
	<-got
	s := b.Status()
	s.Conditions[0].Status = api.True
	if b.Status().Conditions[0].Status != api.False {
		t.Error("the board's own status was handed out")
	}
}

// TestFailedReadingKeepsTheStatus: what was known stays; what failed is said
// once in the log and tried again with growing pauses.
func TestFailedReadingKeepsTheStatus(t *testing.T) {
	w := start(t)
	w.SetConfig(config.Default(), nil)
	w.wait(t, "sync", api.Status.Healthy)
	w.kernel.set(func(k *fakeKernel) { k.failing = errors.New("no such luck") })
	w.Kick("test")
	s := w.wait(t, "OutOfSync", func(s api.Status) bool { return !s.Network.InSync })
	if s.Uplink.Address != "192.168.64.3" || !s.Docker.Running || cond(s, api.CondUplink).Status != api.True || cond(s, api.CondRules).Message != "no such luck" {
		t.Errorf("%+v", s)
	}
	before, _ := w.kernel.counts()
	time.Sleep(300 * time.Millisecond)
	if after, _ := w.kernel.counts(); after-before > 8 {
		t.Errorf("%d looks in 300 ms of failure", after-before)
	}
	if n := w.logged.count("could not be brought in sync"); n != 1 {
		t.Errorf("said %d times", n)
	}
	w.kernel.set(func(k *fakeKernel) { k.failing = nil })
	w.wait(t, "sync without further news", api.Status.Healthy)
	w.kernel.damage()
	w.Kick("test")
	w.wait(t, "a repair", func(s api.Status) bool { return s.Network.Repairs == 1 && s.Network.InSync })
}

// TestReconciledIsNotEarly: a look that began before Docker was asked with a
// configuration says nothing about that configuration.
func TestReconciledIsNotEarly(t *testing.T) {
	const gen = 5
	e := facts.Engine{Known: true, Running: true, Network: facts.DockerNetwork{Found: true}}
	k := &fakeKernel{}
	l := New(Options{Kernel: k, Log: slog.New(slog.DiscardHandler), Timing: Defaults(), Board: NewBoard(api.Status{})})
	l.want.cfg, l.want.gen = config.Default(), gen
	k.reading = func() { l.dockerState.learn(e, gen) } // Docker's answer comes while the look is under way
	l.look(t.Context(), "test", time.Now())
	if g := l.board.Status().Generation; g.Reconciled == gen {
		t.Errorf("%+v after a look with what Docker was before", g)
	}
	l.look(t.Context(), "test", time.Now())
	if g := l.board.Status().Generation; g.Reconciled != gen {
		t.Errorf("%+v", g)
	}
	// a configuration that comes during a look stays the desired one
	k.reading = func() { l.SetConfig(config.Default(), nil) }
	l.look(t.Context(), "test", time.Now())
	if g := l.board.Status().Generation; g.Desired <= gen {
		t.Errorf("%+v, a look took back what came meanwhile", g)
	}
}

// TestAliveOverASetClock: the last round is remembered with its monotonic time.
func TestAliveOverASetClock(t *testing.T) {
	w := start(t)
	w.SetConfig(config.Default(), nil)
	w.wait(t, "sync", api.Status.Healthy)
	if !w.Alive(time.Second) {
		t.Error("not alive")
	}
	if last := w.heartbeat.Load(); last.Round(0) == *last {
		t.Error("the last round's time has no monotonic reading: a clock that is set makes it old")
	}
	old := time.Now().Add(-2 * w.timing.Resync)
	l := New(Options{Timing: w.timing})
	if l.Alive(time.Hour) {
		t.Error("alive before the first round")
	}
	if l.heartbeat.Store(&old); l.Alive(time.Second) {
		t.Error("a loop that hangs is alive")
	}
}

// lines counts what was logged.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) count(part string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), part)
}
