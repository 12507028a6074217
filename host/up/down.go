package up

import (
	"context"
	"errors"
	"net/netip"
	"strings"

	"klimax/host/route"
	"klimax/shared/api"
	"klimax/shared/netplan"
	"klimax/shared/progress"
)

// DownResult is what Down found and did.
type DownResult struct {
	Removed []route.Change // routes that were taken away
	Kept    []route.Route  // routes of this guest that stay, without RemoveRoutes
	Guest   *api.Status    // nil when the agent did not answer
}

// Down takes this computer's way to the guest away when removeRoutes is true.
// A guest that klimax did not start is not stopped by it. The agent need not
// answer: the routes themselves tell which are this guest's.
func Down(ctx context.Context, o Options, removeRoutes bool) (DownResult, error) {
	var res DownResult
	p, err := o.Config.Plan()
	if err != nil {
		return res, err
	}
	var guest netip.Addr
	var uplink netip.Prefix
	err = steps(ctx, o.Sink, []progress.Step{{ID: "connect", Title: "Connect to the guest",
		Run: func(ctx context.Context, _ func(string)) (progress.Result, error) {
			st, err := o.Guest.Status(ctx)
			switch {
			case ctx.Err() != nil:
				return progress.Result{}, ctx.Err()
			case err != nil:
				first, _, _ := strings.Cut(err.Error(), "\n")
				return progress.Result{Message: "it does not answer, and need not: " + first}, nil
			}
			res.Guest, uplink = &st, uplinkNetwork(st)
			guest, err = uplinkAddress(st)
			return progress.Result{Message: "klimax-guest " + st.Version}, err
		}}})
	if err != nil {
		return res, err
	}
	changes, stepErr := leftover(ctx, o, p, guest, uplink)
	if !removeRoutes {
		for _, c := range changes {
			res.Kept = append(res.Kept, route.Route{Dest: c.Dest, Gateway: c.Gateway})
		}
		changes = nil
	}
	q := route.NewRequest(p, guest, uplink, changes)
	err = steps(ctx, askRoot(o, q), []progress.Step{{ID: "route", Title: "Remove the routes to the guest",
		Run: func(ctx context.Context, log func(string)) (progress.Result, error) {
			switch {
			case stepErr != nil:
				return progress.Result{}, stepErr
			case len(res.Kept) > 0:
				return progress.Result{Message: "not asked for, they stay (--remove-route takes them away)"}, nil
			case len(changes) == 0:
				return progress.Result{Message: "there are none"}, nil
			}
			r, err := change(ctx, o, q, log)
			if err == nil {
				res.Removed = changes
			}
			return r, err
		}}})
	return res, err
}

// leftover lists the removals of all routes of this guest.
func leftover(ctx context.Context, o Options, p netplan.Plan, guest netip.Addr, uplink netip.Prefix) ([]route.Change, error) {
	state, err := o.Routes.Current(ctx, p, uplink)
	if err != nil {
		return nil, err
	}
	return route.RemoveAll(p, guest, state), nil
}

// View is the state of a guest and of this computer's way to it.
type View struct {
	Guest api.Status
	Host  HostView
}

// HostView is this computer's half of a View.
type HostView struct {
	Version string `json:"version"`
	// Guest is the value of --guest that leads to the agent.
	Guest      string          `json:"guest"`
	Local      bool            `json:"local"` // the guest is this computer and needs no route
	InSync     bool            `json:"inSync"`
	Routes     []route.Line    `json:"routes"`
	Conditions []api.Condition `json:"conditions"`
}

// Healthy reports whether all is as the configuration asks for, on both sides.
func (v View) Healthy() bool { return v.Guest.Healthy() && v.Host.InSync }

// Look reads the state of both sides and changes nothing. A problem of this
// computer's side is a condition of the view, not an error.
func Look(ctx context.Context, o Options) (View, error) {
	var v View
	p, err := o.Config.Plan()
	if err != nil {
		return v, err
	}
	if v.Guest, err = o.Guest.Status(ctx); err != nil {
		return v, err
	}
	state, w, err := lookAtRoutes(ctx, o, p, v.Guest)
	var taken *route.Conflict
	switch {
	case ctx.Err() != nil:
		return v, ctx.Err()
	case errors.As(err, &taken):
		v.Host.Conditions = append(v.Host.Conditions, api.Condition{Type: route.CondBridgeRoute, Status: api.False, Reason: "RouteTaken", Message: err.Error()})
		return v, nil
	case err != nil:
		v.Host.Conditions = append(v.Host.Conditions, api.Condition{Type: route.CondBridgeRoute, Status: api.False, Reason: "NoRoute", Message: err.Error()})
		return v, nil
	}
	v.Host.Local, v.Host.Routes, v.Host.Conditions = w.Local, route.Lines(w, state), w.Conditions
	v.Host.InSync = len(route.Diff(w, state)) == 0
	for _, c := range w.Conditions {
		v.Host.InSync = v.Host.InSync && c.Status == api.True
	}
	return v, nil
}
