//go:build linux

package lab

import (
	"time"

	"klimax/test/lab/probe"
)

// Result, Loop, Flow and Server are those of package probe.
type (
	Result = probe.Result
	Loop   = probe.Loop
	Flow   = probe.Flow
	Server = probe.Server
)

// FlowInterval is the time between two exchanges of a flow.
const FlowInterval = 20 * time.Millisecond

// Get connects once from a namespace and returns the address from which the server saw it come.
func (l *Lab) Get(n *NS, target string, timeout time.Duration) (peer string, err error) {
	return probe.Get(n.Do, target, timeout)
}

// MustGet is Get for a connection that must be answered; want is the peer's address to be seen, or empty.
func (l *Lab) MustGet(n *NS, target, want string) string {
	l.t.Helper()
	peer, err := l.Get(n, target, 2*time.Second)
	if err != nil {
		l.t.Fatalf("from %s: %v", n.Name, err)
	}
	if want != "" && peer != want {
		l.t.Fatalf("from %s: get %s: the server saw %s, want %s", n.Name, target, peer, want)
	}
	return peer
}

// WaitGet repeats Get until it is answered, at most for limit.
func (l *Lab) WaitGet(n *NS, target string, limit time.Duration) (peer string, err error) {
	wait(l.t.Context(), limit, func() bool {
		peer, err = l.Get(n, target, 500*time.Millisecond)
		return err == nil
	})
	return peer, err
}

// Serve listens in a namespace and answers as the containers' servers do; it remembers who called.
func (l *Lab) Serve(n *NS, addr string) *Server {
	l.t.Helper()
	ln, err := n.Listen(addr)
	if err != nil {
		l.t.Fatalf("lab: serve in %s: %v", n.Name, err)
	}
	s := probe.Serve(ln, true)
	l.onClose(func() { s.Close() })
	return s
}

// Loop opens a new connection every interval from a namespace until its Stop.
func (l *Lab) Loop(n *NS, target string, interval time.Duration) *Loop {
	l.t.Helper()
	p, err := probe.NewLoop(n.Do, target, interval)
	if err != nil {
		l.t.Fatalf("lab: from %s: %v", n.Name, err)
	}
	l.onClose(func() { p.Stop() })
	return p
}

// Flow keeps one connection from a namespace busy until its Stop, which says whether it was ever broken.
func (l *Lab) Flow(n *NS, target string) *Flow {
	l.t.Helper()
	f, err := probe.NewFlow(n.Do, target, FlowInterval)
	if err != nil {
		l.t.Fatalf("lab: from %s: %v", n.Name, err)
	}
	l.onClose(func() { f.Stop() })
	return f
}

// Throughput sends to a sink (SinkPort of a server container) for a time and returns bytes per second as the
// receiver counted them.
func (l *Lab) Throughput(n *NS, target string, d time.Duration) (float64, error) {
	return probe.Throughput(n.Do, target, d)
}
