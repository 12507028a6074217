//go:build linux

package lab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"klimax/test/lab/sweep"
)

// NS is a network namespace.
type NS struct {
	Name string // as ip-netns(8) knows it; for a container's, the container's name
	Path string // a file that is the namespace

	lab *Lab
	h   *netlink.Handle // for those that the lab made
}

// AddNS makes a further namespace, with only its loopback interface, called by the lab's name and the word.
func (l *Lab) AddNS(word string) (*NS, error) {
	n := &NS{Name: l.Name + "-" + word, lab: l}
	n.Path = filepath.Join(sweep.NetnsDir, n.Name)
	here := &NS{Name: "the test's own", Path: "/proc/thread-self/ns/net", lab: l}
	err := here.Do(func() error { // NewNamed leaves the thread in the new namespace
		h, err := netns.NewNamed(n.Name)
		if err == nil {
			err = h.Close()
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make namespace %s: %w", n.Name, err)
	}
	h, err := netns.GetFromPath(n.Path)
	if err != nil {
		return nil, fmt.Errorf("open namespace %s: %w", n.Name, err)
	}
	defer h.Close()
	if n.h, err = netlink.NewHandleAt(h, unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("netlink in %s: %w", n.Name, err)
	}
	l.mu.Lock()
	l.spaces = append(l.spaces, n)
	l.mu.Unlock()
	return n, n.Up("lo")
}

// Command is a command that will run in the namespace, in a process group of its own; the end of the context kills the group,
// the lab's end whatever still runs. Only the network
// namespace is another one (nsenter --net, not ip netns exec, which hides /sys/fs/cgroup).
func (n *NS) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + n.Path, "--", name}, args...)...)
	c.SysProcAttr = n.lab.sysProcAttr()
	// With its children, which would else keep its output open, and Wait waiting.
	c.Cancel = func() error { return unix.Kill(-c.Process.Pid, unix.SIGKILL) }
	c.WaitDelay = 2 * time.Second
	return c
}

// Run runs a command in the namespace and returns its standard output; an error has its standard error.
func (n *NS) Run(ctx context.Context, name string, args ...string) (string, error) {
	var out, errOut strings.Builder
	c := n.Command(ctx, name, args...)
	c.Stdout, c.Stderr = &out, &errOut
	if err := c.Run(); err != nil {
		return out.String(), fmt.Errorf("in %s: %s %s: %w: %s", n.Name, name, strings.Join(args, " "), err, strings.TrimSpace(errOut.String()))
	}
	return out.String(), nil
}

// MustRun is Run for a command that must succeed.
func (n *NS) MustRun(name string, args ...string) string {
	n.lab.t.Helper()
	out, err := n.Run(n.lab.t.Context(), name, args...)
	if err != nil {
		n.lab.t.Fatal(err)
	}
	return out
}

// Do runs f on an OS thread that is in the namespace. Sockets that f makes belong to it for good; goroutines that f
// starts are elsewhere.
func (n *NS) Do(f func() error) error {
	runtime.LockOSThread()
	// /proc/thread-self: threads of one process may be in different namespaces.
	old, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer old.Close()
	to, err := os.Open(n.Path)
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter %s: %w", n.Name, err)
	}
	defer to.Close()
	if err := unix.Setns(int(to.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter %s: %w", n.Name, err)
	}
	defer func() {
		if unix.Setns(int(old.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		} // else the thread dies with its goroutine: never used again in the wrong namespace
	}()
	return f()
}

// Listen opens a TCP listener in the namespace.
func (n *NS) Listen(addr string) (ln net.Listener, err error) {
	err = n.Do(func() (err error) { ln, err = net.Listen("tcp4", addr); return err })
	return ln, err
}

// Sysctl sets a value below /proc/sys/net ("ipv4.ip_forward").
func (n *NS) Sysctl(key, value string) error {
	return n.Do(func() error {
		return os.WriteFile("/proc/sys/net/"+strings.ReplaceAll(key, ".", "/"), []byte(value), 0)
	})
}

// Up sets an interface up.
func (n *NS) Up(link string) error {
	k, err := n.link(link)
	if err == nil {
		err = n.h.LinkSetUp(k)
	}
	if err != nil {
		return fmt.Errorf("set %s up in %s: %w", link, n.Name, err)
	}
	return nil
}

// AddAddr gives an interface an address with its prefix length ("192.168.64.3/24"), DelAddr takes it away.
func (n *NS) AddAddr(link, prefix string) error { return n.addr("add", link, prefix) }

// DelAddr is the reverse of AddAddr.
func (n *NS) DelAddr(link, prefix string) error { return n.addr("remove", link, prefix) }

func (n *NS) addr(verb, link, prefix string) error {
	k, err := n.link(link)
	if err != nil {
		return fmt.Errorf("%s address %s in %s: %w", verb, prefix, n.Name, err)
	}
	a, err := netlink.ParseAddr(prefix)
	if err != nil {
		return fmt.Errorf("%s address %s in %s: %w", verb, prefix, n.Name, err)
	}
	f := n.h.AddrAdd
	if verb == "remove" {
		f = n.h.AddrDel
	}
	if err := f(k, a); err != nil {
		return fmt.Errorf("%s address %s on %s in %s: %w", verb, prefix, link, n.Name, err)
	}
	return nil
}

// AddRoute adds a route to a network ("default" or a prefix) over a gateway.
func (n *NS) AddRoute(dst, via string) error {
	gw, err := netip.ParseAddr(via)
	if err != nil {
		return fmt.Errorf("route in %s: %w", n.Name, err)
	}
	r := &netlink.Route{Gw: gw.AsSlice()}
	if dst != "default" {
		if _, r.Dst, err = net.ParseCIDR(dst); err != nil {
			return fmt.Errorf("route in %s: %w", n.Name, err)
		}
	}
	if err := n.h.RouteReplace(r); err != nil {
		return fmt.Errorf("route %s via %s in %s: %w", dst, via, n.Name, err)
	}
	return nil
}

func (n *NS) link(name string) (netlink.Link, error) {
	if n.h == nil {
		return nil, fmt.Errorf("%s is a container's namespace: use Command", n.Name)
	}
	return n.h.LinkByName(name)
}
