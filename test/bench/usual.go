//go:build linux

package main

import (
	"fmt"
	"strings"

	"klimax/test/lab"
)

// usualWorld is the workload without an agent, on a network as kind makes it,
// with the usual design: a oneshot that puts rules into Docker's own chains
// once Docker is up, and again after each of its starts.
func usualWorld(t *bed, l *lab.Lab) *world {
	w := &world{t: t, l: l}
	l.CreateNetwork(dockerNetwork, bridgeCIDR, nil)
	w.workload(lab.Spec{})
	reapply(w)
	return w
}

// reapply runs the oneshot, as the ExecStartPost of docker.service or a unit
// after it would.
func reapply(w *world) {
	script := usualIptables(w.l.Setup().Moby29())
	if !w.l.Setup().Iptables() {
		script = usualNft()
	}
	w.l.VM.MustRun("sh", "-ec", script)
}

// usualIptables deletes and inserts with the iptables command: the way in (and,
// on engines that drop direct routing in their raw table, past that), the way
// out, and the exemption from Docker's masquerading.
func usualIptables(raw bool) string {
	rules := []string{
		fmt.Sprintf("-t nat %%s POSTROUTING -s %s -d %s -j ACCEPT", bridgeCIDR, hostNetwork),
		fmt.Sprintf("%%s DOCKER-USER -s %s -d %s -j ACCEPT", hostNetwork, bridgeCIDR),
		fmt.Sprintf("%%s DOCKER-USER -s %s -d %s -j ACCEPT", bridgeCIDR, hostNetwork),
	}
	if raw {
		rules = append(rules, fmt.Sprintf("-t raw %%s PREROUTING -s %s -d %s -j ACCEPT", hostNetwork, bridgeCIDR))
	}
	var b strings.Builder
	for _, r := range rules {
		fmt.Fprintf(&b, "iptables %s 2>/dev/null || true\niptables %s\n", fmt.Sprintf(r, "-D"), fmt.Sprintf(r, "-I"))
	}
	return b.String()
}

// usualNft does the same in Docker's nftables table.
func usualNft() string {
	var b strings.Builder
	for _, r := range [][2]string{
		{"raw-PREROUTING", fmt.Sprintf("ip saddr %s ip daddr %s", hostNetwork, bridgeCIDR)},
		{"filter-FORWARD", fmt.Sprintf("ip saddr %s ip daddr %s", hostNetwork, bridgeCIDR)},
		{"nat-POSTROUTING", fmt.Sprintf("ip saddr %s ip daddr %s", bridgeCIDR, hostNetwork)},
	} {
		fmt.Fprintf(&b, `for h in $(nft -a list chain ip docker-bridges %s | sed -n 's/.*comment "usual" # handle //p'); do
 nft delete rule ip docker-bridges %s handle $h
done
nft insert rule ip docker-bridges %s %s accept comment '"usual"'
`, r[0], r[0], r[0], r[1])
	}
	return b.String()
}
