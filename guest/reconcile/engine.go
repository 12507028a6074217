package reconcile

import (
	"context"
	"fmt"
	"sync"
	"time"

	"klimax/guest/docker"
	"klimax/guest/facts"
	"klimax/shared/config"
	"klimax/shared/netplan"
)

// engineState is what was last learned of the engine, shared between the
// goroutine that asks it and the one that reconciles.
type engineState struct {
	mu        sync.Mutex
	engine    facts.Engine
	restarts  int
	connected int   // streams of events so far
	gen       int64 // the configuration with which it was asked last
	since     time.Time
}

// get also tells whether the engine was asked, and its network looked after,
// with a configuration of at least this generation.
func (s *engineState) get(gen int64) (e facts.Engine, restarts int, settled bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.engine, s.restarts, s.gen >= gen
}

// runningSince tells since when the engine that runs now is known to run.
func (s *engineState) runningSince() (time.Time, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.since, s.engine.Running
}

// learn stores what Read found. An engine that does not answer, or not
// everything, keeps what was known of it: its network and containers may well
// be alive (live-restore).
func (s *engineState) learn(e facts.Engine, gen int64) (changed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !e.Known {
		old := s.engine
		old.Running, old.Reason, old.Problem = e.Running, e.Reason, e.Problem
		e = old
	}
	if e.Running && !s.engine.Running {
		s.since = time.Now()
	}
	changed = !e.Equal(s.engine) || s.gen != gen
	s.engine, s.gen = e, gen
	return changed
}

// lost notes the end of a stream of events.
func (s *engineState) lost() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.engine.Running = false
	s.engine.Reason, s.engine.Problem = "Stopped", "the Docker engine stopped"
}

func (s *engineState) connect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.connected++; s.connected > 1 {
		s.restarts++
	}
}

// followDocker listens to the engine and asks for looks at it.
func (l *Loop) followDocker(ctx context.Context) {
	l.engine.Follow(ctx, func(s docker.Signal) {
		switch s {
		case docker.Connected:
			l.dockerState.connect()
			l.dockerNews.Set(nowReason)
			l.log.Info("connected to the Docker engine")
		case docker.Lost:
			l.dockerState.lost()
			l.log.Info("the Docker engine stopped")
			l.Kick("the Docker engine stopped")
		case docker.Changed:
			l.dockerNews.Set("a container or network changed")
		}
	})
}

// nowReason asks for a look without waiting for silence: a new engine.
const nowReason = "the Docker engine started"

// dockerPoll is how often an engine that does not answer is asked again for
// the status; its start is noticed much sooner, by the stream of events.
const dockerPoll = 10 * time.Second

// refreshDocker asks the engine whenever there is news of it, many events at
// once, and makes the network when it is missing.
func (l *Loop) refreshDocker(ctx context.Context) {
	l.dockerNews.Set("start")
	poll := time.NewTicker(dockerPoll)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-poll.C:
			if e, _, _ := l.dockerState.get(0); e.Running && e.Problem == "" && e.Network.Problem == "" {
				continue
			}
			l.dockerNews.Set("timer")
		case <-l.dockerNews.C():
		}
		reason, since := l.dockerNews.Take()
		if reason == "a container or network changed" {
			l.waitForSilence(ctx, since)
			l.dockerNews.Take()
		}
		l.askDocker(ctx, reason)
	}
}

// waitForSilence returns when no event came for a while, or after a bound.
func (l *Loop) waitForSilence(ctx context.Context, since time.Time) {
	for time.Since(since) < l.timing.DockerMax {
		select {
		case <-ctx.Done():
			return
		case <-time.After(l.timing.DockerSettle):
			return
		case <-l.dockerNews.C():
		}
	}
}

func (l *Loop) askDocker(ctx context.Context, reason string) {
	cfg, gen, err := l.want.get()
	if err != nil {
		return
	}
	plan, err := cfg.Plan()
	if err != nil {
		return
	}
	e := l.engine.Read(ctx, cfg, plan)
	if e.Running && e.Network.Reason == "Missing" {
		e = l.makeNetwork(ctx, cfg, plan, e)
	}
	if ctx.Err() != nil {
		return
	}
	if l.dockerState.learn(e, gen) || reason == nowReason {
		l.Kick("docker: " + reason)
	}
}

// makeNetwork creates the routed network, unless the guest has a route that
// its range would shadow.
func (l *Loop) makeNetwork(ctx context.Context, cfg config.Config, plan netplan.Plan, e facts.Engine) facts.Engine {
	f, err := l.kernel.Facts(ctx, Query(cfg, plan, e))
	if err == nil {
		for _, o := range f.Overlaps {
			if o.Range == plan.Bridge {
				e.Network.Reason, e.Network.Problem = "RouteOverlap", overlapText(o)
				return e
			}
		}
	}
	created, err := l.engine.EnsureNetwork(ctx, cfg, plan)
	if err != nil {
		l.log.Error("the Docker network could not be made", "network", cfg.Network.DockerNetwork, "error", err)
		e.Network.Reason, e.Network.Problem = "CreateFailed", err.Error()
		return e
	}
	if created {
		l.log.Info("Docker network created", "network", cfg.Network.DockerNetwork, "subnet", plan.Bridge)
	}
	return l.engine.Read(ctx, cfg, plan)
}

func overlapText(o facts.Overlap) string {
	dev := ""
	if o.Device != "" {
		dev = " (" + o.Device + ")"
	}
	return fmt.Sprintf("the route %v%s of this machine overlaps %v: choose another %s", o.Route, dev, o.Range, o.Key)
}
