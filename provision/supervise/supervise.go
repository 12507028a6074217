// Package supervise keeps a program running on a machine that has no init
// system to do it: a supervising process starts it, restarts it when it ends,
// forwards SIGTERM, and writes a log and two pid files. What it started can be
// found and stopped again, and nothing else is ever signalled.
package supervise

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Process is a program to keep running. Its pid files are NAME.supervisor.pid
// and NAME.pid in RunDir.
type Process struct {
	Name    string
	RunDir  string
	LogFile string        // both streams and the supervisor's own lines are appended
	Grace   time.Duration // from SIGTERM to SIGKILL
	Command []string
}

// maxLog is the size from which the log is moved to NAME.1 when the
// supervisor starts.
const maxLog = 10 << 20

// Times of the restarts: the pause doubles from first to longest, and starts
// anew after a run that lasted for settled.
const (
	firstPause   = 200 * time.Millisecond
	longestPause = 10 * time.Second
	settled      = 30 * time.Second
)

func (p Process) childFile() string { return filepath.Join(p.RunDir, p.Name+".pid") }
func (p Process) supervisorFile() string {
	return filepath.Join(p.RunDir, p.Name+".supervisor.pid")
}

// Args are the command line arguments from which FromArgs makes the process again.
func (p Process) Args() []string {
	return append([]string{"--name", p.Name, "--run-dir", p.RunDir, "--log-file", p.LogFile,
		"--grace", p.Grace.String(), "--"}, p.Command...)
}

// FromArgs reads what Args wrote.
func FromArgs(args []string) (Process, error) {
	p := Process{Grace: 10 * time.Second}
	for len(args) > 0 && args[0] != "--" {
		if len(args) == 1 {
			return p, fmt.Errorf("%s needs a value", args[0])
		}
		switch args[0] {
		case "--name":
			p.Name = args[1]
		case "--run-dir":
			p.RunDir = args[1]
		case "--log-file":
			p.LogFile = args[1]
		case "--grace":
			d, err := time.ParseDuration(args[1])
			if err != nil {
				return p, err
			}
			p.Grace = d
		default:
			return p, fmt.Errorf("unknown flag %s", args[0])
		}
		args = args[2:]
	}
	if len(args) > 0 {
		p.Command = args[1:]
	}
	return p, p.check()
}

func (p Process) check() error {
	switch {
	case p.Name == "" || strings.ContainsAny(p.Name, "/\x00"):
		return fmt.Errorf("supervised process: %q is no name", p.Name)
	case !filepath.IsAbs(p.RunDir) || !filepath.IsAbs(p.LogFile):
		return fmt.Errorf("supervised process %s: run directory %q and log file %q must be absolute", p.Name, p.RunDir, p.LogFile)
	case len(p.Command) == 0:
		return fmt.Errorf("supervised process %s: no command", p.Name)
	}
	return nil
}

// Running returns the program's process when it, or at least its supervisor,
// runs. PID is 0 while the supervisor pauses before a restart.
func Running(p Process) (id Identity, running bool, err error) {
	return p.runningIn(proc{"/proc"})
}

func (p Process) runningIn(table proc) (Identity, bool, error) {
	child, childRuns, err := table.running(p.childFile())
	if err != nil || childRuns {
		return child, childRuns, err
	}
	_, runs, err := table.running(p.supervisorFile())
	return Identity{}, runs, err
}

// Start starts a supervisor for p in the background, detached from the
// caller's terminal and session, by running self (a program and its first
// arguments, which must come to FromArgs and Run) with p's arguments. It
// returns when the supervisor has started the program. A supervisor that
// already runs is left alone; a program whose supervisor was killed is stopped
// first, so that there are never two.
func Start(ctx context.Context, self []string, p Process) error {
	if err := p.check(); err != nil {
		return err
	}
	table := proc{"/proc"}
	if _, runs, err := table.running(p.supervisorFile()); err != nil || runs {
		return err
	}
	if orphan, runs, err := table.running(p.childFile()); err != nil {
		return err
	} else if runs {
		if err := table.end(orphan, p.Grace); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(filepath.Dir(p.LogFile), 0o750); err != nil {
		return err
	}
	log, err := openLog(p.LogFile)
	if err != nil {
		return err
	}
	defer log.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	argv := append(self[:len(self):len(self)], p.Args()...)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = "/"
	cmd.Stdin, cmd.Stdout, cmd.Stderr = null, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting the supervisor of %s: %w", p.Name, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	for {
		if _, runs, err := table.running(p.childFile()); err == nil && runs {
			return nil
		}
		select {
		case err := <-ended:
			return fmt.Errorf("the supervisor of %s ended at once: %v; see %s", p.Name, err, p.LogFile)
		case <-ctx.Done():
			err := fmt.Errorf("the supervisor of %s has not started it: %w; see %s", p.Name, ctx.Err(), p.LogFile)
			_, stopErr := Stop(p) // what did not start must not start later
			return errors.Join(err, stopErr)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Stop ends the program and its supervisor, and also a program whose
// supervisor was killed. It reports whether anything ran. The log stays.
func Stop(p Process) (stopped bool, err error) {
	table := proc{"/proc"}
	// The supervisor first: it ends its program itself and does not start it again.
	for _, f := range []struct {
		path  string
		grace time.Duration
	}{{p.supervisorFile(), p.Grace + 5*time.Second}, {p.childFile(), p.Grace}} {
		id, runs, err := table.running(f.path)
		if err != nil {
			return stopped, err
		}
		if runs {
			stopped = true
			if err := table.end(id, f.grace); err != nil {
				return stopped, fmt.Errorf("stopping %s: %w", p.Name, err)
			}
		}
		if err := os.Remove(f.path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return stopped, err
		}
	}
	return stopped, nil
}

// Run is the supervisor: it keeps the program running until ctx ends, then
// sends it SIGTERM, after the grace period SIGKILL, and returns when it has
// ended. Two supervisors of the same name do not run at once.
func Run(ctx context.Context, p Process, out io.Writer, log *slog.Logger) error {
	if err := p.check(); err != nil {
		return err
	}
	table := proc{"/proc"}
	if id, runs, err := table.running(p.supervisorFile()); err != nil {
		return err
	} else if runs && id.PID != os.Getpid() {
		return fmt.Errorf("%s is already supervised by process %d", p.Name, id.PID)
	}
	if err := table.write(p.supervisorFile(), os.Getpid()); err != nil {
		return fmt.Errorf("writing %s: %w", p.supervisorFile(), err)
	}
	defer os.Remove(p.supervisorFile())
	for pause := firstPause; ; {
		began := time.Now()
		err := p.once(ctx, table, out)
		if ctx.Err() != nil {
			log.Info("stopped", "process", p.Name)
			return nil
		}
		if time.Since(began) > settled {
			pause = firstPause
		}
		log.Warn("the program ended and is started again", "process", p.Name, "result", result(err), "pause", pause)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = min(2*pause, longestPause)
	}
}

// searchPath is what systemd gives its services. The caller's may lack the
// directories for root's programs, where dockerd looks for iptables.
const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// once runs the program one time.
func (p Process) once(ctx context.Context, table proc, out io.Writer) error {
	cmd := exec.CommandContext(ctx, p.Command[0], p.Command[1:]...)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "PATH="+searchPath)
	cmd.Stdout, cmd.Stderr = out, out
	// A session of its own: a signal to the supervisor's group is not the program's.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = p.Grace
	if err := cmd.Start(); err != nil {
		return err
	}
	defer os.Remove(p.childFile())
	if err := table.write(p.childFile(), cmd.Process.Pid); err != nil && !errors.Is(err, os.ErrProcessDone) {
		// Without the file nobody could stop it later.
		cmd.Process.Kill()
		cmd.Wait()
		return fmt.Errorf("writing %s: %w", p.childFile(), err)
	}
	return cmd.Wait()
}

func result(err error) string {
	if err == nil {
		return "exit status 0"
	}
	return err.Error()
}

// openLog opens a log for appending and moves a big one aside first.
func openLog(name string) (*os.File, error) {
	if i, err := os.Stat(name); err == nil && i.Size() > maxLog {
		if err := os.Rename(name, name+".1"); err != nil {
			return nil, err
		}
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o640)
	if err != nil {
		return nil, fmt.Errorf("the log of a supervised process: %w", err)
	}
	return f, nil
}
