package supervise

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"klimax/shared/atomicfile"
)

// Identity names one process for good: numbers are given out again, but not
// together with the same start time in the same boot.
type Identity struct {
	PID   int
	Start uint64 // in clock ticks since boot, field 22 of /proc/PID/stat (proc(5))
	Boot  string // /proc/sys/kernel/random/boot_id
}

// String is the content of a pid file: "PID START BOOT".
func (i Identity) String() string { return fmt.Sprintf("%d %d %s", i.PID, i.Start, i.Boot) }

// parseIdentity reads what String wrote.
func parseIdentity(text string) (Identity, error) {
	f := strings.Fields(text)
	if len(f) != 3 {
		return Identity{}, fmt.Errorf("%q is not PID, start time and boot", strings.TrimSpace(text))
	}
	pid, err := strconv.Atoi(f[0])
	if err != nil || pid <= 1 {
		return Identity{}, fmt.Errorf("%q is no process number", f[0])
	}
	start, err := strconv.ParseUint(f[1], 10, 64)
	if err != nil {
		return Identity{}, fmt.Errorf("%q is no start time", f[1])
	}
	return Identity{PID: pid, Start: start, Boot: f[2]}, nil
}

// proc reads the process table; its field is "/proc" but in tests.
type proc struct{ dir string }

// identify returns the identity of a running process. A zombie, which has
// ended and only waits for its parent, does not count as running.
func (p proc) identify(pid int) (Identity, error) {
	stat, err := os.ReadFile(filepath.Join(p.dir, strconv.Itoa(pid), "stat"))
	if err != nil {
		return Identity{}, err
	}
	// The second field is the program's name in parentheses and may hold
	// anything, parentheses and blanks included: count from the last one.
	end := strings.LastIndexByte(string(stat), ')')
	f := strings.Fields(string(stat[end+1:]))
	if end < 0 || len(f) < 20 {
		return Identity{}, fmt.Errorf("process %d: its stat file has an unknown form", pid)
	}
	if f[0] == "Z" || f[0] == "X" {
		return Identity{}, fmt.Errorf("process %d: %w", pid, os.ErrProcessDone)
	}
	start, err := strconv.ParseUint(f[19], 10, 64)
	if err != nil {
		return Identity{}, fmt.Errorf("process %d: its start time: %w", pid, err)
	}
	boot, err := os.ReadFile(filepath.Join(p.dir, "sys/kernel/random/boot_id"))
	if err != nil {
		return Identity{}, err
	}
	return Identity{PID: pid, Start: start, Boot: strings.TrimSpace(string(boot))}, nil
}

// running reads a pid file and reports whether the very process that it was
// written for still runs. A file that is missing, garbled, or of a process
// that has ended means false; other errors are returned.
func (p proc) running(file string) (Identity, bool, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return Identity{}, false, nil
	}
	if err != nil {
		return Identity{}, false, err
	}
	want, err := parseIdentity(string(text))
	if err != nil {
		return Identity{}, false, nil
	}
	have, err := p.identify(want.PID)
	return want, err == nil && have == want, nil
}

// write records a running process in a pid file, in one step.
func (p proc) write(file string, pid int) error {
	id, err := p.identify(pid)
	if err != nil {
		return err
	}
	return atomicfile.Write(file, strings.NewReader(id.String()+"\n"), 0o644)
}

// end sends SIGTERM, waits, and sends SIGKILL when the process is still there
// after grace. It returns once the process has ended. A process that is not
// the one that id names is never touched.
func (p proc) end(id Identity, grace time.Duration) error {
	for _, s := range []struct {
		signal syscall.Signal
		wait   time.Duration
	}{{syscall.SIGTERM, grace}, {syscall.SIGKILL, 5 * time.Second}} {
		if have, err := p.identify(id.PID); err != nil || have != id {
			return nil
		}
		if err := syscall.Kill(id.PID, s.signal); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("sending %v to process %d: %w", s.signal, id.PID, err)
		}
		for until := time.Now().Add(s.wait); time.Now().Before(until); time.Sleep(20 * time.Millisecond) {
			if have, err := p.identify(id.PID); err != nil || have != id {
				return nil
			}
		}
	}
	return fmt.Errorf("process %d does not end, not even by SIGKILL: it hangs in the kernel, see /proc/%d/stack", id.PID, id.PID)
}
