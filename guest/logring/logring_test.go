package logring

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
)

func TestRing(t *testing.T) {
	r := New(3)
	for i := range 5 {
		fmt.Fprintf(r, "line %d\n", i)
	}
	get := func(n int) string {
		var b bytes.Buffer
		if err := r.Copy(t.Context(), &b, n, false, func() {}); err != nil {
			t.Error(err)
		}
		return b.String()
	}
	if got := get(-1); got != "line 2\nline 3\nline 4\n" {
		t.Errorf("%q", got)
	}
	if got := get(1); got != "line 4\n" {
		t.Errorf("%q", got)
	}
	if got := get(0); got != "" {
		t.Errorf("%q", got)
	}
	if got := get(99); got != "line 2\nline 3\nline 4\n" {
		t.Errorf("%q", got)
	}
}

type chanWriter chan string

func (c chanWriter) Write(p []byte) (int, error) { c <- string(p); return len(p), nil }

func TestRingFollow(t *testing.T) {
	r := New(10)
	fmt.Fprintln(r, "old")
	ctx, cancel := context.WithCancel(t.Context())
	got, done := make(chanWriter, 10), make(chan error, 1)
	go func() { done <- r.Copy(ctx, got, 0, true, func() {}) }()
	time.Sleep(20 * time.Millisecond)
	fmt.Fprintln(r, "new")
	if s := <-got; s != "new\n" {
		t.Errorf("%q", s)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestHandler(t *testing.T) {
	var out bytes.Buffer
	ring := New(10)
	log := slog.New(Handler(&out, true, slog.LevelInfo, ring)).With("part", "x")
	log.Debug("hidden")
	log.Info("told", "n", 1)
	log.Warn("careful")
	log.WithGroup("g").Error("bad", "n", 2)
	if got := out.String(); got != "<6>msg=told part=x n=1\n<4>msg=careful part=x\n<3>msg=bad part=x g.n=2\n" {
		t.Errorf("journal: %q", got)
	}
	var b bytes.Buffer
	_ = ring.Copy(t.Context(), &b, -1, false, func() {})
	if lines := strings.Split(strings.TrimSpace(b.String()), "\n"); len(lines) != 3 || !strings.Contains(lines[0], "time=") || !strings.Contains(lines[0], "level=INFO msg=told part=x n=1") {
		t.Errorf("ring: %q", lines)
	}
	out.Reset()
	slog.New(Handler(&out, false, slog.LevelInfo, ring)).Info("told")
	if !strings.HasPrefix(out.String(), "time=") {
		t.Errorf("file: %q", out.String())
	}
}
