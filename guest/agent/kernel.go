package agent

import (
	"context"
	"net/netip"
	"time"

	"klimax/guest/facts"
	"klimax/guest/network"
	"klimax/guest/state"
	"klimax/provision"
)

// lockWait bounds the wait for a `network apply` that runs at the same time;
// one takes some milliseconds.
const lockWait = 2 * time.Second

// kernel is the real kernel of this network namespace.
type kernel struct {
	dir state.Dir
	// stateFailed is told when the state directory cannot be written.
	stateFailed func(error)
}

func (k kernel) Facts(ctx context.Context, q facts.KernelQuery) (facts.Facts, error) {
	return facts.ReadKernel(ctx, q)
}

func (k kernel) Rules(ctx context.Context, bridge netip.Prefix) (network.State, facts.Firewall, error) {
	return network.Current(ctx, bridge)
}

// Apply takes the lock that `network apply` takes too. A state directory on a
// full or read-only disk must not cost the rules: without a lock the worst is
// a second round.
func (k kernel) Apply(ctx context.Context, c network.Change) error {
	l, err := k.dir.LockNetwork(ctx, lockWait)
	if err != nil {
		k.stateFailed(err)
	} else {
		defer l.Unlock()
	}
	return network.Apply(ctx, c)
}

// EnableForwarding keeps the value that was there in the state directory. When
// that cannot be written, forwarding is switched on all the same.
func (k kernel) EnableForwarding(context.Context) error {
	_, err := provision.RaiseForwarding("", string(k.dir))
	if err == nil {
		return nil
	}
	k.stateFailed(err)
	return network.EnableForwarding()
}
