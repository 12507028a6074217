package reconcile

import (
	"strings"
	"sync"
	"time"
)

// Trigger collects reasons to look at the world again. Any number of calls of
// Set between two looks becomes one look.
type Trigger struct {
	mu      sync.Mutex
	reasons []string
	first   time.Time // when the oldest pending reason came
	c       chan struct{}
	now     func() time.Time
}

// maxReasons bounds what is kept for people; further ones are counted only.
const maxReasons = 3

// NewTrigger makes a Trigger; now is the clock.
func NewTrigger(now func() time.Time) *Trigger {
	return &Trigger{c: make(chan struct{}, 1), now: now}
}

// Set adds a reason. It never blocks.
func (t *Trigger) Set(reason string) {
	t.mu.Lock()
	if len(t.reasons) == 0 {
		t.first = t.now()
	}
	if len(t.reasons) < maxReasons && !contains(t.reasons, reason) {
		t.reasons = append(t.reasons, reason)
	}
	t.mu.Unlock()
	select {
	case t.c <- struct{}{}:
	default:
	}
}

// C delivers one value while reasons are pending.
func (t *Trigger) C() <-chan struct{} { return t.c }

// Take returns and clears what is pending; since is when the oldest of it came.
func (t *Trigger) Take() (reason string, since time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	select {
	case <-t.c:
	default:
	}
	reason, since = strings.Join(t.reasons, "; "), t.first
	t.reasons = nil
	if reason == "" {
		since = t.now()
	}
	return reason, since
}

func contains(s []string, v string) bool {
	for _, x := range s {
		if x == v {
			return true
		}
	}
	return false
}
