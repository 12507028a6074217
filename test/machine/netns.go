package machine

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// NS is a named network namespace.
type NS struct{ Name string }

// Path is the file that stands for the namespace.
func (n *NS) Path() string { return "/run/netns/" + n.Name }

// Command prepares a command of this computer that sees the namespace's network.
func (n *NS) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + n.Path(), name}, args...)...)
}

// Run runs such a command and returns its output, both streams together.
func (n *NS) Run(ctx context.Context, name string, args ...string) (string, error) {
	out, err := n.Command(ctx, name, args...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("in namespace %s: %s %s: %w\n%s", n.Name, name, strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

func (n *NS) remove() error {
	if _, err := os.Stat(n.Path()); os.IsNotExist(err) {
		return nil
	}
	return ip("netns", "del", n.Name)
}

// networks makes both namespaces, without forwarding and without rules.
func (m *Machine) networks() error {
	for _, ns := range []*NS{m.VM, m.Mac} {
		if err := ip("netns", "add", ns.Name); err != nil {
			return err
		}
		if err := ip("-n", ns.Name, "link", "set", "lo", "up"); err != nil {
			return err
		}
		// A new namespace inherits this computer's value.
		if _, err := ns.Run(context.Background(), "sh", "-c", "echo 0 >/proc/sys/net/ipv4/ip_forward"); err != nil {
			return err
		}
	}
	if m.opts.NoUplink {
		return nil
	}
	return m.AddUplink()
}

// AddUplink makes lima0 and its other end, en0 in Mac, with their addresses.
func (m *Machine) AddUplink() error {
	for _, args := range [][]string{
		{"link", "add", "lima0", "netns", m.VM.Name, "type", "veth", "peer", "name", "en0", "netns", m.Mac.Name},
		{"-n", m.VM.Name, "addr", "add", GuestAddr + "/24", "dev", "lima0"},
		{"-n", m.VM.Name, "link", "set", "lima0", "up"},
		{"-n", m.Mac.Name, "addr", "add", MacAddr + "/24", "dev", "en0"},
		{"-n", m.Mac.Name, "link", "set", "en0", "up"},
	} {
		if err := ip(args...); err != nil {
			return err
		}
	}
	return nil
}

func ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}
