//go:build linux

package main

import (
	"fmt"
	"slices"
	"time"

	"klimax/test/lab"
)

// interval is the time between two connections of a loop.
const interval = 20 * time.Millisecond

// way is one direction in which connections are made.
type way struct {
	name   string
	from   *lab.NS
	target string
	want   string // the caller's address that the server has to see
	flow   bool   // a long-lived connection runs beside the loop
}

// Traffic is what became of the connections of all ways.
type Traffic struct {
	Total       int      `json:"total"`
	Lost        int      `json:"lost"`
	Foreign     int      `json:"foreign"`     // answered, but seen from an address that is not the caller's own
	Flows       int      `json:"flows"`       // long-lived connections
	BrokenFlows int      `json:"brokenFlows"` //
	MaxGap      float64  `json:"maxGapMillis"`
	MaxTook     float64  `json:"maxTookMillis"`   // the slowest answered connection
	FlowStall   float64  `json:"flowStallMillis"` // the slowest exchange on a long-lived connection
	Ways        []Way    `json:"ways"`
	Losses      []Loss   `json:"losses,omitempty"`
	FlowErrors  []string `json:"flowErrors,omitempty"`
}

// Way is what became of the connections of one way.
type Way struct {
	Name    string         `json:"name"`
	Total   int            `json:"total"`
	Lost    int            `json:"lost"`
	Peers   map[string]int `json:"peers"`
	MaxGap  float64        `json:"maxGapMillis"`
	MaxTook float64        `json:"maxTookMillis"`
}

// Loss is one connection that failed or was seen from a foreign address.
type Loss struct {
	At   time.Time `json:"at"` // when its SYN was sent
	Way  string    `json:"way"`
	What string    `json:"what"` // kind of the error, or the foreign address
	Took float64   `json:"tookMillis"`
}

// clean reports whether nothing at all was lost.
func (t Traffic) clean() bool {
	return t.Total > 0 && t.Lost == 0 && t.Foreign == 0 && t.BrokenFlows == 0
}

func (t Traffic) String() string {
	return fmt.Sprintf("%d lost, %d foreign, %d flows broken of %d + %d; longest gap %.0f ms",
		t.Lost, t.Foreign, t.BrokenFlows, t.Total, t.Flows, t.MaxGap)
}

// add takes another run's traffic in.
func (t *Traffic) add(o Traffic) {
	t.Total += o.Total
	t.Lost += o.Lost
	t.Foreign += o.Foreign
	t.Flows += o.Flows
	t.BrokenFlows += o.BrokenFlows
	t.MaxGap = max(t.MaxGap, o.MaxGap)
	t.MaxTook = max(t.MaxTook, o.MaxTook)
	t.FlowStall = max(t.FlowStall, o.FlowStall)
	t.Ways = append(t.Ways, o.Ways...)
	t.Losses = append(t.Losses, o.Losses...)
	t.FlowErrors = append(t.FlowErrors, o.FlowErrors...)
}

// running are the loops and flows of some ways.
type running struct {
	ways  []way
	loops []*lab.Loop
	flows []*lab.Flow // nil where a way has none
}

func start(l *lab.Lab, ways []way) *running {
	r := &running{ways: ways}
	for _, w := range ways {
		var f *lab.Flow
		if w.flow {
			f = l.Flow(w.from, w.target)
		}
		r.flows = append(r.flows, f)
		r.loops = append(r.loops, l.Loop(w.from, w.target, interval))
	}
	return r
}

// lost is how many connections failed so far.
func (r *running) lost() int {
	n := 0
	for _, l := range r.loops {
		n += l.Lost()
	}
	return n
}

func (r *running) stop() Traffic {
	var t Traffic
	for i, w := range r.ways {
		t.add(count(w, r.loops[i].Stop()))
		f := r.flows[i]
		if f == nil {
			continue
		}
		t.Flows++
		err := f.Stop()
		if err == nil && f.Peer() != w.want {
			err = fmt.Errorf("flow %s: seen from %s, want %s", w.target, f.Peer(), w.want)
		}
		if err != nil {
			t.BrokenFlows++
			t.FlowErrors = append(t.FlowErrors, w.name+": "+err.Error())
		}
		_, slowest := f.Exchanges()
		t.FlowStall = max(t.FlowStall, millis(slowest))
	}
	slices.SortFunc(t.Losses, func(a, b Loss) int { return a.At.Compare(b.At) })
	return t
}

// count sums up one loop.
func count(w way, r lab.Result) Traffic {
	t := Traffic{Total: r.Total, Lost: r.Lost, MaxGap: millis(r.MaxGap), MaxTook: millis(r.MaxTook)}
	t.Ways = []Way{{Name: w.name, Total: r.Total, Lost: r.Lost, Peers: r.Peers, MaxGap: t.MaxGap, MaxTook: t.MaxTook}}
	for _, s := range r.Samples {
		l := Loss{At: r.Start.Add(s.At), Way: w.name, What: s.Err, Took: millis(s.Took)}
		if s.Err == "" {
			if s.Peer == w.want {
				continue
			}
			l.What = "seen from " + s.Peer
			t.Foreign++
		}
		t.Losses = append(t.Losses, l)
	}
	return t
}

// outside counts the lost connections that began while the server was there:
// not within slack of a time in which a control, which reaches the server by
// a path without any packet rule, was lost as well.
func outside(losses []Loss, control lab.Result, slack time.Duration) []Loss {
	var down [][2]time.Time
	open := false
	for _, s := range control.Samples {
		at := control.Start.Add(s.At)
		switch {
		case s.Err == "":
			open = false
		case open:
			down[len(down)-1][1] = at
		default:
			down = append(down, [2]time.Time{at, at})
			open = true
		}
	}
	var out []Loss
	for _, l := range losses {
		if !slices.ContainsFunc(down, func(d [2]time.Time) bool {
			return !l.At.Before(d[0].Add(-slack)) && !l.At.After(d[1].Add(slack))
		}) {
			out = append(out, l)
		}
	}
	return out
}

// millis is a duration in milliseconds, to a microsecond.
func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
