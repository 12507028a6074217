//go:build linux

package main

import (
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"klimax/test/lab"
)

// groupNFTables is NFNLGRP_NFTABLES, linux/netfilter/nfnetlink.h.
const groupNFTables = 7

// commit is one nftables transaction that somebody made.
type commit struct {
	at   time.Time // when the notification was read here
	pid  uint32    // of the thread that made it
	name string    // and its name
	what string    // what it changed, for people
}

// watchCommits calls f, on a goroutine of its own, for every nftables commit
// in a namespace until stop. The kernel sends the notification when the new
// rules are in force.
func watchCommits(ns *lab.NS, f func(commit)) (stop func(), err error) {
	file, err := os.Open(ns.Path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: int(file.Fd())})
	if err != nil {
		return nil, fmt.Errorf("watch nftables in %s: %w", ns.Name, err)
	}
	_ = conn.SetReadBuffer(8 << 20) // less is no error: lost notifications are told
	if err := conn.JoinGroup(groupNFTables); err != nil {
		conn.Close()
		return nil, fmt.Errorf("watch nftables in %s: %w", ns.Name, err)
	}
	done := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		changes := map[string]int{}
		for {
			msgs, err := conn.Receive()
			at := time.Now()
			if err != nil {
				select {
				case <-done:
					return
				default:
				}
				clear(changes)
				f(commit{at: at, name: "nobody", what: "notifications were lost: " + err.Error()})
				time.Sleep(time.Millisecond)
				continue
			}
			for _, m := range msgs {
				kind := int(m.Header.Type) & 0xff
				if kind != unix.NFT_MSG_NEWGEN {
					changes[change(kind, m.Data)]++
					continue
				}
				c := commit{at: at, what: words(changes)}
				c.pid, c.name = committer(m.Data)
				clear(changes)
				f(c)
			}
		}
	}()
	return func() {
		close(done)
		conn.SetReadDeadline(time.Unix(1, 0))
		<-ended
		conn.Close()
	}, nil
}

// attributes decodes what follows the four bytes of nfgenmsg.
func attributes(data []byte, f func(kind uint16, d *netlink.AttributeDecoder)) {
	if len(data) < 4 {
		return
	}
	d, err := netlink.NewAttributeDecoder(data[4:])
	if err != nil {
		return
	}
	d.ByteOrder = binary.BigEndian
	for d.Next() {
		f(d.Type(), d)
	}
}

func committer(data []byte) (pid uint32, name string) {
	attributes(data, func(kind uint16, d *netlink.AttributeDecoder) {
		switch kind {
		case unix.NFTA_GEN_PROC_PID:
			pid = d.Uint32()
		case unix.NFTA_GEN_PROC_NAME:
			name = d.String()
		}
	})
	return pid, name
}

// change is one message of a commit in words: "+rule filter/FORWARD".
func change(kind int, data []byte) string {
	verb, inner := "", uint16(0) // inner is the attribute with the name below the table's
	switch kind {
	case unix.NFT_MSG_NEWTABLE:
		verb = "+table"
	case unix.NFT_MSG_DELTABLE:
		verb = "-table"
	case unix.NFT_MSG_NEWCHAIN:
		verb, inner = "+chain", unix.NFTA_CHAIN_NAME
	case unix.NFT_MSG_DELCHAIN:
		verb, inner = "-chain", unix.NFTA_CHAIN_NAME
	case unix.NFT_MSG_NEWRULE:
		verb, inner = "+rule", unix.NFTA_RULE_CHAIN
	case unix.NFT_MSG_DELRULE:
		verb, inner = "-rule", unix.NFTA_RULE_CHAIN
	case unix.NFT_MSG_NEWSET:
		verb, inner = "+set", unix.NFTA_SET_NAME
	case unix.NFT_MSG_DELSET:
		verb, inner = "-set", unix.NFTA_SET_NAME
	case unix.NFT_MSG_NEWSETELEM:
		verb, inner = "+element", unix.NFTA_SET_ELEM_LIST_SET
	case unix.NFT_MSG_DELSETELEM:
		verb, inner = "-element", unix.NFTA_SET_ELEM_LIST_SET
	default:
		return fmt.Sprintf("message %d", kind)
	}
	const tableName = 1 // in all of these messages
	table, name := "", ""
	attributes(data, func(kind uint16, d *netlink.AttributeDecoder) {
		switch {
		case kind == tableName:
			table = d.String()
		case inner != 0 && kind == inner:
			name = "/" + d.String()
		}
	})
	return verb + " " + table + name
}

func words(changes map[string]int) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(changes)) {
		if n := changes[k]; n > 1 {
			k = fmt.Sprintf("%s ×%d", k, n)
		}
		out = append(out, k)
	}
	return strings.Join(out, ", ")
}

// Event is something that happened while connections were made.
type Event struct {
	At   time.Time `json:"at"`
	What string    `json:"what"`
}

// timeline collects events from any goroutine.
type timeline struct {
	mu     sync.Mutex
	events []Event
}

func (t *timeline) add(at time.Time, format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.events = append(t.events, Event{at, fmt.Sprintf(format, args...)})
}

func (t *timeline) commit(c commit) {
	t.add(c.at, "nftables commit by %s (PID %d): %s", c.name, c.pid, c.what)
}

// logs adds the lines of a log that begin with a time, as slog's text handler
// and dockerd write them.
func (t *timeline) logs(who, path string) {
	b, err := os.ReadFile(path)
	if err != nil {
		t.add(time.Now(), "%s's log: %v", who, err)
		return
	}
	for line := range strings.Lines(string(b)) {
		rest, found := strings.CutPrefix(line, "time=")
		stamp, text, cut := strings.Cut(rest, " ")
		if !found || !cut {
			continue
		}
		if at, err := time.Parse(time.RFC3339Nano, strings.Trim(stamp, `"`)); err == nil {
			t.add(at, "%s: %s", who, strings.TrimSpace(text))
		}
	}
}

// between are the events from one time to another, in order.
func (t *timeline) between(from, to time.Time) []Event {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := slices.DeleteFunc(slices.Clone(t.events), func(e Event) bool { return e.At.Before(from) || e.At.After(to) })
	slices.SortStableFunc(out, func(a, b Event) int { return a.At.Compare(b.At) })
	return out
}

// storyLines is how many events of a timeline are printed; the JSON has all.
const storyLines = 120

// story is a timeline for people, in milliseconds since its first event.
func story(events []Event) string {
	var b strings.Builder
	for i, e := range events {
		if i == storyLines {
			fmt.Fprintf(&b, "  … %d more events, see -json\n", len(events)-i)
			break
		}
		fmt.Fprintf(&b, "  %10.1f ms  %s\n", millis(e.At.Sub(events[0].At)), e.What)
	}
	return b.String()
}

// around are the events near a loss, with the losses themselves, in order. A
// connection in which nothing answers is lost at once at its SYN, or a packet
// of it is at any time while it takes.
func (t *timeline) around(losses []Loss) []Event {
	const before, after = 500 * time.Millisecond, 300 * time.Millisecond
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []Event
	for _, e := range t.events {
		if slices.ContainsFunc(losses, func(l Loss) bool {
			return e.At.After(l.At.Add(-before)) && e.At.Before(l.At.Add(time.Duration(l.Took*float64(time.Millisecond))+after))
		}) {
			out = append(out, e)
		}
	}
	for _, l := range losses {
		out = append(out, Event{l.At, fmt.Sprintf("LOST %s: %s (after %.1f ms)", l.Way, l.What, l.Took)})
	}
	slices.SortStableFunc(out, func(a, b Event) int { return a.At.Compare(b.At) })
	return out
}
