package reconcile

import (
	"context"
	"slices"
	"sync"

	"klimax/guest/facts"
	"klimax/guest/network"
	"klimax/shared/api"
	"klimax/shared/netplan"
)

// seen is the last look, kept to read counters again without a new one.
type seen struct {
	mu    sync.Mutex
	valid bool
	plan  netplan.Plan
	facts facts.Facts
	want  network.Ruleset
}

// remember keeps a look and reports whether it found damage: something that was
// wanted when it began as it was wanted in the look before, and was not there.
func (l *Loop) remember(p netplan.Plan, r round) (damage bool) {
	l.seen.mu.Lock()
	defer l.seen.mu.Unlock()
	damage = l.seen.valid && damaged(r.first, l.seen.want, r.firstWant)
	l.seen.valid, l.seen.plan, l.seen.facts, l.seen.want = true, p, r.facts, r.want
	return damage
}

func damaged(d network.Change, before, now network.Ruleset) bool {
	return d.Rebuild || d.IPForward ||
		slices.ContainsFunc(d.Sets, func(name string) bool { return slices.Equal(before.Sets[name], now.Sets[name]) }) ||
		slices.ContainsFunc(d.Chains, func(ch network.Chain) bool { return slices.Equal(before.Rules[ch], now.Rules[ch]) })
}

// RefreshCounters puts what the rules have matched until now on the board.
func (l *Loop) RefreshCounters(ctx context.Context) {
	l.seen.mu.Lock()
	valid, p, f, want := l.seen.valid, l.seen.plan, l.seen.facts, l.seen.want
	l.seen.mu.Unlock()
	if !valid {
		return
	}
	have, _, err := l.kernel.Rules(ctx, p.Bridge)
	if err != nil {
		return // the next look will say so
	}
	l.seen.mu.Lock()
	defer l.seen.mu.Unlock()
	if l.seen.want.String() == want.String() { // else a look came in between
		l.board.refresh(func(s *api.Status) { s.Network.Rules = network.Summary(want, have, f) })
	}
}
