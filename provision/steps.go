package provision

import (
	"context"
	"fmt"
)

// IDs of the steps.
const (
	stepPreflight   = "preflight"
	stepGroup       = "group"
	stepDirectories = "directories"
	stepConfig      = "config"
	stepBinary      = "binary"
	stepForwarding  = "ip-forward"
	stepUnits       = "units"
	stepRules       = "rules"
	stepDaemonJSON  = "daemon-json"
	stepPackages    = "packages"
	stepDocker      = "docker"
	stepAgent       = "agent"
	stepHealth      = "health"
)

// steps is the order of an installation. Everything that Docker must find at
// its first start stands before the packages; everything that the rules need
// (a configuration, the state directory) stands before the rules. The boot
// oneshot among the units starts before the rules are applied, because it
// writes them with empty sets.
func (r *runner) steps() []Step {
	steps := []Step{
		r.preflight(), r.group(), r.directories(), r.config(), r.binary(),
		r.forwarding(),
	}
	if r.systemd() {
		steps = append(steps, r.unitFiles())
	}
	steps = append(steps, r.rules(), r.daemonJSON(), r.packages())
	if r.systemd() {
		steps = append(steps, r.dockerUnit(), r.agentUnit())
	} else {
		steps = append(steps, r.dockerProcess(), r.agentProcess())
	}
	return append(steps, r.health())
}

// preflight looks at what is there before anything is changed.
func (r *runner) preflight() Step {
	return Step{
		ID: stepPreflight, Title: "look at this machine",
		Check: func(ctx context.Context) (bool, string, error) {
			e, err := r.engine(ctx)
			switch {
			case err != nil:
				return false, "", err
			case e.Answers:
				return true, "Docker " + e.Version + " is here", nil
			case r.dockerdProgram() != "":
				return true, "Docker is installed and does not run", nil
			}
			return true, "no Docker yet", nil
		},
		Apply: func(context.Context) error { return nil },
	}
}

// engine is what Preflight found at the beginning, before this run changed
// anything.
func (r *runner) engine(ctx context.Context) (Engine, error) {
	if r.haveFinding {
		return r.findings, nil
	}
	e, err := r.Preflight(ctx)
	if err == nil {
		r.findings, r.haveFinding = e, true
	}
	return e, err
}

// rules applies klimax's own table.
func (r *runner) rules() Step {
	return Step{
		ID: stepRules, Title: "network rules",
		Check: func(ctx context.Context) (bool, string, error) {
			ok, err := r.RulesApplied(ctx)
			if ok {
				return true, "in place", err
			}
			return false, "write klimax's own nftables table", err
		},
		Apply: r.ApplyRules,
		Undo:  r.RemoveRules,
	}
}

// health waits for the agent.
func (r *runner) health() Step {
	return Step{
		ID: stepHealth, Title: "agent answers",
		Check: func(ctx context.Context) (bool, string, error) {
			if err := r.AgentAnswers(ctx); err != nil {
				return false, "wait for " + r.Paths.Socket, nil
			}
			return true, r.Paths.Socket, nil
		},
		Apply: func(ctx context.Context) error {
			if err := wait(ctx, r.AgentTimeout, r.AgentAnswers); err != nil {
				return fmt.Errorf("%w\n  see what it says: %s", err, r.agentLogHint())
			}
			return nil
		},
	}
}

func (r *runner) agentLogHint() string {
	if r.systemd() {
		return "journalctl -u klimax-guest"
	}
	return "tail " + r.agentProcessOptions().LogFile
}
