package provision

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"klimax/systemd"
)

// Units is what provision needs of systemd.
type Units interface {
	Reload(ctx context.Context) error // read unit files again
	Enable(ctx context.Context, units ...string) error
	Disable(ctx context.Context, units ...string) error
	// Start, Restart and Stop wait until the job is done.
	Start(ctx context.Context, unit string) error
	Restart(ctx context.Context, unit string) error
	Stop(ctx context.Context, unit string) error
	State(ctx context.Context, unit string) (UnitState, error)
	// Forget drops the memory of a unit's failure.
	Forget(ctx context.Context, unit string) error
	Close()
}

// UnitState is a unit's state. A unit that does not exist is Down.
type UnitState struct {
	Active  bool // up and ready
	Down    bool // neither up nor on the way there, as between two restarts
	Enabled bool
	MainPID int // 0 when it does not run
}

func (r *runner) manager(ctx context.Context) (Units, error) {
	if r.units == nil {
		u, err := r.Units(ctx)
		if err != nil {
			return nil, fmt.Errorf("reaching systemd: %w", err)
		}
		r.units = u
	}
	return r.units, nil
}

// unitFiles writes and enables the units and starts the boot oneshot.
func (r *runner) unitFiles() Step {
	enabled := []string{systemd.GuestUnit, systemd.NetworkUnit}
	differing := func() (out []systemd.File, err error) {
		files, err := systemd.Render(r.unitOptions())
		for _, f := range files {
			same, err := r.same(filepath.Join(r.Paths.UnitDir, f.Path), f.Content, f.Mode)
			if err != nil {
				return nil, err
			}
			if !same {
				out = append(out, f)
			}
		}
		return out, err
	}
	return Step{
		ID: stepUnits, Title: "systemd units",
		Check: func(ctx context.Context) (bool, string, error) {
			files, err := differing()
			if err != nil {
				return false, "", err
			}
			var names []string
			for _, f := range files {
				names = append(names, f.Path)
			}
			if len(names) > 0 {
				return false, "write " + strings.Join(names, ", "), nil
			}
			u, err := r.manager(ctx)
			if err != nil {
				return false, "", err
			}
			for _, name := range enabled {
				s, err := u.State(ctx, name)
				if err != nil {
					return false, "", err
				}
				if !s.Enabled || name == systemd.NetworkUnit && !s.Active {
					return false, "enable " + name, nil
				}
			}
			return true, "enabled", nil
		},
		Apply: func(ctx context.Context) error {
			files, err := differing()
			if err != nil {
				return err
			}
			for _, f := range files {
				if err := r.writeFile(filepath.Join(r.Paths.UnitDir, f.Path), f.Content, f.Mode); err != nil {
					return err
				}
				r.restart = r.restart || f.Path == systemd.GuestUnit
			}
			u, err := r.manager(ctx)
			if err != nil {
				return err
			}
			if err := u.Reload(ctx); err != nil {
				return err
			}
			if err := u.Enable(ctx, enabled...); err != nil {
				return err
			}
			return u.Start(ctx, systemd.NetworkUnit)
		},
		Undo: func(ctx context.Context) (bool, error) {
			files, err := systemd.Render(r.unitOptions())
			if err != nil {
				return false, err
			}
			here := false
			for _, f := range files {
				_, err := os.Stat(r.at(filepath.Join(r.Paths.UnitDir, f.Path)))
				here = here || err == nil
			}
			if !here {
				return false, nil
			}
			u, err := r.manager(ctx)
			if err != nil {
				return false, err
			}
			var problems []error
			if s, err := u.State(ctx, systemd.NetworkUnit); err == nil && s.Active {
				problems = append(problems, u.Stop(ctx, systemd.NetworkUnit)) // it only forgets that it ran
			}
			problems = append(problems, u.Disable(ctx, enabled...))
			for _, f := range files {
				_, err := r.remove(filepath.Join(r.Paths.UnitDir, f.Path))
				problems = append(problems, err)
			}
			problems = append(problems, u.Reload(ctx))
			for _, name := range enabled {
				u.Forget(ctx, name) // an error means that there is nothing to forget
			}
			return true, errors.Join(problems...)
		},
	}
}

// dockerUnit starts Docker if nothing else has.
func (r *runner) dockerUnit() Step {
	return Step{
		ID: stepDocker, Title: "Docker",
		Check: func(ctx context.Context) (bool, string, error) {
			if err := r.EngineAnswers(ctx); err != nil {
				return false, "start " + systemd.DockerUnit, nil
			}
			return true, "answers", nil
		},
		Apply: func(ctx context.Context) error {
			u, err := r.manager(ctx)
			if err != nil {
				return err
			}
			if err := u.Start(ctx, systemd.DockerUnit); err != nil {
				return fmt.Errorf("%w\n  see what it says: journalctl -u docker", err)
			}
			return wait(ctx, r.DockerTimeout, r.EngineAnswers)
		},
	}
}

// agentUnit starts the agent, or starts it anew when it is not the one that is installed.
func (r *runner) agentUnit() Step {
	return Step{
		ID: stepAgent, Title: "agent",
		Check: func(ctx context.Context) (bool, string, error) {
			u, err := r.manager(ctx)
			if err != nil {
				return false, "", err
			}
			s, err := u.State(ctx, systemd.GuestUnit)
			switch {
			case err != nil:
				return false, "", err
			case !s.Active:
				return false, "start " + systemd.GuestUnit, nil
			case r.outdated(s.MainPID):
				return false, "restart " + systemd.GuestUnit + ": it runs an older program or unit", nil
			}
			return true, "runs", nil
		},
		Apply: func(ctx context.Context) error {
			u, err := r.manager(ctx)
			if err != nil {
				return err
			}
			if err := u.Restart(ctx, systemd.GuestUnit); err != nil {
				return fmt.Errorf("%w\n  see what it says: journalctl -u klimax-guest", err)
			}
			r.restart = false
			return nil
		},
		Undo: func(ctx context.Context) (bool, error) {
			u, err := r.manager(ctx)
			if err != nil {
				return false, err
			}
			s, err := u.State(ctx, systemd.GuestUnit)
			if err != nil || s.Down {
				return false, err
			}
			return true, u.Stop(ctx, systemd.GuestUnit)
		},
	}
}

// outdated reports whether a process must be restarted to be the installed
// program: this run changed what it was started from, or its file has been
// replaced since it started, which an interrupted run leaves.
func (r *runner) outdated(pid int) bool {
	if r.restart {
		return true
	}
	exe, err := os.Readlink(r.at("/proc/" + strconv.Itoa(pid) + "/exe"))
	return err == nil && pid > 0 && strings.HasSuffix(exe, " (deleted)")
}
