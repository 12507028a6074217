package route

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"time"

	"klimax/shared/netplan"
)

// Runner runs one program to its end with the given standard input and returns
// what it printed on both outputs.
type Runner interface {
	Run(ctx context.Context, stdin []byte, name string, args ...string) ([]byte, error)
}

// System is this computer's routing table.
type System struct {
	Runner Runner       // for sudo, and on macOS for netstat and route
	Self   string       // the absolute path of this klimax, which sudo is to run
	Log    *slog.Logger // may not be nil
	// What tests replace.
	root   func() bool
	kernel kernel
	addrs  func() ([]net.Addr, error)
}

// kernel is what differs between the systems.
type kernel interface {
	// routes lists the IPv4 routes; see State and Route.
	routes(ctx context.Context, p netplan.Plan, uplink netip.Prefix) ([]Route, error)
	// apply makes the changes, as far as possible all of them, and joins errors.
	apply(ctx context.Context, changes []Change) error
	// commands says in the system's own words what apply does.
	commands(changes []Change) []string
}

// NewSystem returns the system's routing table. self is the path of this very
// program.
func NewSystem(self string, log *slog.Logger) *System {
	run := execRunner{}
	return &System{Runner: run, Self: self, Log: log, kernel: newKernel(run), addrs: net.InterfaceAddrs,
		root: func() bool { return os.Geteuid() == 0 }}
}

// Current reads the routes and addresses of this computer. uplink is the
// guest's network, used on macOS to tell own routes; it may be invalid.
func (s *System) Current(ctx context.Context, p netplan.Plan, uplink netip.Prefix) (State, error) {
	var st State
	var err error
	if st.Routes, err = s.kernel.routes(ctx, p, uplink); err != nil {
		return st, fmt.Errorf("reading this computer's routes: %w", err)
	}
	sortRoutes(st.Routes)
	addrs, err := s.addrs()
	if err != nil {
		return st, fmt.Errorf("reading this computer's addresses: %w", err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap().Is4() {
				st.Addrs = append(st.Addrs, ip.Unmap())
			}
		}
	}
	return st, nil
}

// Direct reports whether this process may change routes by itself, so that
// Apply will not ask for a password.
func (s *System) Direct() bool { return s.root() }

// Explain returns the commands that Apply will run, or that do the same, for a
// person to see beforehand.
func (s *System) Explain(q Request) []string {
	cmds := s.kernel.commands(q.Changes)
	if s.root() {
		return cmds
	}
	out := []string{"sudo " + s.Self + " route apply   # as root, once; it does:"}
	for _, c := range cmds {
		out = append(out, "  "+c)
	}
	return out
}

// Apply makes the changes: directly when this process may, else through one
// `sudo klimax route apply` with the request on its standard input. sudo asks
// for a password on the terminal by itself. Without changes it does nothing.
func (s *System) Apply(ctx context.Context, q Request) error {
	if len(q.Changes) == 0 {
		return nil
	}
	if s.root() {
		return s.ApplyRequest(ctx, q)
	}
	if _, err := q.validate(); err != nil {
		return err
	}
	in, err := json.Marshal(q)
	if err != nil {
		return fmt.Errorf("encoding the route request: %w", err)
	}
	s.Log.Debug("changing routes through sudo", "program", s.Self, "request", string(in))
	out, err := s.Runner.Run(ctx, in, "sudo", s.Self, "route", "apply")
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("changing routes needs root and there is no sudo here\n  as root, run:\n    %s",
			strings.Join(s.kernel.commands(q.Changes), "\n    "))
	}
	said := strings.TrimSpace(string(out))
	if said == "" {
		said = err.Error()
	}
	return fmt.Errorf("sudo %s route apply: %s\n  the same by hand, as root:\n    %s", s.Self, said,
		strings.Join(s.kernel.commands(q.Changes), "\n    "))
}

// ApplyRequest makes the changes as this process, which has to be root: it
// checks the request against the present routes, applies it and reads back.
func (s *System) ApplyRequest(ctx context.Context, q Request) error {
	p, err := q.validate()
	if err != nil {
		return err
	}
	st, err := s.Current(ctx, p, q.Uplink)
	if err != nil {
		return err
	}
	if err := q.checkAgainst(p, st); err != nil {
		return err
	}
	if err := s.kernel.apply(ctx, q.Changes); err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("%w\n  changing routes needs root (CAP_NET_ADMIN)", err)
		}
		return err
	}
	if st, err = s.Current(ctx, p, q.Uplink); err != nil {
		return err
	}
	return confirm(q, st)
}

// confirm checks that the table now is what the request was to make of it.
// /sbin/route of macOS ends with status 0 also when it failed, so reading back
// is the only proof.
func confirm(q Request, st State) error {
	var errs []error
	for _, c := range q.Changes {
		there, old := false, false
		for _, r := range st.Routes {
			there = there || r.Dest == c.Dest && r.Gateway == c.Gateway && r.Table == ""
			old = old || c.Old.IsValid() && r.Dest == c.Dest && r.Gateway == c.Old && r.Own
		}
		switch {
		case c.Op == Remove && there:
			errs = append(errs, fmt.Errorf("the route %v via %v is still there after its removal", c.Dest, c.Gateway))
		case c.Op != Remove && !there:
			errs = append(errs, fmt.Errorf("the route %v via %v is not there after setting it", c.Dest, c.Gateway))
		case old:
			errs = append(errs, fmt.Errorf("the old route %v via %v is still there", c.Dest, c.Old))
		}
	}
	return errors.Join(errs...)
}

// execRunner runs real programs.
type execRunner struct{}

// killWait is how long a cancelled program gets to end before its pipes are
// closed. sudo cannot be killed by the person who started it, but a terminal's
// interrupt reaches it directly.
const killWait = 2 * time.Second

func (execRunner) Run(ctx context.Context, stdin []byte, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = bytes.NewReader(stdin)
	cmd.WaitDelay = killWait
	out, err := cmd.CombinedOutput()
	if err != nil {
		return out, fmt.Errorf("%s: %w", strings.Join(append([]string{name}, args...), " "), err)
	}
	return out, nil
}
