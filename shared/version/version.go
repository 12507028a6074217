// Package version holds the build stamp of both binaries and decides which
// pairs of them may talk to each other.
package version

import (
	"fmt"
	"runtime/debug"
	"strconv"
	"strings"
)

// Version is the release this binary was built as, "MAJOR.MINOR.PATCH" with an
// optional "-suffix". The Makefile sets it with -ldflags -X.
var Version = "0.1.0-dev"

// Info describes a build.
type Info struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// Get returns this binary's build stamp.
func Get() Info {
	i := Info{Version: Version}
	b, ok := debug.ReadBuildInfo()
	if !ok {
		return i
	}
	i.Go = b.GoVersion
	var goos, goarch string
	for _, s := range b.Settings {
		switch s.Key {
		case "vcs.revision":
			i.Revision = s.Value
		case "GOOS":
			goos = s.Value
		case "GOARCH":
			goarch = s.Value
		}
	}
	i.Platform = goos + "/" + goarch
	return i
}

// String is the one-line form that `version` prints after the program's name.
func (i Info) String() string {
	s := i.Version
	if i.Revision != "" {
		s += " (" + i.Revision[:min(12, len(i.Revision))] + ")"
	}
	return s + " " + i.Go + " " + i.Platform
}

// Side names the binary that has to be upgraded.
type Side string

// The two sides of a connection.
const (
	Host  Side = "host"
	Guest Side = "guest"
)

// MismatchError says that two builds cannot work together and which of them
// is the older one.
type MismatchError struct {
	HostVersion, GuestVersion string
	Upgrade                   Side
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("klimax %s on the host and klimax-guest %s in the guest do not work together: upgrade the %s",
		e.HostVersion, e.GuestVersion, e.Upgrade)
}

// Compatible reports whether a host and a guest of these versions may work
// together: they must share MAJOR.MINOR while MAJOR is 0, and MAJOR from 1 on.
// The error is a *MismatchError that names the older side. A version that does
// not parse is treated as compatible: a development build must not lock its
// author out.
func Compatible(host, guest string) error {
	h, hok := parse(host)
	g, gok := parse(guest)
	if !hok || !gok {
		return nil
	}
	if h[0] == g[0] && (h[0] > 0 || h[1] == g[1]) {
		return nil
	}
	older := Guest
	if h[0] < g[0] || h[0] == g[0] && h[1] < g[1] {
		older = Host
	}
	return &MismatchError{HostVersion: host, GuestVersion: guest, Upgrade: older}
}

func parse(v string) (out [2]int, ok bool) {
	v, _, _ = strings.Cut(strings.TrimPrefix(v, "v"), "-")
	parts := strings.Split(v, ".")
	if len(parts) != 3 {
		return out, false
	}
	for i := range out {
		n, err := strconv.Atoi(parts[i])
		if err != nil || n < 0 {
			return out, false
		}
		out[i] = n
	}
	return out, true
}
