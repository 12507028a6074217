//go:build lab

package provision_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"klimax/test/machine"
)

const guest = "/usr/local/bin/klimax-guest"

// boot starts a machine with the guest's binary at /root/klimax-guest.
func boot(t *testing.T, o machine.Options) *machine.Machine {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "klimax-guest")
	build := exec.Command("go", "build", "-o", binary, "klimax/test/machine/stubguest")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building the guest: %v\n%s", err, out)
	}
	m := machine.Boot(t, o)
	if err := m.Copy(binary, "/root/klimax-guest", 0o755); err != nil {
		t.Fatal(err)
	}
	return m
}

// forwardPolicy is the policy of Docker's (iptables') FORWARD chain.
func forwardPolicy(t *testing.T, m *machine.Machine) string {
	t.Helper()
	out, err := m.VM.Run(t.Context(), "nft", "list", "chain", "ip", "filter", "FORWARD")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(out, "policy ")
	policy, _, _ := strings.Cut(rest, ";")
	return policy
}

// applied returns the notes of each time the rules were applied, last boot only.
func applied(t *testing.T, m *machine.Machine) []string {
	t.Helper()
	return strings.Split(strings.TrimSpace(m.MustRun(t, "cat", "/run/klimax/applied")), "\n")
}

// files lists all files of the machine's disk with kind, mode, owner and
// content, those of Docker's data and of the system's own book-keeping left out.
func files(t *testing.T, m *machine.Machine) []string {
	t.Helper()
	out := m.MustRun(t, "sh", "-c", `cd /
look() { find . -xdev \( -path ./var/lib/docker -o -path ./var/lib/containerd -o -path ./root -o -path ./var/log -o -path ./var/cache \
  -o -path ./var/lib/apt -o -path ./var/lib/dpkg -o -path ./tmp -o -path ./var/tmp \) -prune -o "$@"; }
look -type f -print0 | xargs -0 sha256sum | sed 's/^\(\S*\)  \(.*\)/\2 \1/'
look -printf '%p %y %m %u:%g %l\n'
find run/klimax 2>/dev/null; true`)
	list := strings.Split(out, "\n")
	slices.Sort(list)
	return list
}

func ruleset(t *testing.T, m *machine.Machine) string {
	t.Helper()
	out, err := m.VM.Run(t.Context(), "nft", "list", "ruleset")
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestMachineSystemd(t *testing.T) {
	m := boot(t, machine.Options{})
	bareFiles, bareRules := files(t, m), ruleset(t, m)

	t.Log(m.MustRun(t, "/root/klimax-guest", "install", "--check"))
	if d := cmp.Diff(bareFiles, files(t, m)); d != "" {
		t.Errorf("--check changed files:\n%s", d)
	}

	start := time.Now()
	t.Log(m.MustRun(t, "/root/klimax-guest", "install"))
	t.Logf("installed in %v", time.Since(start))

	// The order: all of klimax's own was there before Docker's first start.
	first := applied(t, m)[0]
	if !strings.Contains(first, "docker: false network apply --boot") {
		t.Errorf("the first one to apply rules was %q, want the boot unit before there was Docker", first)
	}
	if got := forwardPolicy(t, m); got != "accept" {
		t.Errorf("the FORWARD policy is %q after Docker's first start", got)
	}
	log := m.MustRun(t, "journalctl", "-u", "docker", "--no-pager", "-o", "short-monotonic")
	if strings.Contains(log, "IPv4 forwarding is disabled") {
		t.Errorf("Docker found forwarding off:\n%s", log)
	}
	if out := m.MustRun(t, "docker", "info", "--format", "{{.LiveRestoreEnabled}}"); strings.TrimSpace(out) != "true" {
		t.Errorf("live-restore is %s", out)
	}
	m.MustRun(t, "sh", "-c", "test $(stat -c %U:%G:%a /run/klimax) = root:klimax:750 && test $(stat -c %G:%a /run/klimax/guest.sock) = klimax:660 && test $(stat -c %a /var/lib/klimax) = 700")

	t.Run("second time", func(t *testing.T) {
		before, since := files(t, m), m.MustRun(t, "systemctl", "show", "klimax-guest", "docker", "-p", "ActiveEnterTimestampMonotonic")
		start := time.Now()
		out := m.MustRun(t, guest, "install")
		t.Logf("in %v", time.Since(start))
		if !strings.HasSuffix(out, "\nunchanged\n") || strings.Contains(out, "done") {
			t.Errorf("the second installation says:\n%s", out)
		}
		if d := cmp.Diff(before, files(t, m)); d != "" {
			t.Errorf("it changed files:\n%s", d)
		}
		if now := m.MustRun(t, "systemctl", "show", "klimax-guest", "docker", "-p", "ActiveEnterTimestampMonotonic"); now != since {
			t.Errorf("it restarted something: %s, before %s", now, since)
		}
	})

	t.Run("units", func(t *testing.T) {
		// The distribution's own unit names /bin/kill, which the bare machine lacks.
		out := m.MustRun(t, "sh", "-c", "systemd-analyze verify klimax-guest.service klimax-network.service docker.service 2>&1 | grep -v '^docker.service: Command /bin/kill is not executable' || true")
		if out != "" {
			t.Errorf("systemd-analyze verify says:\n%s", out)
		}
		// verify must be able to complain
		if out, err := m.Run(t.Context(), "sh", "-c", "sed s/Restart=always/Restart=allways/ /etc/systemd/system/klimax-guest.service >/tmp/bad.service; systemd-analyze verify /tmp/bad.service"); !strings.Contains(out, "allways") {
			t.Errorf("verify accepted a wrong unit: %v\n%s", err, out)
		}
	})

	t.Run("docker restart fires the drop-in", func(t *testing.T) {
		m.MustRun(t, "systemctl", "reset-failed", "docker")
		n := len(applied(t, m))
		agent := m.MustRun(t, "systemctl", "show", "-P", "MainPID", "klimax-guest")
		m.MustRun(t, "systemctl", "restart", "docker")
		now := applied(t, m)
		if len(now) != n+1 || !strings.Contains(now[n], "docker: true network apply --config") {
			t.Errorf("after a restart: %q", now[n:])
		}
		if after := m.MustRun(t, "systemctl", "show", "-P", "MainPID", "klimax-guest"); after != agent {
			t.Errorf("the agent was restarted with Docker: process %s, before %s", after, agent)
		}
		m.MustRun(t, "systemctl", "stop", "docker", "docker.socket")
		m.MustRun(t, "systemctl", "is-active", "klimax-guest")
		m.MustRun(t, "systemctl", "start", "docker")
	})

	t.Run("agent killed", func(t *testing.T) {
		m.MustRun(t, "systemctl", "kill", "-s", "KILL", "klimax-guest")
		time.Sleep(2 * time.Second)
		m.MustRun(t, "systemctl", "is-active", "klimax-guest")
	})

	t.Run("Docker comes up whatever klimax does", func(t *testing.T) {
		config := m.MustRun(t, "cat", "/etc/klimax/klimax.yaml")
		defer func() {
			if err := m.Write("/etc/klimax/klimax.yaml", config, 0o640); err != nil {
				t.Error(err)
			}
		}()
		restart := func() time.Duration {
			t.Helper()
			m.MustRun(t, "systemctl", "reset-failed", "docker") // Debian's limit of starts in a minute
			start := time.Now()
			m.MustRun(t, "systemctl", "restart", "docker")
			return time.Since(start)
		}
		for word, limit := range map[string]time.Duration{"broken": 5 * time.Second, "hang": 20 * time.Second} {
			if err := m.Write("/etc/klimax/klimax.yaml", word+"\n", 0o640); err != nil {
				t.Fatal(err)
			}
			took := restart()
			if m.MustRun(t, "docker", "version"); took > limit {
				t.Errorf("%s: the restart took %v", word, took)
			}
			if word == "hang" && took < 10*time.Second {
				t.Errorf("the call that hangs ended after %v: it was not tried", took)
			}
		}
		m.MustRun(t, "mv", guest, guest+".away")
		if took := restart(); took > 5*time.Second {
			t.Errorf("without the program the restart took %v", took)
		}
		m.MustRun(t, "mv", guest+".away", guest)
	})

	t.Run("reboot", func(t *testing.T) {
		start := time.Now()
		if err := m.Reboot(); err != nil {
			t.Fatal(err)
		}
		t.Logf("in %v", time.Since(start))
		first := applied(t, m)[0]
		if !strings.Contains(first, "docker: false network apply --boot") {
			t.Errorf("the first one to apply rules was %q", first)
		}
		when, err := strconv.ParseFloat(strings.Fields(first)[0], 64)
		if err != nil {
			t.Fatal(err)
		}
		var docker float64
		fmt.Sscan(m.MustRun(t, "systemctl", "show", "-P", "ExecMainStartTimestampMonotonic", "docker"), &docker)
		if docker /= 1e6; when >= docker {
			t.Errorf("rules at %.2f s, Docker was started at %.2f s", when, docker)
		}
		if got := forwardPolicy(t, m); got != "accept" {
			t.Errorf("the FORWARD policy is %q", got)
		}
		if rules := ruleset(t, m); !strings.Contains(rules, "table ip klimax") {
			t.Errorf("the rules are not there:\n%s", rules)
		}
		m.MustRun(t, "systemctl", "is-active", "klimax-guest", "klimax-network", "docker")
	})

	t.Run("stop", func(t *testing.T) {
		m.MustRun(t, guest, "stop")
		if _, err := m.Run(t.Context(), "systemctl", "is-active", "klimax-guest"); err == nil {
			t.Error("the agent still runs")
		}
		m.MustRun(t, "docker", "version")
		if !strings.Contains(ruleset(t, m), "table ip klimax") {
			t.Error("stopping removed the rules")
		}
		m.MustRun(t, guest, "install")
		m.MustRun(t, "systemctl", "is-active", "klimax-guest")
	})

	t.Run("uninstall", func(t *testing.T) {
		t.Log(m.MustRun(t, guest, "uninstall", "--packages"))
		if got := m.MustRun(t, "cat", "/proc/sys/net/ipv4/ip_forward"); got != "0\n" {
			t.Errorf("ip_forward is %q", got)
		}
		if strings.Contains(ruleset(t, m), "klimax") {
			t.Errorf("rules of klimax's are left (bare: %s):\n%s", bareRules, ruleset(t, m))
		}
		compare(t, bareFiles, files(t, m))
		if out := m.MustRun(t, "sh", "-c", "systemctl list-units --all | grep klimax || true"); out != "" {
			t.Errorf("units are left:\n%s", out)
		}
	})
}

// compare expects that uninstalling gave back the files that were there, but
// for what removing packages leaves in any case.
func compare(t *testing.T, before, after []string) {
	t.Helper()
	expected := func(line string) bool {
		for _, p := range []string{"./etc/group", "./etc/gshadow", "./etc/ld.so.cache", "./etc/.pwd.lock", "./etc/subuid", "./etc/apparmor.d",
			"./etc/systemd/system/multi-user.target.wants ", "./etc/systemd/system/sockets.target.wants ", "./opt/containerd", "./var/lib/systemd", "./etc/containerd",
			"./etc/machine-id", "./etc/mtab", "./etc/docker", "./etc/cni", "./etc/hosts"} {
			if strings.HasPrefix(line, p) {
				return true
			}
		}
		return false
	}
	for _, l := range after {
		if !slices.Contains(before, l) && !expected(l) {
			t.Errorf("left or changed: %s", l)
		}
		if strings.Contains(l, "klimax") {
			t.Errorf("left of klimax: %s", l)
		}
	}
	for _, l := range before {
		if !slices.Contains(after, l) && !expected(l) {
			t.Errorf("gone or changed: %s", l)
		}
	}
}

func TestMachineNoInit(t *testing.T) {
	m := boot(t, machine.Options{NoSystemd: true})
	bareFiles := files(t, m)
	start := time.Now()
	t.Log(m.MustRun(t, "/root/klimax-guest", "install"))
	t.Logf("installed in %v", time.Since(start))
	if first := applied(t, m)[0]; !strings.Contains(first, "docker: false network apply") {
		t.Errorf("the first one to apply rules was %q", first)
	}
	if got := forwardPolicy(t, m); got != "accept" {
		t.Errorf("the FORWARD policy is %q", got)
	}
	if out := m.MustRun(t, "docker", "info", "--format", "{{.LiveRestoreEnabled}}"); strings.TrimSpace(out) != "true" {
		t.Errorf("live-restore is %s", out)
	}
	if out, err := m.Run(t.Context(), "test", "-e", "/usr/sbin/policy-rc.d"); err == nil {
		t.Errorf("policy-rc.d is left: %s", out)
	}
	if out := m.MustRun(t, guest, "install"); !strings.HasSuffix(out, "\nunchanged\n") {
		t.Errorf("the second installation says:\n%s", out)
	}

	// dockerd is started again when it dies, and keeps its FORWARD policy.
	pid := strings.Fields(m.MustRun(t, "cat", "/run/klimax/dockerd.pid"))[0]
	m.MustRun(t, "sh", "-c", "kill -9 "+pid)
	m.MustRun(t, "sh", "-c", "for i in $(seq 100); do docker version && exit; sleep 0.1; done; exit 1")
	if now := strings.Fields(m.MustRun(t, "cat", "/run/klimax/dockerd.pid"))[0]; now == pid {
		t.Error("dockerd has the same number after it was killed")
	}

	// Stop: the agent and dockerd, nobody else's process.
	m.MustRun(t, "sh", "-c", "setsid sleep 4711 >/dev/null 2>&1 &")
	m.MustRun(t, guest, "stop")
	left := m.MustRun(t, "sh", "-c", "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done")
	for _, name := range []string{"dockerd", "containerd", "klimax-guest"} {
		if strings.Contains(left, name) {
			t.Errorf("%s still runs:\n%s", name, left)
		}
	}
	if !strings.Contains(left, "sleep 4711") {
		t.Error("somebody else's process was stopped")
	}
	if !strings.Contains(ruleset(t, m), "table ip klimax") {
		t.Error("stopping removed the rules")
	}

	// The machine is switched off with everything running and comes back:
	// stale pid files, an empty kernel.
	m.MustRun(t, guest, "install")
	if err := m.Reboot(); err != nil {
		t.Fatal(err)
	}
	t.Log(m.MustRun(t, guest, "install"))
	m.MustRun(t, "docker", "version")
	if got := forwardPolicy(t, m); got != "accept" {
		t.Errorf("the FORWARD policy is %q after a reboot", got)
	}

	t.Log(m.MustRun(t, guest, "uninstall", "--packages"))
	if got := m.MustRun(t, "cat", "/proc/sys/net/ipv4/ip_forward"); got != "0\n" {
		t.Errorf("ip_forward is %q", got)
	}
	compare(t, bareFiles, files(t, m))
}

// A Docker that was there first: it is not restarted, its configuration and
// its containers stay as they are.
func TestMachineExistingDocker(t *testing.T) {
	m := boot(t, machine.Options{Docker: true})
	pid := m.MustRun(t, "systemctl", "show", "-P", "MainPID", "docker")
	m.MustRun(t, "/root/klimax-guest", "install")
	if now := m.MustRun(t, "systemctl", "show", "-P", "MainPID", "docker"); now != pid {
		t.Errorf("dockerd is process %s, was %s", now, pid)
	}
	if out, err := m.Run(t.Context(), "test", "-e", "/etc/docker/daemon.json"); err == nil {
		t.Errorf("daemon.json was written: %s", out)
	}
	// Asked for, it is taken over without a restart.
	m.MustRun(t, guest, "install", "--live-restore")
	for i := 0; ; i++ {
		out := m.MustRun(t, "docker", "info", "--format", "{{.LiveRestoreEnabled}}")
		if strings.TrimSpace(out) == "true" {
			break
		}
		if i == 50 {
			t.Fatalf("live-restore is %s after a reload", out)
		}
		time.Sleep(100 * time.Millisecond)
	}
	if now := m.MustRun(t, "systemctl", "show", "-P", "MainPID", "docker"); now != pid {
		t.Errorf("dockerd is process %s, was %s", now, pid)
	}
	m.MustRun(t, guest, "uninstall", "--packages")
	m.MustRun(t, "docker", "version")
	if out, err := m.Run(t.Context(), "test", "-e", "/etc/docker/daemon.json"); err == nil {
		t.Errorf("daemon.json is left: %s", out)
	}
}
