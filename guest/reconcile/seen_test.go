package reconcile

import (
	"testing"

	"klimax/guest/network"
	"klimax/shared/netplan"
)

// TestRepairsAreCounted: also where the damage changes what is wanted
// elsewhere, as iptables -F does; a wish that changed is no damage.
func TestRepairsAreCounted(t *testing.T) {
	before := network.Ruleset{Rules: map[network.Chain][]network.Rule{network.DockerUser: {{ID: "a"}}}, Sets: map[string]network.Set{"x": {{From: 1, To: 2}}}}
	now := network.Ruleset{Rules: map[network.Chain][]network.Rule{network.DockerUser: {{ID: "a"}}, network.FilterForward: {{ID: "b"}}}, Sets: map[string]network.Set{"x": {{From: 1, To: 3}}}}
	for _, c := range []struct {
		change network.Change
		want   bool
	}{
		{network.Change{}, false},
		{network.Change{Rebuild: true}, true},
		{network.Change{IPForward: true}, true},
		{network.Change{Sets: []string{"x"}}, false},
		{network.Change{Chains: []network.Chain{network.FilterForward}}, false},
		{network.Change{Chains: []network.Chain{network.FilterForward, network.DockerUser}}, true},
	} {
		if got := damaged(c.change, before, now); got != c.want {
			t.Errorf("%+v: %v", c.change, got)
		}
	}
}

// TestNoRepairWhileWishesChange: what a starting Docker makes us want for a
// moment is no damage when it has gone again.
func TestNoRepairWhileWishesChange(t *testing.T) {
	l := &Loop{}
	forward := network.Ruleset{Rules: map[network.Chain][]network.Rule{network.FilterForward: {{ID: "a"}}}}
	l.remember(netplan.Plan{}, round{})
	r := round{first: network.Change{Chains: []network.Chain{network.FilterForward}}, firstWant: forward}
	if l.remember(netplan.Plan{}, r) {
		t.Error("counted")
	}
	l.seen.want = forward
	if r.want = forward; !l.remember(netplan.Plan{}, r) {
		t.Error("damage is not counted")
	}
}
