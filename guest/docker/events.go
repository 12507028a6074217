package docker

import (
	"context"
	"time"

	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/filters"
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

// Follow reports the engine's events until the context ends. After a break of
// the stream it connects again and reports Connected; the caller then reads
// everything anew, so that nothing that happened in between is missed. wake
// cuts a waiting time short, for other news of a starting engine.
func (c *Client) Follow(ctx context.Context, wake <-chan struct{}, notify func(Signal)) {
	delay := firstRetry
	for ctx.Err() == nil {
		if c.follow(ctx, notify) {
			delay = firstRetry
		}
		timer := time.NewTimer(delay)
		select {
		case <-ctx.Done():
		case <-timer.C:
			delay = min(delay*2, lastRetry)
		case <-wake:
			delay = firstRetry
		}
		timer.Stop()
	}
}

// follow reads one stream to its end and reports whether there was one.
func (c *Client) follow(ctx context.Context, notify func(Signal)) (connected bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The stream's own call succeeds only once the engine answers; a ping says
	// so first, with a limit, and negotiates the API version anew: another
	// engine may answer now.
	ping, stop := context.WithTimeout(ctx, callTimeout)
	p, err := c.api.Ping(ping)
	stop()
	if err != nil {
		return false
	}
	c.api.NegotiateAPIVersionPing(p)
	msgs, errs := c.api.Events(ctx, events.ListOptions{Filters: filters.NewArgs(
		filters.Arg("type", string(events.ContainerEventType)),
		filters.Arg("type", string(events.NetworkEventType)),
		filters.Arg("type", string(events.DaemonEventType)),
	)})
	notify(Connected)
	for {
		select {
		case m := <-msgs:
			if matters(m) {
				notify(Changed)
			}
		case <-errs:
			if ctx.Err() == nil {
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
