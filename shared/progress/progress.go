// Package progress tells people and programs how far a long operation is:
// a step list on a terminal, plain lines in a pipe, JSON events on request.
package progress

import "time"

// State is what happened to a step.
type State string

// The states of a step. Each step begins with Started and ends with one of
// the last three.
const (
	Started State = "started"
	Log     State = "log"    // a line of detail within a step
	Done    State = "done"   // something was changed
	Same    State = "same"   // nothing had to be changed
	Failed  State = "failed" // Message says why
)

// Event is one line of progress, and one JSON object with -o json.
type Event struct {
	Time    time.Time `json:"time"`
	Step    string    `json:"step"`            // kebab-case ID, stable
	Title   string    `json:"title,omitempty"` // for people
	State   State     `json:"state"`
	Message string    `json:"message,omitempty"`
	Millis  int64     `json:"millis,omitempty"` // on the last event of a step
}

// Sink takes events; it must be safe for use by several goroutines.
type Sink interface{ Event(Event) }
