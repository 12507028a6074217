//go:build linux

package main

import (
	"net"
	"strings"
	"testing"

	"klimax/test/lab/probe"
)

func TestRun(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := probe.Serve(ln, true)
	defer s.Close()
	none, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	none.Close()
	for _, tt := range []struct{ args, err string }{
		{"get ADDR", ""},
		{"loop --interval 5ms --for 50ms ADDR", ""},
		{"flow --interval 5ms --for 50ms ADDR", ""},
		{"get NONE", "refused"},
		{"loop --interval 5ms --for 20ms NONE", "were lost"},
		{"flow NONE", "refused"},
		{"serve ADDR", "address already in use"},
		{"", "no command"},
		{"get", "takes one address"},
		{"dance ADDR", `no command "dance"`},
		{"get --no-flag ADDR", "not defined"},
	} {
		args := strings.Fields(strings.NewReplacer("ADDR", s.Addr(), "NONE", none.Addr().String()).Replace(tt.args))
		err := run(args)
		if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("%q: %v, want %q", tt.args, err, tt.err)
		}
	}
	if n := len(s.Seen()); n < 8 {
		t.Errorf("the server saw %d connections", n)
	}
}
