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
	b, err := newBatch()
	if err != nil {
		return err
	}
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
			b.replaceShared(ch, c.have, c.want.Rules[ch], c.head[ch])
		}
	}
	if b.err != nil {
		return fmt.Errorf("encode nftables transaction: %w", b.err)
	}
	if err := b.conn.commit(); err != nil {
		return fmt.Errorf("apply nftables transaction: %w", err)
	}
	return nil
}

// Stale reports whether an error of Apply came from a ruleset that changed
// between reading and applying.
func Stale(err error) bool {
	return slices.ContainsFunc([]error{unix.ERESTART, unix.ENOENT, unix.EBUSY, unix.EEXIST, unix.EINTR},
		func(e error) bool { return errors.Is(err, e) })
}

type batch struct {
	conn *transaction
	err  error
}

func newBatch() (*batch, error) {
	conn, err := newTransaction()
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	return &batch{conn: conn}, nil
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
		if err := b.conn.AddSet(s, nil); err != nil {
			b.fail(fmt.Errorf("set %s: %w", name, err))
		}
		b.updateSet(name, nil, c.want.Sets[name])
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
	each := func(in, not Set, f func(*nftables.Set, []nftables.SetElement) error) {
		rest := slices.DeleteFunc(slices.Clone(in), func(i Interval) bool { return slices.Contains(not, i) })
		for part := range slices.Chunk(rest, maxIntervals) {
			if err := f(s, elements(part, int(s.KeyType.Bytes))); err != nil {
				b.fail(fmt.Errorf("set %s: %w", name, err))
			}
		}
	}
	each(have, want, b.conn.SetDeleteElements)
	each(want, have, b.conn.SetAddElements)
}

// maxIntervals go into one message: its list of elements, of some 70 bytes
// each, has a length of 16 bits.
const maxIntervals = 500

// replaceShared takes our rules out of a chain of iptables and puts the wanted
// ones in: at its head where they must be the first, else behind the rules of
// others, as far as those let anything pass. Rules of others are not touched.
//
// Where a rule goes by its handle the change is for the ruleset that was read
// and no other: a table that was made anew counts handles from 1 again.
func (b *batch) replaceShared(name Chain, state State, want []Rule, head bool) {
	t, c := name.split()
	table := &nftables.Table{Name: t, Family: nftables.TableFamilyIPv4}
	chain := &nftables.Chain{Table: table, Name: c}
	have := state.Rules[name]
	for _, p := range have {
		if !p.Ours {
			continue
		}
		b.conn.generation = state.generation
		if err := b.conn.DelRule(&nftables.Rule{Table: table, Chain: chain, Handle: p.handle}); err != nil {
			b.fail(fmt.Errorf("delete rule in %s: %w", name, err))
		}
	}
	rule := func(r Rule, before uint64) *nftables.Rule {
		return &nftables.Rule{Table: table, Chain: chain, Position: before, Exprs: encode(r), UserData: encodeComment(r.ID)}
	}
	end := slices.IndexFunc(have, func(p Placed) bool { return !p.Ours && p.terminal })
	switch {
	case head:
		for _, r := range slices.Backward(want) {
			b.conn.InsertRule(rule(r, 0))
		}
	case end >= 0:
		b.conn.generation = state.generation
		for _, r := range want {
			b.conn.InsertRule(rule(r, have[end].handle))
		}
	default:
		for _, r := range want {
			b.conn.AddRule(rule(r, 0))
		}
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
		b, err := newBatch()
		if err != nil {
			return false, err
		}
		changed := have.Leftover
		if have.Leftover {
			b.conn.DelTable(ownTable())
		}
		for _, ch := range c.Chains {
			if !ch.Own() {
				b.replaceShared(ch, have, nil, false)
				changed = true
			}
		}
		if b.err != nil {
			return false, b.err
		}
		err = b.conn.commit()
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
