//go:build lab

package e2e

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
	"klimax/test/guestrun"
	"klimax/test/lab"
)

var bin string

func TestMain(m *testing.M) {
	var err error
	if bin, err = os.MkdirTemp("", "klimax-e2e-"); err != nil {
		panic(err)
	}
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", bin+"/", "klimax/cmd/klimax", "klimax/cmd/klimax-guest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	code := 1
	if err != nil {
		fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
	} else {
		code = m.Run()
	}
	_ = os.RemoveAll(bin)
	os.Exit(code)
}

// host is a computer that runs klimax.
type host struct {
	t     *testing.T
	l     *lab.Lab
	ns    *lab.NS
	guest string
	home  string
}

// run runs klimax and expects an exit code; what it printed has to contain the parts.
func (h host) run(code int, args []string, parts ...string) string {
	h.t.Helper()
	c := h.ns.Command(context.Background(), filepath.Join(bin, "klimax"), append([]string{"--guest", "unix://" + h.guest}, args...)...)
	c.Env = append(os.Environ(), "KLIMAX_HOME="+h.home, "HOME="+h.home)
	out, err := c.CombinedOutput()
	if err != nil && c.ProcessState == nil {
		h.t.Fatal(err)
	}
	if got := c.ProcessState.ExitCode(); got != code {
		h.t.Errorf("klimax %v: exit %d, want %d\n%s", args, got, code, out)
	}
	for _, p := range parts {
		if !strings.Contains(string(out), p) {
			h.t.Errorf("klimax %v: %q is not in\n%s", args, p, out)
		}
	}
	return string(out)
}

func (h host) routes() string { return h.ns.MustRun("ip", "route", "show", "proto", "107") }

func TestUpAndDown(t *testing.T) {
	lab.Each(t, func(t *testing.T, s lab.Setup) {
		l := lab.New(t, lab.Options{Setup: s})
		g := guestrun.New(t, l, filepath.Join(bin, "klimax-guest"))
		mac := host{t: t, l: l, ns: l.Mac, guest: g.Socket, home: filepath.Join(l.Dir, "home")}

		// no agent: said with what to do, nothing is changed
		mac.run(api.ExitUnreachable, []string{"up"}, g.Socket)
		if r := mac.routes(); r != "" {
			t.Errorf("routes without a guest: %s", r)
		}
		g.Up()
		mac.run(0, []string{"up"}, "172.30.0.0/16", "Next: ")
		if r := mac.routes(); !strings.Contains(r, "172.30.0.0/16 via 192.168.64.3") {
			t.Errorf("routes: %s", r)
		}
		// the demo, reached by address, sees the mac
		if out, code := g.Run("demo", "start", "--config", g.Config); code != 0 {
			t.Fatal(out)
		}
		g.WaitFor("the demo", 5*time.Second, func(s api.Status) bool { return len(s.Clusters) == 1 && s.Clusters[0].Demo && s.Healthy() })
		mac.run(0, []string{"up"}, "Nothing had to be changed", "172.30.99.200", "sees this computer as 192.168.64.1")
		for _, at := range []string{"172.30.99.2", "172.30.99.200"} {
			out := l.Mac.MustRun("curl", "-sS", "--max-time", "3", "http://"+at+"/")
			if want := "you are 192.168.64.1, this is " + at; !strings.Contains(out, want) {
				t.Errorf("%s answers %q", at, out)
			}
		}
		var st struct {
			api.Status
			Host map[string]any `json:"host"`
		}
		if err := json.Unmarshal([]byte(mac.run(0, []string{"status", "-o", "json"})), &st); err != nil || !st.Network.InSync || st.Host == nil {
			t.Errorf("status -o json: %+v %v", st, err)
		}
		mac.run(0, []string{"status"}, "192.168.64.3", "172.30.0.0/16")
		// a second time nothing changes, on the guest's own machine no route is needed
		own := mac
		own.ns = l.VM
		own.run(0, []string{"up"})
		if r := own.routes(); r != "" {
			t.Errorf("the guest's own machine got routes: %s", r)
		}

		// another address of the guest: the next up follows it
		if err := l.VM.DelAddr("lima0", "192.168.64.3/24"); err != nil {
			t.Fatal(err)
		}
		if err := l.VM.AddAddr("lima0", "192.168.64.55/24"); err != nil {
			t.Fatal(err)
		}
		g.WaitFor("the address", 5*time.Second, func(s api.Status) bool { return s.Uplink.Address == "192.168.64.55" && s.Healthy() })
		mac.run(0, []string{"up"}, "192.168.64.55")
		if r := mac.routes(); !strings.Contains(r, "172.30.0.0/16 via 192.168.64.55") || strings.Contains(r, ".64.3 ") {
			t.Errorf("routes: %s", r)
		}
		l.Mac.MustRun("curl", "-sS", "--max-time", "3", "http://172.30.99.200/")

		// Docker away: degraded, and said so
		if err := l.Docker().Stop(context.Background(), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		g.WaitCondition(api.CondDocker, api.False, "")
		mac.run(api.ExitDegraded, []string{"status"}, "DockerReady")
		if err := l.Docker().Start(context.Background()); err != nil {
			t.Fatal(err)
		}
		g.WaitFor("all well", 10*time.Second, api.Status.Healthy)

		// down keeps the routes until told, and is idempotent
		mac.run(0, []string{"down"}, "--remove-route")
		if mac.routes() == "" {
			t.Error("down removed the routes unasked")
		}
		mac.run(0, []string{"down", "--remove-route"})
		if r := mac.routes(); r != "" {
			t.Errorf("routes after down: %s", r)
		}
		mac.run(0, []string{"down", "--remove-route"})
		if out, code := g.Run("demo", "stop", "--config", g.Config); code != 0 || !strings.Contains(out, "removed") {
			t.Errorf("demo stop: %d %s", code, out)
		}
	})
}

// TestConfigTravels: what the host's file says is what the guest does.
func TestConfigTravels(t *testing.T) {
	l := lab.New(t, lab.Options{Setup: lab.Nftables})
	g := guestrun.New(t, l, filepath.Join(bin, "klimax-guest"))
	g.Up()
	mac := host{t: t, l: l, ns: l.Mac, guest: g.Socket, home: filepath.Join(l.Dir, "home")}
	file := filepath.Join(mac.home, "klimax.yaml")
	write := func(text string) {
		if err := os.MkdirAll(mac.home, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte("apiVersion: klimax/v1\n"+text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("network:\n  kindBridgeCIDER: 172.31.0.0/16\n")
	mac.run(api.ExitUsage, []string{"up"}, "klimax.yaml:3", "kindBridgeCIDR")
	write("network:\n  kindBridgeCIDR: 172.31.0.0/24\n")
	mac.run(api.ExitUsage, []string{"up"}, "/16")
	if s := g.Status(); s.Docker.Subnet != "172.30.0.0/16" || s.Generation.Desired != 1 {
		t.Errorf("a broken file reached the guest: %+v", s.Generation)
	}
	// another network beside the first one
	write("network:\n  kindBridgeCIDR: 172.31.0.0/16\n  dockerNetwork: klimax\n")
	mac.run(0, []string{"up"}, "172.31.0.0/16")
	s := g.Status()
	if s.Docker.Network != "klimax" || s.Docker.Subnet != "172.31.0.0/16" || s.Generation.Reconciled != s.Generation.Desired {
		t.Errorf("%+v %+v", s.Docker, s.Generation)
	}
	if r := mac.routes(); !strings.Contains(r, "172.31.0.0/16 via 192.168.64.3") {
		t.Errorf("routes: %s", r)
	}
	c := l.RunServer("c1", "klimax", "172.31.1.2", nil)
	l.MustGet(l.Mac, c.Addr(), l.MacAddr())
	mac.run(0, []string{"up"}, "Nothing had to be changed")
	// a range that a VPN of the host has is refused by name
	l.Mac.MustRun("ip", "route", "add", "172.20.0.0/14", "dev", "lo")
	write("network:\n  kindBridgeCIDR: 172.21.0.0/16\n  dockerNetwork: other\n")
	mac.run(api.ExitDegraded, []string{"up"}, "172.20.0.0/14", "network.kindBridgeCIDR")
	if s := g.Status(); s.Docker.Network != "klimax" {
		t.Errorf("the guest was changed: %+v", s.Docker)
	}
}
