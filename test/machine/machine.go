package machine

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Addresses of the two ends of lima0's network.
const (
	GuestAddr = "192.168.64.2" // lima0, in the machine
	MacAddr   = "192.168.64.1" // en0, in Machine.Mac
)

// upMarker is written by a machine without an init once it is set up.
const upMarker = "/run/test-machine-up"

// Options say what kind of machine to boot. The zero value is a bare one: the
// distribution with systemd as its init, nothing installed.
type Options struct {
	Docker    bool // Docker's packages are installed
	NoSystemd bool // no init at all: PID 1 is a stub that only reaps
	NoUplink  bool // lima0 does not exist until AddUplink
}

// Machine is a running machine.
type Machine struct {
	Name string
	VM   *NS // the machine's own network
	Mac  *NS // the other end of lima0

	opts    Options
	dir     string // overlay's layers, log
	merged  string // the root file system, seen from here
	nspawn  *exec.Cmd
	console *os.File
	leader  int // PID 1 of the machine, seen from here
}

// Boot starts a machine and waits until its boot has ended. The machine goes
// away with the test. It needs root.
func Boot(t testing.TB, o Options) *Machine {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("a test machine needs root")
	}
	r, err := prepare(context.Background(), t.Logf)
	if err != nil {
		t.Fatalf("the machines' root file system: %v", err)
	}
	id := make([]byte, 4)
	rand.Read(id)
	m := &Machine{Name: "klxm-" + hex.EncodeToString(id), opts: o}
	m.VM, m.Mac = &NS{Name: m.Name}, &NS{Name: m.Name + "-mac"}
	if m.dir, err = os.MkdirTemp("", m.Name+"-"); err != nil {
		t.Fatal(err)
	}
	m.merged = filepath.Join(m.dir, "root")
	stop, err := watch(m.Name, m.dir)
	if err != nil {
		os.RemoveAll(m.dir)
		t.Fatalf("the machine's watchdog: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the machine's last words:\n%s", m.lastWords())
		}
		if err := stop(); err != nil {
			t.Errorf("removing machine %s: %v", m.Name, err)
		}
		m.reap()
	})
	if err := m.mount(r); err != nil {
		t.Fatal(err)
	}
	if err := m.start(); err != nil {
		t.Fatalf("booting machine %s: %v", m.Name, err)
	}
	return m
}

// mount lays the machine's root over the pristine one. Docker's data lies
// beside it, because overlay2 does not work on an overlay.
func (m *Machine) mount(r roots) error {
	for _, d := range []string{"root", "upper", "work", "docker", "containerd"} {
		if err := os.MkdirAll(filepath.Join(m.dir, d), 0o755); err != nil {
			return err
		}
	}
	lower := r.bare
	if m.opts.Docker {
		lower = r.docker + ":" + r.bare
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", lower, filepath.Join(m.dir, "upper"), filepath.Join(m.dir, "work"))
	if err := syscall.Mount("overlay", m.merged, "overlay", 0, options); err != nil {
		return fmt.Errorf("mounting the machine's root: %w", err)
	}
	return nil
}

// start makes the networks and boots what is mounted.
func (m *Machine) start() error {
	if err := m.networks(); err != nil {
		return err
	}
	var err error
	if m.console, err = os.OpenFile(filepath.Join(m.dir, "console.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644); err != nil {
		return err
	}
	args := []string{"-c", enterCgroups + `exec systemd-nspawn "$@"`, m.Name,
		"--quiet", "--register=no", "--keep-unit", "-M", m.Name, "-D", m.merged,
		"--network-namespace-path=" + m.VM.Path(), "--capability=all",
		"--system-call-filter=add_key keyctl bpf", "--resolv-conf=off", "--timezone=off",
		"--link-journal=no", "--console=pipe",
		"--bind=" + filepath.Join(m.dir, "docker") + ":/var/lib/docker",
		"--bind=" + filepath.Join(m.dir, "containerd") + ":/var/lib/containerd",
	}
	if m.opts.NoSystemd {
		args = append(args, "--as-pid2", "/bin/sh", "-c", remountCgroups+"; : >"+upMarker+"; exec sleep infinity")
	} else {
		args = append(args, "-b")
	}
	m.nspawn = exec.Command("sh", args...)
	m.nspawn.Env = append(os.Environ(), "SYSTEMD_NSPAWN_API_VFS_WRITABLE=network")
	m.nspawn.Stdout, m.nspawn.Stderr = m.console, m.console
	m.nspawn.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := m.nspawn.Start(); err != nil {
		return err
	}
	return m.booted(90 * time.Second)
}

// booted waits until the machine can run commands and its boot has ended.
func (m *Machine) booted(limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	var last string
	for ; ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		m.leader = child(m.nspawn.Process.Pid)
		if m.leader == 0 {
			if wait := m.exited(); wait != "" {
				return fmt.Errorf("systemd-nspawn ended: %s\n%s", wait, m.lastWords())
			}
			continue
		}
		if m.opts.NoSystemd {
			if out, err := m.Run(ctx, "test", "-e", upMarker); err != nil {
				last = out + err.Error()
				continue
			}
			return nil
		}
		out, err := m.Run(ctx, "systemctl", "is-system-running", "--wait")
		switch last = strings.TrimSpace(out); last {
		case "running", "degraded":
			return nil
		}
		if err != nil && last == "" {
			last = err.Error()
		}
	}
	return fmt.Errorf("not up after %v: %s\n%s", limit, last, m.lastWords())
}

// Reboot shuts the machine down and boots it again with the same disk and,
// as after a real reboot, an empty /run and a network without any rules.
// A machine without systemd is switched off the hard way.
func (m *Machine) Reboot() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if m.opts.NoSystemd {
		syscall.Kill(m.leader, syscall.SIGKILL)
	} else {
		m.Run(ctx, "systemctl", "poweroff") // the connection ends with the machine
	}
	done := make(chan struct{})
	go func() { m.nspawn.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		return fmt.Errorf("machine %s did not shut down in a minute\n%s", m.Name, m.lastWords())
	}
	m.console.Close()
	for _, ns := range []*NS{m.VM, m.Mac} {
		if err := ns.remove(); err != nil {
			return err
		}
	}
	return m.start()
}

// Run runs a command inside and returns its output, both streams together.
// The error holds the output too.
func (m *Machine) Run(ctx context.Context, command ...string) (string, error) {
	cmd := m.Command(ctx, command...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("in the machine: %s: %w\n%s", strings.Join(command, " "), err, out.String())
	}
	return out.String(), nil
}

// MustRun is Run for a test: an error ends it.
func (m *Machine) MustRun(t testing.TB, command ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	out, err := m.Run(ctx, command...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Command prepares a command that runs inside, in the machine's namespaces
// and cgroups, with a root login's short environment.
func (m *Machine) Command(ctx context.Context, command ...string) *exec.Cmd {
	args := []string{"-c", enterCgroups + `exec nsenter "$@"`, m.Name,
		"-t", strconv.Itoa(m.leader), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w",
		"env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C", "TERM=dumb"}
	cmd := exec.CommandContext(ctx, "sh", append(args, command...)...)
	cmd.WaitDelay = 2 * time.Second // a background process may hold the pipe
	return cmd
}

// Copy copies a file of this computer into the machine.
func (m *Machine) Copy(from, to string, mode os.FileMode) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := os.MkdirAll(filepath.Dir(m.Path(to)), 0o755); err != nil {
		return err
	}
	out, err := os.OpenFile(m.Path(to), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}

// Write writes a file inside the machine.
func (m *Machine) Write(path, content string, mode os.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(m.Path(path)), 0o755); err != nil {
		return err
	}
	return os.WriteFile(m.Path(path), []byte(content), mode)
}

// Path is where a file of the machine, /run and /tmp included, is seen from
// here while it runs. Absolute links on the way are followed on this side.
func (m *Machine) Path(inside string) string {
	return filepath.Join("/proc", strconv.Itoa(m.leader), "root", inside)
}

func (m *Machine) lastWords() string {
	data, _ := os.ReadFile(filepath.Join(m.dir, "console.log"))
	return string(tail(data))
}

// exited says how nspawn ended, empty while it runs.
func (m *Machine) exited() string {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(m.nspawn.Process.Pid), "stat"))
	if err != nil {
		return err.Error()
	}
	if _, rest, ok := strings.Cut(string(data), ") "); ok && rest[0] == 'Z' {
		return "exited"
	}
	return ""
}

func (m *Machine) reap() {
	if m.nspawn != nil && m.nspawn.Process != nil && m.nspawn.ProcessState == nil {
		m.nspawn.Wait()
	}
	if m.console != nil {
		m.console.Close()
	}
}

// child returns a child process of pid that is PID 1 of a namespace, 0 when
// there is none yet.
func child(pid int) int {
	stats, _ := filepath.Glob("/proc/[0-9]*/status")
	parent := fmt.Sprintf("\nPPid:\t%d\n", pid)
	for _, name := range stats {
		data, err := os.ReadFile(name)
		if err != nil || !strings.Contains(string(data), parent) {
			continue
		}
		_, ids, ok := strings.Cut(string(data), "\nNSpid:")
		if !ok {
			continue
		}
		ids, _, _ = strings.Cut(ids, "\n")
		if f := strings.Fields(ids); len(f) > 1 && f[len(f)-1] == "1" {
			n, _ := strconv.Atoi(f[0])
			return n
		}
	}
	return 0
}
