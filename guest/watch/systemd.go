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

// UnitMayBeAsked reports whether a connection to a socket that systemd may hold
// for a unit starts nothing: the unit is starting or running, or is none of
// systemd's. When systemd does not answer it is assumed so.
func UnitMayBeAsked(ctx context.Context, unit string) bool {
	conn, err := dbus.NewSystemConnectionContext(ctx)
	if err != nil {
		return true
	}
	defer conn.Close()
	props, err := conn.GetUnitPropertiesContext(ctx, unit)
	if err != nil || props["LoadState"] != "loaded" {
		return true
	}
	switch props["ActiveState"] {
	case "active", "activating", "reloading":
		return true
	}
	return false
}

// Unit reports the ActiveState of a systemd unit, at first and at every change,
// until the context ends. A unit that does not exist is not reported.
func Unit(ctx context.Context, log *slog.Logger, unit string, state func(string)) {
	for ctx.Err() == nil {
		err := followUnit(ctx, unit, state)
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

func followUnit(ctx context.Context, unit string, state func(string)) error {
	conn, err := dbus.NewSystemConnectionContext(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	updates := make(chan *dbus.PropertiesUpdate, 64)
	errs := make(chan error, 8)
	conn.SetPropertiesSubscriber(updates, errs)
	if err := conn.Subscribe(); err != nil {
		return err
	}
	props, err := conn.GetUnitPropertiesContext(ctx, unit)
	if err != nil {
		return err
	}
	// systemd repeats the state with every other property that changes, also
	// in the moment in which the unit begins to stop.
	last := ""
	tell := func(s string) {
		if s != last {
			last = s
			state(s)
		}
	}
	if s, ok := props["ActiveState"].(string); ok && props["LoadState"] == "loaded" {
		tell(s)
	}
	alive := time.NewTicker(systemdRetry)
	defer alive.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case u := <-updates:
			if v, ok := u.Changed["ActiveState"]; ok && u.UnitName == unit {
				if s, ok := v.Value().(string); ok {
					tell(s)
				}
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
