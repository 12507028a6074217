package provision

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"klimax/provision/supervise"
	"klimax/shared/progress"
)

// TestMain lets the test binary play klimax-guest where it is installed.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == SuperviseCommand {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		p, err := supervise.FromArgs(os.Args[2:])
		if err == nil {
			err = supervise.Run(ctx, p, os.Stdout, slog.New(slog.DiscardHandler))
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) > 1 && os.Args[1] == "run" {
		time.Sleep(time.Hour)
		return
	}
	os.Exit(m.Run())
}

// world is a made-up machine in a directory: what provision runs and asks is
// played by its methods, which record what happened in which order.
type world struct {
	t          *testing.T
	root       string
	candidates map[string]string // what apt would install
	listsOld   bool              // apt knows nothing before an update
	failApt    int               // so many installations fail
	engine     Engine
	oddDocker  error
	rules      bool
	units      map[string]*UnitState
	agentUp    bool

	// atInstall is called when apt-get install runs.
	atInstall func()

	mu     sync.Mutex
	log    []string
	events []progress.Event
}

func newWorld(t *testing.T, withSystemd bool) *world {
	w := &world{t: t, root: t.TempDir(), candidates: map[string]string{
		"docker.io": "20.10.24+dfsg1-1+deb12u1", "ca-certificates": "20230311",
	}, units: map[string]*UnitState{}}
	w.write("/etc/group", "root:x:0:\n")
	w.write(ipForward, "0\n")
	w.write("/proc/self/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
	for _, p := range []string{"apt-get", "apt-cache"} {
		w.program("/usr/bin/" + p)
	}
	w.write("/usr/sbin/.keep", "")
	w.write("/etc/sysctl.d/.keep", "")
	w.write("/usr/local/bin/.keep", "")
	w.write("/run/.keep", "")
	w.write("/var/lib/.keep", "")
	w.write("/var/log/.keep", "")
	if withSystemd {
		w.write("/run/systemd/system/.keep", "")
		w.write("/etc/systemd/system/.keep", "")
	}
	return w
}

func (w *world) path(p string) string { return filepath.Join(w.root, p) }

func (w *world) write(path, text string) {
	w.t.Helper()
	if err := os.MkdirAll(filepath.Dir(w.path(path)), 0o755); err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(w.path(path), []byte(text), 0o644); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) program(path string) {
	w.t.Helper()
	w.write(path, "#!/bin/sh\nexec sleep 1000\n")
	if err := os.Chmod(w.path(path), 0o755); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) read(path string) string {
	data, err := os.ReadFile(w.path(path))
	if err != nil {
		return ""
	}
	return string(data)
}

func (w *world) note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.log = append(w.log, fmt.Sprintf(format, args...))
}

// Event makes world a progress.Sink.
func (w *world) Event(e progress.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, e)
}

// outcome is the last event of each step, by ID.
func (w *world) outcome() map[string]progress.Event {
	out := map[string]progress.Event{}
	for _, e := range w.events {
		out[e.Step] = e
	}
	return out
}

func (w *world) options() Options {
	return Options{
		Root: w.root, Self: os.Args[0], DefaultConfig: []byte("apiVersion: klimax/v1\n"),
		Preflight: func(context.Context) (Engine, error) { return w.engine, w.oddDocker },
		EngineAnswers: func(ctx context.Context) error {
			r, err := begin(Options{Root: w.root, Preflight: w.none, EngineAnswers: w.nothing, RulesApplied: w.never,
				ApplyRules: w.nothing, RemoveRules: w.never, AgentAnswers: w.nothing})
			if err != nil {
				return err
			}
			_, supervised, _ := supervise.Running(r.dockerProcessOptions())
			if w.engine.Answers || supervised || w.unit("docker.service").Active {
				return nil
			}
			return errors.New("no engine")
		},
		RulesApplied: func(context.Context) (bool, error) { return w.rules, nil },
		ApplyRules:   func(context.Context) error { w.note("apply rules"); w.rules = true; return nil },
		RemoveRules: func(context.Context) (bool, error) {
			had := w.rules
			w.rules = false
			return had, nil
		},
		AgentAnswers: func(context.Context) error {
			if w.agentUp || w.unit("klimax-guest.service").Active {
				return nil
			}
			return errors.New("no agent")
		},
		Run:           w.run,
		Units:         func(context.Context) (Units, error) { return (*fakeUnits)(w), nil },
		Progress:      w,
		DockerTimeout: time.Second, AgentTimeout: time.Second,
		chown: func(string, int, int) error { return nil },
	}
}

func (w *world) none(context.Context) (Engine, error) { return Engine{}, nil }
func (w *world) nothing(context.Context) error        { return nil }
func (w *world) never(context.Context) (bool, error)  { return false, nil }

// run plays the programs that provision runs.
func (w *world) run(_ context.Context, _ []string, name string, args ...string) (string, error) {
	line := strings.Join(append([]string{name}, args...), " ")
	switch {
	case name == "groupadd":
		w.note("%s", line)
		// The group that new files get anyway: no right to change it is needed.
		w.write("/etc/group", fmt.Sprintf("%s%s:x:%d:\n", w.read("/etc/group"), args[1], os.Getgid()))
	case name == "groupdel":
		w.note("%s", line)
		var keep []string
		for _, l := range strings.SplitAfter(w.read("/etc/group"), "\n") {
			if !strings.HasPrefix(l, args[0]+":") {
				keep = append(keep, l)
			}
		}
		w.write("/etc/group", strings.Join(keep, ""))
	case name == "apt-cache":
		var out strings.Builder
		for _, p := range args[1:] {
			if v := w.candidates[p]; v != "" && !w.listsOld {
				fmt.Fprintf(&out, "%s:\n  Installed: (none)\n  Candidate: %s\n", p, v)
			}
		}
		return out.String(), nil
	case name == "dpkg-query":
		out := "ii libc6\n"
		if w.read("/usr/sbin/dockerd") != "" {
			out += "ii docker.io\nii runc\n"
		}
		return out + "rc old\n", nil
	case name == "apt-get" && slices.Contains(args, "update"):
		w.note("apt-get update")
		w.listsOld = false
	case name == "apt-get" && slices.Contains(args, "install"):
		w.note("apt-get install %s", strings.Join(args[slices.Index(args, "--no-install-recommends")+1:], " "))
		if w.atInstall != nil {
			w.atInstall()
		}
		if w.failApt > 0 {
			w.failApt--
			return "", errors.New("apt-get: exit status 100")
		}
		w.program("/usr/sbin/dockerd")
		w.program("/usr/bin/docker")
	case name == "apt-get" && slices.Contains(args, "purge"):
		w.note("apt-get purge %s", strings.Join(args[slices.Index(args, "purge")+1:], " "))
		os.Remove(w.path("/usr/sbin/dockerd"))
		os.Remove(w.path("/usr/bin/docker"))
		w.unit("docker.service").Active = false
	case strings.HasSuffix(name, "/dockerd"):
		return "Docker version 20.10.24+dfsg1, build 5d6db84\n", nil
	default:
		w.t.Errorf("unexpected program: %s", line)
	}
	return "", nil
}

func (w *world) unit(name string) *UnitState {
	if w.units[name] == nil {
		w.units[name] = &UnitState{Down: true}
	}
	return w.units[name]
}

// fakeUnits is world as systemd.
type fakeUnits world

func (f *fakeUnits) set(verb, unit string, active bool) error {
	w := (*world)(f)
	w.note("%s %s", verb, unit)
	w.unit(unit).Active, w.unit(unit).Down = active, !active
	return nil
}
func (f *fakeUnits) Forget(context.Context, string) error          { return nil }
func (f *fakeUnits) Close()                                        {}
func (f *fakeUnits) Reload(context.Context) error                  { return nil }
func (f *fakeUnits) Start(_ context.Context, u string) error       { return f.set("start", u, true) }
func (f *fakeUnits) Restart(_ context.Context, u string) error     { return f.set("restart", u, true) }
func (f *fakeUnits) Stop(_ context.Context, u string) error        { return f.set("stop", u, false) }
func (f *fakeUnits) Enable(_ context.Context, us ...string) error  { return f.enable(true, us) }
func (f *fakeUnits) Disable(_ context.Context, us ...string) error { return f.enable(false, us) }
func (f *fakeUnits) State(_ context.Context, u string) (UnitState, error) {
	return *(*world)(f).unit(u), nil
}
func (f *fakeUnits) enable(on bool, units []string) error {
	for _, u := range units {
		if _, err := os.Stat((*world)(f).path("/etc/systemd/system/" + u)); err != nil {
			return err
		}
		(*world)(f).unit(u).Enabled = on
	}
	return nil
}

// snapshot lists every file with its mode and content, so that two of them
// can be compared.
func (w *world) snapshot() map[string]string {
	w.t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(w.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		i, err := d.Info()
		if err != nil {
			return err
		}
		text := ""
		if i.Mode().IsRegular() {
			text = sum([]byte(w.read(strings.TrimPrefix(path, w.root))))
		}
		out[strings.TrimPrefix(path, w.root)] = i.Mode().String() + " " + text
		return nil
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}
