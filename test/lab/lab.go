//go:build linux

// Package lab builds, for one test, a small world around a Docker engine of its own: network namespaces that
// play the Mac, the VM, a third network and a neighbour on the uplink, the engine inside the VM's, and
// containers that tell who is calling. Everything is removed when the test ends, however it ends. It needs
// root, and what `go run ./test/labdeps` installs.
package lab

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"klimax/test/lab/sweep"
)

// Options says what kind of lab is wanted. The zero value is a debian lab with live-restore.
type Options struct {
	Setup         Setup          // which engine and firewall backend; default Debian
	NoLiveRestore bool           // containers die with dockerd, and come back with it (restart=always)
	NoDocker      bool           // dockerd is not started; l.Docker().Start does it later
	ForwardDrop   bool           // ip_forward is 0 before dockerd starts: Docker turns it on and sets FORWARD's policy to DROP (iptables backends only)
	DaemonJSON    map[string]any // content of the engine's configuration file; see Docker.SetConfig
	DaemonArgs    []string       // further arguments for dockerd
	UplinkPrefix  string         // the VM's address on the uplink; default 192.168.64.3/24
	MacAddr       string         // the Mac's address there; default 192.168.64.1
	NeighbourAddr string         // the neighbour's address there; default 192.168.64.77
	UplinkName    string         // the uplink's interface in the VM; default lima0
	NoUplinkAddr  bool           // the uplink is up, but has no address yet
	Legacy        bool           // dockerd finds iptables-legacy under the name iptables (iptables backends only)
}

// Lab is one such world:
//
//	mac en0 (a bridge) 192.168.64.1 ─┬─ lima0 192.168.64.3 vm eth1 10.99.0.2 ── 10.99.0.1 eth0 lan
//	neighbour eth0    192.168.64.77 ─┘
//
// The VM's default route goes to lan. The Mac has a route to what is behind the VM only after RouteFromMac,
// lan after RouteFromLAN; the neighbour has none.
type Lab struct {
	Mac, VM, LAN, Neighbour *NS

	Name string // unique on this machine: namespaces, cgroups and the directory are called so
	Dir  string // all files; short enough for unix sockets below it, removed at the end

	opts   Options
	t      testing.TB
	tools  tools
	docker *Docker
	cgroup *os.File // where all processes are started in the cgroup v2 hierarchy; nil when there is none

	dog     *exec.Cmd
	dogIn   io.WriteCloser
	dogOut  *bufio.Reader
	mu      sync.Mutex
	closers []func() // what this process itself holds in the namespaces: loops, flows, servers
	spaces  []*NS
}

// New builds a lab; what goes wrong ends the test. It takes seconds, the first time on a machine minutes
// (helper binaries and Docker 29 are built and kept, see package cache).
func New(t testing.TB, o Options) *Lab {
	t.Helper()
	l, err := build(t, o)
	if err != nil {
		t.Fatalf("lab: %v", err)
	}
	return l
}

func build(t testing.TB, o Options) (*Lab, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	if err := checkMachine(); err != nil {
		return nil, err
	}
	tl, err := buildTools(t.Context(), o.Setup, func(s string) { fmt.Fprintln(os.Stderr, "lab: "+s) })
	if err != nil {
		return nil, err
	}
	l := &Lab{opts: o, t: t, tools: tl}
	if err := l.makeDir(); err != nil {
		return nil, err
	}
	if err := l.startWatchdog(); err != nil {
		return nil, err
	}
	t.Cleanup(l.close)
	if err := l.makeCgroup(); err != nil {
		return nil, err
	}
	if err := l.makeNetwork(); err != nil {
		return nil, fmt.Errorf("network: %w", err)
	}
	l.docker = newDocker(l)
	if o.NoDocker {
		return l, nil
	}
	return l, l.docker.Start(t.Context())
}

// TempDir is where labs have their directories: $TMPDIR, unless that is too long. A unix socket's path has 107 bytes at
// most, and Docker's own go 50 below the lab's directory.
func TempDir() string {
	if tmp := os.TempDir(); len(tmp) <= 40 {
		return tmp
	}
	return "/tmp"
}

// makeDir makes the lab's directory, and with it its name: no two labs of a machine have the same.
func (l *Lab) makeDir() error {
	tmp := TempDir()
	for {
		var id [3]byte
		rand.Read(id[:])
		l.Name = "klx-" + hex.EncodeToString(id[:])
		l.Dir = filepath.Join(tmp, l.Name)
		if _, err := os.Lstat(filepath.Join(sweep.NetnsDir, l.Name+"-vm")); err == nil {
			continue // of a lab in another $TMPDIR
		}
		err := os.Mkdir(l.Dir, 0o755)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return err
		}
		return l.Place().WriteOwner()
	}
}

func (o *Options) fill() error {
	def := func(s *string, v string) {
		if *s == "" {
			*s = v
		}
	}
	if o.Setup == "" {
		o.Setup = Debian
	}
	if !o.Setup.known() {
		return fmt.Errorf("no setup %q; there are %v", o.Setup, all)
	}
	if o.ForwardDrop && !o.Setup.Iptables() {
		return fmt.Errorf("setup %s refuses to start with ip_forward=0 and sets no FORWARD policy: no ForwardDrop there", o.Setup)
	}
	if o.Legacy && !o.Setup.Iptables() {
		return fmt.Errorf("setup %s does not use iptables: no Legacy there", o.Setup)
	}
	def(&o.UplinkPrefix, "192.168.64.3/24")
	def(&o.MacAddr, "192.168.64.1")
	def(&o.NeighbourAddr, "192.168.64.77")
	def(&o.UplinkName, "lima0")
	return nil
}

// Commands are the programs that the lab runs or its tests use, all of which labdeps installs.
func Commands() []string {
	return []string{"dockerd", "containerd", "runc", "nft", "iptables", "conntrack", "ip", "nsenter", "sysctl"}
}

// checkMachine names the first thing that is missing, before anything is made.
func checkMachine() error {
	if os.Getuid() != 0 {
		return errors.New("needs root: network namespaces and a Docker engine are made; run the test as root")
	}
	for _, c := range Commands() {
		if _, err := exec.LookPath(c); err == nil {
			continue
		}
		for _, d := range []string{"/usr/sbin", "/sbin"} {
			if _, err := os.Stat(filepath.Join(d, c)); err == nil {
				return fmt.Errorf("%s is in %s, which is not on the PATH: export PATH=$PATH:/usr/sbin:/sbin", c, d)
			}
		}
		return fmt.Errorf("%s is not there; install what the lab needs: go run ./test/labdeps", c)
	}
	return nil
}

// startWatchdog starts the process that removes the lab when this one has ended or closes the pipe. Nothing
// but the directory is made before.
func (l *Lab) startWatchdog() error {
	// Not bound to the test's context: that is cancelled before the clean-ups run.
	l.dog = exec.Command(l.tools.watchdog, l.Name, l.Dir, strconv.Itoa(os.Getpid()))
	l.dog.Dir = "/"
	l.dog.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // not in the session that ^C or a killed group ends
	in, err := l.dog.StdinPipe()
	if err != nil {
		return fmt.Errorf("watchdog: %w", err)
	}
	out, err := l.dog.StdoutPipe()
	if err != nil {
		return fmt.Errorf("watchdog: %w", err)
	}
	if err := l.dog.Start(); err != nil {
		return fmt.Errorf("watchdog: %w", err)
	}
	l.dogIn, l.dogOut = in, bufio.NewReader(out)
	if s, err := l.dogOut.ReadString('\n'); s != "ready\n" {
		return fmt.Errorf("watchdog: said %q: %v", s, err)
	}
	return nil
}

// close ends what this process holds, lets the watchdog remove the lab, and fails the test when that fails.
func (l *Lab) close() {
	l.mu.Lock()
	cl := l.closers
	l.closers = nil
	l.mu.Unlock()
	for _, f := range cl {
		f()
	}
	if l.docker != nil {
		l.docker.closeClient()
	}
	if l.t.Failed() && l.docker != nil {
		l.t.Logf("lab: end of dockerd's log:\n%s", l.docker.LogTail(25))
	}
	l.dogIn.Close()
	said, _ := io.ReadAll(l.dogOut)
	if err := l.dog.Wait(); err != nil || strings.TrimSpace(string(said)) != "swept" {
		l.t.Errorf("lab: %s was not removed completely (%v):\n%s", l.Name, err, said)
	}
	for _, n := range l.spaces {
		n.h.Close()
	}
	if l.cgroup != nil {
		l.cgroup.Close()
	}
	if l.docker != nil {
		l.docker.reap()
	}
}

// onClose registers what must end before the lab is removed.
func (l *Lab) onClose(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closers = append(l.closers, f)
}

// makeCgroup makes the lab's cgroup in the version 2 hierarchy, where a whole tree can be killed at once. All
// processes of the lab are started in its child "lab", dockerd puts the containers beside it. Where cgroup v2 is
// not mounted, processes are found by their namespaces.
func (l *Lab) makeCgroup() error {
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err != nil {
			continue
		}
		dir := filepath.Join(root, l.Name, "lab")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("cgroup: %w", err)
		}
		f, err := os.Open(dir)
		if err != nil {
			return fmt.Errorf("cgroup: %w", err)
		}
		l.cgroup = f
		return nil
	}
	return nil
}

// sysProcAttr starts a process in the lab's cgroup and in a process group of its own.
func (l *Lab) sysProcAttr() *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setpgid: true}
	if l.cgroup != nil {
		a.UseCgroupFD, a.CgroupFD = true, int(l.cgroup.Fd())
	}
	return a
}

// Place is what the sweep of this lab removes, for tests of the lab itself.
func (l *Lab) Place() sweep.Place {
	return sweep.Place{Name: l.Name, Dir: l.Dir, Owner: os.Getpid()}
}

// Docker is the lab's engine, also while it is not running.
func (l *Lab) Docker() *Docker { return l.docker }

// Setup is the engine that the lab was made with.
func (l *Lab) Setup() Setup { return l.opts.Setup }

// wait calls f every few milliseconds until it gives true or the time is over.
func wait(ctx context.Context, limit time.Duration, f func() bool) bool {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for !f() {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(5 * time.Millisecond):
		}
	}
	return true
}
