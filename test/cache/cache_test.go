//go:build unix

package cache

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestDir(t *testing.T) {
	t.Setenv("KLIMAX_CACHE", "/a/b")
	t.Setenv("XDG_CACHE_HOME", "/x")
	t.Setenv("HOME", "/h")
	for _, want := range []string{"/a/b", "/x/klimax", "/h/.cache/klimax"} {
		if got, err := Dir(); err != nil || got != want {
			t.Errorf("Dir() = %q, %v; want %q", got, err, want)
		}
		if want == "/a/b" {
			t.Setenv("KLIMAX_CACHE", "")
		} else {
			t.Setenv("XDG_CACHE_HOME", "")
		}
	}
}

func TestGetBuildsOnce(t *testing.T) {
	t.Setenv("KLIMAX_CACHE", filepath.Join(t.TempDir(), "not", "there"))
	var built atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			d, err := Get(t.Context(), "thing", Key("1"), func(_ context.Context, dir string) error {
				built.Add(1)
				time.Sleep(30 * time.Millisecond)
				return os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o644)
			})
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := os.Stat(filepath.Join(d, "f")); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := built.Load(); n != 1 {
		t.Errorf("built %d times, want once", n)
	}
}

func TestFailedBuildLeavesNothing(t *testing.T) {
	root := t.TempDir()
	t.Setenv("KLIMAX_CACHE", root)
	boom := errors.New("boom")
	fail := func(_ context.Context, dir string) error {
		os.WriteFile(filepath.Join(dir, "half"), nil, 0o644)
		return boom
	}
	if _, err := Get(t.Context(), "thing", "k", fail); !errors.Is(err, boom) {
		t.Fatalf("err = %v, want boom", err)
	}
	list, _ := os.ReadDir(root)
	if len(list) != 1 || list[0].Name() != "locks" {
		t.Errorf("left: %v", list)
	}
	ok := func(_ context.Context, dir string) error { return nil }
	if _, err := Get(t.Context(), "thing", "k", ok); err != nil {
		t.Errorf("after a failure: %v", err)
	}
}

func TestGetWaitsNoLongerThanContext(t *testing.T) {
	t.Setenv("KLIMAX_CACHE", t.TempDir())
	in, out := make(chan bool), make(chan bool)
	go Get(context.Background(), "thing", "k", func(context.Context, string) error { close(in); <-out; return nil })
	<-in
	defer close(out)
	ctx, cancel := context.WithTimeout(t.Context(), 80*time.Millisecond)
	defer cancel()
	_, err := Get(ctx, "thing", "k", func(context.Context, string) error { return nil })
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("err = %v, want deadline exceeded", err)
	}
}

// TestTwoProcesses runs this test binary twice at once; each appends a line to a log when it builds.
func TestTwoProcesses(t *testing.T) {
	if log := os.Getenv("CACHE_TEST_LOG"); log != "" {
		_, err := Get(t.Context(), "shared", "k", func(context.Context, string) error {
			f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
			if err != nil {
				return err
			}
			defer f.Close()
			time.Sleep(100 * time.Millisecond)
			_, err = f.WriteString("built\n")
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	root := t.TempDir()
	log := filepath.Join(root, "log")
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			c := exec.Command(os.Args[0], "-test.run=^TestTwoProcesses$")
			c.Env = append(os.Environ(), "CACHE_TEST_LOG="+log, "KLIMAX_CACHE="+filepath.Join(root, "c"))
			if out, err := c.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	wg.Wait()
	if b, _ := os.ReadFile(log); strings.Count(string(b), "built") != 1 {
		t.Errorf("log = %q, want one build", b)
	}
}

func TestPrune(t *testing.T) {
	root := t.TempDir()
	t.Setenv("KLIMAX_CACHE", root)
	old := time.Now().Add(-2 * unusedFor)
	mk := func(name string, at time.Time) {
		os.Mkdir(filepath.Join(root, name), 0o755)
		os.Chtimes(filepath.Join(root, name), at, at)
	}
	mk("thing-"+Key("old"), old)
	mk("thing-"+Key("recent"), time.Now())
	mk("thing.building-123", time.Now())
	mk("thing-else-"+Key("old"), old)
	if _, err := Get(t.Context(), "thing", Key("new"), func(context.Context, string) error { return nil }); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{
		"thing-" + Key("old"): false, "thing-" + Key("recent"): true, "thing.building-123": false,
		"thing-else-" + Key("old"): true, "thing-" + Key("new"): true,
	} {
		if _, err := os.Stat(filepath.Join(root, name)); (err == nil) != want {
			t.Errorf("%s there: %v, want %v", name, err == nil, want)
		}
	}
}

func TestHashFiles(t *testing.T) {
	root := t.TempDir()
	w := func(name, s string) {
		p := filepath.Join(root, name)
		os.MkdirAll(filepath.Dir(p), 0o755)
		os.WriteFile(p, []byte(s), 0o644)
	}
	w("a/x.go", "1")
	w("b.sum", "2")
	h := func() string {
		s, err := HashFiles(root, "a", "b.sum")
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	first := h()
	if h() != first {
		t.Error("not stable")
	}
	for _, c := range [][2]string{{"a/x.go", "changed"}, {"a/sub/y.go", "new"}, {"b.sum", "3"}} {
		w(c[0], c[1])
		next := h()
		if next == first {
			t.Errorf("%s changed, hash did not", c[0])
		}
		first = next
	}
	if _, err := HashFiles(root, "none"); err == nil {
		t.Error("no error for a missing file")
	}
}
