//go:build linux

package probe

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

// LoopTimeout is how long a connection of a loop may take. It is below the kernel's first retransmission of
// a SYN (1 s), so that a single dropped packet counts as a lost connection.
const LoopTimeout = 900 * time.Millisecond

// Sample is one connection.
type Sample struct {
	At   time.Duration // when the SYN was sent, since the loop's start
	Took time.Duration // until the answer or the failure
	Peer string        // the caller's address as the server saw it; empty when lost
	Err  string        // Kind of the error; empty when not lost
}

// Result is what a loop saw.
type Result struct {
	Target    string
	Start     time.Time
	Total     int
	Lost      int
	Peers     map[string]int // answered connections by the address that the server saw
	Errors    map[string]int // lost connections by Kind
	FirstLost time.Duration  // offset from Start of the first lost connection; 0 when none was
	LastLost  time.Duration
	MaxGap    time.Duration // the longest time between the starts of two answered connections in a row
	MaxTook   time.Duration // the slowest answered connection
	Samples   []Sample      // by At
}

// String is one line for test logs.
func (r Result) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d connections, %d lost", r.Target, r.Total, r.Lost)
	for _, k := range slices.Sorted(maps.Keys(r.Errors)) {
		fmt.Fprintf(&b, " %s×%d", k, r.Errors[k])
	}
	if r.Lost > 0 {
		fmt.Fprintf(&b, " (from %v to %v)", r.FirstLost.Round(time.Millisecond), r.LastLost.Round(time.Millisecond))
	}
	for _, k := range slices.Sorted(maps.Keys(r.Peers)) {
		fmt.Fprintf(&b, ", peer %s×%d", k, r.Peers[k])
	}
	fmt.Fprintf(&b, ", longest gap %v, slowest %v", r.MaxGap.Round(time.Millisecond), r.MaxTook.Round(100*time.Microsecond))
	return b.String()
}

// Loop opens a new connection every interval until Stop, whether or not the former ones are answered.
type Loop struct {
	target string
	start  time.Time
	stop   chan struct{}
	done   chan struct{}
	once   sync.Once
	wg     sync.WaitGroup

	mu      sync.Mutex
	samples []Sample
	err     error // entering the namespace failed
}

// NewLoop starts a loop from the namespace of in, which is held by one OS thread until Stop.
func NewLoop(in Enter, target string, interval time.Duration) (*Loop, error) {
	to, err := netip.ParseAddrPort(target)
	if err != nil {
		return nil, fmt.Errorf("loop: %w", err)
	}
	if interval <= 0 {
		return nil, fmt.Errorf("loop %s: interval %v is not above zero", target, interval)
	}
	l := &Loop{target: target, stop: make(chan struct{}), done: make(chan struct{})}
	entered := make(chan struct{})
	go func() {
		defer close(l.done)
		err := in(func() error {
			l.start = time.Now()
			close(entered)
			l.run(to, interval)
			return nil
		})
		l.mu.Lock()
		l.err = err
		l.mu.Unlock()
	}()
	select {
	case <-entered:
		return l, nil
	case <-l.done:
		return nil, fmt.Errorf("loop %s: %w", target, l.err)
	}
}

// run keeps to the schedule start + n × interval: a late tick is made up for at once, none is left out.
func (l *Loop) run(to netip.AddrPort, interval time.Duration) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for n := 0; ; n++ {
		timer.Reset(time.Until(l.start.Add(time.Duration(n) * interval)))
		select {
		case <-l.stop:
			return
		case <-timer.C:
		}
		at := time.Now()
		f, err := dial(to)
		if err != nil {
			l.add(at, "", err)
			continue
		}
		l.wg.Go(func() {
			defer f.Close()
			peer, err := line(f, at.Add(LoopTimeout))
			l.add(at, peer, err)
		})
	}
}

func (l *Loop) add(at time.Time, peer string, err error) {
	s := Sample{At: at.Sub(l.start), Took: time.Since(at), Peer: peer}
	if err != nil {
		s.Err = Kind(err)
	}
	l.mu.Lock()
	l.samples = append(l.samples, s)
	l.mu.Unlock()
}

// Lost is the number of connections that failed so far.
func (l *Loop) Lost() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, s := range l.samples {
		if s.Err != "" {
			n++
		}
	}
	return n
}

// Stop ends the loop, waits for the connections that are still open (at most LoopTimeout) and returns what
// was seen. It may be called again and returns the same.
func (l *Loop) Stop() Result {
	l.once.Do(func() { close(l.stop) })
	<-l.done
	l.wg.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	return summarize(l.target, l.start, slices.Clone(l.samples))
}

func summarize(target string, start time.Time, samples []Sample) Result {
	slices.SortStableFunc(samples, func(a, b Sample) int { return cmp.Compare(a.At, b.At) })
	r := Result{Target: target, Start: start, Total: len(samples), Peers: map[string]int{}, Errors: map[string]int{}, Samples: samples}
	var good time.Duration // the last answered connection's start
	for _, s := range samples {
		if s.Err != "" {
			if r.Lost == 0 {
				r.FirstLost = s.At
			}
			r.Lost++
			r.LastLost = s.At
			r.Errors[s.Err]++
			continue
		}
		r.Peers[s.Peer]++
		r.MaxGap = max(r.MaxGap, s.At-good)
		r.MaxTook = max(r.MaxTook, s.Took)
		good = s.At
	}
	if len(samples) > 0 { // a gap that lasted until the end is one, too
		r.MaxGap = max(r.MaxGap, samples[len(samples)-1].At-good)
	}
	return r
}

// Flow is one long-lived connection on which a byte goes forth and back every interval.
type Flow struct {
	target string
	peer   string
	stop   chan struct{}
	done   chan struct{}
	once   sync.Once

	mu     sync.Mutex
	n      int
	maxRTT time.Duration
	err    error
}

// flowPatience is how long a byte may take. TCP repairs a short loss by itself; a flow whose packets are
// dropped for longer is broken.
const flowPatience = 8 * time.Second

// NewFlow opens the connection from the namespace of in; the first answer must come within 2 s.
func NewFlow(in Enter, target string, interval time.Duration) (*Flow, error) {
	to, err := netip.ParseAddrPort(target)
	if err != nil {
		return nil, fmt.Errorf("flow: %w", err)
	}
	var c *os.File
	if err := in(func() (err error) { c, err = dial(to); return err }); err != nil {
		return nil, fmt.Errorf("flow %s: %w", target, err)
	}
	f := &Flow{target: target, stop: make(chan struct{}), done: make(chan struct{})}
	if f.peer, err = line(c, time.Now().Add(2*time.Second)); err != nil {
		c.Close()
		return nil, fmt.Errorf("flow %s: %s: %w", target, Kind(err), err)
	}
	go func() {
		defer close(f.done)
		defer c.Close()
		f.run(c, interval)
	}()
	return f, nil
}

func (f *Flow) run(c *os.File, interval time.Duration) {
	start := time.Now()
	b := make([]byte, 1)
	for {
		last := false
		select {
		case <-f.stop: // one more exchange: the flow must be whole at the end
			last = true
		case <-time.After(interval):
		}
		at := time.Now()
		c.SetDeadline(at.Add(flowPatience))
		_, err := c.Write([]byte{'x'})
		if err == nil {
			_, err = c.Read(b)
		}
		f.mu.Lock()
		if err != nil {
			f.err = fmt.Errorf("flow %s (peer %s) broke %v after its start, after %d exchanges: %s: %w",
				f.target, f.peer, at.Sub(start).Round(time.Millisecond), f.n, Kind(err), err)
		} else {
			f.n++
			f.maxRTT = max(f.maxRTT, time.Since(at))
		}
		f.mu.Unlock()
		if err != nil || last {
			return
		}
	}
}

// Peer is the address from which the server saw the flow come.
func (f *Flow) Peer() string { return f.peer }

// Exchanges is how many bytes went forth and back so far, and the slowest of them.
func (f *Flow) Exchanges() (n int, slowest time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n, f.maxRTT
}

// Stop makes a last exchange, closes the flow and returns nil when it was never broken.
func (f *Flow) Stop() error {
	f.once.Do(func() { close(f.stop) })
	<-f.done
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}
