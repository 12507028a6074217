package progress

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// Step is one step of a long operation. Run does it and may be called again:
// what is as wanted already is left alone and reported as not Changed. It calls
// log for lines of detail, from any goroutine, until it returns.
type Step struct {
	ID    string // kebab-case, stable
	Title string // for people, without a full stop
	Run   func(ctx context.Context, log func(line string)) (Result, error)
}

// Result is what a step that did not fail has to say.
type Result struct {
	Changed bool
	Message string // may be empty
}

// Run runs the steps one after the other, tells sink about each, and stops at
// the first that fails or when ctx ends. The error names the step by its title.
func Run(ctx context.Context, sink Sink, steps []Step) error {
	for _, s := range steps {
		if ctx.Err() != nil {
			return fmt.Errorf("%s: not begun: %w", s.Title, context.Cause(ctx))
		}
		if err := run(ctx, sink, s); err != nil {
			return fmt.Errorf("%s: %w", s.Title, err)
		}
	}
	return nil
}

func run(ctx context.Context, sink Sink, s Step) error {
	start := time.Now()
	event := func(state State, message string, millis int64) {
		sink.Event(Event{Time: time.Now(), Step: s.ID, Title: s.Title, State: state, Message: message, Millis: millis})
	}
	event(Started, "", 0)
	result, err := s.Run(ctx, func(line string) { event(Log, strings.TrimRight(line, "\r\n"), 0) })
	millis := time.Since(start).Milliseconds()
	switch {
	case err != nil:
		event(Failed, err.Error(), millis)
	case result.Changed:
		event(Done, result.Message, millis)
	default:
		event(Same, result.Message, millis)
	}
	return err
}
