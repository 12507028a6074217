package provision

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/coreos/go-systemd/v22/dbus"
)

// jobLimit is how long a start, stop or restart may take.
const jobLimit = 90 * time.Second

// bus is systemd over D-Bus.
type bus struct{ conn *dbus.Conn }

// connect takes the system bus, or systemd's own socket on a machine that has
// no D-Bus daemon (root may use it).
func connect(ctx context.Context) (Units, error) {
	conn, err := dbus.NewSystemConnectionContext(ctx)
	if err != nil {
		var direct error
		if conn, direct = dbus.NewSystemdConnectionContext(ctx); direct != nil {
			return nil, errors.Join(err, direct)
		}
	}
	return bus{conn}, nil
}

func (b bus) Close() { b.conn.Close() }

func (b bus) Reload(ctx context.Context) error { return b.conn.ReloadContext(ctx) }

func (b bus) Enable(ctx context.Context, units ...string) error {
	if _, _, err := b.conn.EnableUnitFilesContext(ctx, units, false, true); err != nil {
		return fmt.Errorf("enabling %v: %w", units, err)
	}
	return b.conn.ReloadContext(ctx)
}

func (b bus) Disable(ctx context.Context, units ...string) error {
	if _, err := b.conn.DisableUnitFilesContext(ctx, units, false); err != nil {
		return fmt.Errorf("disabling %v: %w", units, err)
	}
	return nil
}

func (b bus) Forget(ctx context.Context, unit string) error {
	return b.conn.ResetFailedUnitContext(ctx, unit)
}

func (b bus) Start(ctx context.Context, unit string) error {
	return job(ctx, "starting", unit, b.conn.StartUnitContext)
}

func (b bus) Restart(ctx context.Context, unit string) error {
	return job(ctx, "restarting", unit, b.conn.RestartUnitContext)
}

func (b bus) Stop(ctx context.Context, unit string) error {
	return job(ctx, "stopping", unit, b.conn.StopUnitContext)
}

func job(ctx context.Context, what, unit string, call func(context.Context, string, string, chan<- string) (int, error)) error {
	ctx, cancel := context.WithTimeout(ctx, jobLimit)
	defer cancel()
	done := make(chan string, 1)
	if _, err := call(ctx, unit, "replace", done); err != nil {
		return fmt.Errorf("%s %s: %w", what, unit, err)
	}
	select {
	case result := <-done:
		if result != "done" && result != "skipped" {
			return fmt.Errorf("%s %s: the result is %q", what, unit, result)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s %s: %w", what, unit, ctx.Err())
	}
}

func (b bus) State(ctx context.Context, unit string) (UnitState, error) {
	p, err := b.conn.GetAllPropertiesContext(ctx, unit)
	if err != nil {
		return UnitState{}, fmt.Errorf("reading the state of %s: %w", unit, err)
	}
	pid, _ := p["MainPID"].(uint32)
	return UnitState{
		Active:  p["ActiveState"] == "active" || p["ActiveState"] == "reloading",
		Down:    p["ActiveState"] == "inactive" || p["ActiveState"] == "failed",
		Enabled: p["UnitFileState"] == "enabled",
		MainPID: int(pid),
	}, nil
}
