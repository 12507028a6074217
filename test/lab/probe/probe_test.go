//go:build linux

package probe

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

func listen(t *testing.T) net.Listener {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln
}

func TestGet(t *testing.T) {
	s := Serve(listen(t), true)
	defer s.Close()
	for range 3 {
		if peer, err := Get(Here, s.Addr(), time.Second); err != nil || peer != "127.0.0.1" {
			t.Fatalf("%q, %v", peer, err)
		}
	}
	if p := s.Peers(); p["127.0.0.1"] != 3 || len(s.Seen()) != 3 {
		t.Errorf("server saw %v", p)
	}
	closed := listen(t)
	closed.Close()
	silent := listen(t)
	hangup := listen(t)
	go func() {
		for {
			c, err := hangup.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	for target, want := range map[string]string{
		closed.Addr().String(): "refused",
		silent.Addr().String(): "timeout",
		hangup.Addr().String(): "closed",
		"[::1]:80":             "not an IPv4 address",
		"localhost:80":         "unable to parse",
		"240.0.0.1:80":         "240.0.0.1",
	} {
		if peer, err := Get(Here, target, 100*time.Millisecond); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %q, %v; want %s", target, peer, err, want)
		}
	}
}

func TestLoop(t *testing.T) {
	s := Serve(listen(t), true)
	l, err := NewLoop(Here, s.Addr(), 5*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(200 * time.Millisecond)
	before := l.Lost()
	s.Close()
	time.Sleep(100 * time.Millisecond)
	r := l.Stop()
	if before != 0 || r.Lost < 5 || r.Errors["refused"] < 5 || r.Peers["127.0.0.1"] < 20 || r.Total != len(r.Samples) ||
		r.FirstLost < 150*time.Millisecond || r.MaxGap < 50*time.Millisecond {
		t.Errorf("before the end %d lost; %v", before, r)
	}
	if got := l.Stop(); got.Total != r.Total {
		t.Errorf("a second Stop: %v", got)
	}
	if _, err := NewLoop(func(func() error) error { return io.EOF }, s.Addr(), time.Second); err == nil {
		t.Error("no error when the namespace cannot be entered")
	}
}

func TestSummarize(t *testing.T) {
	ms := time.Millisecond
	r := summarize("x", time.Time{}, []Sample{
		{At: 40 * ms, Took: 3 * ms, Peer: "a"},
		{At: 0, Took: 1 * ms, Peer: "a"},
		{At: 10 * ms, Err: "timeout"},
		{At: 20 * ms, Err: "refused"},
		{At: 30 * ms, Peer: "b", Took: 2 * ms},
		{At: 90 * ms, Err: "timeout"},
	})
	got := fmt.Sprint(r.Total, r.Lost, r.Peers, r.Errors, r.FirstLost, r.LastLost, r.MaxGap, r.MaxTook)
	want := "6 3 map[a:2 b:1] map[refused:1 timeout:2] 10ms 90ms 50ms 3ms"
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if s := r.String(); s != "x: 6 connections, 3 lost refused×1 timeout×2 (from 10ms to 90ms), peer a×2, peer b×1, longest gap 50ms, slowest 3ms" {
		t.Error(s)
	}
	if r := summarize("x", time.Time{}, nil); r.Total != 0 || r.MaxGap != 0 {
		t.Errorf("nothing: %v", r)
	}
}

func TestFlow(t *testing.T) {
	s := Serve(listen(t), false)
	whole, err := NewFlow(Here, s.Addr(), 2*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	broken, err := NewFlow(Here, s.Addr(), 2*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond)
	if err := whole.Stop(); err != nil || whole.Peer() != "127.0.0.1" {
		t.Errorf("peer %s: %v", whole.Peer(), err)
	}
	if n, slowest := whole.Exchanges(); n < 5 || slowest == 0 {
		t.Errorf("%d exchanges, slowest %v", n, slowest)
	}
	s.Close()
	if err := broken.Stop(); err == nil || !strings.Contains(err.Error(), "broke") {
		t.Errorf("the server's end went unseen: %v", err)
	}
	if _, err := NewFlow(Here, s.Addr(), time.Second); err == nil {
		t.Error("no error without a server")
	}
}

func TestHTTP(t *testing.T) {
	s := ServeHTTP(listen(t))
	defer s.Close()
	r, err := http.Get("http://" + s.Addr() + "/any")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if b, err := io.ReadAll(r.Body); err != nil || string(b) != "127.0.0.1\n" || r.StatusCode != 200 {
		t.Errorf("%d %q %v", r.StatusCode, b, err)
	}
	h, err := http.Head("http://" + s.Addr())
	if err != nil || h.ContentLength != 10 {
		t.Errorf("HEAD: %v %v", h, err)
	}
}

func TestThroughput(t *testing.T) {
	s := ServeSink(listen(t))
	defer s.Close()
	if n, err := Throughput(Here, s.Addr(), 50*time.Millisecond); err != nil || n < 1e6 {
		t.Errorf("%.0f bytes/s, %v", n, err)
	}
	s.Close()
	if _, err := Throughput(Here, s.Addr(), time.Second); err == nil {
		t.Error("no error without a sink")
	}
}
