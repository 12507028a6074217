//go:build linux

package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/docker/docker/client"
)

// startLimit is how long dockerd may take to answer after its start, and stopLimit how long to end, on a busy
// machine.
const (
	startLimit = 60 * time.Second
	stopLimit  = 60 * time.Second
)

// Docker is the lab's engine. Its containerd runs from the first Start to the lab's end, as on a host where it is a
// service of its own.
type Docker struct {
	Socket string // of the API
	Host   string // the same for DOCKER_HOST
	Root   string // data-root
	Config string // its configuration file (--config-file), read at start and on SIGHUP; the first Start makes it when it is missing
	Log    string // dockerd's log file, of all starts

	lab  *Lab
	cli  *client.Client
	once sync.Once // the image is imported once
	ierr error

	mu         sync.Mutex
	setup      Setup
	keyPlaced  bool // placeKey was called for this setup
	daemon     *process
	containerd *process
}

// process is a child and how it ended.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended and was waited for
}

func newDocker(l *Lab) *Docker {
	d := &Docker{
		Socket: filepath.Join(l.Dir, "docker.sock"),
		Root:   filepath.Join(l.Dir, "data"),
		Config: filepath.Join(l.Dir, "daemon.json"),
		Log:    filepath.Join(l.Dir, "dockerd.log"),
		lab:    l,
		setup:  l.opts.Setup,
	}
	d.Host = "unix://" + d.Socket
	return d
}

// Client is an API client that negotiates the version with the engine at its first call.
func (d *Docker) Client() *client.Client {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.client()
}

func (d *Docker) client() *client.Client {
	if d.cli == nil {
		c, err := client.NewClientWithOpts(client.WithHost(d.Host), client.WithAPIVersionNegotiation())
		if err != nil { // only a host that cannot be parsed
			d.lab.t.Fatalf("lab: docker client: %v", err)
		}
		d.cli = c
	}
	return d.cli
}

func (d *Docker) closeClient() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cli != nil {
		d.cli.Close()
		d.cli = nil
	}
}

// SetConfig merges keys into the engine's configuration file; a key with the value nil is taken out. It acts at the
// next start or, for what can be reloaded, on SIGHUP.
func (d *Docker) SetConfig(keys map[string]any) error {
	m := map[string]any{}
	b, err := os.ReadFile(d.Config)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil {
		if err := json.Unmarshal(b, &m); err != nil {
			return fmt.Errorf("%s: %w", d.Config, err)
		}
	}
	for k, v := range keys {
		if m[k] = v; v == nil {
			delete(m, k)
		}
	}
	if b, err = json.MarshalIndent(m, "", "  "); err != nil {
		return err
	}
	return os.WriteFile(d.Config, b, 0o644)
}

// Use makes the next start another engine's, on the same data.
func (d *Docker) Use(s Setup) error {
	t, err := buildTools(d.lab.t.Context(), s, func(string) {})
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.setup, d.lab.tools, d.keyPlaced = s, t, false
	if d.cli != nil { // it has negotiated another API version
		d.cli.Close()
		d.cli = nil
	}
	return nil
}

// args are dockerd's arguments. All paths are below the lab's directory; the wrapper runtime makes privileged
// containers and Docker 29 possible with old runc and confined machines.
func (d *Docker) args() []string {
	l := d.lab
	a := []string{
		"--config-file", d.Config,
		"--data-root", d.Root,
		"--exec-root", filepath.Join(l.Dir, "exec"),
		"--pidfile", filepath.Join(l.Dir, "docker.pid"),
		"-H", d.Host,
		"--containerd", filepath.Join(l.Dir, "containerd.sock"),
		"--containerd-namespace", l.Name,
		"--containerd-plugins-namespace", l.Name + "-plugins",
		"--exec-opt", "native.cgroupdriver=cgroupfs",
		"--cgroup-parent", "/" + l.Name,
		"--add-runtime", "lab=" + l.tools.runcwrap,
		"--default-runtime", "lab",
	}
	if d.setup.Moby29() {
		a = append(a,
			"--userland-proxy-path", l.tools.dockerProxy,
			// containerd's own image store wants a newer containerd than distributions have.
			"--feature", "containerd-snapshotter=false",
		)
		if d.setup == Nftables {
			a = append(a, "--firewall-backend=nftables")
		}
	}
	return append(a, l.opts.DaemonArgs...)
}

// Start starts the engine (and, the first time, its containerd) and waits until the API answers.
func (d *Docker) Start(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.daemon != nil && !d.daemon.ended() {
		return errors.New("dockerd is running already")
	}
	if _, err := os.Stat(d.Config); errors.Is(err, fs.ErrNotExist) {
		keys := map[string]any{"live-restore": !d.lab.opts.NoLiveRestore}
		for k, v := range d.lab.opts.DaemonJSON {
			keys[k] = v
		}
		if err := d.SetConfig(keys); err != nil {
			return err
		}
	}
	if err := d.linkLegacy(); err != nil {
		return err
	}
	if d.containerd == nil {
		if err := d.startContainerd(ctx); err != nil {
			return err
		}
	}
	bin := "dockerd"
	if d.setup.Moby29() {
		bin = d.lab.tools.dockerd
	}
	if !d.keyPlaced {
		if err := d.placeKey(ctx, bin); err != nil {
			return err
		}
		d.keyPlaced = true
	}
	os.Remove(d.Socket) // of a killed one: else a client is refused instead of finding nothing
	p, err := d.spawn(d.Log, bin, d.args()...)
	if err != nil {
		return err
	}
	d.daemon = p
	return d.waitAPI(ctx)
}

// placeKey keeps 20.10 from writing a key for long gone registries to /etc/docker, and takes the setting out for newer
// engines, which refuse to start on it. A configuration that is broken is left for dockerd to complain about.
func (d *Docker) placeKey(ctx context.Context, bin string) error {
	const key = "deprecated-key-path"
	v, err := exec.CommandContext(ctx, bin, "--version").Output()
	if err != nil {
		return fmt.Errorf("%s --version: %w", bin, err)
	}
	var m map[string]any
	if b, err := os.ReadFile(d.Config); err != nil || json.Unmarshal(b, &m) != nil {
		return nil
	}
	_, there := m[key]
	switch old := bytes.Contains(v, []byte("version 20.10.")); {
	case old && !there:
		return d.SetConfig(map[string]any{key: filepath.Join(d.lab.Dir, "key.json")})
	case !old && there:
		return d.SetConfig(map[string]any{key: nil})
	}
	return nil
}

// waitAPI waits until the engine answers or ends.
func (d *Docker) waitAPI(ctx context.Context) error {
	c, p := d.client(), d.daemon
	up := wait(ctx, startLimit, func() bool {
		if p.ended() {
			return true
		}
		// dockerd listens early and answers late: one patient call sees the moment.
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		_, err := c.Ping(ctx)
		return err == nil
	})
	switch {
	case p.ended():
		return fmt.Errorf("dockerd (%s) ended at its start: %v; its log ends with:\n%s", d.setup, p.cmd.ProcessState, d.LogTail(15))
	case !up:
		return fmt.Errorf("dockerd (%s) does not answer; its log ends with:\n%s", d.setup, d.LogTail(15))
	}
	return nil
}

// disabled are plugins of containerd that dockerd does not use; opt would make a directory outside of the lab.
var disabled = []string{
	"io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt", "io.containerd.internal.v1.restart",
	"io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
	"io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
}

func (d *Docker) startContainerd(ctx context.Context) error {
	at := func(s string) string { return filepath.Join(d.lab.Dir, s) }
	list, _ := json.Marshal(disabled) // a JSON array of strings is TOML as well
	if err := os.WriteFile(at("containerd.toml"), fmt.Appendf(nil, "version = 2\ndisabled_plugins = %s\n", list), 0o644); err != nil {
		return err
	}
	p, err := d.spawn(at("containerd.log"), "containerd", "--config", at("containerd.toml"),
		"--root", at("containerd/root"), "--state", at("containerd/state"), "--address", at("containerd.sock"))
	if err != nil {
		return err
	}
	d.containerd = p
	up := wait(ctx, startLimit, func() bool {
		_, err := os.Stat(at("containerd.sock"))
		return err == nil || p.ended()
	})
	if !up || p.ended() {
		return fmt.Errorf("containerd does not listen; its log ends with:\n%s", tail(at("containerd.log"), 15))
	}
	return nil
}

// spawn starts a program in the VM's namespace, with its output in a file. nsenter becomes the program: the process
// number is the program's own.
func (d *Docker) spawn(log, name string, args ...string) (*process, error) {
	f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	c := d.lab.VM.Command(context.Background(), name, args...)
	c.Stdout, c.Stderr, c.Dir = f, f, d.lab.Dir
	if d.lab.opts.Legacy {
		c.Env = append(os.Environ(), "PATH="+d.legacyDir()+":"+os.Getenv("PATH"))
	}
	if err := c.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &process{cmd: c, done: make(chan struct{})}
	go func() {
		c.Wait()
		close(p.done)
	}()
	return p, nil
}

func (d *Docker) legacyDir() string { return filepath.Join(d.lab.Dir, "legacy") }

// linkLegacy makes a directory where iptables-legacy has the names of iptables, as update-alternatives would do it for
// the whole machine.
func (d *Docker) linkLegacy() error {
	if !d.lab.opts.Legacy {
		return nil
	}
	if err := os.MkdirAll(d.legacyDir(), 0o755); err != nil {
		return err
	}
	for _, v := range []string{"iptables", "ip6tables"} {
		for _, verb := range []string{"", "-save", "-restore"} {
			to, err := exec.LookPath(v + "-legacy" + verb)
			if err != nil {
				return fmt.Errorf("%w; install what the lab needs: go run ./test/labdeps", err)
			}
			if err := os.Symlink(to, filepath.Join(d.legacyDir(), v+verb)); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
		}
	}
	return nil
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// PID is dockerd's process number, 0 when it does not run.
func (d *Docker) PID() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.daemon == nil || d.daemon.ended() {
		return 0
	}
	return d.daemon.cmd.Process.Pid
}

// Stop sends dockerd a signal and waits until it has ended.
func (d *Docker) Stop(ctx context.Context, sig syscall.Signal) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.daemon == nil || d.daemon.ended() {
		return errors.New("stop dockerd: it does not run")
	}
	if err := d.daemon.cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("stop dockerd: %w", err)
	}
	select {
	case <-d.daemon.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop dockerd by %v: %w", sig, context.Cause(ctx))
	case <-time.After(stopLimit):
		return fmt.Errorf("stop dockerd by %v: still there after %v; its log ends with:\n%s", sig, stopLimit, d.LogTail(15))
	}
}

// Restart is Stop and Start: it returns when the new dockerd's API answers.
func (d *Docker) Restart(ctx context.Context, sig syscall.Signal) error {
	if err := d.Stop(ctx, sig); err != nil {
		return err
	}
	return d.Start(ctx)
}

// reap waits for the children that the sweep has killed, so that no zombies remain.
func (d *Docker) reap() {
	for _, p := range []*process{d.daemon, d.containerd} {
		if p == nil {
			continue
		}
		select {
		case <-p.done:
		case <-time.After(10 * time.Second): // the sweep has reported what it could not kill
		}
	}
}

// LogTail is the last n lines of dockerd's log.
func (d *Docker) LogTail(n int) string { return tail(d.Log, n) }

func tail(file string, n int) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	lines := slices.Collect(strings.Lines(string(bytes.TrimSpace(b))))
	return strings.Join(lines[max(0, len(lines)-n):], "")
}
