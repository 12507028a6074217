package up

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"klimax/shared/progress"
)

// Ports that probes connect to.
const (
	nodePort    = 6443 // the API server in a kind node
	demoPort    = 80   // the demo workload's HTTP
	gatewayPort = 9    // "discard": nothing listens there, and the refusal is the answer
)

// target is one address to try.
type target struct {
	addr netip.AddrPort
	what string
	demo bool // answers HTTP with the address that it sees
	// hint is true for an address that may be silent although all is well:
	// the guest's own firewall decides about its own addresses.
	hint bool
}

// targets picks what can be tried without doing harm: the demo by HTTP, the
// nodes of real clusters by a connection to their API server, and without
// either the bridge's own address by a connection that is refused.
func (r *run) targets() []target {
	var out []target
	for _, c := range r.result.Guest.Clusters {
		if vip, err := netip.ParseAddr(c.VIP); err == nil && c.Demo {
			out = append(out, target{addr: netip.AddrPortFrom(vip, demoPort), what: "the demo", demo: true})
			continue
		}
		for _, n := range c.Nodes {
			if a, err := netip.ParseAddr(n); err == nil {
				out = append(out, target{addr: netip.AddrPortFrom(a, nodePort), what: "cluster " + c.Name})
				break // the first is the control plane
			}
		}
	}
	if len(out) == 0 {
		out = append(out, target{addr: netip.AddrPortFrom(r.plan.Gateway(), gatewayPort), what: "the bridge", hint: true})
	}
	return out
}

// probe proves that what should be reachable from here is. After a change it
// tries for a while, else once.
func (r *run) probe(ctx context.Context, _ func(string)) (progress.Result, error) {
	r.reachable()
	targets := r.targets()
	said, errs := make([]string, len(targets)), make([]error, len(targets))
	var wg sync.WaitGroup
	for i, t := range targets {
		wg.Go(func() { said[i], errs[i] = r.try(ctx, t) })
	}
	wg.Wait()
	if ctx.Err() != nil {
		return progress.Result{}, ctx.Err()
	}
	var ok []string
	for i, s := range said {
		if errs[i] == nil {
			ok = append(ok, s)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return progress.Result{}, fmt.Errorf("%w\n  see: klimax status; in the guest: klimax-guest network show", err)
	}
	return progress.Result{Message: strings.Join(ok, "; ")}, nil
}

// reachable lists what can be used from here.
func (r *run) reachable() {
	if r.wanted.Local {
		r.result.Reachable = append(r.result.Reachable, Reachable{r.plan.Bridge.String(), "containers, nodes and load balancer addresses, on this computer"})
	}
	for _, rt := range r.wanted.Routes {
		what := "containers, nodes and load balancer addresses"
		for _, c := range r.result.Guest.Clusters {
			if c.Routed == rt.Dest.String() {
				what = "pods and services of cluster " + c.Name
			}
		}
		r.result.Reachable = append(r.result.Reachable, Reachable{rt.Dest.String(), what})
	}
	for _, c := range r.result.Guest.Clusters {
		if c.Demo && c.VIP != "" {
			r.result.Demo = "http://" + c.VIP + "/"
		}
	}
}

// try probes one target until it answers or its time is over.
func (r *run) try(ctx context.Context, t target) (string, error) {
	end := time.Now().Add(r.Timing.Probe)
	for {
		said, err := r.once(ctx, t)
		if err == nil || ctx.Err() != nil {
			return said, err
		}
		if !r.result.Changed || time.Now().After(end) || t.hint {
			if t.hint && isTimeout(err) {
				return "nothing runs there that could be tried, and " + t.addr.Addr().String() + " keeps silent", nil
			}
			return "", fmt.Errorf("%s at %v does not answer from here: %w", t.what, t.addr, err)
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(r.Timing.Poll):
		}
	}
}

func (r *run) once(ctx context.Context, t target) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, r.Timing.Connect)
	defer cancel()
	if t.demo {
		return r.askDemo(ctx, t.addr)
	}
	conn, err := r.Dial(ctx, "tcp", t.addr.String())
	if err == nil {
		return t.what + " answers at " + t.addr.Addr().String(), conn.Close()
	}
	// A refusal comes from the address itself: it is reached.
	if errors.Is(err, syscall.ECONNREFUSED) {
		return t.what + " answers at " + t.addr.Addr().String(), nil
	}
	return "", err
}

// askDemo gets the demo's page and checks that the demo sees the address that
// this computer used: that containers see real addresses is the point of it.
func (r *run) askDemo(ctx context.Context, at netip.AddrPort) (string, error) {
	var local string
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, Proxy: nil,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := r.Dial(ctx, network, address)
			if err == nil {
				local, _, _ = net.SplitHostPort(conn.LocalAddr().String())
			}
			return conn, err
		}}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at.Addr().String()+":"+strconv.Itoa(int(at.Port()))+"/", nil)
	if err != nil {
		return "", err
	}
	resp, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	const most = 500 // bytes; the page is one line
	body, err := io.ReadAll(io.LimitReader(resp.Body, most))
	if err != nil {
		return "", err
	}
	line := strings.TrimSpace(string(body))
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%s: %s", resp.Status, line)
	}
	for word := range strings.FieldsFuncSeq(line, func(c rune) bool { return c != '.' && (c < '0' || c > '9') }) {
		if word == local {
			return fmt.Sprintf("the demo at %v sees this computer as %s", at.Addr(), local), nil
		}
	}
	return "", fmt.Errorf("it does not see this computer's address %s, it says: %s", local, line)
}

func isTimeout(err error) bool {
	var n net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &n) && n.Timeout()
}
