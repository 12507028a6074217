package up

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"klimax/host/route"
	"klimax/shared/api"
	"klimax/shared/netplan"
	"klimax/shared/progress"
)

func (r *run) config(context.Context, func(string)) (progress.Result, error) {
	p, err := r.Config.Plan()
	r.plan = p
	return progress.Result{Message: r.Source}, err
}

func (r *run) connect(ctx context.Context, _ func(string)) (progress.Result, error) {
	st, err := r.Guest.Status(ctx)
	r.result.Guest = st
	return progress.Result{Message: "klimax-guest " + st.Version}, err
}

// addressPlan finds collisions on this computer before anything is changed.
func (r *run) addressPlan(ctx context.Context, _ func(string)) (progress.Result, error) {
	err := r.desired(ctx)
	var none *route.NoUplinkError
	if errors.As(err, &none) {
		return progress.Result{Message: "waits for the guest's address"}, nil
	}
	message := fmt.Sprintf("%v is free here", r.plan.Bridge)
	if r.wanted.Local {
		message = "the guest is this computer"
	}
	return progress.Result{Message: message}, err
}

// desired reads this computer's routes and computes those that are wanted for
// the guest's last known state.
func (r *run) desired(ctx context.Context) (err error) {
	r.state, r.wanted, err = lookAtRoutes(ctx, r.Options, r.plan, r.result.Guest)
	r.result.Local = r.wanted.Local
	return err
}

// guestConfig puts the configuration when the guest has another one. One that
// the guest cannot read itself is replaced like any other.
func (r *run) guestConfig(ctx context.Context, log func(string)) (progress.Result, error) {
	want := r.Config.ForGuest()
	const tries = 2 // somebody else may put one at the same time
	for try := 1; ; try++ {
		have, etag, err := r.Guest.Config(ctx)
		var e *api.Error
		switch {
		case errors.As(err, &e) && e.Code == api.CodeInvalidConfig:
			log("the guest's own configuration is not valid and is replaced: " + e.Message)
			etag = ""
		case err != nil:
			return progress.Result{}, err
		case etag == want.ETag():
			r.applied = r.result.Guest.Generation.Desired
			return progress.Result{}, nil
		}
		put, err := r.Guest.PutConfig(ctx, want, etag)
		if errors.As(err, &e) && e.Code == api.CodePreconditionFailed && try < tries {
			continue
		}
		if err != nil {
			return progress.Result{}, err
		}
		r.applied = put.Generation
		r.result.Changed = r.result.Changed || put.Changed
		return progress.Result{Changed: put.Changed, Message: strings.Join(differences(have, want), ", ")}, nil
	}
}

// freshAgent is how long after its start an agent may still be finding its
// feet, so that a bad condition is waited for though nothing was changed.
const freshAgent = 30 * time.Second

// reconcile waits until the guest has applied the configuration, and a while
// longer for its conditions to become good. Conditions without which nothing
// would work here end it with an error, others are reported at the end.
func (r *run) reconcile(ctx context.Context, log func(string)) (progress.Result, error) {
	start := time.Now()
	wait := r.result.Changed || start.Sub(r.result.Guest.Started) < freshAgent
	for said := ""; ; {
		st, err := r.Guest.Status(ctx)
		if err != nil {
			return progress.Result{}, err
		}
		r.result.Guest = st
		reconciled := st.Generation.Reconciled >= r.applied
		bad := notGood(st)
		switch passed := time.Since(start); {
		case reconciled && len(bad) == 0:
			return progress.Result{Message: guestLine(st)}, nil
		case reconciled && (!wait || passed >= r.Timing.Settle):
			r.result.Conditions = append(r.result.Conditions, bad...)
			if err := r.blocking(ctx, bad); err != nil {
				return progress.Result{}, err
			}
			return progress.Result{Message: "not all is well: " + bad[0].Message}, nil
		case passed >= r.Timing.Reconcile:
			return progress.Result{}, fmt.Errorf("the guest has not applied the configuration within %v (generation %d, applied is %d)%s\n"+
				"  in the guest, see: klimax-guest status; klimax-guest logs", r.Timing.Reconcile, r.applied, st.Generation.Reconciled, list(bad))
		}
		if now := list(bad); now != said {
			said = now
			for _, c := range bad {
				log(c.Type + ": " + c.Message)
			}
		}
		select {
		case <-ctx.Done():
			return progress.Result{}, ctx.Err()
		case <-time.After(r.Timing.Poll):
		}
	}
}

// blocking returns an error when one of the conditions means that nothing can
// be reached, whatever is done here.
func (r *run) blocking(ctx context.Context, bad []api.Condition) error {
	var b []api.Condition
	for _, c := range bad {
		switch c.Type {
		case api.CondDocker, api.CondDockerNetwork, api.CondRules, api.CondForwarding:
			b = append(b, c)
		case api.CondUplink:
			// A guest that is this computer needs none to be reached from here.
			if err := r.desired(ctx); err != nil || !r.wanted.Local {
				b = append(b, c)
			}
		}
	}
	if len(b) == 0 {
		return nil
	}
	return fmt.Errorf("the guest is not ready%s\n  in the guest, see: klimax-guest status", list(b))
}

// notGood lists what keeps the guest from being healthy.
func notGood(st api.Status) []api.Condition {
	var out []api.Condition
	for _, c := range st.Conditions {
		if c.Status != api.True {
			out = append(out, c)
		}
	}
	if len(out) == 0 && !st.Network.InSync {
		out = append(out, api.Condition{Type: api.CondRules, Status: api.False, Reason: "NotInSync",
			Message: "the rules are not all in place: " + missing(st.Network.Rules)})
	}
	return out
}

func missing(rules []api.Rule) string {
	var ids []string
	for _, r := range rules {
		if r.Present < r.Wanted {
			ids = append(ids, string(r.ID))
		}
	}
	if len(ids) == 0 {
		return "the agent has not applied them yet"
	}
	return strings.Join(ids, ", ")
}

func list(cs []api.Condition) string {
	var b strings.Builder
	for _, c := range cs {
		b.WriteString("\n  " + c.Type + ": " + strings.ReplaceAll(c.Message, "\n", "\n  "))
	}
	return b.String()
}

// guestLine sums the guest up.
func guestLine(st api.Status) string {
	parts := []string{"rules in place"}
	if st.Docker.Version != "" {
		parts = append(parts, "Docker "+st.Docker.Version)
	}
	if st.Uplink.Address != "" {
		parts = append(parts, st.Uplink.Name+" "+st.Uplink.Address)
	}
	return strings.Join(parts, ", ")
}

// routes compares and changes this computer's routes.
func (r *run) routes(ctx context.Context) error {
	err := r.desired(ctx)
	var changes []route.Change
	if err == nil {
		changes = route.Diff(r.wanted, r.state)
		for _, c := range r.wanted.Conditions {
			if c.Status != api.True {
				r.result.Conditions = append(r.result.Conditions, c)
			}
		}
	}
	q := route.NewRequest(r.plan, r.wanted.Guest, uplinkNetwork(r.result.Guest), changes)
	sink := askRoot(r.Options, q)
	return steps(ctx, sink, []progress.Step{{ID: "route", Title: "Route to the guest",
		Run: func(ctx context.Context, log func(string)) (progress.Result, error) {
			if err != nil {
				return progress.Result{}, err
			}
			res, err := change(ctx, r.Options, q, log)
			r.result.Changed = r.result.Changed || res.Changed
			if err == nil && r.wanted.Local {
				res.Message = strings.TrimPrefix(res.Message+"; the guest is this computer and needs no route", "; ")
			}
			return res, err
		}}})
}

// askRoot announces that a password may be asked for, when it may, and returns
// the sink for the step that asks.
func askRoot(o Options, q route.Request) progress.Sink {
	if len(q.Changes) == 0 || o.Routes.Direct() {
		return o.Sink
	}
	if o.AskRoot != nil {
		o.AskRoot(o.Routes.Explain(q))
	}
	return quiet{o.Sink}
}

// change applies a request's changes.
func change(ctx context.Context, o Options, q route.Request, log func(string)) (progress.Result, error) {
	if len(q.Changes) == 0 {
		return progress.Result{}, nil
	}
	var said []string
	for _, c := range q.Changes {
		said = append(said, c.String())
	}
	if o.Routes.Direct() {
		for _, cmd := range o.Routes.Explain(q) {
			log(cmd)
		}
	}
	if err := o.Routes.Apply(ctx, q); err != nil {
		return progress.Result{}, err
	}
	return progress.Result{Changed: true, Message: strings.Join(said, ", ")}, nil
}

// lookAtRoutes reads this computer's routes and computes the wanted ones.
func lookAtRoutes(ctx context.Context, o Options, p netplan.Plan, st api.Status) (route.State, route.Wanted, error) {
	guest, err := uplinkAddress(st)
	if err != nil {
		return route.State{}, route.Wanted{}, err
	}
	state, err := o.Routes.Current(ctx, p, uplinkNetwork(st))
	if err != nil {
		return state, route.Wanted{}, err
	}
	w, err := route.Desired(route.Input{Plan: p, Guest: guest, GuestDev: st.Uplink.Name, BridgeDev: st.Docker.Bridge,
		Clusters: st.Clusters, RoutePods: o.Config.Network.RoutePods, State: state})
	return state, w, err
}

// uplinkAddress is the guest's address, invalid while it has none.
func uplinkAddress(st api.Status) (netip.Addr, error) {
	s, _, _ := strings.Cut(st.Uplink.Address, "/")
	if s == "" {
		return netip.Addr{}, nil
	}
	a, err := netip.ParseAddr(s)
	if err != nil || !a.Is4() {
		return netip.Addr{}, fmt.Errorf("the guest says that its address is %q, which is no IPv4 address", st.Uplink.Address)
	}
	return a, nil
}

func uplinkNetwork(st api.Status) netip.Prefix {
	p, err := netip.ParsePrefix(st.Uplink.Network)
	if err != nil {
		return netip.Prefix{}
	}
	return p.Masked()
}
