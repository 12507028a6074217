// Package logring writes log lines for journald or a file and keeps the last
// ones in memory, for `klimax-guest logs`.
package logring

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"slices"
	"sync"
)

// Ring keeps the last lines written to it. It is safe for concurrent use.
type Ring struct {
	mu    sync.Mutex
	size  int
	lines [][]byte
	subs  map[chan struct{}]bool
	total int // lines ever written
}

// New makes a ring of at most size lines.
func New(size int) *Ring { return &Ring{size: size, subs: map[chan struct{}]bool{}} }

// Write takes whole lines, as log handlers write them.
func (r *Ring) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for line := range bytes.Lines(p) {
		r.lines = append(r.lines, slices.Clone(line))
		r.total++
	}
	if over := len(r.lines) - r.size; over > 0 {
		r.lines = slices.Delete(r.lines, 0, over)
	}
	for c := range r.subs {
		select {
		case c <- struct{}{}:
		default:
		}
	}
	return len(p), nil
}

// after returns the lines behind number seen that are still kept, and the
// number of the last one.
func (r *Ring) after(seen int) ([]byte, int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fresh := min(r.total-seen, len(r.lines))
	return bytes.Join(r.lines[len(r.lines)-fresh:], nil), r.total
}

// Copy writes the last n lines (all of them for n < 0) and, with follow, every
// new one until the context ends. flush is called after each write.
func (r *Ring) Copy(ctx context.Context, w io.Writer, n int, follow bool, flush func()) error {
	c := make(chan struct{}, 1)
	r.mu.Lock()
	r.subs[c] = true
	seen := r.total - len(r.lines)
	if n >= 0 {
		seen = max(seen, r.total-n)
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		delete(r.subs, c)
		r.mu.Unlock()
	}()
	for {
		var b []byte
		if b, seen = r.after(seen); len(b) > 0 {
			if _, err := w.Write(b); err != nil {
				return err
			}
			flush()
		}
		if !follow {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-c:
		}
	}
}

// Handler logs to the ring with time stamps and to out: with journald's level
// prefixes and no time of its own where journald reads it, else like the ring.
func Handler(out io.Writer, journald bool, level slog.Level, ring *Ring) slog.Handler {
	plain := &slog.HandlerOptions{Level: level}
	hs := tee{slog.NewTextHandler(ring, plain)}
	if journald {
		noTime := &slog.HandlerOptions{Level: level, ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if len(groups) == 0 && (a.Key == slog.TimeKey || a.Key == slog.LevelKey) {
				return slog.Attr{}
			}
			return a
		}}
		var mu sync.Mutex
		return append(hs, journal{new(bytes.Buffer), &mu, out, nil, noTime})
	}
	return append(hs, slog.NewTextHandler(out, plain))
}

type tee []slog.Handler

func (t tee) Enabled(ctx context.Context, l slog.Level) bool { return t[0].Enabled(ctx, l) }

func (t tee) Handle(ctx context.Context, r slog.Record) error {
	var err error
	for _, h := range t {
		if e := h.Handle(ctx, r.Clone()); e != nil {
			err = e
		}
	}
	return err
}

func (t tee) WithAttrs(a []slog.Attr) slog.Handler {
	out := make(tee, len(t))
	for i, h := range t {
		out[i] = h.WithAttrs(a)
	}
	return out
}

func (t tee) WithGroup(name string) slog.Handler {
	out := make(tee, len(t))
	for i, h := range t {
		out[i] = h.WithGroup(name)
	}
	return out
}

// journal prefixes each line with "<N>", which journald reads as its priority,
// sd-daemon(3).
type journal struct {
	buf  *bytes.Buffer
	mu   *sync.Mutex
	out  io.Writer
	with []func(slog.Handler) slog.Handler
	opts *slog.HandlerOptions
}

func (j journal) Enabled(_ context.Context, l slog.Level) bool { return l >= j.opts.Level.Level() }

func (j journal) Handle(ctx context.Context, r slog.Record) error {
	prefix := "<7>"
	switch {
	case r.Level >= slog.LevelError:
		prefix = "<3>"
	case r.Level >= slog.LevelWarn:
		prefix = "<4>"
	case r.Level >= slog.LevelInfo:
		prefix = "<6>"
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.buf.Reset()
	j.buf.WriteString(prefix)
	var h slog.Handler = slog.NewTextHandler(j.buf, j.opts)
	for _, f := range j.with {
		h = f(h)
	}
	if err := h.Handle(ctx, r); err != nil {
		return err
	}
	_, err := j.out.Write(j.buf.Bytes())
	return err
}

func (j journal) WithAttrs(a []slog.Attr) slog.Handler {
	j.with = append(slices.Clip(j.with), func(h slog.Handler) slog.Handler { return h.WithAttrs(a) })
	return j
}

func (j journal) WithGroup(name string) slog.Handler {
	j.with = append(slices.Clip(j.with), func(h slog.Handler) slog.Handler { return h.WithGroup(name) })
	return j
}
