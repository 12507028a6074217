package provision

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"klimax/shared/atomicfile"
)

const (
	ipForward = "/proc/sys/net/ipv4/ip_forward"
	// previousForward, in the state directory, holds the value that
	// ip_forward had before klimax first raised it.
	previousForward = "ip_forward.before"
)

const sysctlText = `# Written by klimax: the containers' network is routed to other hosts.
# Set before Docker starts, so that Docker does not set the FORWARD policy to DROP.
net.ipv4.ip_forward = 1
`

// RaiseForwarding makes the kernel forward IPv4 and keeps the value it found
// in the state directory, if none is kept yet. The value is only ever raised.
// root is put before all paths.
func RaiseForwarding(root, stateDir string) (changed bool, err error) {
	value, err := os.ReadFile(filepath.Join(root, ipForward))
	if err != nil {
		return false, err
	}
	if strings.TrimSpace(string(value)) != "0" {
		return false, nil
	}
	kept := filepath.Join(root, stateDir, previousForward)
	if _, err := os.Stat(kept); errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(kept), 0o700); err != nil {
			return false, err
		}
		if err := atomicfile.Write(kept, strings.NewReader("0\n"), 0o600); err != nil {
			return false, err
		}
	}
	// Not writeAtomic: this is no file but the kernel.
	if err := os.WriteFile(filepath.Join(root, ipForward), []byte("1\n"), 0o644); err != nil {
		return false, fmt.Errorf("turning on forwarding: %w", err)
	}
	return true, nil
}

// ForwardingRaised reports whether RaiseForwarding kept a value that
// RestoreForwarding would put back.
func ForwardingRaised(root, stateDir string) bool {
	_, err := os.Stat(filepath.Join(root, stateDir, previousForward))
	return err == nil
}

// RestoreForwarding puts back the value that RaiseForwarding kept, and forgets
// it. Without one it does nothing: forwarding was on before klimax came.
func RestoreForwarding(root, stateDir string) (changed bool, err error) {
	kept := filepath.Join(root, stateDir, previousForward)
	value, err := os.ReadFile(kept)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := os.WriteFile(filepath.Join(root, ipForward), value, 0o644); err != nil {
		return false, fmt.Errorf("putting back %s: %w", ipForward, err)
	}
	return true, os.Remove(kept)
}

// forwarding turns on IPv4 forwarding now and at each boot.
func (r *runner) forwarding() Step {
	return Step{
		ID: stepForwarding, Title: "IPv4 forwarding",
		Check: func(context.Context) (bool, string, error) {
			live, err := os.ReadFile(r.at(ipForward))
			if err != nil {
				return false, "", err
			}
			file, err := r.same(r.Paths.SysctlFile, []byte(sysctlText), 0o644)
			if err != nil {
				return false, "", err
			}
			on := strings.TrimSpace(string(live)) != "0"
			switch {
			case on && file:
				return true, "on", nil
			case on:
				return false, "keep it on over a boot: " + r.Paths.SysctlFile, nil
			}
			return false, "turn it on, now and at each boot: " + r.Paths.SysctlFile, nil
		},
		Apply: func(context.Context) error {
			if err := r.writeFile(r.Paths.SysctlFile, []byte(sysctlText), 0o644); err != nil {
				return err
			}
			_, err := RaiseForwarding(r.Root, r.Paths.StateDir)
			return err
		},
		Undo: func(ctx context.Context) (bool, error) {
			file, err := r.remove(r.Paths.SysctlFile)
			if err != nil {
				return file, err
			}
			// A running Docker needs forwarding for its own containers and would
			// not turn it on again before its next start.
			if r.EngineAnswers(ctx) == nil {
				r.say(stepForwarding, "net.ipv4.ip_forward stays 1 until the next boot, because Docker runs and needs it")
				return file, nil
			}
			live, err := RestoreForwarding(r.Root, r.Paths.StateDir)
			return file || live, err
		},
	}
}
