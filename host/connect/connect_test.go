package connect

import (
	"errors"
	"strings"
	"testing"

	"klimax/shared/config"
)

func TestResolve(t *testing.T) {
	for _, c := range []struct {
		flag, kind, goos string
		socket           string
		err              []string
	}{
		{flag: "unix:///run/x.sock", goos: "darwin", socket: "/run/x.sock"},
		{flag: "unix:///run//y/../x.sock", kind: "lima", goos: "linux", socket: "/run/x.sock"},
		{flag: "local", goos: "linux", socket: DefaultSocket},
		{goos: "linux", socket: DefaultSocket},
		{kind: "local", goos: "linux", socket: DefaultSocket},

		{goos: "darwin", err: []string{"guest.type: lima (the default on darwin) is not in this version", "--guest unix:///"}},
		{kind: "lima", goos: "linux", err: []string{"guest.type: lima is not in this version"}},
		{kind: "ssh", goos: "linux", err: []string{"guest.type: ssh is not in this version", "guest.type: local"}},
		{kind: "local", goos: "darwin", err: []string{"local is for Linux"}},
		{kind: "podman", goos: "linux", err: []string{`"podman" is unknown`}},
		{flag: "ssh://root@box", goos: "linux", err: []string{"--guest ssh://root@box: a guest over ssh is not in this version"}},
		{flag: "lima", goos: "darwin", err: []string{"a guest over lima is not in this version"}},
		{flag: "unix://run/x.sock", goos: "linux", err: []string{"names a host", "unix:///run/x.sock"}},
		{flag: "/run/x.sock", goos: "linux", err: []string{"not of the form unix:///path", "write --guest unix:///run/x.sock"}},
		{flag: "tcp://1.2.3.4:80", goos: "linux", err: []string{"not of the form unix:///path"}},
		{flag: "unix://", goos: "linux", err: []string{"names no socket"}},
		{flag: "unix:///run/", goos: "linux", err: []string{"names no socket"}},
		{flag: "unix:///" + strings.Repeat("x", 103), goos: "linux", err: []string{"104 bytes", "at most 103"}},
		{flag: "%zz", goos: "linux", err: []string{"not of the form"}},
	} {
		got, err := Resolve(c.flag, config.Guest{Type: c.kind}, c.goos)
		if len(c.err) == 0 {
			if err != nil || got.Socket != c.socket || got.String() != "unix://"+c.socket {
				t.Errorf("%+v: got %v, %v", c, got, err)
			}
			continue
		}
		var e *Error
		if !errors.As(err, &e) {
			t.Errorf("%+v: got %v, %v", c, got, err)
			continue
		}
		for _, w := range c.err {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%+v: got %v, want %q", c, err, w)
			}
		}
	}
}
