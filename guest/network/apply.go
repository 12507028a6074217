package network

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"klimax/guest/facts"
)

// Apply makes one nftables transaction of the change: either all of it is in
// the kernel afterwards or nothing, and no packet meets a state in between.
// Only packet rules are touched; ip_forward is EnableForwarding's.
//
// An error that Stale reports means that the kernel changed since it was read:
// read again and apply the new difference.
func Apply(_ context.Context, c Change) error {
	if !c.Rebuild && len(c.Sets) == 0 && len(c.Chains) == 0 {
		return nil
	}
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	b := batch{conn: conn}
	if c.Rebuild {
		b.rebuild(c)
	}
	for _, name := range c.Sets {
		b.updateSet(name, c.have.Sets[name], c.want.Sets[name])
	}
	for _, ch := range c.Chains {
		if ch.Own() {
			b.replaceOwn(ch, c.want.Rules[ch])
		} else {
			b.replaceShared(ch, c.have.Rules[ch], c.want.Rules[ch])
		}
	}
	if b.err != nil {
		return fmt.Errorf("encode nftables transaction: %w", b.err)
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("apply nftables transaction: %w", err)
	}
	return nil
}

// Stale reports whether an error of Apply came from rules or chains that went
// away between reading and applying.
func Stale(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EINTR)
}

type batch struct {
	conn *nftables.Conn
	err  error
}

func (b *batch) fail(err error) { b.err = errors.Join(b.err, err) }

// rebuild deletes the table, if any, and makes it with all it holds.
func (b *batch) rebuild(c Change) {
	b.conn.AddTable(ownTable()) // so that deleting it cannot fail
	b.conn.DelTable(ownTable())
	b.conn.AddTable(ownTable())
	sets := ownSets()
	for _, name := range slices.Sorted(maps.Keys(sets)) {
		s := sets[name]
		if err := b.conn.AddSet(s, elements(c.want.Sets[name], int(s.KeyType.Bytes))); err != nil {
			b.fail(fmt.Errorf("set %s: %w", name, err))
		}
	}
	chains := ownChains()
	for _, name := range slices.Sorted(maps.Keys(chains)) {
		spec := chains[name]
		_, short := name.split()
		accept := nftables.ChainPolicyAccept
		b.conn.AddChain(&nftables.Chain{Table: ownTable(), Name: short, Type: spec.kind,
			Hooknum: spec.hook, Priority: &spec.priority, Policy: &accept})
		b.addOwn(name, c.want.Rules[name])
	}
}

func (b *batch) addOwn(name Chain, rules []Rule) {
	_, short := name.split()
	for _, r := range rules {
		b.conn.AddRule(&nftables.Rule{Table: ownTable(), Chain: &nftables.Chain{Table: ownTable(), Name: short},
			Exprs: encode(r), UserData: encodeComment(r.ID)})
	}
}

// replaceOwn keeps the base chain: making one anew waits for the kernel's RCU
// grace period, up to 60 ms for a nat chain.
func (b *batch) replaceOwn(name Chain, rules []Rule) {
	_, short := name.split()
	b.conn.FlushChain(&nftables.Chain{Table: ownTable(), Name: short})
	b.addOwn(name, rules)
}

func (b *batch) updateSet(name string, have, want Set) {
	s := ownSets()[name]
	n := int(s.KeyType.Bytes)
	gone := slices.DeleteFunc(slices.Clone(have), func(i Interval) bool { return slices.Contains(want, i) })
	added := slices.DeleteFunc(slices.Clone(want), func(i Interval) bool { return slices.Contains(have, i) })
	if len(gone) > 0 {
		if err := b.conn.SetDeleteElements(s, elements(gone, n)); err != nil {
			b.fail(fmt.Errorf("set %s: %w", name, err))
		}
	}
	if len(added) > 0 {
		if err := b.conn.SetAddElements(s, elements(added, n)); err != nil {
			b.fail(fmt.Errorf("set %s: %w", name, err))
		}
	}
}

// replaceShared takes our rules out of a chain of iptables and puts the wanted
// ones at its head. Rules of others are not touched.
func (b *batch) replaceShared(name Chain, have []Placed, want []Rule) {
	t, c := name.split()
	table := &nftables.Table{Name: t, Family: nftables.TableFamilyIPv4}
	chain := &nftables.Chain{Table: table, Name: c}
	for _, p := range have {
		if !p.Ours {
			continue
		}
		if err := b.conn.DelRule(&nftables.Rule{Table: table, Chain: chain, Handle: p.handle}); err != nil {
			b.fail(fmt.Errorf("delete rule in %s: %w", name, err))
		}
	}
	for _, r := range slices.Backward(want) {
		b.conn.InsertRule(&nftables.Rule{Table: table, Chain: chain, Exprs: encode(r), UserData: encodeComment(r.ID)})
	}
}

// Remove takes every rule of klimax out of all tables, in one transaction. It
// needs no running agent and reports whether there was anything.
func Remove(ctx context.Context) (bool, error) {
	for attempt := 0; ; attempt++ {
		have, _, err := Current(ctx, netip.PrefixFrom(netip.IPv4Unspecified(), 0))
		if err != nil {
			return false, err
		}
		c := Diff(Ruleset{}, have, facts.Facts{IPForward: true})
		conn, err := nftables.New()
		if err != nil {
			return false, fmt.Errorf("open nftables: %w", err)
		}
		b := batch{conn: conn}
		changed := have.Leftover
		if have.Leftover {
			conn.DelTable(ownTable())
		}
		for _, ch := range c.Chains {
			if !ch.Own() {
				b.replaceShared(ch, have.Rules[ch], nil)
				changed = true
			}
		}
		if b.err != nil {
			return false, b.err
		}
		err = conn.Flush()
		if err == nil {
			return changed, nil
		}
		if !Stale(err) || attempt >= 5 {
			return false, fmt.Errorf("remove the rules of klimax: %w", err)
		}
	}
}

// ForwardSysctl is the switch that klimax raises.
const ForwardSysctl = "/proc/sys/net/ipv4/ip_forward"

// EnableForwarding switches ip_forward on.
func EnableForwarding() error {
	if err := os.WriteFile(ForwardSysctl, []byte("1\n"), 0); err != nil {
		return fmt.Errorf("switch on net.ipv4.ip_forward: %w (run as root: sysctl -w net.ipv4.ip_forward=1)", err)
	}
	return nil
}
