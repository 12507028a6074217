// Package provision turns a bare Debian or Ubuntu into a klimax guest, and
// back: an ordered list of steps, each of which checks before it changes
// anything and knows how to take its change back. The order matters most
// around Docker: forwarding, klimax's own rules and the daemon's configuration
// come first, so that Docker finds them at its very first start and never
// sets its FORWARD policy to DROP.
package provision

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"klimax/shared/progress"
	"klimax/systemd"
)

// Paths are where things go. All are absolute.
type Paths struct {
	Binary       string // klimax-guest
	Config       string // klimax.yaml
	Socket       string // the agent's API; its directory holds pid files too
	StateDir     string
	LogDir       string // logs of supervised processes, without systemd only
	SysctlFile   string
	UnitDir      string // systemd's directory for local units
	DaemonJSON   string // Docker's configuration
	DockerPID    string // Docker's pid file
	DockerSocket string // where a dockerd that provision starts listens
	PolicyRC     string // what keeps packages from starting services (invoke-rc.d(8))
	Timeout      string // coreutils' timeout
}

// DefaultPaths returns the paths of an ordinary installation.
func DefaultPaths() Paths {
	return Paths{
		Binary:       "/usr/local/bin/klimax-guest",
		Config:       "/etc/klimax/klimax.yaml",
		Socket:       "/run/klimax/guest.sock",
		StateDir:     "/var/lib/klimax",
		LogDir:       "/var/log/klimax",
		SysctlFile:   "/etc/sysctl.d/99-klimax.conf",
		UnitDir:      "/etc/systemd/system",
		DaemonJSON:   "/etc/docker/daemon.json",
		DockerPID:    "/run/docker.pid",
		DockerSocket: "/run/docker.sock",
		PolicyRC:     "/usr/sbin/policy-rc.d",
		Timeout:      "/usr/bin/timeout",
	}
}

// Choice is yes, no, or as the situation suggests.
type Choice int

// The choices.
const (
	Auto Choice = iota
	Yes
	No
)

// Engine is what is known of Docker before anything is changed.
type Engine struct {
	Answers bool   // a daemon answers on the socket that is used
	Version string // empty when it does not
}

// Options describe an installation. The functions are injected, because what
// they do belongs to packages that provision does not know.
type Options struct {
	Root  string // put before every path that is read or written, for tests
	Paths Paths  // zero means DefaultPaths
	Group string // may use the agent's socket; "" means klimax

	// Self is the klimax-guest to install, usually the running program.
	Self string
	// DefaultConfig is written when there is no configuration yet.
	DefaultConfig []byte
	// LiveRestore says whether daemon.json is to be managed (live-restore, and
	// ip-forward-no-drop where the engine knows it). Auto: only where Docker is
	// new here; elsewhere it is suggested.
	LiveRestore Choice
	// DockerdArgs are further arguments of a dockerd that provision starts itself.
	DockerdArgs []string
	// RemovePackages lets Uninstall remove the packages that Install installed,
	// Docker among them. Docker's data stays.
	RemovePackages bool

	// Preflight finds Docker before anything is changed. It returns an error
	// that names a kind of Docker klimax cannot work with.
	Preflight func(context.Context) (Engine, error)
	// EngineAnswers is nil when the daemon answers.
	EngineAnswers func(context.Context) error
	// RulesApplied reports whether klimax's table is as it should be by now.
	RulesApplied func(context.Context) (bool, error)
	ApplyRules   func(context.Context) error
	// RemoveRules reports whether there was anything to remove.
	RemoveRules func(context.Context) (bool, error)
	// AgentAnswers is nil when the agent answers on its socket.
	AgentAnswers func(context.Context) error

	// Run runs a program and returns its output; nil means os/exec.
	Run Runner
	// Units connects to systemd; nil means D-Bus.
	Units func(context.Context) (Units, error)

	Progress progress.Sink // may be nil
	Logger   *slog.Logger  // may be nil

	// Limits of waiting; zero means the default.
	DockerTimeout time.Duration // until Docker answers, 60 s
	AgentTimeout  time.Duration // until the agent answers, 30 s

	chown func(path string, uid, gid int) error // for tests without root
}

// Step is one thing that has to be as wanted.
type Step struct {
	ID    string // kebab-case, stable
	Title string
	// Check reports whether nothing has to be done; plan says in a few words
	// what would be, or what was found.
	Check func(context.Context) (satisfied bool, plan string, err error)
	Apply func(context.Context) error
	// Undo takes back what Apply did, and only that. It reports whether there
	// was anything. Nil means that there never is.
	Undo func(context.Context) (changed bool, err error)
}

// Planned is what Plan found out about a step.
type Planned struct {
	ID        string `json:"id"`
	Title     string `json:"title"`
	Satisfied bool   `json:"satisfied"`
	Plan      string `json:"plan,omitempty"`
	Error     string `json:"error,omitempty"`
}

// Install brings the machine into the wanted state and reports whether
// anything was changed. It stops at the first step that fails; running it
// again goes on from there.
func Install(ctx context.Context, o Options) (changed bool, err error) {
	r, err := begin(o)
	if err != nil {
		return false, err
	}
	defer r.end()
	if err := r.lock(); err != nil {
		return false, err
	}
	for _, s := range r.steps() {
		did, err := r.run(ctx, s)
		changed = changed || did
		if err != nil {
			return changed, fmt.Errorf("%s: %w", s.Title, err)
		}
	}
	return changed, nil
}

// Plan says for each step what Install would do, and changes nothing. A step
// that cannot know before an earlier one is done says what it expects.
func Plan(ctx context.Context, o Options) ([]Planned, error) {
	r, err := begin(o)
	if err != nil {
		return nil, err
	}
	defer r.end()
	var out []Planned
	for _, s := range r.steps() {
		p := Planned{ID: s.ID, Title: s.Title}
		p.Satisfied, p.Plan, err = s.Check(ctx)
		if err != nil {
			p.Satisfied, p.Error = false, err.Error()
		}
		out = append(out, p)
	}
	return out, nil
}

// Stop stops the agent and, on a machine without systemd, the dockerd that
// Install started; a dockerd of somebody else and all rules stay. It reports
// whether anything was running.
func Stop(ctx context.Context, o Options) (changed bool, err error) {
	r, err := begin(o)
	if err != nil {
		return false, err
	}
	defer r.end()
	return r.undo(ctx, func(id string) bool { return id == stepAgent || id == stepDocker })
}

// Uninstall takes back what Install did, in reverse order: it goes on after a
// failure and returns all of them. The configuration stays when somebody has
// changed it, and so does Docker unless RemovePackages is set.
func Uninstall(ctx context.Context, o Options) (changed bool, err error) {
	r, err := begin(o)
	if err != nil {
		return false, err
	}
	defer r.end()
	return r.undo(ctx, func(string) bool { return true })
}

// runner carries one call through its steps.
type runner struct {
	Options
	lockFile    *os.File
	units       Units // connected on first use
	restart     bool  // the agent must not go on with what it was started with
	findings    Engine
	haveFinding bool
}

func begin(o Options) (*runner, error) {
	if o.Paths == (Paths{}) {
		o.Paths = DefaultPaths()
	}
	if o.Group == "" {
		o.Group = "klimax"
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Run == nil {
		o.Run = execute
	}
	if o.Units == nil {
		o.Units = connect
	}
	if o.chown == nil {
		o.chown = os.Lchown
	}
	if o.DockerTimeout == 0 {
		o.DockerTimeout = time.Minute
	}
	if o.AgentTimeout == 0 {
		o.AgentTimeout = 30 * time.Second
	}
	for name, missing := range map[string]bool{
		"Preflight": o.Preflight == nil, "EngineAnswers": o.EngineAnswers == nil,
		"RulesApplied": o.RulesApplied == nil, "ApplyRules": o.ApplyRules == nil, "RemoveRules": o.RemoveRules == nil,
		"AgentAnswers": o.AgentAnswers == nil,
	} {
		if missing {
			return nil, fmt.Errorf("provision: Options.%s is not set", name)
		}
	}
	return &runner{Options: o}, nil
}

func (r *runner) end() {
	if r.units != nil {
		r.units.Close()
	}
	if r.lockFile != nil {
		r.lockFile.Close()
	}
}

// at is where a path lies under Root.
func (r *runner) at(path string) string { return filepath.Join(r.Root, path) }

// systemd reports whether systemd is the init, as sd_booted(3) does.
func (r *runner) systemd() bool {
	i, err := os.Lstat(r.at("/run/systemd/system"))
	return err == nil && i.IsDir()
}

func (r *runner) unitOptions() systemd.Options {
	return systemd.Options{
		Binary: r.Paths.Binary, Config: r.Paths.Config, Socket: r.Paths.Socket,
		StateDir: r.Paths.StateDir, Group: r.Group, Timeout: r.Paths.Timeout,
	}
}

// run does one step: check, apply, and check again, because only what is then
// found counts.
func (r *runner) run(ctx context.Context, s Step) (changed bool, err error) {
	began := time.Now()
	r.emit(s, progress.Started, "", 0)
	finish := func(state progress.State, message string) {
		r.emit(s, state, message, time.Since(began))
	}
	ok, plan, err := s.Check(ctx)
	if err == nil && ok {
		finish(progress.Same, plan)
		return false, nil
	}
	if err == nil {
		r.emit(s, progress.Log, plan, 0)
		if err = s.Apply(ctx); err == nil {
			var left string
			if ok, left, err = s.Check(ctx); err == nil && !ok {
				err = fmt.Errorf("it had no lasting effect, still to do: %s", left)
			}
		}
		changed = true
	}
	if err != nil {
		finish(progress.Failed, err.Error())
		return changed, err
	}
	finish(progress.Done, plan)
	return changed, nil
}

// undo calls Undo of the wanted steps from the last to the first.
func (r *runner) undo(ctx context.Context, want func(id string) bool) (changed bool, err error) {
	if _, err := os.Stat(filepath.Dir(r.at(r.Paths.Socket))); err == nil {
		if err := r.lock(); err != nil {
			return false, err
		}
	}
	var problems []error
	for _, s := range slices.Backward(r.steps()) {
		if s.Undo == nil || !want(s.ID) {
			continue
		}
		began := time.Now()
		r.emit(s, progress.Started, "", 0)
		did, err := s.Undo(ctx)
		changed = changed || did
		switch {
		case err != nil:
			problems = append(problems, fmt.Errorf("%s: %w", s.Title, err))
			r.emit(s, progress.Failed, err.Error(), time.Since(began))
		case did:
			r.emit(s, progress.Done, "", time.Since(began))
		default:
			r.emit(s, progress.Same, "", time.Since(began))
		}
	}
	return changed, errors.Join(problems...)
}

func (r *runner) emit(s Step, state progress.State, message string, took time.Duration) {
	r.Logger.Debug("step", "step", s.ID, "state", string(state), "message", message)
	if r.Progress != nil && (state != progress.Log || message != "") {
		r.Progress.Event(progress.Event{
			Time: time.Now(), Step: s.ID, Title: s.Title, State: state, Message: message, Millis: took.Milliseconds(),
		})
	}
}

// say adds a line of detail to a step that is under way.
func (r *runner) say(id, format string, args ...any) {
	r.emit(Step{ID: id}, progress.Log, fmt.Sprintf(format, args...), 0)
}

// lock keeps two installations from running at once.
func (r *runner) lock() error {
	dir := filepath.Dir(r.at(r.Paths.Socket))
	if err := os.MkdirAll(dir, 0o750); err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("%w: this needs root, run it with sudo", err)
		}
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, "provision.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("%w: this needs root, run it with sudo", err)
		}
		return err
	}
	if err := flock(f); err != nil {
		f.Close()
		return fmt.Errorf("another installation is under way (it holds %s): %w", f.Name(), err)
	}
	r.lockFile = f
	return nil
}

// wait polls until ok returns nil, and returns its last error when limit is over.
func wait(ctx context.Context, limit time.Duration, ok func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		try, done := context.WithTimeout(ctx, 5*time.Second)
		err := ok(try)
		done()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no answer within %v: %w", limit, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
