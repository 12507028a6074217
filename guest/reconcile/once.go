package reconcile

import (
	"context"

	"klimax/guest/facts"
	"klimax/guest/network"
	"klimax/shared/config"
	"klimax/shared/netplan"
)

// View is one look: what is, what is wanted, and what differs.
type View struct {
	Plan   netplan.Plan
	Facts  facts.Facts
	Want   network.Ruleset
	Have   network.State
	Change network.Change
}

// Look reads and compares, and changes nothing.
func Look(ctx context.Context, k Kernel, cfg config.Config, engine facts.Engine) (View, error) {
	var v View
	var err error
	if v.Plan, err = cfg.Plan(); err != nil {
		return v, err
	}
	l := &Loop{kernel: k}
	if v.Facts, v.Have, err = l.read(ctx, cfg, v.Plan, engine); err != nil {
		return v, err
	}
	v.Want = desired(cfg, v.Plan, v.Facts, v.Have)
	v.Change = network.Diff(v.Want, v.Have, v.Facts)
	return v, nil
}

// Once brings the kernel in sync and says in words what was different before,
// nothing for no change. It needs no agent.
func Once(ctx context.Context, k Kernel, cfg config.Config, engine facts.Engine) (changed string, err error) {
	plan, err := cfg.Plan()
	if err != nil {
		return "", err
	}
	l := &Loop{kernel: k}
	r, err := l.converge(ctx, cfg, plan, engine)
	if r.changed() {
		changed = r.first.String()
	}
	return changed, err
}
