package supervise

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestMain lets the test binary play the supervisor.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "supervise" {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		p, err := FromArgs(os.Args[2:])
		if err == nil {
			err = Run(ctx, p, os.Stdout, slog.New(slog.NewTextHandler(os.Stdout, nil)))
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func self() []string { return []string{os.Args[0], "supervise"} }

func process(t *testing.T, script string) Process {
	t.Helper()
	dir := t.TempDir()
	p := Process{
		Name: "it", RunDir: dir, LogFile: filepath.Join(dir, "log/it.log"), Grace: 2 * time.Second,
		Command: []string{"sh", "-c", script},
	}
	t.Cleanup(func() {
		if _, err := Stop(p); err != nil {
			t.Error(err)
		}
	})
	return p
}

func start(t *testing.T, p Process) Identity {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := Start(ctx, self(), p); err != nil {
		t.Fatal(err)
	}
	id, runs, err := Running(p)
	if err != nil || !runs {
		t.Fatalf("just started: running %v, %v", runs, err)
	}
	return id
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("did not happen: " + what)
		}
	}
}

func gone(id Identity) bool {
	have, err := proc{"/proc"}.identify(id.PID)
	return err != nil || have != id
}

func TestStartStop(t *testing.T) {
	p := process(t, "echo hello; exec sleep 1000")
	id := start(t, p)
	if again := start(t, p); again != id {
		t.Errorf("a second start replaced %v by %v", id, again)
	}
	eventually(t, "a line in the log", func() bool {
		log, _ := os.ReadFile(p.LogFile)
		return strings.HasPrefix(string(log), "hello\n")
	})
	if sid, _ := exec.Command("ps", "-o", "sid=", "-p", fmt.Sprint(id.PID)).Output(); strings.TrimSpace(string(sid)) != fmt.Sprint(id.PID) {
		t.Errorf("the program is in session %s, not in one of its own", sid)
	}
	if stopped, err := Stop(p); err != nil || !stopped {
		t.Fatalf("Stop = %v, %v", stopped, err)
	}
	if !gone(id) {
		t.Error("the program survived Stop")
	}
	if stopped, err := Stop(p); err != nil || stopped {
		t.Errorf("a second Stop = %v, %v", stopped, err)
	}
	if left, _ := filepath.Glob(filepath.Join(p.RunDir, "*.pid")); left != nil {
		t.Errorf("left behind: %v", left)
	}
}

func TestRestarts(t *testing.T) {
	p := process(t, "exec sleep 1000")
	id := start(t, p)
	if err := syscall.Kill(id.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a restart", func() bool {
		now, runs, err := Running(p)
		if err != nil || !runs {
			t.Fatalf("while it restarts: running %v, %v", runs, err)
		}
		return now.PID != 0 && now != id
	})
}

func TestBackOff(t *testing.T) {
	dir := t.TempDir()
	p := Process{Name: "x", RunDir: dir, LogFile: filepath.Join(dir, "log"), Grace: time.Second,
		Command: []string{"sh", "-c", "echo run >>" + dir + "/runs"}}
	ctx, cancel := context.WithTimeout(t.Context(), 900*time.Millisecond)
	defer cancel()
	if err := Run(ctx, p, nil, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	// Starts at 0, 0.2 and 0.6 s; the next would be at 1.4 s.
	runs, _ := os.ReadFile(filepath.Join(dir, "runs"))
	if n := strings.Count(string(runs), "run"); n < 2 || n > 3 {
		t.Errorf("%d runs in 0.9 s, want the pause to double from 0.2 s", n)
	}
}

// A program that ignores SIGTERM is killed after the grace period.
func TestStubborn(t *testing.T) {
	p := process(t, "trap '' TERM; echo ready; while :; do sleep 0.1; done")
	p.Grace = 300 * time.Millisecond
	id := start(t, p)
	eventually(t, "the trap", func() bool { log, _ := os.ReadFile(p.LogFile); return len(log) > 0 })
	begin := time.Now()
	if _, err := Stop(p); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took < p.Grace || took > 3*time.Second {
		t.Errorf("took %v, want a little over %v", took, p.Grace)
	}
	if !gone(id) {
		t.Error("still there")
	}
}

// A supervisor that was killed leaves its program: Stop finds it all the same,
// and Start does not make a second one.
func TestOrphan(t *testing.T) {
	p := process(t, "exec sleep 1000")
	killSupervisor := func() {
		t.Helper()
		id, runs, err := proc{"/proc"}.running(p.supervisorFile())
		if err != nil || !runs {
			t.Fatalf("no supervisor: %v", err)
		}
		syscall.Kill(id.PID, syscall.SIGKILL)
		eventually(t, "the supervisor's end", func() bool { return gone(id) })
	}
	first := start(t, p)
	killSupervisor()
	if id, runs, _ := Running(p); !runs || id != first {
		t.Errorf("the orphan is not found: %v, %v", id, runs)
	}
	second := start(t, p)
	if !gone(first) {
		t.Error("two programs at once")
	}
	killSupervisor()
	if stopped, err := Stop(p); err != nil || !stopped {
		t.Fatalf("Stop = %v, %v", stopped, err)
	}
	if !gone(second) {
		t.Error("the orphan survived Stop")
	}
}

// A number that was given to another process is never signalled.
func TestRecycledNumber(t *testing.T) {
	p := process(t, "true")
	other := exec.Command("sleep", "1000")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { other.Process.Kill(); other.Wait() }()
	id, err := proc{"/proc"}.identify(other.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	for name, stale := range map[string]Identity{
		"started earlier": {PID: id.PID, Start: id.Start - 1, Boot: id.Boot},
		"an earlier boot": {PID: id.PID, Start: id.Start, Boot: "another"},
	} {
		for _, file := range []string{p.childFile(), p.supervisorFile()} {
			if err := os.WriteFile(file, []byte(stale.String()), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if _, runs, err := Running(p); err != nil || runs {
			t.Errorf("%s: running = %v, %v", name, runs, err)
		}
		if stopped, err := Stop(p); err != nil || stopped {
			t.Errorf("%s: Stop = %v, %v", name, stopped, err)
		}
		if gone(id) {
			t.Fatalf("%s: somebody else's process was killed", name)
		}
	}
}

func TestIdentify(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("sys/kernel/random/boot_id", "b\n")
	stat := func(name, state string) string {
		return "7 (" + name + ") " + state + " 1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 1 1 1\n"
	}
	for _, c := range []struct {
		stat string
		want Identity
		ok   bool
	}{
		{stat("sh", "S"), Identity{7, 4242, "b"}, true},
		{stat("a) Z (b", "R"), Identity{7, 4242, "b"}, true},
		{stat("sh", "Z"), Identity{}, false},
		{"7 (sh) S 1", Identity{}, false},
		{"", Identity{}, false},
	} {
		write("7/stat", c.stat)
		got, err := proc{dir}.identify(7)
		if (err == nil) != c.ok || got != c.want {
			t.Errorf("%q: %v, %v, want %v", c.stat, got, err, c.want)
		}
	}
	for _, text := range []string{"", "7", "7 4242", "x 4242 b", "7 x b", "1 4242 b", "-7 4242 b"} {
		write("pid", text)
		if id, runs, err := (proc{dir}).running(filepath.Join(dir, "pid")); runs || err != nil {
			t.Errorf("pid file %q: %v, %v, %v", text, id, runs, err)
		}
	}
}

func TestArgs(t *testing.T) {
	p := Process{Name: "dockerd", RunDir: "/run/x", LogFile: "/var/log/x", Grace: 15 * time.Second,
		Command: []string{"dockerd", "--name", "--", "-H", "unix:///x y"}}
	got, err := FromArgs(p.Args())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(p, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	for _, bad := range [][]string{
		nil, {"--name"}, {"--unknown", "x"}, {"--grace", "soon", "--", "x"},
		{"--name", "a/b", "--run-dir", "/r", "--log-file", "/l", "--", "x"},
		{"--name", "a", "--run-dir", "r", "--log-file", "/l", "--", "x"},
		{"--name", "a", "--run-dir", "/r", "--log-file", "/l"},
	} {
		if got, err := FromArgs(bad); err == nil {
			t.Errorf("%q gave %+v", bad, got)
		}
	}
}

func TestFailingStart(t *testing.T) {
	p := process(t, "true")
	p.Command = []string{filepath.Join(t.TempDir(), "missing")}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err := Start(ctx, self(), p)
	if err == nil || !strings.Contains(err.Error(), p.LogFile) {
		t.Errorf("error = %v, want one that names the log", err)
	}
	if err := Start(t.Context(), []string{"/bin/false"}, p); err == nil || !strings.Contains(err.Error(), "ended at once") {
		t.Errorf("error = %v", err)
	}
}
