// Package state keeps what cannot be read back from Docker or the kernel: one
// small file each in the state directory, written atomically, and the locks
// that keep two processes from working on the same machine at once.
package state

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"klimax/shared/atomicfile"
)

// Files of the state directory.
const (
	fileAgentLock   = "agent.lock"
	fileNetworkLock = "network.lock"
	fileSecrets     = "secrets.json"
)

// Dir is a state directory. It is made, 0700, when first written to.
type Dir string

// Secrets is the path of the mirrors' passwords.
func (d Dir) Secrets() string { return filepath.Join(string(d), fileSecrets) }

// WriteFile replaces a file atomically: a reader, or a machine that loses
// power, sees the old content or the new one. Missing parent directories are
// made with mode 0700.
func WriteFile(path string, data []byte, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return atomicfile.Write(path, bytes.NewReader(data), mode)
}

// Check tries whether the directory can be written, with a file that is there
// for a moment only.
func (d Dir) Check() error {
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(string(d), ".check.*")
	if err != nil {
		return err
	}
	_, err = f.WriteString("klimax\n")
	return errors.Join(err, f.Sync(), f.Close(), os.Remove(f.Name()))
}

// Lock is a lock that is held.
type Lock struct{ f *os.File }

// HeldError says who holds a lock.
type HeldError struct {
	Path string
	PID  int
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("another klimax-guest is running with this state directory (PID %d holds %s): stop it first, or give this one its own --state-dir", e.PID, e.Path)
}

// LockAgent takes the lock that one agent holds for its life, or fails with a
// *HeldError. It waits for no longer than AgentRunning may hold it elsewhere.
func (d Dir) LockAgent() (*Lock, error) {
	return d.lock(context.Background(), fileAgentLock, 100*time.Millisecond)
}

// AgentRunning returns the PID of the agent that holds the lock, 0 for none.
func (d Dir) AgentRunning() int {
	f, err := os.Open(filepath.Join(string(d), fileAgentLock))
	if err != nil {
		return 0
	}
	defer func() { _ = f.Close() }()
	if unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) == nil {
		return 0
	}
	return readPID(f)
}

// LockNetwork takes the lock that guards reading, comparing and applying
// rules, waiting for at most wait and no longer than the context lasts.
func (d Dir) LockNetwork(ctx context.Context, wait time.Duration) (*Lock, error) {
	return d.lock(ctx, fileNetworkLock, wait)
}

func (d Dir) lock(ctx context.Context, name string, wait time.Duration) (*Lock, error) {
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	path := filepath.Join(string(d), name)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	for end := time.Now().Add(wait); ; time.Sleep(5 * time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Now().After(end) || ctx.Err() != nil {
			pid := readPID(f)
			_ = f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, &HeldError{Path: path, PID: pid}
			}
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
	}
	// For people and for AgentRunning; a full disk must not keep us from working.
	if f.Truncate(0) == nil {
		_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return &Lock{f}, nil
}

// Unlock releases the lock.
func (l *Lock) Unlock() { _ = l.f.Close() }

func readPID(f *os.File) int {
	b := make([]byte, 16)
	n, _ := f.ReadAt(b, 0)
	pid, _ := strconv.Atoi(strings.TrimSpace(string(b[:n])))
	return pid
}
