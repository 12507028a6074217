package progress

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
	"unicode"
)

// Mode is how events are shown.
type Mode int

// The modes. Which one fits is the caller's decision.
const (
	Plain         Mode = iota // one line for each finished step: pipes, logs
	Terminal                  // finished steps, and running ones redrawn in place
	TerminalColor             // the same in colour
	JSON                      // each event as a JSON object on a line of its own
)

// New returns a sink that shows events on w, to which nothing else may write
// while a step runs. now is the clock for running times and for events that
// carry no time; nil is time.Now. Errors of w are ignored: a closed pipe must
// not stop the operation.
func New(w io.Writer, mode Mode, now func() time.Time) Sink {
	if now == nil {
		now = time.Now
	}
	switch mode {
	case JSON:
		return &jsonSink{w: w, now: now}
	case Terminal, TerminalColor:
		return &terminal{w: w, now: now, color: mode == TerminalColor}
	default:
		return &plain{w: w}
	}
}

// Discard is a sink that shows nothing.
type Discard struct{}

// Event does nothing.
func (Discard) Event(Event) {}

type jsonSink struct {
	now func() time.Time
	mu  sync.Mutex
	w   io.Writer
}

func (s *jsonSink) Event(e Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.Time.IsZero() {
		e.Time = s.now()
	}
	line, err := json.Marshal(e)
	if err != nil { // a year beyond 9999, nothing else
		return
	}
	_, _ = s.w.Write(append(line, '\n'))
}

// keptLines is how many lines of detail are remembered of a running step, to
// be shown when it fails.
const keptLines = 20

type plain struct {
	mu   sync.Mutex
	w    io.Writer
	logs map[string][]string // by step
}

func (s *plain) Event(e Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.logs == nil {
		s.logs = map[string][]string{}
	}
	switch e.State {
	case Started:
		s.logs[e.Step] = nil
	case Log:
		s.logs[e.Step] = keep(s.logs[e.Step], e.Message)
	default:
		_, _ = io.WriteString(s.w, finished(e, s.logs[e.Step], plainMarks))
		delete(s.logs, e.Step)
	}
}

// liveWidth is the longest line, in characters, that is redrawn in place: one
// that the terminal wraps could not be erased again.
const liveWidth = 79

// tick is how often running times are redrawn.
const tick = time.Second

type terminal struct {
	now   func() time.Time
	color bool

	mu      sync.Mutex
	w       io.Writer
	running []*liveStep   // in the order of their start
	drawn   int           // live lines on the screen
	stop    chan struct{} // ends the redrawing, non-nil while a step runs
}

type liveStep struct {
	id, title string
	started   time.Time
	logs      []string
}

func (s *terminal) Event(e Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.Time.IsZero() {
		e.Time = s.now()
	}
	out := s.erase()
	i := s.find(e.Step)
	switch {
	case e.State == Started && i < 0:
		s.running = append(s.running, &liveStep{id: e.Step, title: title(e), started: e.Time})
	case e.State == Log && i >= 0:
		s.running[i].logs = keep(s.running[i].logs, e.Message)
	case e.State == Done, e.State == Same, e.State == Failed:
		var logs []string
		if i >= 0 {
			logs = s.running[i].logs
			s.running = append(s.running[:i], s.running[i+1:]...)
		}
		marks := terminalMarks
		if s.color {
			marks = colorMarks
		}
		out += finished(e, logs, marks)
	}
	_, _ = io.WriteString(s.w, out+s.draw())
	s.keepTicking()
}

func (s *terminal) find(step string) int {
	for i, l := range s.running {
		if l.id == step {
			return i
		}
	}
	return -1
}

// erase returns what removes the live lines from the screen.
func (s *terminal) erase() string {
	if s.drawn == 0 {
		return ""
	}
	return fmt.Sprintf("\x1b[%dA\x1b[J", s.drawn)
}

// draw returns one line for each running step.
func (s *terminal) draw() string {
	var b strings.Builder
	for _, l := range s.running {
		line := []rune(fmt.Sprintf("… %s", l.title))
		if d := s.now().Sub(l.started); d >= tick {
			line = append(line, []rune(" ("+duration(d.Truncate(tick))+")")...)
		}
		if len(l.logs) > 0 {
			line = append(line, []rune("  "+l.logs[len(l.logs)-1])...)
		}
		if len(line) > liveWidth {
			line = append(line[:liveWidth-1], '…')
		}
		b.WriteString(string(line) + "\n")
	}
	s.drawn = len(s.running)
	return b.String()
}

// keepTicking starts or ends the goroutine that redraws running times, so that
// there is one exactly while a step runs.
func (s *terminal) keepTicking() {
	switch {
	case len(s.running) > 0 && s.stop == nil:
		s.stop = make(chan struct{})
		go s.ticks(s.stop)
	case len(s.running) == 0 && s.stop != nil:
		close(s.stop)
		s.stop = nil
	}
}

func (s *terminal) ticks(stop <-chan struct{}) {
	t := time.NewTicker(tick)
	defer t.Stop()
	for {
		select {
		case <-stop:
			return
		case <-t.C:
		}
		s.mu.Lock()
		select {
		case <-stop: // the last step ended while this waited for the lock
		default:
			_, _ = io.WriteString(s.w, s.erase()+s.draw())
		}
		s.mu.Unlock()
	}
}

// marks are the words that begin the line of a finished step.
type marks struct{ done, same, failed, reset string }

var (
	plainMarks    = marks{done: "done    ", same: "same    ", failed: "FAILED  "}
	terminalMarks = marks{done: "✓ ", same: "= ", failed: "✗ "}
	colorMarks    = marks{done: "\x1b[32m✓ ", same: "\x1b[2m= ", failed: "\x1b[31m✗ ", reset: "\x1b[0m"}
)

// finished returns the line of a finished step; with a failed one its last
// lines of detail as well.
func finished(e Event, logs []string, m marks) string {
	mark := m.same
	switch e.State {
	case Done:
		mark = m.done
	case Failed:
		mark = m.failed
	}
	var b strings.Builder
	b.WriteString(mark + title(e) + m.reset)
	if e.State != Same {
		fmt.Fprintf(&b, " (%s)", duration(time.Duration(e.Millis)*time.Millisecond))
	}
	first, rest, _ := strings.Cut(e.Message, "\n")
	if first != "" {
		b.WriteString(": " + printable(first))
	}
	b.WriteByte('\n')
	if rest != "" {
		for line := range strings.SplitSeq(rest, "\n") {
			b.WriteString("    " + printable(line) + "\n")
		}
	}
	if e.State == Failed {
		for _, l := range logs {
			b.WriteString("    | " + l + "\n")
		}
	}
	return b.String()
}

func title(e Event) string {
	if e.Title == "" {
		return printable(e.Step)
	}
	return printable(e.Title)
}

func keep(logs []string, line string) []string {
	logs = append(logs, printable(strings.TrimRight(line, "\r\n")))
	return logs[max(0, len(logs)-keptLines):]
}

// printable replaces control characters: a package manager's output must not
// move the cursor.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s)
}

// duration is d for people: "0.4 s", "12 s", "2 m 05 s".
func duration(d time.Duration) string {
	switch {
	case d < 10*time.Second && d%time.Second != 0:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	}
	s := int(d.Seconds())
	return fmt.Sprintf("%d m %02d s", s/60, s%60)
}
