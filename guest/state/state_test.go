package state

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a", "f")
	if err := WriteFile(path, []byte("one"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(path, []byte("two"), 0o600); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	st, _ := os.Stat(path)
	if err != nil || string(b) != "two" || st.Mode().Perm() != 0o600 {
		t.Errorf("%s %v %v", b, st.Mode(), err)
	}
	if st, _ = os.Stat(filepath.Dir(path)); st.Mode().Perm() != 0o700 {
		t.Errorf("directory %v", st.Mode())
	}
	if err := WriteFile("/dev/null/x", nil, 0o600); err == nil {
		t.Error("written below a device")
	}
	// a failed replacement leaves the target and no temporary file
	if err := os.Mkdir(filepath.Join(dir, "d"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(filepath.Join(dir, "d"), []byte("x"), 0o600); err == nil {
		t.Error("a directory was replaced")
	}
	if list, _ := os.ReadDir(dir); len(list) != 2 {
		t.Errorf("left behind: %v", list)
	}
}

func TestLocks(t *testing.T) {
	d := Dir(filepath.Join(t.TempDir(), "s"))
	if d.AgentRunning() != 0 {
		t.Error("no agent yet")
	}
	l, err := d.LockAgent()
	if err != nil {
		t.Fatal(err)
	}
	if d.AgentRunning() != os.Getpid() {
		t.Errorf("held by %d", d.AgentRunning())
	}
	var held *HeldError
	if _, err := d.LockAgent(); !errors.As(err, &held) || held.PID != os.Getpid() || !strings.Contains(err.Error(), "--state-dir") {
		t.Errorf("second lock: %v", err)
	}
	l.Unlock()
	if d.AgentRunning() != 0 {
		t.Error("unlocked")
	}
	// somebody who only looks is no other agent
	f, err := os.Open(filepath.Join(string(d), fileAgentLock))
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(20*time.Millisecond, func() { _ = f.Close() })
	if l, err = d.LockAgent(); err != nil {
		t.Errorf("beside one who looks: %v", err)
	} else {
		l.Unlock()
	}
	// the network lock waits
	n, err := d.LockNetwork(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.LockNetwork(t.Context(), 20*time.Millisecond); !errors.As(err, &held) {
		t.Errorf("not held: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	start := time.Now()
	if _, err := d.LockNetwork(ctx, time.Minute); !errors.As(err, &held) || time.Since(start) > time.Second {
		t.Errorf("with a context that ends: %v after %v", err, time.Since(start))
	}
	time.AfterFunc(20*time.Millisecond, n.Unlock)
	if n, err = d.LockNetwork(t.Context(), 2*time.Second); err != nil {
		t.Errorf("not given after the wait: %v", err)
	} else {
		n.Unlock()
	}
	if _, err := Dir("/dev/null/x").LockAgent(); err == nil {
		t.Error("a lock below a device")
	}
}

func TestCheck(t *testing.T) {
	d := Dir(filepath.Join(t.TempDir(), "s"))
	if err := d.Check(); err != nil {
		t.Error(err)
	}
	if list, err := os.ReadDir(string(d)); err != nil || len(list) != 0 {
		t.Errorf("left behind: %v %v", list, err)
	}
	if err := Dir("/dev/null/x").Check(); err == nil {
		t.Error("a directory below a device can be written")
	}
}
