package route

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"klimax/shared/netplan"
)

// bsdKernel works with the programs that come with macOS. It lies in a file
// for every system so that its tests run on all of them.
type bsdKernel struct{ run Runner }

// Both programs are named by their paths: they may run as root.
const (
	netstatPath = "/usr/sbin/netstat"
	routePath   = "/sbin/route"
)

func (k bsdKernel) routes(ctx context.Context, p netplan.Plan, uplink netip.Prefix) ([]Route, error) {
	out, err := k.run.Run(ctx, nil, netstatPath, "-rn", "-f", "inet")
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out)))
	}
	return ParseNetstat(string(out), p, uplink)
}

func (k bsdKernel) apply(ctx context.Context, changes []Change) error {
	var errs []error
	for _, c := range changes {
		for _, args := range routeArgs(c) {
			if err := ctx.Err(); err != nil {
				return errors.Join(append(errs, err)...)
			}
			if out, err := k.run.Run(ctx, nil, routePath, args...); err != nil {
				errs = append(errs, fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out))))
			}
		}
	}
	return errors.Join(errs...)
}

func (k bsdKernel) commands(changes []Change) []string {
	var out []string
	for _, c := range changes {
		for _, args := range routeArgs(c) {
			out = append(out, routePath+" "+strings.Join(args, " "))
		}
	}
	return out
}

// routeArgs returns the arguments of /sbin/route for a change. A replacement
// deletes and adds: the old route led nowhere, so the moment between is no
// loss, and route(8) does not say whether `change` moves a route to the
// interface of the new gateway.
func routeArgs(c Change) [][]string {
	args := func(verb string, gw netip.Addr) []string {
		return []string{"-n", verb, "-net", c.Dest.String(), gw.String()}
	}
	switch c.Op {
	case Add:
		return [][]string{args("add", c.Gateway)}
	case Replace:
		return [][]string{args("delete", c.Old), args("add", c.Gateway)}
	case Remove:
		return [][]string{args("delete", c.Gateway)}
	}
	return nil
}
