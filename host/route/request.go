package route

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"

	"klimax/shared/netplan"
)

// Request is what `klimax route apply` reads on standard input, as JSON. It is
// how a person's klimax hands the changes to the one that runs as root.
type Request struct {
	Version     int          `json:"version"`
	Bridge      netip.Prefix `json:"bridge"`         // network.kindBridgeCIDR
	ClusterBase netip.Addr   `json:"clusterBase"`    // kind.clusterCIDRBase
	Guest       netip.Addr   `json:"guest,omitzero"` // invalid when the guest could not be asked
	Uplink      netip.Prefix `json:"uplink,omitzero"`
	Changes     []Change     `json:"changes"`
}

const (
	requestVersion = 1
	// requestLimit bounds the standard input of `klimax route apply`, in bytes:
	// 100 changes need about 10,000.
	requestLimit = 64 << 10
	// changeLimit is a route for the bridge and each cluster, and the removal
	// of as many.
	changeLimit = 2 * (netplan.MaxCluster + 1)
)

// private are the networks that routes to a guest may lie in: RFC 1918, the
// shared space of RFC 6598 and the benchmarking space of RFC 2544. Whatever
// else is asked for, root must not be talked into redirecting public addresses.
var private = [...]netip.Prefix{
	netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("198.18.0.0/15"),
}

// NewRequest packs changes for ApplyRequest.
func NewRequest(p netplan.Plan, guest netip.Addr, uplink netip.Prefix, changes []Change) Request {
	return Request{Version: requestVersion, Bridge: p.Bridge, ClusterBase: p.ClusterBase,
		Guest: guest, Uplink: uplink, Changes: changes}
}

// ReadRequest decodes and checks a request. Nothing but one JSON object with
// known fields is accepted.
func ReadRequest(r io.Reader) (Request, error) {
	data, err := io.ReadAll(io.LimitReader(r, requestLimit+1))
	if err != nil {
		return Request{}, fmt.Errorf("reading the route request: %w", err)
	}
	if len(data) > requestLimit {
		return Request{}, fmt.Errorf("the route request is larger than %d bytes", requestLimit)
	}
	var q Request
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&q); err != nil {
		return Request{}, fmt.Errorf("the route request is not valid: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Request{}, errors.New("the route request is followed by something else")
	}
	_, err = q.validate()
	return q, err
}

// validate checks a request by itself: every destination is one that the plan
// permits and private, every gateway can be one. What the kernel's table says
// about it is checked by checkAgainst.
func (q Request) validate() (netplan.Plan, error) {
	if q.Version != requestVersion {
		return netplan.Plan{}, fmt.Errorf("route request of version %d, this klimax knows version %d: use one and the same klimax", q.Version, requestVersion)
	}
	p, err := netplan.New(q.Bridge, q.ClusterBase)
	if err != nil {
		return p, err
	}
	if len(q.Changes) == 0 || len(q.Changes) > changeLimit {
		return p, fmt.Errorf("route request with %d changes, 1 to %d are possible", len(q.Changes), changeLimit)
	}
	seen := map[string]bool{}
	var errs []error
	for _, c := range q.Changes {
		errs = append(errs, q.validateChange(p, c))
		key := c.Dest.String()
		if c.Op == Remove {
			key = "remove " + key + " " + c.Gateway.String()
		}
		if seen[key] {
			errs = append(errs, fmt.Errorf("%v is there twice", c))
		}
		seen[key] = true
	}
	return p, errors.Join(errs...)
}

func (q Request) validateChange(p netplan.Plan, c Change) error {
	if !c.Dest.IsValid() || c.Dest != c.Dest.Masked() {
		return fmt.Errorf("destination %v is no network", c.Dest)
	}
	if err := validGateway(p, c.Gateway); err != nil {
		return fmt.Errorf("%v: %w", c.Dest, err)
	}
	switch c.Op {
	case Remove:
		return nil // only own routes go, see checkAgainst
	case Replace:
		if !c.Old.Is4() {
			return fmt.Errorf("%v: a replacement needs the old gateway", c.Dest)
		}
	case Add:
		if c.Old.IsValid() {
			return fmt.Errorf("%v: an addition has no old gateway", c.Dest)
		}
	default:
		return fmt.Errorf("%v: unknown operation %q", c.Dest, c.Op)
	}
	if !candidate(p, c.Dest) {
		return fmt.Errorf("destination %v is not in the plan (bridge %v, clusters %v)", c.Dest, p.Bridge, p.ClusterSpan())
	}
	if c.Gateway != q.Guest {
		return fmt.Errorf("%v: the gateway %v is not the guest's address %v", c.Dest, c.Gateway, q.Guest)
	}
	for _, net := range private {
		if net.Contains(c.Dest.Addr()) {
			return nil
		}
	}
	return fmt.Errorf("destination %v is no private network: klimax sets routes within %v only", c.Dest, private)
}

func validGateway(p netplan.Plan, a netip.Addr) error {
	switch {
	case !a.Is4() || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return fmt.Errorf("gateway %v is no host's address", a)
	case p.Bridge.Contains(a) || p.ClusterSpan().Contains(a):
		return fmt.Errorf("gateway %v lies within the plan's own ranges", a)
	}
	return nil
}

// checkAgainst refuses changes that the present state does not allow: only own
// routes are replaced and removed, and nothing is added over somebody else's.
func (q Request) checkAgainst(p netplan.Plan, st State) error {
	in := Input{Plan: p, Guest: q.Guest, State: st}
	has := func(dest netip.Prefix, gw netip.Addr) bool {
		for _, r := range st.Routes {
			if r.Own && r.Dest == dest && r.Gateway == gw {
				return true
			}
		}
		return false
	}
	var errs []error
	for _, c := range q.Changes {
		switch {
		case c.Op == Remove && !has(c.Dest, c.Gateway):
			errs = append(errs, fmt.Errorf("%v via %v is not a route of klimax's", c.Dest, c.Gateway))
		case c.Op == Replace && !has(c.Dest, c.Old):
			errs = append(errs, fmt.Errorf("%v via %v is not a route of klimax's", c.Dest, c.Old))
		case c.Op == Remove:
		case st.ownAddr(c.Gateway):
			errs = append(errs, fmt.Errorf("%v: the gateway %v is this computer itself", c.Dest, c.Gateway))
		case !attached(st.Routes, c.Gateway):
			errs = append(errs, &NotAttachedError{Guest: c.Gateway})
		default:
			if x := conflict(in, c.Dest); x != nil {
				x.Key = "network.kindBridgeCIDR"
				if c.Dest != p.Bridge {
					x.Key = "kind.clusterCIDRBase"
				}
				errs = append(errs, x)
			}
		}
	}
	return errors.Join(errs...)
}
