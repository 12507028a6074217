//go:build linux

// Package probe makes the TCP connections that tests measure with, and answers them: a server that tells
// each caller the address it sees, single connections, loops of connections and long-lived flows.
package probe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Enter runs a function on an OS thread that is in the network namespace to be measured from. A socket
// belongs to the namespace of the thread that made it, whoever uses it later.
type Enter func(func() error) error

// Here is the Enter of the namespace that the process is in.
func Here(f func() error) error { return f() }

// dial makes a socket in the calling thread's namespace and sends the SYN; it does not wait for the
// answer. The first read reports a connection that failed. Without Go's dialer, which may make the socket
// on another goroutine, and so on a thread in another namespace.
func dial(to netip.AddrPort) (*os.File, error) {
	if !to.Addr().Is4() {
		return nil, fmt.Errorf("connect to %s: not an IPv4 address and port", to)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	// A reset instead of a FIN when closed: no TIME_WAIT piles up over thousands of connections.
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("setsockopt", err)
	}
	unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		unix.Close(fd)
		return nil, os.NewSyscallError("connect", err)
	}
	return os.NewFile(uintptr(fd), to.String()), nil
}

// line reads the server's first line: the peer's address.
func line(f *os.File, deadline time.Time) (string, error) {
	if err := f.SetReadDeadline(deadline); err != nil {
		return "", err
	}
	b := make([]byte, 64)
	n := 0
	for {
		m, err := f.Read(b[n:])
		n += m
		if s, _, ok := strings.Cut(string(b[:n]), "\n"); ok {
			return s, nil
		}
		if err != nil {
			return "", err
		}
		if n == len(b) {
			return "", fmt.Errorf("no line in the first %d bytes", n)
		}
	}
}

// Get connects once and returns the address from which the server saw the connection come.
func Get(in Enter, target string, timeout time.Duration) (string, error) {
	to, err := netip.ParseAddrPort(target)
	if err != nil {
		return "", fmt.Errorf("get: %w", err)
	}
	deadline := time.Now().Add(timeout)
	var f *os.File
	err = in(func() (err error) { f, err = dial(to); return err })
	if err != nil {
		return "", fmt.Errorf("get %s: %w", target, err)
	}
	defer f.Close()
	peer, err := line(f, deadline)
	if err != nil {
		return "", fmt.Errorf("get %s: %s: %w", target, Kind(err), err)
	}
	return peer, nil
}

// Kind is one word for what went wrong with a connection, fit for counting: timeout, refused, reset,
// closed, no-host, no-network or the error's own text.
func Kind(err error) string {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, unix.ETIMEDOUT), errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.Is(err, unix.ECONNREFUSED):
		return "refused"
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return "reset"
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrClosed):
		return "closed"
	case errors.Is(err, unix.EHOSTUNREACH):
		return "no-host"
	case errors.Is(err, unix.ENETUNREACH):
		return "no-network"
	}
	return err.Error()
}
