package watch

import (
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/dbus"
)

// systemdRetry is the pause before the bus is asked again.
const systemdRetry = 5 * time.Second

// SystemdBooted reports whether systemd is the init of this machine, by the
// rule of sd_booted(3).
func SystemdBooted() bool {
	st, err := os.Lstat("/run/systemd/system")
	return err == nil && st.IsDir()
}

// Unit reports changes of a systemd unit's state until the context ends.
func Unit(ctx context.Context, log *slog.Logger, unit string, notify Notify) {
	for ctx.Err() == nil {
		err := followUnit(ctx, unit, notify)
		if ctx.Err() != nil {
			return
		}
		log.Info("systemd's bus broke off, connecting again", "unit", unit, "error", err)
		select {
		case <-ctx.Done():
		case <-time.After(systemdRetry):
		}
	}
}

func followUnit(ctx context.Context, unit string, notify Notify) error {
	conn, err := dbus.NewSystemConnectionContext(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.Subscribe(); err != nil {
		return err
	}
	updates := make(chan *dbus.PropertiesUpdate, 64)
	errs := make(chan error, 8)
	conn.SetPropertiesSubscriber(updates, errs)
	alive := time.NewTicker(systemdRetry)
	defer alive.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case u := <-updates:
			if state, ok := u.Changed["ActiveState"]; ok && u.UnitName == unit {
				notify(unit + " is " + state.String())
			}
		case err := <-errs:
			return err
		case <-alive.C:
			if !conn.Connected() {
				return os.ErrClosed
			}
		}
	}
}
