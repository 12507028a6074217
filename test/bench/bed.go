//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"

	"klimax/test/lab"
)

// bed is what a lab takes for the test that made it: here it is a part of the
// benchmark. What fails in it ends that part, and the others go on.
type bed struct {
	testing.TB // nil; it only lends the interface's unexported method

	ctx context.Context

	mu       sync.Mutex
	cleanups []func()
	notes    []string // what is only worth telling when the part failed
	errs     []error
}

// inLab makes a lab, runs f in it and removes it. The error is whatever f or
// the lab reported by the methods of testing.TB.
func inLab(ctx context.Context, o lab.Options, f func(t *bed, l *lab.Lab)) error {
	return inBed(ctx, func(t *bed) { f(t, lab.New(t, o)) })
}

// inBed runs f in a goroutine that Fatal can end, then the clean-ups.
func inBed(ctx context.Context, f func(t *bed)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	t := &bed{ctx: ctx}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer t.clean()
		defer cancel() // before the clean-ups, as package testing does
		f(t)
	}()
	<-done
	if len(t.errs) == 0 {
		return nil
	}
	for _, n := range t.notes {
		t.errs = append(t.errs, errors.New(n))
	}
	return errors.Join(t.errs...)
}

// clean runs the clean-ups, the last registered one first; one that ends its
// goroutine does not keep the others from running.
func (t *bed) clean() {
	for {
		t.mu.Lock()
		n := len(t.cleanups)
		if n == 0 {
			t.mu.Unlock()
			return
		}
		f := t.cleanups[n-1]
		t.cleanups = slices.Delete(t.cleanups, n-1, n)
		t.mu.Unlock()
		done := make(chan struct{})
		go func() {
			defer close(done)
			f()
		}()
		<-done
	}
}

func (t *bed) fail(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.errs = append(t.errs, errors.New(text))
}

// Helper does nothing: there are no line numbers to get right.
func (t *bed) Helper() {}

// Context ends when the part has ended or the benchmark is interrupted.
func (t *bed) Context() context.Context { return t.ctx }

// Cleanup registers what runs at the part's end, last first.
func (t *bed) Cleanup(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cleanups = append(t.cleanups, f)
}

// Failed reports whether anything was reported.
func (t *bed) Failed() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.errs) > 0
}

// Logf keeps a note, which is shown when the part fails.
func (t *bed) Logf(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.notes = append(t.notes, fmt.Sprintf(format, args...))
}

// Errorf reports a failure and goes on.
func (t *bed) Errorf(format string, args ...any) { t.fail(fmt.Sprintf(format, args...)) }

// Fatal reports a failure and ends the part; it must be called on the part's
// own goroutine.
func (t *bed) Fatal(args ...any) {
	t.fail(fmt.Sprint(args...))
	runtime.Goexit()
}

// Fatalf is Fatal with a format.
func (t *bed) Fatalf(format string, args ...any) {
	t.fail(fmt.Sprintf(format, args...))
	runtime.Goexit()
}
