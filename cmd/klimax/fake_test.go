package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
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
)

// agent is a stand-in for the guest's agent.
type agent struct {
	mu      sync.Mutex
	status  api.Status
	cfg     config.Config
	version string
	hang    bool // GET /status does not answer
	puts    int
}

func newAgent() *agent {
	a := &agent{version: "0.1.0", cfg: config.Default(), status: api.Status{
		Version: "0.1.0", Started: time.Now().Add(-90 * time.Minute),
		Uplink: api.Uplink{Name: "lima0", Address: "192.168.64.3", Network: "192.168.64.0/24"},
		Docker: api.Docker{Running: true, Version: "20.10.24", FirewallBackend: "iptables", Network: "kind", Bridge: "br-kind",
			Subnet: "172.30.0.0/16", Access: "nat-unprotected"},
		Network:    api.Network{InSync: true, Allow: []string{"192.168.64.0/24"}, Ranges: []string{"172.30.0.0/16"}},
		Generation: api.Generation{Desired: 1, Reconciled: 1},
	}}
	for _, t := range []string{api.CondDocker, api.CondUplink, api.CondRules} {
		a.status.Conditions = append(a.status.Conditions, api.Condition{Type: t, Status: api.True, Reason: "Fine"})
	}
	return a
}

func (a *agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	w.Header().Set(api.HeaderGuestVersion, a.version)
	w.Header().Set("Content-Type", "application/json")
	switch r.Method + " " + r.URL.Path {
	case "GET /v1/status":
		if a.hang {
			<-r.Context().Done()
			return
		}
		_ = json.NewEncoder(w).Encode(a.status)
	case "GET /v1/config":
		w.Header().Set("ETag", `"`+a.cfg.ETag()+`"`)
		_ = json.NewEncoder(w).Encode(a.cfg.Redacted())
	case "PUT /v1/config":
		a.puts++
		var c config.Config
		if err := json.NewDecoder(r.Body).Decode(&c); err != nil {
			w.WriteHeader(422)
			_ = json.NewEncoder(w).Encode(api.Error{Code: api.CodeInvalidConfig, Message: err.Error()})
			return
		}
		a.cfg = c
		a.status.Generation = api.Generation{Desired: a.status.Generation.Desired + 1, Reconciled: a.status.Generation.Desired + 1}
		_ = json.NewEncoder(w).Encode(api.ConfigPut{Generation: a.status.Generation.Desired, ETag: c.ETag(), Changed: true})
	default:
		http.NotFound(w, r)
	}
}

// table is a routing table.
type table struct {
	state route.State
	root  bool
	err   error
}

func newTable() *table {
	return &table{root: true, state: route.State{Routes: []route.Route{
		{Dest: netip.MustParsePrefix("0.0.0.0/0"), Gateway: netip.MustParseAddr("10.0.0.1"), Dev: "eth0"},
		{Dest: netip.MustParsePrefix("192.168.64.0/24"), Dev: "virbr1"}}}}
}

func (f *table) Current(context.Context, netplan.Plan, netip.Prefix) (route.State, error) {
	return route.State{Routes: slices.Clone(f.state.Routes), Addrs: f.state.Addrs}, nil
}
func (f *table) Direct() bool { return f.root }
func (f *table) Explain(q route.Request) []string {
	return []string{fmt.Sprintf("sudo klimax route apply (%d changes)", len(q.Changes))}
}
func (f *table) Apply(ctx context.Context, q route.Request) error { return f.ApplyRequest(ctx, q) }
func (f *table) ApplyRequest(_ context.Context, q route.Request) error {
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

// world is everything around a run.
type world struct {
	t      *testing.T
	agent  *agent
	routes *table
	socket string
	home   string
	stdin  string
	env    map[string]string
	tty    bool
	ctx    context.Context
	dial   func(ctx context.Context, network, address string) (net.Conn, error)
	goos   string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, agent: newAgent(), routes: newTable(), home: t.TempDir(), env: map[string]string{}, ctx: t.Context(), goos: "linux",
		dial: func(context.Context, string, string) (net.Conn, error) { return nil, syscall.ECONNREFUSED }}
	// Not in t.TempDir: with a long test name its path is too long for a socket.
	dir, err := os.MkdirTemp("", "klx")
	if err != nil {
		t.Fatal(err)
	}
	w.socket = filepath.Join(dir, "s")
	l, err := net.Listen("unix", w.socket)
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: w.agent}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close(); _ = os.RemoveAll(dir) })
	return w
}

func (w *world) file(name, text string) string {
	w.t.Helper()
	path := filepath.Join(w.home, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
	return path
}

// run runs the program against the stand-ins; flags come before the command.
func (w *world) run(args ...string) (code int, stdout, stderr string) {
	return w.bare(append([]string{"--guest", "unix://" + w.socket}, args...)...)
}

func (w *world) bare(args ...string) (code int, stdout, stderr string) {
	w.t.Helper()
	var out, errs bytes.Buffer
	code = run(w.ctx, args, streams{In: strings.NewReader(w.stdin), Out: &out, Err: &errs, OutTerminal: w.tty, ErrTerminal: w.tty},
		environment{Getenv: func(k string) string { return w.env[k] }, HomeDir: func() (string, error) { return w.home, nil },
			GOOS: w.goos, Self: "/usr/local/bin/klimax", Routes: w.routes, Dial: w.dial, Version: "0.1.0"})
	return code, out.String(), errs.String()
}

func (w *world) want(code int, parts []string, args ...string) (stdout, stderr string) {
	w.t.Helper()
	got, stdout, stderr := w.run(args...)
	if got != code {
		w.t.Errorf("klimax %s: exit code %d, want %d", strings.Join(args, " "), got, code)
	}
	for _, p := range parts {
		if !strings.Contains(stdout+stderr, p) {
			w.t.Errorf("klimax %s: no %q in\n%s\n%s", strings.Join(args, " "), p, stdout, stderr)
		}
	}
	return stdout, stderr
}

var errSudo = errors.New("sudo: a password is required")
