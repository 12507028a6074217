//go:build lab

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"klimax/shared/api"
	"klimax/test/guestrun"
	"klimax/test/machine"
)

// TestUnderSystemd: the agent as a service beside a Docker whose socket
// systemd holds. A Docker that somebody stops stays stopped; one that starts
// is noticed; a killed agent comes back; no restart of Docker is delayed.
func TestUnderSystemd(t *testing.T) {
	m := machine.Boot(t, machine.Options{Docker: true})
	if err := m.Copy(filepath.Join(bin, "klimax-guest"), "/root/klimax-guest", 0o755); err != nil {
		t.Fatal(err)
	}
	t.Log(m.MustRun(t, "/root/klimax-guest", "install", "--live-restore", "yes"))
	status := func() (s api.Status) {
		out, _ := m.Run(t.Context(), "klimax-guest", "status", "-o", "json")
		_ = json.Unmarshal([]byte(out), &s)
		return s
	}
	wait := func(what string, limit time.Duration, ok func(api.Status) bool) api.Status {
		t.Helper()
		var s api.Status
		for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			if s = status(); ok(s) {
				return s
			}
		}
		t.Fatalf("waited %v for %s: %+v", limit, what, s)
		return s
	}
	active := func(unit string) string {
		out, _ := m.Run(t.Context(), "systemctl", "is-active", unit)
		state, _, _ := strings.Cut(out, "\n")
		return state
	}
	wait("all well", 20*time.Second, api.Status.Healthy)
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := m.Run(context.Background(), "journalctl", "-u", "klimax-guest", "-u", "docker.service", "-o", "short-precise", "--no-pager", "-n", "400")
			t.Logf("the journal's end:\n%s", out)
		}
	})

	t.Run("a stopped Docker stays stopped", func(t *testing.T) {
		if active("docker.socket") != "active" {
			t.Fatal("systemd does not hold Docker's socket: the test is wrong")
		}
		m.MustRun(t, "systemctl", "stop", "docker.service")
		wait("the stop", 5*time.Second, func(s api.Status) bool {
			return guestrun.Condition(s, api.CondDocker).Reason == "Stopped" && !s.Docker.Running && s.Network.InSync
		})
		// longer than every period in which the agent would ask by itself
		time.Sleep(12 * time.Second)
		if got := active("docker.service"); got != "inactive" {
			t.Errorf("docker.service is %s", got)
		}
		// an agent that starts now must not wake it either
		m.MustRun(t, "systemctl", "restart", "klimax-guest")
		time.Sleep(2 * time.Second)
		if got := active("docker.service"); got != "inactive" {
			t.Errorf("after the agent's restart docker.service is %s", got)
		}
		m.MustRun(t, "systemctl", "start", "docker.service")
		wait("the start", 5*time.Second, api.Status.Healthy)
	})

	t.Run("restarts", func(t *testing.T) {
		m.MustRun(t, "klimax-guest", "demo", "start")
		before := wait("the demo", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Healthy() })
		m.Mac.Run(t.Context(), "ip", "route", "replace", "172.30.0.0/16", "via", before.Uplink.Address)
		const n = 5
		for i := range n {
			m.MustRun(t, "systemctl", "reset-failed", "docker.service")
			start := time.Now()
			m.MustRun(t, "systemctl", "restart", "docker.service")
			if d := time.Since(start); d > 8*time.Second {
				t.Errorf("restart %d of Docker took %v", i, d)
			}
			want := before.Docker.Restarts + i + 1
			wait(fmt.Sprintf("restart %d", i), 5*time.Second, func(s api.Status) bool { return s.Docker.Restarts == want && s.Healthy() })
			out, err := m.Mac.Run(t.Context(), "curl", "-sS", "--max-time", "3", "http://172.30.99.200/")
			if err != nil || !strings.Contains(out, "you are 192.168.64.1") {
				t.Errorf("the demo after restart %d: %s %v", i, out, err)
			}
		}
	})

	t.Run("a killed agent comes back", func(t *testing.T) {
		pid := strings.TrimSpace(m.MustRun(t, "systemctl", "show", "-P", "MainPID", "klimax-guest"))
		m.MustRun(t, "sh", "-c", "kill -9 "+pid)
		wait("another agent", 10*time.Second, func(s api.Status) bool { return s.PID != 0 && fmt.Sprint(s.PID) != pid && s.Healthy() })
		if out := m.MustRun(t, "journalctl", "-u", "klimax-guest", "-o", "json", "-n", "200"); !strings.Contains(out, `"PRIORITY":"6"`) {
			t.Errorf("the journal has no priorities:\n%s", out)
		}
		out := m.MustRun(t, "systemctl", "show", "-P", "StatusText", "klimax-guest")
		if !strings.Contains(out, "in sync") {
			t.Errorf("systemctl status says %q", out)
		}
	})

	t.Run("stops within a second", func(t *testing.T) {
		start := time.Now()
		m.MustRun(t, "systemctl", "stop", "klimax-guest")
		if d := time.Since(start); d > 1500*time.Millisecond {
			t.Errorf("took %v", d)
		}
		out, err := m.VM.Run(context.Background(), "nft", "list", "table", "ip", "klimax")
		if err != nil || !strings.Contains(out, "klimax:guard") {
			t.Errorf("the rules are gone: %s %v", out, err)
		}
	})
}
