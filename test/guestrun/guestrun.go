//go:build linux

// Package guestrun runs the agent, klimax-guest, in the VM of a lab, as tests
// and the benchmark need it.
package guestrun

import (
	"context"
	"encoding/json"
	"errors"
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
	"klimax/test/lab"
)

// endLimit is how long an agent may take to end; SIGTERM is promised to take
// less than a second.
const endLimit = 5 * time.Second

// Build builds the agent as `make build` does, static and stripped, into the
// file at path.
func Build(ctx context.Context, path string) error {
	c := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, "klimax/cmd/klimax-guest")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("build klimax-guest: %w\n%s", err, out)
	}
	return nil
}

// Guest is an agent in the VM's namespace of a lab. All its files lie in the
// lab's directory.
type Guest struct {
	Binary   string // klimax-guest
	Config   string // configuration file
	Socket   string
	StateDir string
	Log      string // what it writes to standard error, of all its runs
	Client   *client.Client

	t    testing.TB
	l    *lab.Lab
	cmd  *exec.Cmd // nil while it was not started
	done chan struct{}
}

// New prepares an agent without a configuration file, which means the
// defaults; it is stopped at the test's end.
func New(t testing.TB, l *lab.Lab, binary string) *Guest {
	t.Helper()
	at := func(name string) string { return filepath.Join(l.Dir, name) }
	g := &Guest{Binary: binary, Config: at("klimax.yaml"), Socket: at("guest.sock"), StateDir: at("state"), Log: at("guest.log"), t: t, l: l}
	// A version that is none is compatible with every agent, also with one of
	// another stamp than this program's.
	g.Client = client.Unix(g.Socket, "lab")
	t.Cleanup(func() {
		g.Stop()
		g.Client.Close()
		if t.Failed() {
			t.Logf("end of the agent's log:\n%s", g.LogTail(40))
		}
	})
	return g
}

// LogTail is the last n lines of the agent's log.
func (g *Guest) LogTail(n int) string {
	b, err := os.ReadFile(g.Log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// WriteConfig writes the configuration file, less its apiVersion; empty text
// removes it. A running agent reads it on SIGHUP.
func (g *Guest) WriteConfig(text string) {
	g.t.Helper()
	var err error
	if text == "" {
		if err = os.Remove(g.Config); errors.Is(err, os.ErrNotExist) {
			err = nil
		}
	} else {
		err = os.WriteFile(g.Config, []byte("apiVersion: klimax/v1\n"+text), 0o644)
	}
	if err != nil {
		g.t.Fatal(err)
	}
}

// Command is klimax-guest in the VM's namespace, with the lab's engine as its
// DOCKER_HOST.
func (g *Guest) Command(args ...string) *exec.Cmd {
	c := g.l.VM.Command(context.Background(), g.Binary, args...)
	c.Env = append(os.Environ(), "DOCKER_HOST="+g.l.Docker().Host)
	return c
}

// Run runs klimax-guest to its end and returns what it printed and its exit code.
func (g *Guest) Run(args ...string) (string, int) {
	g.t.Helper()
	c := g.Command(args...)
	out, err := c.CombinedOutput()
	if err != nil && c.ProcessState == nil {
		g.t.Fatalf("klimax-guest %v: %v", args, err)
	}
	return string(out), c.ProcessState.ExitCode()
}

// Network runs `klimax-guest network VERB` with this guest's paths.
func (g *Guest) Network(verb string, args ...string) (string, int) {
	g.t.Helper()
	return g.Run(append([]string{"network", verb, "--config", g.Config, "--state-dir", g.StateDir}, args...)...)
}

// Start starts the agent, with further arguments of `run`, without waiting for
// anything.
func (g *Guest) Start(args ...string) {
	g.t.Helper()
	f, err := os.OpenFile(g.Log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		g.t.Fatal(err)
	}
	defer f.Close()
	c := g.Command(append([]string{"run", "--config", g.Config, "--socket", g.Socket, "--state-dir", g.StateDir}, args...)...)
	c.Stdout, c.Stderr = f, f
	if err := c.Start(); err != nil {
		g.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		_ = c.Wait()
		close(done)
	}()
	g.cmd, g.done = c, done
}

// Up starts the agent and waits until all is well.
func (g *Guest) Up() api.Status {
	g.t.Helper()
	g.Start()
	return g.WaitFor("all well", 20*time.Second, api.Status.Healthy)
}

// PID is the agent's process number, 0 when it was not started.
func (g *Guest) PID() int {
	if g.cmd == nil {
		return 0
	}
	return g.cmd.Process.Pid // nsenter becomes the program
}

// Signal sends a signal to the agent, if it was started.
func (g *Guest) Signal(s syscall.Signal) {
	if g.cmd != nil {
		_ = g.cmd.Process.Signal(s)
	}
}

// Stop ends the agent with SIGTERM and returns how long that took.
func (g *Guest) Stop() time.Duration { return g.end(syscall.SIGTERM) }

// Kill ends the agent with SIGKILL.
func (g *Guest) Kill() { g.end(syscall.SIGKILL) }

func (g *Guest) end(s syscall.Signal) time.Duration {
	if g.cmd == nil {
		return 0
	}
	begin := time.Now()
	g.Signal(s)
	select {
	case <-g.done:
	case <-time.After(endLimit):
		g.t.Errorf("the agent did not end within %v after %v", endLimit, s)
		_ = g.cmd.Process.Kill()
		<-g.done
	}
	g.cmd = nil
	return time.Since(begin)
}

// WaitFor polls the status until ok, and returns it; what names for a person
// what is waited for.
func (g *Guest) WaitFor(what string, limit time.Duration, ok func(api.Status) bool) api.Status {
	g.t.Helper()
	var s api.Status
	var err error
	for end := time.Now().Add(limit); time.Now().Before(end) && g.t.Context().Err() == nil; time.Sleep(20 * time.Millisecond) {
		if s, err = g.Client.Status(g.t.Context()); err == nil && ok(s) {
			return s
		}
	}
	b, _ := json.MarshalIndent(s, "", " ")
	g.t.Fatalf("waited %v for %s: %v\n%s", limit, what, err, b)
	return s
}

// Status is the agent's status now.
func (g *Guest) Status() api.Status {
	g.t.Helper()
	s, err := g.Client.Status(g.t.Context())
	if err != nil {
		g.t.Fatal(err)
	}
	return s
}

// WaitCondition waits for a condition to have a status and, unless empty, a reason.
func (g *Guest) WaitCondition(kind string, want api.ConditionStatus, reason string) api.Condition {
	g.t.Helper()
	s := g.WaitFor(fmt.Sprintf("%s=%s %s", kind, want, reason), 15*time.Second, func(s api.Status) bool {
		c := Condition(s, kind)
		return c.Status == want && (reason == "" || c.Reason == reason)
	})
	return Condition(s, kind)
}

// Condition is the status's condition of that type, zero when there is none.
func Condition(s api.Status, kind string) api.Condition {
	for _, c := range s.Conditions {
		if c.Type == kind {
			return c
		}
	}
	return api.Condition{}
}

// Rule is the status's rule with that identifier; one that is not wanted has
// only that.
func Rule(s api.Status, id api.RuleID) api.Rule {
	for _, r := range s.Network.Rules {
		if r.ID == id {
			return r
		}
	}
	return api.Rule{ID: id}
}
