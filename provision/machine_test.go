//go:build lab

package provision_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"klimax/shared/api"
	"klimax/shared/progress"
	"klimax/test/machine"
)

const guest = "/usr/local/bin/klimax-guest"

// boot starts a machine with the guest's binary at /root/klimax-guest.
func boot(t *testing.T, o machine.Options) *machine.Machine {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "klimax-guest")
	build := exec.Command("go", "build", "-o", binary, "klimax/cmd/klimax-guest")
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

// steps runs a command of provisioning and returns how each step ended.
func steps(t *testing.T, m *machine.Machine, command ...string) map[string]progress.State {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := m.Command(ctx, append(command, "-o", "json")...)
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s%s", command, err, out, complaint.String())
	}
	states := map[string]progress.State{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var e progress.Event
		if err := d.Decode(&e); err == io.EOF {
			return states
		} else if err != nil {
			t.Fatalf("%v: %v\n%s", command, err, out)
		}
		states[e.Step] = e.State
	}
}

// unchanged expects that no step did anything.
func unchanged(t *testing.T, states map[string]progress.State) {
	t.Helper()
	for step, state := range states {
		if state != progress.Same {
			t.Errorf("step %s is %s", step, state)
		}
	}
	if len(states) < 10 {
		t.Errorf("only %d steps: %v", len(states), states)
	}
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

// show reads a number of a unit's.
func show(t *testing.T, m *machine.Machine, unit, property string) (n int64) {
	t.Helper()
	if _, err := fmt.Sscan(m.MustRun(t, "systemctl", "show", "-P", property, unit), &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// rulesBeforeDocker expects that the boot oneshot had ended well when dockerd was started.
func rulesBeforeDocker(t *testing.T, m *machine.Machine) {
	t.Helper()
	if out := strings.TrimSpace(m.MustRun(t, "systemctl", "show", "-P", "Result", "klimax-network")); out != "success" {
		t.Errorf("klimax-network: %s", out)
	}
	if code := show(t, m, "klimax-network", "ExecMainStatus"); code != 0 {
		t.Errorf("klimax-network: exit status %d:\n%s", code, m.MustRun(t, "journalctl", "-u", "klimax-network", "--no-pager"))
	}
	rules, docker := show(t, m, "klimax-network", "ExecMainExitTimestampMonotonic"), show(t, m, "docker", "ExecMainStartTimestampMonotonic")
	if rules == 0 || rules >= docker {
		t.Errorf("klimax-network ended at %d µs, dockerd was started at %d µs", rules, docker)
	}
	if got := forwardPolicy(t, m); got != "accept" {
		t.Errorf("the FORWARD policy is %q", got)
	}
	if !strings.Contains(ruleset(t, m), "table ip klimax") {
		t.Error("the own table is not there")
	}
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
	bareFiles := files(t, m)

	t.Log(m.MustRun(t, "/root/klimax-guest", "install", "--check"))
	if d := cmp.Diff(bareFiles, files(t, m)); d != "" {
		t.Errorf("--check changed files:\n%s", d)
	}
	start := time.Now()
	t.Log(steps(t, m, "/root/klimax-guest", "install"))
	t.Logf("installed in %v", time.Since(start))

	// All of klimax's own was there before Docker's first start.
	rulesBeforeDocker(t, m)
	if out := m.MustRun(t, "docker", "info", "--format", "{{.LiveRestoreEnabled}}"); strings.TrimSpace(out) != "true" {
		t.Errorf("live-restore is %s", out)
	}
	m.MustRun(t, "sh", "-c", "test $(stat -c %U:%G:%a /run/klimax) = root:klimax:750 && test $(stat -c %G:%a /run/klimax/guest.sock) = klimax:660 && test $(stat -c %a /var/lib/klimax) = 700")
	// The unit's sandbox lets the agent do its work.
	healthy(t, m)

	t.Run("second time", func(t *testing.T) {
		before, since := files(t, m), m.MustRun(t, "systemctl", "show", "klimax-guest", "docker", "-p", "ActiveEnterTimestampMonotonic")
		start := time.Now()
		unchanged(t, steps(t, m, guest, "install"))
		t.Logf("in %v", time.Since(start))
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

	t.Run("docker restart", func(t *testing.T) {
		agent := show(t, m, "klimax-guest", "MainPID")
		restartDocker(t, m)
		if post := m.MustRun(t, "systemctl", "show", "-P", "ExecStartPost", "docker"); !strings.Contains(post, "klimax-guest network apply") || !strings.Contains(post, "code=exited ; status=0") {
			t.Errorf("the drop-in: %s", post)
		}
		m.MustRun(t, "systemctl", "stop", "docker", "docker.socket")
		m.MustRun(t, "systemctl", "is-active", "klimax-guest")
		m.MustRun(t, "systemctl", "start", "docker")
		if now := show(t, m, "klimax-guest", "MainPID"); now != agent {
			t.Errorf("the agent went down with Docker: process %d, before %d", now, agent)
		}
		// Without an agent the drop-in alone mends the rules.
		m.MustRun(t, "systemctl", "stop", "klimax-guest")
		if _, err := m.VM.Run(t.Context(), "nft", "delete", "table", "ip", "klimax"); err != nil {
			t.Fatal(err)
		}
		restartDocker(t, m)
		if !strings.Contains(ruleset(t, m), "table ip klimax") {
			t.Error("a Docker restart did not bring the rules back")
		}
		m.MustRun(t, "systemctl", "start", "klimax-guest")
	})

	t.Run("agent killed", func(t *testing.T) {
		m.MustRun(t, "systemctl", "kill", "-s", "KILL", "klimax-guest")
		time.Sleep(2500 * time.Millisecond)
		m.MustRun(t, "systemctl", "is-active", "klimax-guest")
		if !strings.Contains(ruleset(t, m), "table ip klimax") {
			t.Error("the rules went with the agent")
		}
	})

	t.Run("Docker comes up whatever klimax does", func(t *testing.T) {
		if took := restartDocker(t, m); took > 5*time.Second {
			t.Errorf("with all well: the restart took %v", took)
		}
		broken(t, m, func() {
			if took := restartDocker(t, m); took > 5*time.Second {
				t.Errorf("with a broken configuration: the restart took %v", took)
			}
		})
		m.MustRun(t, "mv", guest, guest+".away")
		if took := restartDocker(t, m); took > 5*time.Second {
			t.Errorf("without the program: the restart took %v", took)
		}
		if err := m.Write(guest, "#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 1; done\n", 0o755); err != nil {
			t.Fatal(err)
		}
		if took := restartDocker(t, m); took < 10*time.Second || took > 16*time.Second {
			t.Errorf("with a program that hangs and ignores SIGTERM: the restart took %v, want some 11 s", took)
		}
		m.MustRun(t, "mv", guest+".away", guest)
	})

	t.Run("reboot", func(t *testing.T) {
		start := time.Now()
		if err := m.Reboot(); err != nil {
			t.Fatal(err)
		}
		t.Logf("in %v", time.Since(start))
		rulesBeforeDocker(t, m)
		m.MustRun(t, "systemctl", "is-active", "klimax-guest", "klimax-network", "docker")
		healthy(t, m)
		broken(t, m, func() {
			if err := m.Reboot(); err != nil {
				t.Fatal(err)
			}
			m.MustRun(t, "docker", "version")
			rulesBeforeDocker(t, m)
		})
		m.MustRun(t, "systemctl", "restart", "klimax-guest")
		healthy(t, m)
	})

	t.Run("stop", func(t *testing.T) {
		steps(t, m, guest, "stop")
		if _, err := m.Run(t.Context(), "systemctl", "is-active", "klimax-guest"); err == nil {
			t.Error("the agent still runs")
		}
		m.MustRun(t, "docker", "version")
		if !strings.Contains(ruleset(t, m), "table ip klimax") {
			t.Error("stopping removed the rules")
		}
		steps(t, m, guest, "install")
		m.MustRun(t, "systemctl", "is-active", "klimax-guest")
	})

	t.Run("uninstall", func(t *testing.T) {
		t.Log(steps(t, m, guest, "uninstall", "--remove-packages"))
		if got := m.MustRun(t, "cat", "/proc/sys/net/ipv4/ip_forward"); got != "0\n" {
			t.Errorf("ip_forward is %q", got)
		}
		if r := ruleset(t, m); strings.Contains(r, "klimax") {
			t.Errorf("rules of klimax's are left:\n%s", r)
		}
		compare(t, bareFiles, files(t, m))
		if out := m.MustRun(t, "sh", "-c", "systemctl list-units --all | grep klimax || true"); out != "" {
			t.Errorf("units are left:\n%s", out)
		}
	})
}

// healthy waits until the agent says that all rules are in sync.
func healthy(t *testing.T, m *machine.Machine) {
	t.Helper()
	var out string
	for end := time.Now().Add(15 * time.Second); ; time.Sleep(200 * time.Millisecond) {
		out, _ = m.Run(t.Context(), guest, "status", "-o", "json")
		var s api.Status
		if err := json.Unmarshal([]byte(out), &s); err == nil && s.Healthy() {
			return
		}
		if time.Now().After(end) {
			break
		}
	}
	t.Errorf("the agent is not well:\n%s\n%s", out, m.MustRun(t, "sh", "-c", "journalctl -u klimax-guest --no-pager -n 30 || cat /var/log/klimax/guest.log"))
}

// restartDocker restarts docker.service, expects it to answer, and returns how
// long the restart took.
func restartDocker(t *testing.T, m *machine.Machine) time.Duration {
	t.Helper()
	m.MustRun(t, "systemctl", "reset-failed", "docker") // Debian's limit of starts in a minute
	start := time.Now()
	m.MustRun(t, "systemctl", "restart", "docker")
	took := time.Since(start)
	m.MustRun(t, "docker", "version")
	return took
}

// broken calls f while the configuration cannot be read.
func broken(t *testing.T, m *machine.Machine, f func()) {
	t.Helper()
	const path = "/etc/klimax/klimax.yaml"
	config := m.MustRun(t, "cat", path)
	if err := m.Write(path, "network: [\n", 0o640); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Write(path, config, 0o640); err != nil {
			t.Fatal(err)
		}
	}()
	f()
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
	t.Log(steps(t, m, "/root/klimax-guest", "install"))
	t.Logf("installed in %v", time.Since(start))
	if got := forwardPolicy(t, m); got != "accept" {
		t.Errorf("the FORWARD policy is %q", got)
	}
	if out := m.MustRun(t, "docker", "info", "--format", "{{.LiveRestoreEnabled}}"); strings.TrimSpace(out) != "true" {
		t.Errorf("live-restore is %s", out)
	}
	if _, err := m.Run(t.Context(), "test", "-e", "/usr/sbin/policy-rc.d"); err == nil {
		t.Error("policy-rc.d is left")
	}
	healthy(t, m)
	unchanged(t, steps(t, m, guest, "install"))

	// dockerd is started again when it dies.
	pid := strings.Fields(m.MustRun(t, "cat", "/run/klimax/dockerd.pid"))[0]
	m.MustRun(t, "sh", "-c", "kill -9 "+pid)
	m.MustRun(t, "sh", "-c", "for i in $(seq 100); do docker version && exit; sleep 0.1; done; exit 1")
	if now := strings.Fields(m.MustRun(t, "cat", "/run/klimax/dockerd.pid"))[0]; now == pid {
		t.Error("dockerd has the same number after it was killed")
	}

	// Stop: the agent and dockerd, nobody else's process.
	m.MustRun(t, "sh", "-c", "setsid sleep 4711 >/dev/null 2>&1 &")
	steps(t, m, guest, "stop")
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
	steps(t, m, guest, "install")
	if err := m.Reboot(); err != nil {
		t.Fatal(err)
	}
	steps(t, m, guest, "install")
	if got := forwardPolicy(t, m); got != "accept" {
		t.Errorf("the FORWARD policy is %q after a reboot", got)
	}
	healthy(t, m)

	t.Log(steps(t, m, guest, "uninstall", "--remove-packages"))
	if got := m.MustRun(t, "cat", "/proc/sys/net/ipv4/ip_forward"); got != "0\n" {
		t.Errorf("ip_forward is %q", got)
	}
	compare(t, bareFiles, files(t, m))
}

// A Docker that was there first: it is not restarted, its configuration and
// its containers stay as they are.
func TestMachineExistingDocker(t *testing.T) {
	m := boot(t, machine.Options{Docker: true})
	// Without klimax Docker turns on forwarding itself and sets this policy:
	// what the other tests find to be otherwise is klimax's doing.
	if got := forwardPolicy(t, m); got != "drop" {
		t.Errorf("the FORWARD policy of a Docker that came first is %q", got)
	}
	pid := show(t, m, "docker", "MainPID")
	steps(t, m, "/root/klimax-guest", "install")
	if now := show(t, m, "docker", "MainPID"); now != pid {
		t.Errorf("dockerd is process %d, was %d", now, pid)
	}
	if _, err := m.Run(t.Context(), "test", "-e", "/etc/docker/daemon.json"); err == nil {
		t.Error("daemon.json was written")
	}
	// Asked for, it is taken over without a restart.
	steps(t, m, guest, "install", "--live-restore", "yes")
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
	unchanged(t, steps(t, m, guest, "install"))
	steps(t, m, guest, "uninstall", "--remove-packages")
	if now := show(t, m, "docker", "MainPID"); now != pid {
		t.Errorf("dockerd is process %d, was %d", now, pid)
	}
	if _, err := m.Run(t.Context(), "test", "-e", "/etc/docker/daemon.json"); err == nil {
		t.Error("daemon.json is left")
	}
	if got := m.MustRun(t, "cat", "/proc/sys/net/ipv4/ip_forward"); got != "1\n" {
		t.Errorf("ip_forward is %q under a Docker that goes on", got)
	}
}
