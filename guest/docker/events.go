package docker

import (
	"context"
	"path/filepath"
	"sync"
	"time"

	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/filters"
	"github.com/fsnotify/fsnotify"
)

// Signal is what Follow reports.
type Signal string

// The signals.
const (
	Connected Signal = "connected" // a stream began: everything may be different
	Changed   Signal = "changed"   // a network or container came, went or changed
	Lost      Signal = "lost"      // the stream ended: the engine is going or gone
)

// Reconnection delays: an engine that restarts is noticed soon, one that stays
// away costs next to nothing.
const (
	firstRetry = 50 * time.Millisecond
	lastRetry  = time.Second
)

// refusal is how long after its answer a refused call for events may take to
// tell its error.
const refusal = 10 * time.Millisecond

// gate keeps this client away from an engine that is stopping or stopped.
//
// There are two reasons. Engine 29 waits 5 s for an open stream of events when
// it shuts down with live-restore and running containers, so the stream has to
// be closed as soon as the engine begins to stop. And where systemd holds the
// socket, each connection to it starts the engine that somebody just stopped.
type gate struct {
	mu     sync.Mutex
	closed bool
	stream context.CancelFunc // of the open stream, nil while there is none
	permit func(context.Context) bool
	wake   chan struct{}
}

// SetPermit gives the client a function that it asks before it makes a
// connection while it has no stream of events: news of a stopping unit may
// come later than the end of the stream.
func (c *Client) SetPermit(permit func(context.Context) bool) {
	c.gate.mu.Lock()
	defer c.gate.mu.Unlock()
	c.gate.permit = permit
}

// allows reports whether the engine may be asked something now.
func (g *gate) allows(ctx context.Context) bool {
	g.mu.Lock()
	closed, streaming, permit := g.closed, g.stream != nil, g.permit
	g.mu.Unlock()
	return !closed && (streaming || permit == nil || permit(ctx))
}

// UnitState tells the client the state of the engine's systemd unit.
func (c *Client) UnitState(state string) {
	stopped := state == "deactivating" || state == "inactive" || state == "failed"
	c.gate.mu.Lock()
	c.gate.closed = stopped
	if stopped && c.gate.stream != nil {
		c.gate.stream()
	}
	c.gate.mu.Unlock()
	c.gate.nudge()
}

func (g *gate) nudge() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

func (g *gate) isClosed() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.closed
}

// open registers a stream; false when the gate is closed.
func (g *gate) open(cancel context.CancelFunc) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.stream = cancel
	return true
}

func (g *gate) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stream = nil
}

// Follow reports the engine's events until the context ends. After a break of
// the stream it connects again and reports Connected; the caller then reads
// everything anew, so that nothing that happened in between is missed.
func (c *Client) Follow(ctx context.Context, notify func(Signal)) {
	watch := c.watchSocket(ctx)
	delay := firstRetry
	for ctx.Err() == nil {
		watch.aim()
		if c.gate.allows(ctx) && c.follow(ctx, watch, notify) {
			delay = firstRetry
		}
		timer := time.NewTimer(delay)
		select {
		case <-ctx.Done():
		case <-timer.C:
			delay = min(delay*2, lastRetry)
		case <-c.gate.wake:
			delay = firstRetry
		}
		timer.Stop()
	}
}

// socketWatch ends the stream when the engine removes its socket, which is the
// first thing it does when it shuts down, and cuts waiting short when a socket
// appears. Without inotify only time is lost.
type socketWatch struct {
	c *Client
	w *fsnotify.Watcher // nil without inotify

	mu   sync.Mutex
	sock string // the socket's path without symbolic links
}

func (c *Client) watchSocket(ctx context.Context) *socketWatch {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return &socketWatch{c: c}
	}
	s := &socketWatch{c: c, w: w}
	go s.run(ctx)
	return s
}

// aim watches the directory in which the socket is or will be. It is called
// again and again: the directory may come and go with the engine.
func (s *socketWatch) aim() {
	if s.w == nil {
		return
	}
	sock, err := filepath.EvalSymlinks(s.c.Socket())
	if err != nil {
		dir, err := filepath.EvalSymlinks(filepath.Dir(s.c.Socket()))
		if err != nil {
			return
		}
		sock = filepath.Join(dir, filepath.Base(s.c.Socket()))
	}
	s.mu.Lock()
	s.sock = sock
	s.mu.Unlock()
	_ = s.w.Add(filepath.Dir(sock))
}

func (s *socketWatch) run(ctx context.Context) {
	defer func() { _ = s.w.Close() }()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.w.Errors:
		case e := <-s.w.Events:
			s.mu.Lock()
			ours := e.Name == s.sock
			s.mu.Unlock()
			if !ours || !e.Has(fsnotify.Create) && !e.Has(fsnotify.Remove) && !e.Has(fsnotify.Rename) {
				continue
			}
			if !e.Has(fsnotify.Create) {
				s.c.gate.mu.Lock()
				if s.c.gate.stream != nil {
					s.c.gate.stream()
				}
				s.c.gate.mu.Unlock()
			}
			s.c.gate.nudge()
		}
	}
}

// follow reads one stream to its end and reports whether there was one.
func (c *Client) follow(life context.Context, watch *socketWatch, notify func(Signal)) (connected bool) {
	ctx, cancel := context.WithCancel(life)
	defer cancel()
	if !c.gate.open(cancel) {
		return false
	}
	defer c.gate.end()
	// The stream's own call succeeds only once the engine answers; a ping says
	// so first, with a limit. Another engine may answer now.
	if c.renew() != nil {
		return false
	}
	ping, stop := context.WithTimeout(ctx, callTimeout)
	_, err := c.API().Ping(ping)
	stop()
	if err != nil {
		return false
	}
	watch.aim() // the directory may have come together with the socket
	msgs, errs := c.API().Events(ctx, events.ListOptions{Filters: filters.NewArgs(
		filters.Arg("type", string(events.ContainerEventType)),
		filters.Arg("type", string(events.NetworkEventType)),
		filters.Arg("type", string(events.DaemonEventType)),
	)})
	// A call that is refused ends at once; it is no stream.
	select {
	case <-errs:
		return false
	case <-time.After(refusal):
	}
	notify(Connected)
	for {
		select {
		case m := <-msgs:
			if matters(m) {
				notify(Changed)
			}
		case <-errs:
			if life.Err() == nil {
				notify(Lost)
			}
			return true
		}
	}
}

// matters leaves out what cannot change rules: health checks and execs are
// most of what a busy cluster reports.
func matters(m events.Message) bool {
	switch m.Action {
	case events.ActionCreate, events.ActionStart, events.ActionDie, events.ActionDestroy, events.ActionRename,
		events.ActionConnect, events.ActionDisconnect, events.ActionRemove, events.ActionReload, events.ActionUpdate:
		return true
	}
	return false
}
