package up

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"

	"klimax/shared/api"
	"klimax/shared/progress"
)

// demoServer answers like the demo; seen is what it says that it sees.
func demoServer(t *testing.T, seen func(r *http.Request) string) func(context.Context, string, string) (net.Conn, error) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "klimax demo: you are %s, this is 172.30.99.200\n", seen(r))
	}))
	t.Cleanup(s.Close)
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		if address != "172.30.99.200:80" {
			return nil, fmt.Errorf("dialled %s", address)
		}
		var d net.Dialer
		return d.DialContext(ctx, network, s.Listener.Addr().String())
	}
}

func TestProbeDemo(t *testing.T) {
	own := func(r *http.Request) string { h, _, _ := net.SplitHostPort(r.RemoteAddr); return h }
	for name, c := range map[string]struct {
		dial func(context.Context, string, string) (net.Conn, error)
		err  string
	}{
		"sees this computer": {demoServer(t, own), ""},
		"sees the bridge":    {demoServer(t, func(*http.Request) string { return "172.30.0.1" }), "does not see this computer's address 127.0.0.1, it says: klimax demo: you are 172.30.0.1"},
		"almost the same":    {demoServer(t, func(*http.Request) string { return "127.0.0.11" }), "does not see this computer's address"},
		"dead": {func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no route to host") },
			"the demo at 172.30.99.200:80 does not answer from here"},
		"refuses": {func(context.Context, string, string) (net.Conn, error) { return nil, syscall.ECONNREFUSED }, "does not answer from here"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.opts.Dial = c.dial
			w.guest.status.Clusters = []api.Cluster{{Name: "demo", Number: 99, Demo: true, Nodes: []string{"172.30.99.2"}, VIP: "172.30.99.200"}}
			res, err := w.up(t)
			if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
				t.Errorf("got %v, want %q", err, c.err)
			}
			if res.Demo != "http://172.30.99.200/" {
				t.Errorf("demo %q", res.Demo)
			}
			if c.err == "" && !strings.Contains(w.log.all(progress.Same), "probe: the demo at 172.30.99.200 sees this computer as 127.0.0.1") {
				t.Errorf("said\n%s", w.log.all(progress.Same))
			}
		})
	}
}

func TestProbe(t *testing.T) {
	dev := []api.Cluster{{Name: "dev", Number: 1, Nodes: []string{"172.30.1.2", "172.30.1.3"}}}
	for name, c := range map[string]struct {
		clusters []api.Cluster
		answer   map[string]error
		err      string
		said     string
	}{
		"node refuses":     {dev, map[string]error{"172.30.1.2:6443": syscall.ECONNREFUSED}, "", "cluster dev answers at 172.30.1.2"},
		"node unreachable": {dev, map[string]error{"172.30.1.2:6443": syscall.EHOSTUNREACH}, "cluster dev at 172.30.1.2:6443 does not answer from here", ""},
		"node silent":      {dev, map[string]error{"172.30.1.2:6443": context.DeadlineExceeded}, "does not answer from here", ""},
		"bridge refuses":   {nil, map[string]error{"172.30.0.1:9": syscall.ECONNREFUSED}, "", "the bridge answers at 172.30.0.1"},
		"bridge silent":    {nil, map[string]error{"172.30.0.1:9": context.DeadlineExceeded}, "", "nothing runs there that could be tried"},
		"bridge no route":  {nil, map[string]error{"172.30.0.1:9": syscall.ENETUNREACH}, "the bridge at 172.30.0.1:9 does not answer", ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.guest.status.Clusters = c.clusters
			w.opts.Dial = func(_ context.Context, _, address string) (net.Conn, error) {
				err, ok := c.answer[address]
				if !ok {
					t.Errorf("dialled %s", address)
				}
				return nil, &net.OpError{Op: "dial", Err: err}
			}
			_, err := w.up(t)
			if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
				t.Errorf("got %v, want %q", err, c.err)
			}
			if !strings.Contains(w.log.all(progress.Same), c.said) {
				t.Errorf("said\n%s", w.log.all(progress.Same))
			}
		})
	}
}
