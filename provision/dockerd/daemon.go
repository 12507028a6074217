package dockerd

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// Daemon is a running dockerd.
type Daemon struct {
	PID     int
	Command string // its arguments, separated by NUL
}

// Find returns the daemon whose number stands in pidFile, false when there is
// none. root is put before the path of /proc, for tests; a stale number that
// belongs to another program by now is not taken for a daemon.
func Find(root, pidFile string) (Daemon, bool) {
	text, err := os.ReadFile(pidFile)
	if err != nil {
		return Daemon{}, false
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid <= 1 {
		return Daemon{}, false
	}
	proc := filepath.Join(root, "/proc", strconv.Itoa(pid))
	name, err := os.ReadFile(filepath.Join(proc, "comm"))
	if err != nil || strings.TrimSpace(string(name)) != "dockerd" {
		return Daemon{}, false
	}
	command, _ := os.ReadFile(filepath.Join(proc, "cmdline"))
	return Daemon{PID: pid, Command: string(command)}, true
}

// Reload makes the daemon read its file again. It keeps running with the old
// settings, and says so in its log, when the file is not acceptable.
func (d Daemon) Reload() error {
	if err := syscall.Kill(d.PID, syscall.SIGHUP); err != nil {
		return fmt.Errorf("asking dockerd (process %d) to read its configuration again: %w", d.PID, err)
	}
	return nil
}
