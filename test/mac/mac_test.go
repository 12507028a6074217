//go:build lab

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"klimax/test/machine"
)

// build makes static programs and copies them into the machine's /root.
func build(t *testing.T, m *machine.Machine, packages ...string) {
	t.Helper()
	dir := t.TempDir()
	for _, p := range packages {
		to := filepath.Join(dir, filepath.Base(p))
		cmd := exec.Command("go", "build", "-o", to, p)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("building %s: %v\n%s", p, err, out)
		}
		if err := m.Copy(to, "/root/"+filepath.Base(p), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

func links(t *testing.T, m *machine.Machine) string {
	t.Helper()
	return m.MustRun(t, "sh", "-c", "ip -o -4 addr; ip route; ip netns; ls /run/netns 2>/dev/null; true")
}

func TestNetwork(t *testing.T) {
	m := machine.Boot(t, machine.Options{NoSystemd: true, NoUplink: true})
	build(t, m, "klimax/test/mac")
	bare := links(t, m)

	if out := m.MustRun(t, "/root/mac", "net", "up"); strings.TrimSpace(out) == "unchanged" {
		t.Errorf("the first time: %s", out)
	}
	if out := m.MustRun(t, "/root/mac", "net", "up"); strings.TrimSpace(out) != "unchanged" {
		t.Errorf("the second time: %s", out)
	}
	if out := m.MustRun(t, "/root/mac", "run", "--", "ip", "-o", "-4", "addr"); !strings.Contains(out, "192.168.64.1/24") || strings.Contains(out, "192.168.64.2/24") {
		t.Errorf("addresses on the Mac:\n%s", out)
	}
	// Half of it is gone: it is completed.
	m.MustRun(t, "ip", "link", "set", "lima0", "down")
	m.MustRun(t, "ip", "addr", "flush", "dev", "lima0")
	m.MustRun(t, "/root/mac", "net", "up")
	m.MustRun(t, "ip", "link", "del", "lima0")
	m.MustRun(t, "/root/mac", "net", "up")
	if out := m.MustRun(t, "/root/mac", "net", "up"); strings.TrimSpace(out) != "unchanged" {
		t.Errorf("after completing: %s", out)
	}

	// A call from there reaches this side.
	if out, err := m.Run(t.Context(), "/root/mac", "curl", "http://192.168.64.2:9/"); err == nil || !strings.Contains(out, "refused") {
		t.Errorf("nobody listens, yet: %v\n%s", err, out)
	}
	for _, bad := range []string{"https://192.168.64.2/", "http://name/", "192.168.64.2"} {
		if _, err := m.Run(t.Context(), "/root/mac", "curl", bad); err == nil {
			t.Errorf("curl %s was accepted", bad)
		}
	}

	m.MustRun(t, "/root/mac", "net", "down")
	if out := m.MustRun(t, "/root/mac", "net", "down"); strings.TrimSpace(out) != "unchanged" {
		t.Errorf("the second time down: %s", out)
	}
	if after := links(t, m); after != bare {
		t.Errorf("left behind:\n%s\nbefore:\n%s", after, bare)
	}

	// Refusals change nothing.
	for what, c := range map[string][3]string{
		"an address": {"ip link add d0 type bridge && ip addr add 192.168.65.7/16 dev d0", "d0 has 192.168.65.7", "ip link del d0"},
		"a route":    {"ip link add d0 type bridge && ip link set d0 up && ip route add 192.168.64.128/25 dev d0", "a route to 192.168.64.128/25", "ip link del d0"},
		"a lima0":    {"ip link add lima0 type bridge", "already has an interface lima0", "ip link del lima0"},
	} {
		m.MustRun(t, "sh", "-c", c[0])
		before := links(t, m)
		out, err := m.Run(t.Context(), "/root/mac", "net", "up")
		if err == nil || !strings.Contains(out, c[1]) {
			t.Errorf("%s: %v\n%s", what, err, out)
		}
		m.MustRun(t, "/root/mac", "net", "down") // takes nothing that is not its own
		if after := links(t, m); after != before {
			t.Errorf("%s: it changed\n%s\nto\n%s", what, before, after)
		}
		m.MustRun(t, "sh", "-c", c[2])
	}
	if out, err := m.Run(t.Context(), "setpriv", "--reuid=65534", "--clear-groups", "/root/mac", "net", "up"); err == nil || !strings.Contains(out, "sudo") && !strings.Contains(out, "ermission denied") {
		t.Errorf("without root: %v\n%s", err, out)
	}
}

// TestUpAndDown is `make up` and `make down` on a bare machine without an init.
func TestUpAndDown(t *testing.T) {
	m := machine.Boot(t, machine.Options{NoSystemd: true, NoUplink: true})
	build(t, m, "klimax/test/mac", "klimax/cmd/klimax", "klimax/cmd/klimax-guest")
	for round, limit := range []time.Duration{3 * time.Minute, 20 * time.Second} {
		start := time.Now()
		out := m.MustRun(t, "/root/mac", "--bin", "/root", "up")
		t.Logf("round %d in %v:\n%s", round+1, time.Since(start), out)
		if took := time.Since(start); took > limit {
			t.Errorf("round %d took %v", round+1, took)
		}
		for _, address := range []string{"172.30.99.2", "172.30.99.200"} {
			if !strings.Contains(out, "http://"+address+"/") {
				t.Errorf("round %d does not print %s", round+1, address)
			}
			if out := m.MustRun(t, "/root/mac", "curl", "http://"+address+"/"); !strings.Contains(out, "192.168.64.1") {
				t.Errorf("%s answers the Mac: %s", address, out)
			}
		}
	}
	t.Log(m.MustRun(t, "/root/mac", "--bin", "/root", "down"))
	left := m.MustRun(t, "sh", "-c", "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done; ls /run/netns")
	for _, name := range []string{"dockerd", "containerd", "klimax"} {
		if strings.Contains(left, name) {
			t.Errorf("%s is left:\n%s", name, left)
		}
	}
	// Nothing runs: taking it down once more is no error.
	m.MustRun(t, "/root/mac", "--bin", "/root", "down")
	// And it comes up again.
	m.MustRun(t, "/root/mac", "--bin", "/root", "up")
}
