package agent

import (
	"context"
	"fmt"
	"time"

	"klimax/guest/docker"
	"klimax/guest/facts"
	"klimax/guest/network"
	"klimax/guest/reconcile"
	"klimax/guest/state"
	"klimax/provision"
	"klimax/shared/config"
	"klimax/shared/netplan"
)

// engineWait bounds how long one-shot commands wait for the engine. The
// drop-in of docker.service has 10 s in all.
const engineWait = 3 * time.Second

// OneShot does what the agent does, once and without one.
type OneShot struct {
	Config     config.Config
	StateDir   string
	DockerHost string
	// NoDocker leaves the engine out: at boot it is not there yet.
	NoDocker bool
}

func (o OneShot) engine(ctx context.Context) (facts.Engine, error) {
	if o.NoDocker {
		return facts.Engine{}, nil
	}
	d, err := docker.Open(o.DockerHost)
	if err != nil {
		return facts.Engine{}, err
	}
	defer func() { _ = d.Close() }()
	plan, err := o.Config.Plan()
	if err != nil {
		return facts.Engine{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, engineWait)
	defer cancel()
	return d.Read(ctx, o.Config, plan), nil
}

func (o OneShot) kernel() kernel {
	return kernel{dir: state.Dir(o.StateDir), stateFailed: func(error) {}}
}

// Apply brings the kernel in sync and says in words what was different.
func (o OneShot) Apply(ctx context.Context) (changed string, err error) {
	e, err := o.engine(ctx)
	if err != nil {
		return "", err
	}
	return reconcile.Once(ctx, o.kernel(), o.Config, e)
}

// Look compares and changes nothing.
func (o OneShot) Look(ctx context.Context) (reconcile.View, error) {
	e, err := o.engine(ctx)
	if err != nil {
		return reconcile.View{}, err
	}
	return reconcile.Look(ctx, o.kernel(), o.Config, e)
}

// Removed says what Remove did.
type Removed struct {
	Rules      bool `json:"rules"`      // there were rules, now there are none
	Forwarding bool `json:"forwarding"` // ip_forward was switched off again
	// ForwardingKept: klimax had switched ip_forward on, but an engine runs
	// that needs it and would have switched it on itself.
	ForwardingKept bool `json:"forwardingKept"`
}

// Remove takes every trace of klimax out of the packet filters and puts
// ip_forward back. It refuses while an agent runs, which would put the rules
// back at once.
func (o OneShot) Remove(ctx context.Context) (Removed, error) {
	var out Removed
	dir := state.Dir(o.StateDir)
	if pid := dir.AgentRunning(); pid != 0 {
		return out, fmt.Errorf("the agent is running (PID %d) and would put the rules back: stop it first (systemctl stop klimax-guest, or klimax-guest stop)", pid)
	}
	e, err := o.engine(ctx)
	if err != nil {
		return out, err
	}
	if out.Rules, err = network.Remove(ctx); err != nil {
		return out, err
	}
	if e.Running {
		out.ForwardingKept = provision.ForwardingRaised("", o.StateDir)
		return out, nil
	}
	out.Forwarding, err = provision.RestoreForwarding("", o.StateDir)
	return out, err
}

// Demo returns a client and the plan for the demo commands.
func (o OneShot) Demo() (*docker.Client, netplan.Plan, error) {
	plan, err := o.Config.Plan()
	if err != nil {
		return nil, plan, err
	}
	d, err := docker.Open(o.DockerHost)
	return d, plan, err
}
