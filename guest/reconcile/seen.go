package reconcile

import (
	"context"
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

// remember keeps a look and reports whether it wanted the same as the one
// before: what then had to be changed was damage.
func (l *Loop) remember(p netplan.Plan, f facts.Facts, want network.Ruleset) (same bool) {
	l.seen.mu.Lock()
	defer l.seen.mu.Unlock()
	same = l.seen.valid && l.seen.want.String() == want.String()
	l.seen.valid, l.seen.plan, l.seen.facts, l.seen.want = true, p, f, want
	return same
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
	l.board.refresh(func(s *api.Status) { s.Network.Rules = network.Summary(want, have, f) })
}
