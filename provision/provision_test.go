package provision

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"klimax/provision/dockerd"
	"klimax/provision/supervise"
	"klimax/shared/progress"
)

func install(t *testing.T, w *world, o Options) bool {
	t.Helper()
	w.log, w.events = nil, nil
	changed, err := Install(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return changed
}

func TestInstallTwiceAndUninstall(t *testing.T) {
	for _, kind := range []struct {
		name    string
		systemd bool
	}{{"systemd", true}, {"no init", false}} {
		t.Run(kind.name, func(t *testing.T) {
			w := newWorld(t, kind.systemd)
			w.agentUp = !kind.systemd
			o := w.options()
			t.Cleanup(func() { Stop(t.Context(), o) })
			bare := w.snapshot()

			if planned, err := Plan(t.Context(), o); err != nil {
				t.Fatal(err)
			} else if d := cmp.Diff(bare, w.snapshot()); d != "" {
				t.Errorf("a plan changed the machine:\n%s", d)
			} else {
				for _, p := range planned {
					done := p.ID == "preflight" || p.ID == "health" && w.agentUp
					if p.Satisfied != done || p.Error != "" || p.Plan == "" {
						t.Errorf("planned: %+v", p)
					}
				}
			}

			// Docker must find everything at its first start, which may be during apt-get install.
			w.atInstall = func() {
				if got := w.read(ipForward); got != "1\n" {
					t.Errorf("ip_forward is %q when Docker is installed", got)
				}
				if !w.rules {
					t.Error("the rules are not there when Docker is installed")
				}
				if got := w.read("/etc/docker/daemon.json"); got != "{\n  \"live-restore\": true\n}\n" {
					t.Errorf("daemon.json when Docker is installed: %q", got)
				}
				if got := w.read("/etc/sysctl.d/99-klimax.conf"); !strings.Contains(got, "net.ipv4.ip_forward = 1") {
					t.Errorf("sysctl file when Docker is installed: %q", got)
				}
				policy := w.read("/usr/sbin/policy-rc.d")
				if kind.systemd && policy != "" || !kind.systemd && !strings.HasSuffix(policy, "\nexit 101\n") {
					t.Errorf("policy-rc.d when Docker is installed: %q", policy)
				}
				dropIn := w.read("/etc/systemd/system/docker.service.d/klimax.conf")
				if kind.systemd != (dropIn != "") {
					t.Errorf("drop-in when Docker is installed: %q", dropIn)
				}
			}
			if !install(t, w, o) {
				t.Error("the first installation says it changed nothing")
			}
			want := []string{"groupadd --system klimax", "apply rules", "apt-get install docker.io ca-certificates"}
			if kind.systemd {
				want = []string{"groupadd --system klimax", "start klimax-network.service", "apply rules",
					"apt-get install docker.io ca-certificates", "start docker.service", "restart klimax-guest.service"}
			}
			if d := cmp.Diff(want, w.log); d != "" {
				t.Errorf("order (-want +got):\n%s", d)
			}
			for path, mode := range map[string]os.FileMode{
				"/var/lib/klimax": 0o700, "/run/klimax": 0o750, "/etc/klimax": 0o755, "/etc/klimax/klimax.yaml": 0o640,
				"/usr/local/bin/klimax-guest": 0o755, "/etc/docker/daemon.json": 0o644,
			} {
				i, err := os.Stat(w.path(path))
				if err != nil || i.Mode().Perm() != mode {
					t.Errorf("%s: %v, %v, want mode %v", path, i, err, mode)
				}
			}
			if _, err := os.Stat(w.path("/usr/sbin/policy-rc.d")); err == nil {
				t.Error("policy-rc.d is left behind")
			}

			if install(t, w, o) {
				t.Error("the second installation says it changed something")
			}
			if w.log != nil {
				t.Errorf("the second installation did %q", w.log)
			}
			for id, e := range w.outcome() {
				if e.State != progress.Same {
					t.Errorf("second time: %s is %s: %s", id, e.State, e.Message)
				}
			}

			o.RemovePackages = true
			changed, err := Uninstall(t.Context(), o)
			if err != nil || !changed {
				t.Fatalf("uninstall: %v, %v", changed, err)
			}
			if d := cmp.Diff(bare, w.snapshot()); d != "" {
				t.Errorf("uninstalling leaves (-before +after):\n%s", d)
			}
			if w.rules {
				t.Error("the rules are still there")
			}
			for name, u := range w.units {
				if u.Active || u.Enabled {
					t.Errorf("%s: %+v", name, *u)
				}
			}
			if changed, err := Uninstall(t.Context(), o); err != nil || changed {
				t.Errorf("a second uninstallation: %v, %v", changed, err)
			}
			if d := cmp.Diff(bare, w.snapshot()); d != "" {
				t.Errorf("a second uninstallation leaves:\n%s", d)
			}
		})
	}
}

func TestStopIsExact(t *testing.T) {
	w := newWorld(t, false)
	w.agentUp = true
	o := w.options()
	install(t, w, o)
	r, err := begin(o)
	if err != nil {
		t.Fatal(err)
	}
	running := func() (out []string) {
		for _, p := range []supervise.Process{r.agentProcessOptions(), r.dockerProcessOptions()} {
			if _, runs, _ := supervise.Running(p); runs {
				out = append(out, p.Name)
			}
		}
		return out
	}
	if d := cmp.Diff([]string{"guest", "dockerd"}, running()); d != "" {
		t.Fatalf("after installing:\n%s", d)
	}
	before := w.snapshot()
	if changed, err := Stop(t.Context(), o); err != nil || !changed {
		t.Fatalf("stop: %v, %v", changed, err)
	}
	if got := running(); got != nil {
		t.Errorf("still running: %v", got)
	}
	after := w.snapshot()
	for _, m := range []map[string]string{before, after} {
		for _, f := range []string{"guest.pid", "guest.supervisor.pid", "dockerd.pid", "dockerd.supervisor.pid"} {
			delete(m, "/run/klimax/"+f)
		}
		delete(m, "/var/log/klimax/guest.log")
		delete(m, "/var/log/klimax/dockerd.log")
	}
	if d := cmp.Diff(before, after); d != "" {
		t.Errorf("stopping changed more than processes:\n%s", d)
	}
	if !w.rules {
		t.Error("stopping removed the rules")
	}
	if changed, err := Stop(t.Context(), o); err != nil || changed {
		t.Errorf("a second stop: %v, %v", changed, err)
	}

	// An engine of somebody else is neither started nor stopped.
	w.engine = Engine{Answers: true, Version: "20.10.24"}
	install(t, w, o)
	if d := cmp.Diff([]string{"guest"}, running()); d != "" {
		t.Errorf("beside another engine:\n%s", d)
	}
	if _, err := Stop(t.Context(), o); err != nil {
		t.Error(err)
	}
}

func TestExistingDocker(t *testing.T) {
	existing := func(t *testing.T) *world {
		w := newWorld(t, true)
		w.engine = Engine{Answers: true, Version: "28.5.2"}
		w.program("/usr/bin/dockerd")
		w.program("/usr/bin/docker")
		w.write("/etc/docker/daemon.json", `{"debug": true}`)
		return w
	}
	t.Run("is left alone", func(t *testing.T) {
		w := existing(t)
		install(t, w, w.options())
		if got := w.read("/etc/docker/daemon.json"); got != `{"debug": true}` {
			t.Errorf("daemon.json became %s", got)
		}
		if e := w.outcome()["daemon-json"]; e.State != progress.Same || !strings.Contains(e.Message, "live-restore") {
			t.Errorf("nothing was suggested: %+v", e)
		}
		for _, l := range w.log {
			if strings.HasPrefix(l, "apt-get") || strings.Contains(l, "docker.service") {
				t.Errorf("did %q", l)
			}
		}
	})
	t.Run("is changed when asked", func(t *testing.T) {
		w := existing(t)
		o := w.options()
		o.LiveRestore = Yes
		install(t, w, o)
		want := `{"debug": true, "live-restore": true, "ip-forward-no-drop": true}`
		if got := w.read("/etc/docker/daemon.json"); got != want {
			t.Errorf("daemon.json is %s, want %s", got, want)
		}
		o.LiveRestore = Auto // once managed, it stays so
		if install(t, w, o) {
			t.Error("the second time changed something")
		}
		if _, err := Uninstall(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		if got := w.read("/etc/docker/daemon.json"); got != `{"debug": true}` {
			t.Errorf("uninstalling left %s", got)
		}
		if w.read("/usr/bin/dockerd") == "" {
			t.Error("uninstalling removed somebody else's Docker")
		}
	})
	t.Run("a flag is not repeated", func(t *testing.T) {
		w := existing(t)
		w.write("/etc/default/docker", "#DOCKER_OPTS=--ip-forward-no-drop\nDOCKER_OPTS=\"--live-restore\"\n")
		o := w.options()
		o.LiveRestore = Yes
		install(t, w, o)
		if got := w.read("/etc/docker/daemon.json"); got != `{"debug": true, "ip-forward-no-drop": true}` {
			t.Errorf("daemon.json is %s", got)
		}
	})
	t.Run("a changed value is theirs", func(t *testing.T) {
		w := existing(t)
		o := w.options()
		o.LiveRestore = Yes
		install(t, w, o)
		theirs := strings.Replace(w.read("/etc/docker/daemon.json"), `"live-restore": true`, `"live-restore": false`, 1)
		w.write("/etc/docker/daemon.json", theirs)
		if install(t, w, o) || w.read("/etc/docker/daemon.json") != theirs {
			t.Errorf("daemon.json became %s", w.read("/etc/docker/daemon.json"))
		}
	})
	t.Run("odd kinds stop everything", func(t *testing.T) {
		w := existing(t)
		w.oddDocker = errors.New("this is Docker from snap")
		before := w.snapshot()
		_, err := Install(t.Context(), w.options())
		if err == nil || !strings.Contains(err.Error(), "from snap") {
			t.Errorf("error = %v", err)
		}
		after := w.snapshot()
		delete(after, "/run/klimax")
		delete(after, "/run/klimax/provision.lock")
		if d := cmp.Diff(before, after); d != "" {
			t.Errorf("something was changed:\n%s", d)
		}
	})
}

func TestDaemonJSON(t *testing.T) {
	t.Run("a new engine that knows more", func(t *testing.T) {
		w := newWorld(t, true)
		w.candidates["docker.io"] = "28.2.2-0ubuntu1~24.04.1"
		install(t, w, w.options())
		if got := w.read("/etc/docker/daemon.json"); got != "{\n  \"live-restore\": true,\n  \"ip-forward-no-drop\": true\n}\n" {
			t.Errorf("daemon.json is %q", got)
		}
	})
	t.Run("not wanted", func(t *testing.T) {
		w := newWorld(t, true)
		o := w.options()
		o.LiveRestore = No
		install(t, w, o)
		if _, err := os.Stat(w.path("/etc/docker/daemon.json")); err == nil {
			t.Error("daemon.json was written")
		}
	})
	t.Run("no JSON", func(t *testing.T) {
		w := newWorld(t, true)
		broken := "{\n  // a comment\n}\n"
		w.write("/etc/docker/daemon.json", broken)
		_, err := Install(t.Context(), w.options())
		var bad *dockerd.NotJSONError
		if !errors.As(err, &bad) || bad.Line != 2 {
			t.Errorf("error = %v", err)
		}
		if w.read("/etc/docker/daemon.json") != broken {
			t.Error("the file was changed")
		}
		if w.read("/usr/sbin/dockerd") != "" {
			t.Error("Docker was installed all the same")
		}
	})
}

func TestPackages(t *testing.T) {
	t.Run("no lists yet", func(t *testing.T) {
		w := newWorld(t, true)
		w.listsOld = true
		install(t, w, w.options())
		if d := cmp.Diff([]string{"apt-get update", "apt-get install docker.io ca-certificates"}, aptOf(w)); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
	t.Run("a client package of its own", func(t *testing.T) {
		w := newWorld(t, true)
		w.candidates["docker-cli"] = "26.1.5+dfsg1-9+b9"
		w.candidates["docker.io"] = "26.1.5+dfsg1-9+b9"
		install(t, w, w.options())
		if d := cmp.Diff([]string{"apt-get install docker.io ca-certificates docker-cli"}, aptOf(w)); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
	t.Run("only the client is missing", func(t *testing.T) {
		w := newWorld(t, true)
		w.program("/usr/sbin/dockerd")
		_, err := Install(t.Context(), w.options())
		if err == nil || !strings.Contains(err.Error(), "docker command") {
			t.Errorf("error = %v", err)
		}
		w.candidates["docker-cli"] = "26.1.5"
		install(t, w, w.options())
		if d := cmp.Diff([]string{"apt-get install ca-certificates docker-cli"}, aptOf(w)); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
	t.Run("AppArmor without its tools", func(t *testing.T) {
		w := newWorld(t, true)
		w.write("/sys/module/apparmor/parameters/enabled", "Y\n")
		w.candidates["apparmor"] = "3.0.8"
		install(t, w, w.options())
		if d := cmp.Diff([]string{"apt-get install docker.io ca-certificates apparmor"}, aptOf(w)); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
	t.Run("certificates are there", func(t *testing.T) {
		w := newWorld(t, true)
		w.program("/usr/sbin/update-ca-certificates")
		install(t, w, w.options())
		if d := cmp.Diff([]string{"apt-get install docker.io"}, aptOf(w)); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
	t.Run("old lists", func(t *testing.T) {
		w := newWorld(t, true)
		w.failApt = 1
		install(t, w, w.options())
		if d := cmp.Diff([]string{"apt-get install docker.io ca-certificates", "apt-get update", "apt-get install docker.io ca-certificates"}, aptOf(w)); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	})
	t.Run("fails and goes on later", func(t *testing.T) {
		w := newWorld(t, false)
		w.agentUp = true
		w.failApt = 2
		o := w.options()
		t.Cleanup(func() { Stop(t.Context(), o) })
		w.write("/usr/sbin/policy-rc.d", "#!/bin/sh\nexit 0\n")
		changed, err := Install(t.Context(), o)
		if err == nil || !changed {
			t.Fatalf("Install = %v, %v", changed, err)
		}
		if got := w.read("/usr/sbin/policy-rc.d"); got != "#!/bin/sh\nexit 0\n" {
			t.Errorf("policy-rc.d became %q", got)
		}
		if got := w.outcome()["packages"]; got.State != progress.Failed {
			t.Errorf("the step is %+v", got)
		}
		if !install(t, w, o) {
			t.Error("the second run changed nothing")
		}
		if got := w.read("/usr/sbin/policy-rc.d"); got != "#!/bin/sh\nexit 0\n" {
			t.Errorf("policy-rc.d became %q", got)
		}
	})
	t.Run("after a kill", func(t *testing.T) { // policy-rc.d of an earlier run is still there
		w := newWorld(t, false)
		w.agentUp = true
		w.write("/usr/sbin/policy-rc.d", "#!/bin/sh\n"+policyMark+"exit 101\n")
		w.write("/usr/sbin/policy-rc.d.klimax-saved", "theirs")
		o := w.options()
		t.Cleanup(func() { Stop(t.Context(), o) })
		install(t, w, o)
		if got := w.read("/usr/sbin/policy-rc.d"); got != "theirs" {
			t.Errorf("policy-rc.d is %q", got)
		}
		if left, _ := filepath.Glob(w.path("/usr/sbin/policy-rc.d.*")); left != nil {
			t.Errorf("left behind: %v", left)
		}
	})
	t.Run("another distribution", func(t *testing.T) {
		w := newWorld(t, true)
		os.Remove(w.path("/usr/bin/apt-get"))
		_, err := Install(t.Context(), w.options())
		if err == nil || !strings.Contains(err.Error(), "no Debian or Ubuntu") {
			t.Errorf("error = %v", err)
		}
	})
}

func aptOf(w *world) (out []string) {
	for _, l := range w.log {
		if strings.HasPrefix(l, "apt-get") {
			out = append(out, l)
		}
	}
	return out
}

func TestForwarding(t *testing.T) {
	t.Run("was on", func(t *testing.T) {
		w := newWorld(t, true)
		w.write(ipForward, "1\n")
		o := w.options()
		o.RemovePackages = true
		install(t, w, o)
		if _, err := Uninstall(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		if got := w.read(ipForward); got != "1\n" {
			t.Errorf("ip_forward became %q", got)
		}
	})
	t.Run("Docker goes on needing it", func(t *testing.T) {
		w := newWorld(t, true)
		o := w.options()
		install(t, w, o)
		if _, err := Uninstall(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		if got := w.read(ipForward); got != "1\n" {
			t.Errorf("ip_forward became %q under a running Docker", got)
		}
		if w.read("/etc/sysctl.d/99-klimax.conf") != "" {
			t.Error("the sysctl file is still there")
		}
	})
	t.Run("raise and restore", func(t *testing.T) {
		w := newWorld(t, true)
		for i, want := range []bool{true, false} {
			if got, err := RaiseForwarding(w.root, "/var/lib/klimax"); err != nil || got != want {
				t.Errorf("raise %d: %v, %v", i, got, err)
			}
		}
		if got := w.read("/var/lib/klimax/ip_forward.before"); got != "0\n" {
			t.Errorf("kept %q", got)
		}
		// Somebody turns it off: raised again, and the first value stays the one to restore.
		w.write(ipForward, "0\n")
		if got, err := RaiseForwarding(w.root, "/var/lib/klimax"); err != nil || !got {
			t.Errorf("raise: %v, %v", got, err)
		}
		for i, want := range []bool{true, false} {
			if got, err := RestoreForwarding(w.root, "/var/lib/klimax"); err != nil || got != want {
				t.Errorf("restore %d: %v, %v", i, got, err)
			}
		}
		if got := w.read(ipForward); got != "0\n" {
			t.Errorf("ip_forward is %q", got)
		}
	})
}

func TestConfigStays(t *testing.T) {
	w := newWorld(t, true)
	o := w.options()
	install(t, w, o)
	w.write("/etc/klimax/klimax.yaml", "apiVersion: klimax/v1\nnetwork: {}\n")
	if install(t, w, o) {
		t.Error("a changed configuration was not left alone")
	}
	if _, err := Uninstall(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if w.read("/etc/klimax/klimax.yaml") == "" {
		t.Error("somebody's configuration was removed")
	}
}

func TestUpgradeRestartsAgent(t *testing.T) {
	w := newWorld(t, true)
	o := w.options()
	install(t, w, o)
	w.write("/usr/local/bin/klimax-guest", "an older one")
	if !install(t, w, o) {
		t.Error("nothing was changed")
	}
	if d := cmp.Diff([]string{"restart klimax-guest.service"}, w.log); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	// An earlier run replaced the program and was interrupted before the restart.
	w.unit("klimax-guest.service").MainPID = 4242
	exe := w.path("/proc/4242/exe")
	if err := os.MkdirAll(filepath.Dir(exe), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/usr/local/bin/klimax-guest (deleted)", exe); err != nil {
		t.Fatal(err)
	}
	o.Units = nil // a restart would not help this made-up process: only look
	r, err := begin(o)
	if err != nil {
		t.Fatal(err)
	}
	if !r.outdated(4242) || r.outdated(1) {
		t.Error("a process of a replaced program is not recognised")
	}
}

func TestHealth(t *testing.T) {
	w := newWorld(t, true)
	o := w.options()
	o.AgentAnswers = func(context.Context) error { return errors.New("connection refused") }
	o.AgentTimeout = 1
	_, err := Install(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "connection refused") || !strings.Contains(err.Error(), "journalctl -u klimax-guest") {
		t.Errorf("error = %v", err)
	}
}

// A step whose Apply says that all is well is believed only when Check finds so.
func TestNoLastingEffect(t *testing.T) {
	w := newWorld(t, true)
	o := w.options()
	o.ApplyRules = func(context.Context) error { return nil }
	_, err := Install(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "no lasting effect") {
		t.Errorf("error = %v", err)
	}
	if w.read("/usr/sbin/dockerd") != "" {
		t.Error("Docker was installed without the rules")
	}
}

func TestTwoAtOnce(t *testing.T) {
	w := newWorld(t, true)
	o := w.options()
	var inner error
	w.atInstall = func() { _, inner = Install(t.Context(), o) }
	install(t, w, o)
	if inner == nil || !strings.Contains(inner.Error(), "under way") {
		t.Errorf("the second one at once: %v", inner)
	}
}

func TestParsePolicy(t *testing.T) {
	got := parsePolicy(`docker.io:
  Installed: (none)
  Candidate: 20.10.24+dfsg1-1+deb12u1+b6
  Version table:
     20.10.24+dfsg1-1+deb12u1+b6 500
        500 http://mirror.example/debian bookworm/main amd64 Packages
none:
  Installed: (none)
  Candidate: (none)
  Version table:
N: Unable to locate package docker-cli
`)
	if d := cmp.Diff(map[string]string{"docker.io": "20.10.24+dfsg1-1+deb12u1+b6"}, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
