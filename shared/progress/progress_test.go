package progress

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var update = flag.Bool("update", false, "write testdata anew")

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, got) {
		t.Errorf("%s differs (go test -run %s -update writes it anew):\ngot\n%s\nwant\n%s", path, t.Name(), got, want)
	}
}

// story is an operation with every kind of step.
func story() []Step {
	return []Step{
		{ID: "preflight", Title: "Look around", Run: func(context.Context, func(string)) (Result, error) {
			time.Sleep(40 * time.Millisecond)
			return Result{}, nil
		}},
		{ID: "install-docker", Title: "Install Docker", Run: func(_ context.Context, log func(string)) (Result, error) {
			log("reading package lists\r\n")
			time.Sleep(2500 * time.Millisecond)
			log("a line that is longer than a terminal is wide and would be wrapped, which could not be erased again")
			time.Sleep(63200 * time.Millisecond)
			return Result{Changed: true, Message: "docker.io 20.10.24"}, nil
		}},
		{ID: "sysctl", Title: "Forward packets", Run: func(context.Context, func(string)) (Result, error) {
			return Result{Message: "ip_forward is 1"}, nil
		}},
		{ID: "rules", Title: "Apply the rules", Run: func(_ context.Context, log func(string)) (Result, error) {
			log("bell \a and escape \x1b[2J")
			time.Sleep(3300 * time.Millisecond)
			return Result{}, errors.New("permission denied\nrun it as root: sudo klimax-guest install")
		}},
		{ID: "never", Title: "Never", Run: func(context.Context, func(string)) (Result, error) { panic("run after a failed step") }},
	}
}

func TestRenderers(t *testing.T) {
	for name, mode := range map[string]Mode{"plain": Plain, "terminal": Terminal, "color": TerminalColor, "json": JSON} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var b bytes.Buffer
				err := Run(t.Context(), New(&b, mode, nil), story())
				if err == nil || !strings.HasPrefix(err.Error(), "Apply the rules: permission denied") {
					t.Errorf("Run = %v", err)
				}
				synctest.Wait() // no goroutine may be left: synctest.Test fails then
				golden(t, name+".golden", b.Bytes())
			})
		})
	}
}

// The terminal's screen, once all escape sequences are carried out, is one
// line for each finished step and nothing else.
func TestTerminalLeavesFinishedStepsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		_ = Run(t.Context(), New(&b, Terminal, nil), story())
		want := "= Look around\n" +
			"✓ Install Docker (1 m 05 s): docker.io 20.10.24\n" +
			"= Forward packets: ip_forward is 1\n" +
			"✗ Apply the rules (3.3 s): permission denied\n" +
			"    run it as root: sudo klimax-guest install\n" +
			"    | bell   and escape  [2J\n"
		if got := screen(t, b.String()); got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
	})
}

// screen carries out the two sequences that the terminal renderer uses.
func screen(t *testing.T, s string) string {
	t.Helper()
	var lines []string
	for s != "" {
		if up, after, ok := strings.Cut(s, "A\x1b[J"); ok && strings.HasPrefix(up, "\x1b[") && len(up) < 5 {
			var n int
			if _, err := fmt.Sscanf(up, "\x1b[%d", &n); err != nil || n > len(lines) {
				t.Fatalf("%q with %d lines: %v", up, len(lines), err)
			}
			lines, s = lines[:len(lines)-n], after
			continue
		}
		line, after, _ := strings.Cut(s, "\n")
		if strings.Contains(line, "\x1b") {
			t.Fatalf("escape within %q", line)
		}
		lines, s = append(lines, line), after
	}
	return strings.Join(lines, "\n") + "\n"
}

func TestRunStopsWhenTheContextEnds(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("interrupted by the user")
	steps := []Step{
		{ID: "a", Title: "A", Run: func(context.Context, func(string)) (Result, error) { cancel(why); return Result{Changed: true}, nil }},
		{ID: "b", Title: "B", Run: func(context.Context, func(string)) (Result, error) { t.Error("B ran"); return Result{}, nil }},
	}
	if err := Run(ctx, Discard{}, steps); !errors.Is(err, why) || err.Error() != "B: not begun: interrupted by the user" {
		t.Errorf("Run = %v", err)
	}
}

// Several goroutines may use a sink, and each JSON line stays whole.
func TestConcurrentUse(t *testing.T) {
	for _, mode := range []Mode{Plain, Terminal, TerminalColor, JSON} {
		var b bytes.Buffer
		s := New(&b, mode, nil)
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for j := range 20 {
					id := fmt.Sprintf("step-%d-%d", i, j)
					s.Event(Event{Step: id, State: Started})
					s.Event(Event{Step: id, State: Log, Message: "x"})
					s.Event(Event{Step: id, State: Done, Millis: 1})
				}
			})
		}
		wg.Wait()
		if mode != JSON {
			if got := strings.Count(b.String(), "(0.0 s)"); got != 160 {
				t.Errorf("mode %d: %d finished steps, want 160", mode, got)
			}
			continue
		}
		dec, n := json.NewDecoder(&b), 0
		for {
			var e Event
			if err := dec.Decode(&e); errors.Is(err, io.EOF) {
				break
			} else if err != nil || e.Time.IsZero() {
				t.Fatalf("event %d: %+v, %v", n, e, err)
			}
			n++
		}
		if n != 480 {
			t.Errorf("%d events, want 480", n)
		}
	}
}

func TestDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0 s", 40 * time.Millisecond: "0.0 s", 440 * time.Millisecond: "0.4 s", 3 * time.Second: "3 s",
		12600 * time.Millisecond: "13 s", 65 * time.Second: "1 m 05 s", 3601 * time.Second: "60 m 01 s",
	} {
		if got := duration(d); got != want {
			t.Errorf("duration(%v) = %q, want %q", d, got, want)
		}
	}
}
