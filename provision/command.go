package provision

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// Runner runs a program with further environment variables and returns what
// it printed on standard output. The error holds what it complained about.
type Runner func(ctx context.Context, env []string, name string, args ...string) (stdout string, err error)

// execute is the Runner of the real world: the package manager, groupadd, and
// what they need. Their messages are in English, so that they can be read.
func execute(ctx context.Context, env []string, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(append(os.Environ(), "LC_ALL=C"), env...)
	var out, complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaint
	// A package manager that is killed half-way leaves a mess: ask it, and give it time.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	if err := cmd.Run(); err != nil {
		text := strings.TrimSpace(complaint.String())
		if text == "" {
			text = strings.TrimSpace(out.String())
		}
		if lines := strings.Split(text, "\n"); len(lines) > 12 {
			text = strings.Join(lines[len(lines)-12:], "\n")
		}
		return out.String(), fmt.Errorf("%s: %w\n%s", strings.Join(append([]string{name}, args...), " "), err, text)
	}
	return out.String(), nil
}

func flock(f *os.File) error {
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
}
