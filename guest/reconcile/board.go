package reconcile

import (
	"context"
	"slices"
	"sync"

	"klimax/shared/api"
)

// Board holds the status and tells subscribers when it changes.
type Board struct {
	mu     sync.Mutex
	status api.Status
	reason string
	subs   map[chan struct{}]bool
}

// NewBoard makes a board that shows s at first.
func NewBoard(s api.Status) *Board {
	return &Board{status: s, subs: map[chan struct{}]bool{}}
}

// Status returns a copy.
func (b *Board) Status() api.Status {
	b.mu.Lock()
	defer b.mu.Unlock()
	return clone(b.status)
}

// Update changes the status and wakes subscribers.
func (b *Board) Update(reason string, f func(*api.Status)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(&b.status)
	b.reason = reason
	for c := range b.subs {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// Follow calls f with the status, at once and after every change, until the
// context ends or f fails. A slow f misses states in between, never the last.
func (b *Board) Follow(ctx context.Context, f func(reason string, s api.Status) error) error {
	c := make(chan struct{}, 1)
	c <- struct{}{}
	b.mu.Lock()
	b.subs[c] = true
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		delete(b.subs, c)
		b.mu.Unlock()
	}()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-c:
			b.mu.Lock()
			reason, s := b.reason, clone(b.status)
			b.mu.Unlock()
			if err := f(reason, s); err != nil {
				return err
			}
		}
	}
}

func clone(s api.Status) api.Status {
	s.Network.Allow = slices.Clone(s.Network.Allow)
	s.Network.Ranges = slices.Clone(s.Network.Ranges)
	s.Network.Rules = slices.Clone(s.Network.Rules)
	s.Clusters = slices.Clone(s.Clusters)
	s.Mirrors = slices.Clone(s.Mirrors)
	s.Callers = slices.Clone(s.Callers)
	s.Conditions = slices.Clone(s.Conditions)
	return s
}

func setCondition(s *api.Status, kind string, status api.ConditionStatus, reason, message string) {
	c := api.Condition{Type: kind, Status: status, Reason: reason, Message: message}
	for i := range s.Conditions {
		if s.Conditions[i].Type == kind {
			s.Conditions[i] = c
			return
		}
	}
	s.Conditions = append(s.Conditions, c)
}

// SetCondition sets one condition that is not the loop's own.
func (b *Board) SetCondition(c api.Condition) {
	b.Update(c.Type, func(s *api.Status) { setCondition(s, c.Type, c.Status, c.Reason, c.Message) })
}

// refresh changes the status without telling subscribers: nothing happened.
func (b *Board) refresh(f func(*api.Status)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(&b.status)
}
