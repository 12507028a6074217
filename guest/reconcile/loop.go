// Package reconcile keeps the kernel's rules equal to what is wanted: one
// goroutine debounces news, reads facts, computes, compares, applies, reads
// back, and publishes the status.
package reconcile

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"sync/atomic"
	"time"

	"klimax/guest/docker"
	"klimax/guest/facts"
	"klimax/guest/network"
	"klimax/shared/api"
	"klimax/shared/config"
	"klimax/shared/netplan"
)

// Engine is what the loop needs of Docker.
type Engine interface {
	Read(ctx context.Context, c config.Config, p netplan.Plan) facts.Engine
	EnsureNetwork(ctx context.Context, c config.Config, p netplan.Plan) (created bool, err error)
	Follow(ctx context.Context, notify func(docker.Signal))
}

// Kernel is what the loop needs of the kernel; tests count and break it.
type Kernel interface {
	Facts(ctx context.Context, q facts.KernelQuery) (facts.Facts, error)
	Rules(ctx context.Context, bridge netip.Prefix) (network.State, facts.Firewall, error)
	Apply(ctx context.Context, c network.Change) error
	EnableForwarding(ctx context.Context) error
}

// Timing holds every delay of the loop; Defaults fills it.
type Timing struct {
	Settle       time.Duration // news of the kernel are collected this long
	MinSpacing   time.Duration // between two looks, after a change
	MaxSpacing   time.Duration // between two looks, while they find nothing to do
	DockerSettle time.Duration // events of Docker are collected until this long a silence
	DockerMax    time.Duration // but no longer than this
	Resync       time.Duration // a look without news
	Retry        time.Duration // after a failed look; doubled with each, up to maxRetries times this
	Grace        time.Duration // how long Docker's own rules may be missing, and a started engine may be silent
}

// Defaults are the delays of the agent.
func Defaults() Timing {
	return Timing{
		Settle: 2 * time.Millisecond, MinSpacing: 10 * time.Millisecond, MaxSpacing: 40 * time.Millisecond,
		DockerSettle: 200 * time.Millisecond, DockerMax: time.Second,
		Resync: 30 * time.Second, Retry: 100 * time.Millisecond, Grace: 5 * time.Second,
	}
}

// maxRetries bounds the pause after a failed look: what cannot be mended must
// not fill the log.
const maxRetries = 64

// calm is how long without a look the spacing of looks starts over.
const calm = 250 * time.Millisecond

// Loop is the reconciler. Make it with New and run Run once.
type Loop struct {
	engine Engine
	kernel Kernel
	log    *slog.Logger
	timing Timing
	board  *Board

	kernelNews *Trigger
	dockerNews *Trigger

	want want // configuration, guarded by its own lock

	// Owned by the kernel goroutine.
	applied     bool          // rules were right at least once
	retry       time.Duration // the next pause after a failed look, 0 after a good one
	dockerOddAt time.Time
	lookedAt    time.Time
	spacing     time.Duration

	dockerState engineState
	seen        seen
	heartbeat   atomic.Pointer[time.Time] // of the last round
}

// Alive reports whether the reconciling goroutine went through its loop within
// d, or within its resync interval where that is longer. A clock that is set
// (the guest of a computer that slept) does not matter: the time of the last
// round is kept with its monotonic reading.
func (l *Loop) Alive(d time.Duration) bool {
	last := l.heartbeat.Load()
	return last != nil && time.Since(*last) < max(d, 2*l.timing.Resync)
}

// Options for New.
type Options struct {
	Engine Engine
	Kernel Kernel
	Log    *slog.Logger
	Timing Timing
	Board  *Board
}

// New makes a loop that does nothing until SetConfig and Run are called.
func New(o Options) *Loop {
	return &Loop{
		engine: o.Engine, kernel: o.Kernel, log: o.Log, timing: o.Timing, board: o.Board,
		kernelNews: NewTrigger(time.Now), dockerNews: NewTrigger(time.Now),
	}
}

// Kick says that something in the kernel may have changed.
func (l *Loop) Kick(reason string) { l.kernelNews.Set(reason) }

// KickDocker says that the engine may have come, gone or changed.
func (l *Loop) KickDocker(reason string) { l.dockerNews.Set(reason) }

// Run reconciles until the context ends. Rules stay when it returns.
func (l *Loop) Run(ctx context.Context) {
	done := make(chan struct{}, 2)
	go func() { defer func() { done <- struct{}{} }(); l.followDocker(ctx) }()
	go func() { defer func() { done <- struct{}{} }(); l.refreshDocker(ctx) }()
	l.kernelNews.Set("start")
	l.reconcile(ctx)
	<-done
	<-done
}

func (l *Loop) reconcile(ctx context.Context) {
	resync := time.NewTimer(l.timing.Resync)
	defer resync.Stop()
	retry := time.NewTimer(math.MaxInt64)
	retry.Stop()
	l.spacing = l.timing.MinSpacing
	for {
		now := time.Now()
		l.heartbeat.Store(&now)
		select {
		case <-ctx.Done():
			return
		case <-resync.C:
			l.kernelNews.Set("timer")
		case <-retry.C:
			l.kernelNews.Set("retry")
		case <-l.kernelNews.C():
			pause := max(l.timing.Settle, l.spacing-time.Since(l.lookedAt))
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
		}
		reason, since := l.kernelNews.Take()
		if reason == "" {
			continue
		}
		again := l.look(ctx, reason, since)
		l.lookedAt = time.Now()
		resync.Reset(l.timing.Resync)
		retry.Stop()
		if again > 0 {
			retry.Reset(again)
		}
	}
}

// look is one round. It returns after which time to look again without news, 0
// for no such need.
func (l *Loop) look(ctx context.Context, reason string, since time.Time) time.Duration {
	cfg, gen, cfgErr := l.want.get()
	if cfgErr != nil {
		// Without a valid configuration the rules stay as they are: that is
		// what worked last.
		l.board.Update(reason, func(s *api.Status) {
			setCondition(s, api.CondConfig, api.False, "Invalid", cfgErr.Error())
			s.Network.LastReason = "the configuration is invalid, rules are left as they are"
			s.Network.InSync = false
		})
		return 0
	}
	plan, err := cfg.Plan()
	if err != nil {
		return 0 // a validated configuration has a plan
	}
	engine, restarts, settled := l.dockerState.get(gen)
	r, err := l.converge(ctx, cfg, plan, engine)
	if ctx.Err() != nil {
		return 0
	}
	took := time.Since(since)
	switch {
	case err != nil && l.retry == 0:
		l.log.Error("rules could not be brought in sync", "reason", reason, "error", err)
		l.spacing = l.timing.MinSpacing
	case err == nil && r.changed():
		l.log.Info("rules applied", "reason", reason, "changed", r.first.String(), "millis", millis(took))
		l.spacing = l.timing.MinSpacing
	case time.Since(l.lookedAt) > calm:
		l.spacing = l.timing.MinSpacing
	default:
		l.spacing = min(l.spacing*2, l.timing.MaxSpacing)
	}
	l.log.Debug("looked", "reason", reason, "changed", r.first.String(), "millis", millis(took), "error", err)
	if err != nil {
		l.retry = min(max(2*l.retry, l.timing.Retry), maxRetries*l.timing.Retry)
	} else {
		l.retry = 0
	}
	if !r.read { // what was known is better than nothing
		l.board.Update(reason, func(s *api.Status) { outOfSync(s, err) })
		return l.retry
	}
	repair := l.remember(plan, r) && l.applied
	odd := l.dockerRulesOdd(r.facts)
	l.board.Update(reason, func(s *api.Status) {
		describe(s, cfg, plan, r.facts, r.want, r.have, restarts)
		conditions(s, cfg, r.facts, odd)
		if err != nil {
			outOfSync(s, err)
			return
		}
		s.Network.InSync = true
		setCondition(s, api.CondRules, api.True, "InSync", "all rules are in the kernel as wanted")
		if r.changed() {
			s.Network.LastApplied = time.Now()
			s.Network.LastReason = reason + ": " + r.first.String()
			if repair {
				s.Network.Repairs++
				s.Network.LastRepairMillis = millis(took)
			}
		}
		// Docker is settled once it was asked with this configuration.
		if settled {
			s.Generation.Reconciled = gen
		}
	})
	l.applied = l.applied || err == nil
	switch {
	case err != nil:
		return l.retry
	case odd == oddWaiting:
		return l.timing.Grace
	}
	return 0
}

func outOfSync(s *api.Status, err error) {
	s.Network.InSync = false
	setCondition(s, api.CondRules, api.False, "OutOfSync", err.Error())
}

// round is what one round found and did.
type round struct {
	facts facts.Facts
	want  network.Ruleset
	have  network.State
	read  bool // everything above is there

	// What was different at first, and what was wanted then: Docker, while it
	// starts, changes from one moment to the next what is wanted.
	first     network.Change
	firstWant network.Ruleset
}

func (r round) changed() bool { return r.read && !r.first.Empty() }

// converge reads, computes, applies and reads back until the kernel is as
// wanted.
func (l *Loop) converge(ctx context.Context, cfg config.Config, plan netplan.Plan, engine facts.Engine) (round, error) {
	var r round
	for attempt := 0; ; attempt++ {
		f, have, err := l.read(ctx, cfg, plan, engine)
		if err != nil {
			return r, err
		}
		r.facts, r.have, r.want = f, have, desired(cfg, plan, f, have)
		d := network.Diff(r.want, have, f)
		if !r.read {
			r.first, r.firstWant, r.read = d, r.want, true
		}
		switch {
		case d.Empty():
			return r, nil
		case attempt == maxAttempts:
			return r, fmt.Errorf("somebody else keeps changing the rules: %v", d)
		}
		if d.IPForward {
			if err := l.kernel.EnableForwarding(ctx); err != nil {
				return r, err
			}
		}
		if err := l.kernel.Apply(ctx, d); err != nil && !network.Stale(err) {
			return r, err
		}
	}
}

// maxAttempts bounds how often rules are applied in one round.
const maxAttempts = 8

func desired(cfg config.Config, plan netplan.Plan, f facts.Facts, have network.State) network.Ruleset {
	want := network.Desired(cfg, plan, f)
	if !f.Engine.Known {
		want = network.Keep(want, have)
	}
	return want
}

func (l *Loop) read(ctx context.Context, cfg config.Config, plan netplan.Plan, engine facts.Engine) (facts.Facts, network.State, error) {
	q := Query(cfg, plan, engine)
	f, err := l.kernel.Facts(ctx, q)
	if err != nil {
		return f, network.State{}, err
	}
	have, fw, err := l.kernel.Rules(ctx, plan.Bridge)
	if err != nil {
		return f, have, err
	}
	f.Engine, f.Firewall = engine, fw
	return f, have, nil
}

// Query says what to ask the kernel for, given what is known of the engine.
func Query(cfg config.Config, plan netplan.Plan, engine facts.Engine) facts.KernelQuery {
	q := facts.KernelQuery{
		Uplink: cfg.Network.Uplink, Gateway: plan.Gateway(), Bridge: cfg.BridgeName(),
		Plan: []facts.PlannedUse{{Range: plan.Bridge, Key: "network.kindBridgeCIDR"}},
	}
	if engine.Network.Found {
		q.Bridge = engine.Network.Bridge
		if engine.Network.Gateway.IsValid() {
			q.Gateway = engine.Network.Gateway
		}
	}
	for _, c := range engine.Clusters {
		if pc, err := plan.Cluster(c.Number); err == nil {
			q.Plan = append(q.Plan, facts.PlannedUse{Range: pc.Routed, Key: "kind.clusterCIDRBase"})
		}
	}
	return q
}

func millis(d time.Duration) float64 { return math.Round(float64(d.Microseconds())/10) / 100 }
