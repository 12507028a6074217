package route

import (
	"fmt"
	"net/netip"

	"klimax/shared/netplan"
)

// Op is what a change does.
type Op string

// The three changes there are.
const (
	Add     Op = "add"
	Replace Op = "replace" // another gateway for a destination that has an own route
	Remove  Op = "remove"
)

// Change is one step from what there is to what is wanted.
type Change struct {
	Op      Op           `json:"op"`
	Dest    netip.Prefix `json:"destination"`
	Gateway netip.Addr   `json:"gateway"`             // of the new route; with Remove, of the old one
	Old     netip.Addr   `json:"oldGateway,omitzero"` // with Replace
}

func (c Change) String() string {
	switch c.Op {
	case Replace:
		return fmt.Sprintf("%v via %v (was via %v)", c.Dest, c.Gateway, c.Old)
	case Remove:
		return fmt.Sprintf("remove %v via %v", c.Dest, c.Gateway)
	default:
		return fmt.Sprintf("%v via %v", c.Dest, c.Gateway)
	}
}

// Diff returns the changes that lead from the state to what is wanted, in the
// order in which to make them: what is new or wrong before what is left over.
// It returns none when there is nothing to do.
func Diff(w Wanted, st State) []Change {
	ours := mine(w.plan, w.Guest, st.Routes)
	used := make([]bool, len(ours))
	var changes []Change
	for _, want := range w.Routes {
		present, old := false, netip.Addr{}
		for i, r := range ours {
			if r.Dest != want.Dest || used[i] {
				continue
			}
			switch {
			case r.Gateway == want.Gateway && !present:
				present, used[i] = true, true
			case !old.IsValid():
				old, used[i] = r.Gateway, true
			}
		}
		for _, r := range st.Routes {
			present = present || r.Dest == want.Dest && r.Gateway == want.Gateway && r.Table == ""
		}
		switch {
		case present && old.IsValid():
			changes = append(changes, Change{Op: Remove, Dest: want.Dest, Gateway: old})
		case present:
		case old.IsValid():
			changes = append(changes, Change{Op: Replace, Dest: want.Dest, Gateway: want.Gateway, Old: old})
		default:
			changes = append(changes, Change{Op: Add, Dest: want.Dest, Gateway: want.Gateway})
		}
	}
	for i, r := range ours {
		if !used[i] {
			changes = append(changes, Change{Op: Remove, Dest: r.Dest, Gateway: r.Gateway})
		}
	}
	return changes
}

// RemoveAll returns the changes that take away every route of this plan and
// guest. guest may be invalid when the guest cannot be asked: then the route
// to the plan's bridge says which gateway was its.
func RemoveAll(p netplan.Plan, guest netip.Addr, st State) []Change {
	return Diff(Wanted{Guest: guest, plan: p}, st)
}

// Line is one row of `klimax route show`.
type Line struct {
	Dest    netip.Prefix `json:"destination"`
	For     string       `json:"for"`
	Gateway netip.Addr   `json:"gateway,omitzero"` // the one that is wanted, or of a leftover the one that is there
	State   string       `json:"state"`            // present, missing, wrong-gateway, leftover
	Present netip.Addr   `json:"presentGateway,omitzero"`
}

// Lines lists what is wanted and what is left over, each with its state.
func Lines(w Wanted, st State) []Line {
	state := map[netip.Prefix]Line{}
	var left []Line
	for _, c := range Diff(w, st) {
		switch c.Op {
		case Add:
			state[c.Dest] = Line{State: "missing"}
		case Replace:
			state[c.Dest] = Line{State: "wrong-gateway", Present: c.Old}
		case Remove:
			left = append(left, Line{Dest: c.Dest, For: what(w.plan, c.Dest), Gateway: c.Gateway,
				Present: c.Gateway, State: "leftover"})
		}
	}
	var out []Line
	for _, r := range w.Routes {
		l, differs := state[r.Dest]
		if !differs {
			l = Line{State: "present", Present: r.Gateway}
		}
		l.Dest, l.For, l.Gateway = r.Dest, what(w.plan, r.Dest), r.Gateway
		out = append(out, l)
	}
	return append(out, left...)
}
