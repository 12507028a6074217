package up

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"klimax/host/route"
	"klimax/shared/api"
	"klimax/shared/config"
	"klimax/shared/netplan"
	"klimax/shared/progress"
)

// fakeGuest is an agent that applies a configuration after some looks at its
// status.
type fakeGuest struct {
	mu      sync.Mutex
	status  api.Status
	cfg     config.Config
	puts    int
	slow    int // looks until a put configuration counts as reconciled
	ignores bool
	getErr  error
	putErr  []error // one for each put, nil afterwards
	onLook  func(looks int, st *api.Status)
	looks   int
	dead    error
}

func (g *fakeGuest) Status(context.Context) (api.Status, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.dead != nil {
		return api.Status{}, g.dead
	}
	g.looks++
	if g.slow--; g.slow <= 0 && !g.ignores {
		g.status.Generation.Reconciled = g.status.Generation.Desired
	}
	if g.onLook != nil {
		g.onLook(g.looks, &g.status)
	}
	st := g.status
	st.Conditions = slices.Clone(st.Conditions)
	return st, nil
}

func (g *fakeGuest) Config(context.Context) (config.Config, string, error) {
	return g.cfg.Redacted(), g.cfg.ETag(), g.getErr
}

func (g *fakeGuest) PutConfig(_ context.Context, c config.Config, ifMatch string) (api.ConfigPut, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.puts++
	if len(g.putErr) > 0 {
		err := g.putErr[0]
		g.putErr = g.putErr[1:]
		if err != nil {
			return api.ConfigPut{}, err
		}
	}
	if ifMatch != "" && ifMatch != g.cfg.ETag() {
		return api.ConfigPut{}, &api.Error{Code: api.CodePreconditionFailed, Message: "changed meanwhile"}
	}
	g.cfg = c
	g.status.Generation.Desired++
	g.getErr = nil
	return api.ConfigPut{Generation: g.status.Generation.Desired, ETag: c.ETag(), Changed: true}, nil
}

// fakeRoutes is a routing table.
type fakeRoutes struct {
	state   route.State
	direct  bool
	applied []route.Request
	err     error
}

func (f *fakeRoutes) Current(context.Context, netplan.Plan, netip.Prefix) (route.State, error) {
	return route.State{Routes: slices.Clone(f.state.Routes), Addrs: f.state.Addrs}, nil
}
func (f *fakeRoutes) Direct() bool { return f.direct }
func (f *fakeRoutes) Explain(q route.Request) []string {
	return []string{fmt.Sprintf("%d changes", len(q.Changes))}
}
func (f *fakeRoutes) Apply(_ context.Context, q route.Request) error {
	f.applied = append(f.applied, q)
	if f.err != nil {
		return f.err
	}
	for _, c := range q.Changes {
		if c.Op != route.Add {
			f.state.Routes = slices.DeleteFunc(f.state.Routes, func(r route.Route) bool { return r.Own && r.Dest == c.Dest })
		}
		if c.Op != route.Remove {
			f.state.Routes = append(f.state.Routes, route.Route{Dest: c.Dest, Gateway: c.Gateway, Dev: "virbr1", Own: true})
		}
	}
	return nil
}

// log records the end of each step.
type log struct {
	mu     sync.Mutex
	events []progress.Event
}

func (l *log) Event(e progress.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

func (l *log) String() string {
	var b strings.Builder
	for _, e := range l.events {
		if e.State != progress.Started && e.State != progress.Log {
			fmt.Fprintf(&b, "%s %s\n", e.Step, e.State)
		}
	}
	return b.String()
}

func (l *log) all(s progress.State) string {
	var b strings.Builder
	for _, e := range l.events {
		if e.State == s {
			fmt.Fprintf(&b, "%s: %s\n", e.Step, e.Message)
		}
	}
	return b.String()
}

type world struct {
	guest  *fakeGuest
	routes *fakeRoutes
	log    *log
	asked  [][]string
	opts   Options
}

func good() []api.Condition {
	var out []api.Condition
	for _, t := range []string{api.CondDocker, api.CondDockerNetwork, api.CondUplink, api.CondRules, api.CondForeignFirewall} {
		out = append(out, api.Condition{Type: t, Status: api.True, Reason: "Fine", Message: "all is well"})
	}
	return out
}

func newWorld(t *testing.T) *world {
	w := &world{log: &log{}}
	w.guest = &fakeGuest{cfg: config.Default(), status: api.Status{Version: "0.1.0", Started: time.Now().Add(-time.Hour),
		Uplink:     api.Uplink{Name: "lima0", Address: "192.168.64.3", Network: "192.168.64.0/24"},
		Docker:     api.Docker{Running: true, Version: "20.10.24", Bridge: "br-kind"},
		Network:    api.Network{InSync: true},
		Conditions: good(),
		Generation: api.Generation{Desired: 1, Reconciled: 1}}}
	w.routes = &fakeRoutes{direct: true, state: route.State{
		Routes: []route.Route{{Dest: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.0.0.1"), Dev: "eth0"},
			{Dest: netip.MustParsePrefix("192.168.64.0/24"), Dev: "virbr1"}},
		Addrs: []netip.Addr{netip.MustParseAddr("192.168.64.1")}}}
	cfg := config.Default()
	cfg.Network.Uplink = "lima0"
	w.opts = Options{Config: cfg, Source: "test", Guest: w.guest, Routes: w.routes, Sink: w.log,
		AskRoot: func(c []string) {
			if n := len(w.log.events); n > 0 && w.log.events[n-1].State == progress.Started {
				t.Error("asked for root while a step runs")
			}
			w.asked = append(w.asked, c)
		},
		Dial:   func(context.Context, string, string) (net.Conn, error) { return nil, syscall.ECONNREFUSED },
		Timing: Timing{Reconcile: 300 * time.Millisecond, Settle: 50 * time.Millisecond, Probe: 50 * time.Millisecond, Poll: time.Millisecond, Connect: 50 * time.Millisecond}}
	return w
}

func (w *world) up(t *testing.T) (Result, error) {
	t.Helper()
	w.log.events = nil
	return Up(t.Context(), w.opts)
}

func TestUpTwice(t *testing.T) {
	w := newWorld(t)
	w.guest.slow = 5
	w.guest.status.Clusters = []api.Cluster{{Name: "dev", Number: 1, Nodes: []string{"172.30.1.2"}, Routed: "10.101.0.0/16"}}
	res, err := w.up(t)
	if err != nil {
		t.Fatal(err)
	}
	want := "config same\nconnect same\naddress-plan same\nguest-config done\nreconcile same\nroute done\nprobe same\n"
	if got := w.log.String(); got != want {
		t.Errorf("first:\n%s\nwant\n%s", got, want)
	}
	if !res.Changed || res.Local || len(res.Conditions) != 0 || fmt.Sprint(res.Reachable) !=
		"[{10.101.0.0/16 pods and services of cluster dev} {172.30.0.0/16 containers, nodes and load balancer addresses}]" {
		t.Errorf("result %+v", res)
	}
	if msgs := w.log.all(progress.Done); !strings.Contains(msgs, `network.uplink: "" → "lima0"`) ||
		!strings.Contains(msgs, "route: 10.101.0.0/16 via 192.168.64.3, 172.30.0.0/16 via 192.168.64.3") {
		t.Errorf("messages:\n%s", msgs)
	}
	if w.guest.cfg.Network.Uplink != "lima0" || w.guest.cfg.ETag() != w.opts.Config.ForGuest().ETag() {
		t.Error("the guest has another configuration")
	}

	start := time.Now()
	res, err = w.up(t)
	if err != nil || res.Changed || w.guest.puts != 1 || len(w.routes.applied) != 1 {
		t.Errorf("second: %+v, %v, %d puts, %d applied", res, err, w.guest.puts, len(w.routes.applied))
	}
	if got := w.log.String(); strings.Contains(got, "done") {
		t.Errorf("second:\n%s", got)
	}
	if d := time.Since(start); d > 300*time.Millisecond {
		t.Errorf("doing nothing took %v", d)
	}
}

func TestUpAsksForRootOnce(t *testing.T) {
	w := newWorld(t)
	w.routes.direct = false
	if _, err := w.up(t); err != nil {
		t.Fatal(err)
	}
	if len(w.asked) != 1 || w.asked[0][0] != "1 changes" {
		t.Errorf("asked %v", w.asked)
	}
	for _, e := range w.log.events {
		if e.Step == "route" && e.State == progress.Started {
			t.Error("the step is shown as running while the password is asked for")
		}
	}
	if !strings.Contains(w.log.String(), "route done") {
		t.Errorf("events:\n%s", w.log)
	}
	if _, err := w.up(t); err != nil || len(w.asked) != 1 {
		t.Errorf("second: %v, asked %v", err, w.asked)
	}
	w.routes.state.Routes = w.routes.state.Routes[:2]
	w.routes.err = errors.New("sudo: no")
	if _, err := w.up(t); err == nil || !strings.Contains(err.Error(), "Route to the guest: sudo: no") {
		t.Errorf("refused: %v", err)
	}
}

func TestUpLocal(t *testing.T) {
	w := newWorld(t)
	w.routes.state.Addrs = append(w.routes.state.Addrs, netip.MustParseAddr("192.168.64.3"))
	w.routes.state.Routes = append(w.routes.state.Routes, route.Route{Dest: netip.MustParsePrefix("172.30.0.0/16"), Dev: "br-kind"})
	res, err := w.up(t)
	if err != nil || !res.Local || len(w.routes.applied) != 0 || len(res.Reachable) != 1 {
		t.Errorf("%+v, %v", res, err)
	}
	if !strings.Contains(w.log.all(progress.Same), "route: the guest is this computer and needs no route") {
		t.Errorf("messages:\n%s", w.log.all(progress.Same))
	}
}

// What is wrong with the address plan is said before the guest is touched.
func TestUpConflictFirst(t *testing.T) {
	w := newWorld(t)
	w.routes.state.Routes = append(w.routes.state.Routes, route.Route{Dest: netip.MustParsePrefix("172.16.0.0/12"), Dev: "tun0"})
	_, err := w.up(t)
	var c *route.Conflict
	if !errors.As(err, &c) || c.Key != "network.kindBridgeCIDR" || w.guest.puts != 0 || len(w.routes.applied) != 0 {
		t.Errorf("%v, %d puts", err, w.guest.puts)
	}
	if got := w.log.String(); !strings.HasSuffix(got, "address-plan failed\n") {
		t.Errorf("events:\n%s", got)
	}
}

func TestUpClusterRangeTaken(t *testing.T) {
	w := newWorld(t)
	w.guest.status.Clusters = []api.Cluster{{Name: "dev", Number: 1, Nodes: []string{"172.30.1.2"}, Routed: "10.101.0.0/16"}}
	w.routes.state.Routes = append(w.routes.state.Routes, route.Route{Dest: netip.MustParsePrefix("10.0.0.0/8"), Dev: "tun0"})
	res, err := w.up(t)
	if err != nil || len(res.Conditions) != 1 || res.Conditions[0].Type != route.CondClusterRoutes || len(res.Reachable) != 1 {
		t.Errorf("%+v, %v", res, err)
	}
}

func TestUpGuestConfig(t *testing.T) {
	precondition := &api.Error{Code: api.CodePreconditionFailed, Message: "changed meanwhile"}
	for name, c := range map[string]struct {
		edit func(*world)
		puts int
		err  string
	}{
		"somebody else was faster":   {func(w *world) { w.guest.putErr = []error{precondition} }, 2, ""},
		"twice":                      {func(w *world) { w.guest.putErr = []error{precondition, precondition} }, 2, "changed meanwhile"},
		"the guest's own is invalid": {func(w *world) { w.guest.getErr = &api.Error{Code: api.CodeInvalidConfig, Message: "line 3: x"} }, 1, ""},
		"refused": {func(w *world) {
			w.guest.putErr = []error{&api.Error{Code: api.CodeInvalidConfig, Message: "no such key", Hint: "upgrade"}}
		},
			1, "Configure the guest: no such key\n  upgrade"},
		"nothing differs": {func(w *world) { w.guest.cfg = w.opts.Config.ForGuest() }, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			c.edit(w)
			_, err := w.up(t)
			if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
				t.Errorf("got %v, want %q", err, c.err)
			}
			if w.guest.puts != c.puts {
				t.Errorf("%d puts, want %d", w.guest.puts, c.puts)
			}
		})
	}
}

func TestUpWaits(t *testing.T) {
	bad := func(kind string) []api.Condition {
		cs := good()
		for i := range cs {
			if cs[i].Type == kind {
				cs[i] = api.Condition{Type: kind, Status: api.False, Reason: "Bad", Message: kind + " is bad"}
			}
		}
		return cs
	}
	for name, c := range map[string]struct {
		edit       func(*world)
		err        []string
		conditions int
		logs       string
	}{
		"never applied": {edit: func(w *world) { w.guest.ignores = true; w.guest.status.Conditions = bad(api.CondDocker) },
			err: []string{"Wait for the guest: the guest has not applied the configuration within 300ms (generation 2, applied is 1)", "DockerReady is bad", "klimax-guest logs"}},
		"docker stays away": {edit: func(w *world) { w.guest.status.Conditions = bad(api.CondDocker) },
			err: []string{"the guest is not ready", "DockerReady: DockerReady is bad"}, conditions: 1, logs: "reconcile: DockerReady: DockerReady is bad\n"},
		"docker comes": {edit: func(w *world) {
			w.guest.status.Conditions = bad(api.CondDocker)
			w.guest.onLook = func(n int, st *api.Status) {
				if n > 5 {
					st.Conditions = good()
				}
			}
		}, logs: "reconcile: DockerReady: DockerReady is bad\n"},
		"a foreign firewall is said and survived": {edit: func(w *world) { w.guest.status.Conditions = bad(api.CondForeignFirewall) },
			conditions: 1, logs: "reconcile: NoForeignFirewall: NoForeignFirewall is bad\n"},
		"rules missing": {edit: func(w *world) {
			w.guest.status.Network = api.Network{Rules: []api.Rule{{ID: api.RuleGuard, Wanted: 2, Present: 1}, {ID: api.RuleSNATExempt, Wanted: 1, Present: 1}}}
		}, err: []string{"the rules are not all in place: guard\n"}, conditions: 1, logs: "reconcile: RulesInSync: the rules are not all in place: guard\n"},
		"no address on the uplink": {edit: func(w *world) {
			w.guest.status.Uplink.Address = ""
			w.guest.status.Conditions = bad(api.CondUplink)
		}, err: []string{"UplinkReady is bad"}, conditions: 1, logs: "reconcile: UplinkReady: UplinkReady is bad\n"},
		"the address comes": {edit: func(w *world) {
			w.guest.status.Uplink.Address = ""
			w.guest.status.Conditions = bad(api.CondUplink)
			w.guest.onLook = func(n int, st *api.Status) {
				if n > 5 {
					st.Uplink.Address, st.Conditions = "192.168.64.9", good()
				}
			}
		}, logs: "reconcile: UplinkReady: UplinkReady is bad\n"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			c.edit(w)
			res, err := w.up(t)
			if (err == nil) != (len(c.err) == 0) {
				t.Fatalf("got %v, want %q", err, c.err)
			}
			for _, want := range c.err {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want %q in it", err, want)
				}
			}
			if len(res.Conditions) != c.conditions {
				t.Errorf("conditions %v", res.Conditions)
			}
			if c.logs != "" && !strings.HasPrefix(w.log.all(progress.Log), c.logs) {
				t.Errorf("logs %q, want %q", w.log.all(progress.Log), c.logs)
			}
			if strings.Count(w.log.all(progress.Log), "is bad") > 1 {
				t.Errorf("said again and again:\n%s", w.log.all(progress.Log))
			}
		})
	}
}

// A guest that has been bad for long is not waited for when nothing changed.
func TestUpDoesNotWaitForOldTrouble(t *testing.T) {
	w := newWorld(t)
	w.guest.cfg = w.opts.Config.ForGuest()
	w.opts.Timing.Settle = time.Minute
	w.guest.status.Conditions[4].Status = api.False
	start := time.Now()
	if res, err := w.up(t); err != nil || len(res.Conditions) != 1 || time.Since(start) > time.Second {
		t.Errorf("%+v, %v after %v", res, err, time.Since(start))
	}
}

func TestUpCancelled(t *testing.T) {
	w := newWorld(t)
	w.guest.ignores = true
	w.opts.Timing.Reconcile = time.Minute
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	if _, err := Up(ctx, w.opts); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if got := w.log.all(progress.Failed); got != "reconcile: interrupted\n" {
		t.Errorf("said %q", got)
	}
	if len(w.routes.applied) != 0 {
		t.Error("went on with routes")
	}
}

func TestDown(t *testing.T) {
	w := newWorld(t)
	if _, err := w.up(t); err != nil {
		t.Fatal(err)
	}
	res, err := Down(t.Context(), w.opts, false)
	if err != nil || len(res.Removed) != 0 || len(res.Kept) != 1 || len(w.routes.applied) != 1 {
		t.Errorf("routes not to be removed: %+v, %v", res, err)
	}
	w.guest.dead = errors.New("agent is gone")
	w.routes.direct = false
	w.log.events, w.asked = nil, nil
	res, err = Down(t.Context(), w.opts, true)
	if err != nil || len(res.Removed) != 1 || res.Guest != nil || len(w.routes.state.Routes) != 2 || len(w.asked) != 1 {
		t.Errorf("without the agent: %+v, %v; routes %v, asked %v", res, err, w.routes.state.Routes, w.asked)
	}
	if got := w.log.all(progress.Same); !strings.Contains(got, "connect: it does not answer, and need not: agent is gone") {
		t.Errorf("said\n%s", got)
	}
	res, err = Down(t.Context(), w.opts, true)
	if err != nil || len(res.Removed) != 0 || len(w.routes.applied) != 2 {
		t.Errorf("again: %+v, %v", res, err)
	}
}

func TestLook(t *testing.T) {
	w := newWorld(t)
	v, err := Look(t.Context(), w.opts)
	if err != nil || v.Healthy() || v.Host.InSync || len(v.Host.Routes) != 1 || v.Host.Routes[0].State != "missing" {
		t.Errorf("before: %+v, %v", v.Host, err)
	}
	if _, err := w.up(t); err != nil {
		t.Fatal(err)
	}
	if v, err = Look(t.Context(), w.opts); err != nil || !v.Healthy() || v.Host.Routes[0].State != "present" {
		t.Errorf("after: %+v, %v", v.Host, err)
	}
	w.routes.state.Routes = append(w.routes.state.Routes, route.Route{Dest: netip.MustParsePrefix("172.30.7.0/24"), Dev: "tun0"})
	if v, err = Look(t.Context(), w.opts); err != nil || v.Healthy() || len(v.Host.Conditions) != 1 || v.Host.Conditions[0].Reason != "RouteTaken" {
		t.Errorf("taken: %+v, %v", v.Host, err)
	}
	w.guest.dead = errors.New("gone")
	if _, err = Look(t.Context(), w.opts); err == nil {
		t.Error("no error from a dead agent")
	}
	if len(w.routes.applied) != 1 || w.guest.puts != 1 {
		t.Error("looking changed something")
	}
}

func TestDifferences(t *testing.T) {
	a := config.Default()
	b := config.Default()
	if d := differences(a, b); len(d) != 0 {
		t.Errorf("%q", d)
	}
	b.Network.KindBridgeCIDR = netip.MustParsePrefix("172.31.0.0/16")
	b.Network.RoutePods = false
	b.Registries.Mirrors = append(slices.Clone(b.Registries.Mirrors), config.Mirror{Name: "x", Password: "hush"})
	want := []string{`network.kindBridgeCIDR: "172.30.0.0/16" → "172.31.0.0/16"`, "network.routePods: true → false", "registries.mirrors"}
	if got := differences(a, b); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	b = config.Config{}
	if got := differences(a, b); len(got) != mostDifferences+1 || !strings.HasPrefix(got[mostDifferences], "and ") {
		t.Errorf("everything differs: %q", got)
	}
}
