// Package connect decides where the guest's agent is and how to dial it.
package connect

import (
	"fmt"
	"net/url"
	"path/filepath"
	"strings"

	"klimax/shared/client"
	"klimax/shared/config"
)

// DefaultSocket is the agent's socket on a guest that is this very machine.
const DefaultSocket = "/run/klimax/guest.sock"

// maxSocketPath is the longest path that a unix socket may have on macOS, in
// bytes (sun_path less its NUL); Linux takes 107.
const maxSocketPath = 103

// Target is where the agent is.
type Target struct {
	Socket string // path of its unix socket
}

// String is the value of --guest that leads there.
func (t Target) String() string { return "unix://" + t.Socket }

// Client returns a client for the agent; it does not dial yet.
func (t Target) Client(hostVersion string) *client.Client { return client.Unix(t.Socket, hostVersion) }

// Error says that the guest was named in a way that cannot be used. Nothing
// was tried.
type Error struct {
	Message string
	Hint    string // what works
}

func (e *Error) Error() string { return e.Message + "\n  " + e.Hint }

const works = "what works: a guest on this Linux machine (guest.type: local), or any agent's socket that is visible here: --guest unix:///path/to/guest.sock"

// Resolve turns the value of --guest, or without one the configuration, into a
// target. goos is the platform that decides what an empty guest.type means.
func Resolve(flag string, g config.Guest, goos string) (Target, error) {
	if flag != "" {
		return parse(flag)
	}
	kind := g.Type
	if kind == "" {
		kind = config.GuestLima
		if goos == "linux" {
			kind = config.GuestLocal
		}
	}
	switch {
	case kind == config.GuestLocal && goos != "linux":
		return Target{}, &Error{"guest.type: local is for Linux: a guest needs a Linux kernel, and this is " + goos, works}
	case kind == config.GuestLocal:
		return Target{Socket: DefaultSocket}, nil
	case kind == config.GuestSSH, kind == config.GuestLima:
		why := "guest.type: " + kind
		if g.Type == "" {
			why += " (the default on " + goos + ")"
		}
		return Target{}, &Error{why + " is not in this version of klimax yet", works}
	}
	return Target{}, &Error{fmt.Sprintf("guest.type: %q is unknown", kind), works}
}

func parse(flag string) (Target, error) {
	u, err := url.Parse(flag)
	scheme, _, _ := strings.Cut(flag, ":")
	switch {
	case flag == config.GuestLocal:
		return Target{Socket: DefaultSocket}, nil
	case scheme == config.GuestSSH, scheme == config.GuestLima:
		return Target{}, &Error{"--guest " + flag + ": a guest over " + scheme + " is not in this version of klimax yet", works}
	case err == nil && u.Scheme == "unix" && u.Host != "":
		return Target{}, &Error{"--guest " + flag + " names a host, and a socket has none", "write three slashes: --guest unix:///" + u.Host + u.Path}
	case err != nil || u.Scheme != "unix":
		hint := works
		if filepath.IsAbs(flag) {
			hint = "write --guest unix://" + flag
		}
		return Target{}, &Error{"--guest " + flag + " is not of the form unix:///path", hint}
	}
	return socket(u.Path)
}

func socket(path string) (Target, error) {
	problem := ""
	switch {
	case path == "" || strings.HasSuffix(path, "/"):
		problem = "names no socket"
	case len(path) > maxSocketPath:
		problem = fmt.Sprintf("has a path of %d bytes, a socket's has at most %d", len(path), maxSocketPath)
	}
	if problem != "" {
		return Target{}, &Error{"--guest unix://" + path + " " + problem, "give the agent's socket, for example --guest unix://" + DefaultSocket}
	}
	return Target{Socket: filepath.Clean(path)}, nil
}
