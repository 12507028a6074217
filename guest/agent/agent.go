// Package agent is the life of klimax-guest run: it puts the parts together,
// starts them, tells systemd about itself and ends within a second.
package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"

	"klimax/guest/apiserver"
	"klimax/guest/docker"
	"klimax/guest/logring"
	"klimax/guest/reconcile"
	"klimax/guest/state"
	"klimax/guest/watch"
	"klimax/shared/api"
	"klimax/shared/config"
	"klimax/shared/version"
)

// Options of Run.
type Options struct {
	Config     string // path of klimax.yaml; it need not exist
	Socket     string // path of the API's unix socket
	StateDir   string
	DockerHost string // a DOCKER_HOST value
	Log        *slog.Logger
	Ring       *logring.Ring // the last lines of Log
	Timing     reconcile.Timing
	// Reload delivers whenever the configuration file shall be read again.
	Reload <-chan os.Signal
}

// dockerUnit is the unit whose state is followed where systemd is the init.
const dockerUnit = "docker.service"

// Run runs the agent until the context ends. The rules stay in the kernel.
func Run(ctx context.Context, o Options) error {
	dir := state.Dir(o.StateDir)
	lock, err := dir.LockAgent()
	if err != nil {
		return err
	}
	defer lock.Unlock()
	engine, err := docker.Open(o.DockerHost)
	if err != nil {
		return err
	}
	defer func() { _ = engine.Close() }()
	listener, err := listen(o.Socket)
	if err != nil {
		return err
	}
	a := &agent{
		o: o,
		board: reconcile.NewBoard(api.Status{Version: version.Version, PID: os.Getpid(), Started: time.Now(),
			Clusters: []api.Cluster{}, Mirrors: []api.Mirror{}, Callers: []api.Caller{}, Conditions: []api.Condition{},
			Network: api.Network{Allow: []string{}, Ranges: []string{}, Rules: []api.Rule{}}}),
		store: &configStore{path: o.Config, dir: dir},
	}
	a.loop = reconcile.New(reconcile.Options{
		Engine: engine, Kernel: kernel{dir: dir, stateFailed: a.stateFailed},
		Log: o.Log, Timing: o.Timing, Board: a.board,
	})
	a.applyConfig()

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var parts sync.WaitGroup
	start := func(f func(context.Context)) { parts.Go(func() { f(ctx) }) }
	start(func(ctx context.Context) { watch.NFTables(ctx, o.Log, a.loop.Kick) })
	start(func(ctx context.Context) { watch.Links(ctx, o.Log, a.loop.Kick) })
	if watch.SystemdBooted() && isDefaultHost(o.DockerHost) {
		engine.SetPermit(func(ctx context.Context) bool { return watch.UnitMayBeAsked(ctx, dockerUnit) })
		start(func(ctx context.Context) {
			watch.Unit(ctx, o.Log, dockerUnit, func(state string) {
				engine.UnitState(state)
				a.loop.KickDocker(dockerUnit + " is " + state)
			})
		})
	}
	start(a.loop.Run)
	start(a.reloads)
	start(a.recheckState)
	start(a.tellSystemd)
	o.Log.Info("klimax-guest runs", "version", version.Get().String(), "socket", o.Socket, "config", o.Config)
	err = apiserver.Serve(ctx, listener, apiserver.Options{Backend: a, Log: o.Log})
	cancel()
	parts.Wait()
	o.Log.Info("klimax-guest ends, the rules stay")
	return err
}

// isDefaultHost: only the engine at the default socket is docker.service's.
func isDefaultHost(host string) bool { return host == "" || host == docker.DefaultHost }

type agent struct {
	o     Options
	board *reconcile.Board
	loop  *reconcile.Loop
	store *configStore
	putMu sync.Mutex // for the store and the loop to get configurations in one order
	// stateBad: the state directory could not be written at the last attempt
	stateBad atomic.Bool
}

func (a *agent) applyConfig() {
	a.putMu.Lock()
	defer a.putMu.Unlock()
	c, err := a.store.load()
	if err != nil {
		a.o.Log.Error("the configuration is invalid, rules are left as they are", "file", a.o.Config, "error", err)
	}
	a.loop.SetConfig(c, err)
}

func (a *agent) reloads(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.o.Reload:
			a.o.Log.Info("reading the configuration again", "file", a.o.Config)
			a.applyConfig()
		}
	}
}

// stateFailed is called with the result of every write to the state directory.
func (a *agent) stateFailed(err error) {
	c := api.Condition{Type: api.CondState, Status: api.True, Reason: "OK", Message: "the state directory is writable"}
	var held *state.HeldError
	if errors.As(err, &held) {
		return // somebody is applying rules right now
	}
	if !a.stateBad.Swap(err != nil) && err == nil {
		return // as before
	}
	if err != nil {
		c.Status, c.Reason = api.False, "WriteFailed"
		c.Message = fmt.Sprintf("%v: free some space or make %s writable", err, a.o.StateDir)
	}
	a.board.SetCondition(c)
}

// stateCheck is how often a state directory that could not be written is tried.
const stateCheck = 10 * time.Second

// recheckState notices when the state directory can be written again.
func (a *agent) recheckState(ctx context.Context) {
	tick := time.NewTicker(stateCheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			a.checkState()
		}
	}
}

func (a *agent) checkState() {
	if a.stateBad.Load() {
		a.stateFailed(state.Dir(a.o.StateDir).Check())
	}
}

// Status implements apiserver.Backend. The rules' counters are read now.
func (a *agent) Status() api.Status {
	a.loop.RefreshCounters(context.Background())
	return a.board.Status()
}

// Follow implements apiserver.Backend.
func (a *agent) Follow(ctx context.Context, f func(reason string, s api.Status) error) error {
	return a.board.Follow(ctx, f)
}

// Logs implements apiserver.Backend.
func (a *agent) Logs(ctx context.Context, w io.Writer, n int, follow bool, flush func()) error {
	return a.o.Ring.Copy(ctx, w, n, follow, flush)
}

// Config implements apiserver.Backend.
func (a *agent) Config() (config.Config, error) { return a.store.get() }

// PutConfig implements apiserver.Backend.
func (a *agent) PutConfig(c config.Config, ifMatch string) (api.ConfigPut, error) {
	a.putMu.Lock()
	defer a.putMu.Unlock()
	now, err := a.store.get()
	if err == nil && ifMatch != "" && ifMatch != now.ETag() {
		return api.ConfigPut{}, &api.Error{Code: api.CodePreconditionFailed,
			Message: "the guest's configuration was changed by somebody else meanwhile", Hint: "look at it (klimax status) and try again"}
	}
	for i, m := range c.Registries.Mirrors {
		if m.Password != config.Hidden {
			continue
		}
		for _, old := range now.Registries.Mirrors {
			if old.Name == m.Name {
				c.Registries.Mirrors[i].Password = old.Password
			}
		}
	}
	if err == nil && c.ETag() == now.ETag() {
		return api.ConfigPut{Generation: a.board.Status().Generation.Desired, ETag: now.ETag()}, nil
	}
	stored, err := a.store.put(c)
	a.stateFailed(err)
	if err != nil {
		return api.ConfigPut{}, fmt.Errorf("store the configuration: %w", err)
	}
	gen := a.loop.SetConfig(stored, nil)
	return api.ConfigPut{Generation: gen, ETag: stored.ETag(), Changed: true}, nil
}

// tellSystemd says READY once rules were looked at, keeps the watchdog fed as
// long as the status can be read, and mirrors the state in `systemctl status`.
func (a *agent) tellSystemd(ctx context.Context) {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil || interval <= 0 {
		interval = time.Minute
	}
	tick := time.NewTicker(interval / 3)
	defer tick.Stop()
	updates := make(chan api.Status, 1)
	go func() {
		_ = a.board.Follow(ctx, func(_ string, s api.Status) error {
			select {
			case updates <- s:
			case <-ctx.Done():
			}
			return nil
		})
	}()
	ready, last := false, ""
	for {
		select {
		case <-ctx.Done():
			_, _ = daemon.SdNotify(false, daemon.SdNotifyStopping)
			return
		case <-tick.C:
			if a.loop.Alive(interval) {
				_, _ = daemon.SdNotify(false, daemon.SdNotifyWatchdog)
			}
		case s := <-updates:
			line := "STATUS=rules out of sync"
			if s.Network.InSync {
				line = "STATUS=rules in sync, " + s.Uplink.Name + " " + s.Uplink.Address
			}
			if !ready && len(s.Conditions) > 0 {
				ready = true
				line = daemon.SdNotifyReady + "\n" + line
			}
			if line != last {
				_, _ = daemon.SdNotify(false, line)
				last = line
			}
		}
	}
}

// listen takes the socket that systemd passed, else makes its own: a socket
// file that nobody listens on is replaced, one in use is an error.
func listen(path string) (net.Listener, error) {
	passed, err := activation.Listeners()
	if err == nil && len(passed) > 0 && passed[0] != nil {
		return passed[0], nil
	}
	return apiserver.Listen(path)
}
