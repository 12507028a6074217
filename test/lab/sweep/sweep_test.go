//go:build linux

package sweep

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestOnlyLabs: a wrong name or directory removes nothing.
func TestOnlyLabs(t *testing.T) {
	dir := t.TempDir()
	for _, p := range []Place{{}, {Name: "klx-", Dir: "/"}, {Name: "klx-abcdef", Dir: dir}, {Name: "other", Dir: filepath.Join(dir, "other")}} {
		if err := p.Sweep(); err == nil {
			t.Errorf("%+v was swept", p)
		}
	}
	if _, err := os.Stat(dir); err != nil {
		t.Error(err)
	}
}

// TestSweep needs no root: a process that works in the directory and a file.
func TestSweep(t *testing.T) {
	p := Place{Name: "klx-unit-test", Dir: filepath.Join(t.TempDir(), "klx-unit-test")}
	if err := os.MkdirAll(filepath.Join(p.Dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	c := exec.Command("sleep", "60")
	c.Dir = filepath.Join(p.Dir, "sub")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- c.Wait() }()
	if left := p.Left(); len(left) != 2 || !slices.ContainsFunc(left, func(s string) bool { return strings.Contains(s, "sleep 60") }) {
		t.Errorf("before: %q", left)
	}
	spared := p
	spared.Owner = c.Process.Pid
	if left := spared.Left(); len(left) != 1 {
		t.Errorf("the owner counts as left: %q", left)
	}
	if err := p.Sweep(); err != nil {
		t.Error(err)
	}
	if err := <-done; err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("the process ended with %v", err)
	}
	if left := p.Left(); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if err := p.Sweep(); err != nil {
		t.Errorf("a second sweep: %v", err)
	}
}

// TestStale: a lab counts as stale when its owner is gone, or was another process of that number.
func TestStale(t *testing.T) {
	tmp := t.TempDir()
	mk := func(name, owner string) {
		d := filepath.Join(tmp, name)
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
		os.WriteFile(filepath.Join(d, ownerFile), []byte(owner), 0o644)
	}
	mk("klx-000001", "999999999 5")
	mk("klx-000002", "1 5")
	mk("klx-000003", "")
	mk("klx-x", "") // not a lab's name
	mk("klx-000004", "")
	if err := (Place{Name: "klx-000004", Dir: filepath.Join(tmp, "klx-000004")}).WriteOwner(); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range Stale(tmp) {
		if _, err := os.Stat(p.Dir); err == nil { // not what labs elsewhere on this machine may have left
			got = append(got, p.Name)
		}
	}
	if want := []string{"klx-000001", "klx-000002", "klx-000003"}; !slices.Equal(got, want) {
		t.Errorf("stale: %v, want %v", got, want)
	}
}

func TestUnescape(t *testing.T) {
	if got := unescape(`/tmp/a\040b\134c`); got != `/tmp/a b\c` {
		t.Error(got)
	}
}
