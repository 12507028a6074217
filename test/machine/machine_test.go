//go:build lab

package machine

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestBoot(t *testing.T) {
	start := time.Now()
	m := Boot(t, Options{})
	t.Logf("booted in %v", time.Since(start))
	if got := strings.TrimSpace(m.MustRun(t, "cat", "/proc/1/comm")); got != "systemd" {
		t.Errorf("PID 1 is %q", got)
	}
	if out := m.MustRun(t, "systemctl", "--failed", "--no-legend", "--plain"); strings.TrimSpace(out) != "" {
		t.Errorf("failed units:\n%s", out)
	}
	if out := m.MustRun(t, "cat", "/proc/sys/net/ipv4/ip_forward"); out != "0\n" {
		t.Errorf("ip_forward = %q in a fresh machine", out)
	}
	if out, err := m.Run(t.Context(), "test", "-e", "/usr/sbin/dockerd"); err == nil {
		t.Errorf("a bare machine has dockerd: %s", out)
	}
	if out, err := m.Mac.Run(t.Context(), "ping", "-c1", "-W2", GuestAddr); err != nil {
		// ping may not be on this computer; the neighbour table tells as well.
		if _, look := exec.LookPath("ping"); look == nil {
			t.Errorf("the Mac does not reach the machine: %s", out)
		}
	}
	if err := m.Write("/etc/kept", "x", 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.Write("/run/lost", "x", 0o600); err != nil {
		t.Fatal(err)
	}
	m.MustRun(t, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
	start = time.Now()
	defer func() { d, _ := os.ReadFile(m.dir + "/console.log"); t.Log(string(d)) }()
	if err := m.Reboot(); err != nil {
		t.Fatal(err)
	}
	t.Logf("rebooted in %v", time.Since(start))
	m.MustRun(t, "sh", "-c", "test -e /etc/kept && ! test -e /run/lost")
	if out := m.MustRun(t, "cat", "/proc/sys/net/ipv4/ip_forward"); out != "0\n" {
		t.Errorf("ip_forward = %q after a reboot", out)
	}
}

// TestDocker shows that both kinds of machine can run the distribution's Docker.
func TestDocker(t *testing.T) {
	t.Run("systemd", func(t *testing.T) {
		m := Boot(t, Options{Docker: true})
		if out, err := m.Run(t.Context(), "docker", "version"); err != nil {
			t.Errorf("%v\n%s", err, m.MustRun(t, "journalctl", "-u", "docker", "-n", "40", "--no-pager"))
		} else {
			t.Log(out)
		}
	})
	t.Run("no init", func(t *testing.T) {
		m := Boot(t, Options{Docker: true, NoSystemd: true})
		if _, err := m.Run(t.Context(), "test", "-d", "/run/systemd/system"); err == nil {
			t.Error("the machine without systemd looks as if it had it")
		}
		if out := m.MustRun(t, "cat", "/proc/1/comm"); strings.TrimSpace(out) == "systemd" {
			t.Error("PID 1 is systemd")
		}
		out := m.MustRun(t, "sh", "-c", `dockerd >/tmp/log 2>&1 & for i in $(seq 100); do docker version && exit; sleep .1; done; cat /tmp/log; exit 1`)
		t.Log(out)
	})
}

// TestOfflinePackages shows that Docker installs without a network.
func TestOfflinePackages(t *testing.T) {
	m := Boot(t, Options{})
	m.MustRun(t, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "--no-install-recommends", "docker.io")
	m.MustRun(t, "docker", "version")
}

// TestNothingStays lets a test process with a running machine die and expects
// nothing to be left.
func TestNothingStays(t *testing.T) {
	if os.Getenv("MACHINE_TEST_DIE") != "" {
		m := Boot(t, Options{NoSystemd: true})
		os.WriteFile(os.Getenv("MACHINE_TEST_DIE"), []byte(m.Name+" "+m.dir), 0o600)
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
	}
	note := filepath.Join(t.TempDir(), "name")
	cmd := exec.Command(os.Args[0], "-test.run", "^TestNothingStays$")
	cmd.Env = append(os.Environ(), "MACHINE_TEST_DIE="+note)
	if out, err := cmd.CombinedOutput(); err == nil {
		t.Fatalf("the process was to be killed:\n%s", out)
	}
	data, err := os.ReadFile(note)
	if err != nil {
		t.Fatal(err)
	}
	name, dir, _ := strings.Cut(string(data), " ")
	left := func() (found []string) {
		for _, pattern := range []string{dir, "/run/netns/" + name + "*", "/sys/fs/cgroup/" + name, "/sys/fs/cgroup/*/" + name} {
			hits, _ := filepath.Glob(pattern)
			found = append(found, hits...)
		}
		return found
	}
	for end := time.Now().Add(10 * time.Second); len(left()) > 0; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("left behind: %v", left())
		}
	}
}
