//go:build linux

package main

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"klimax/shared/api"
	"klimax/test/lab"
	"klimax/test/lab/probe"
)

// coldSlack is how far from the container's own down time a connection may
// begin and still be lost to it: two turns of the loops and a little.
const coldSlack = 3 * interval

// Cold is what restarts without live-restore did.
type Cold struct {
	Down     Way            `json:"control"` // guest to container, on the bridge: no rule is on this path
	Mac      Way            `json:"macToContainer"`
	Outside  []Loss         `json:"lostOutsideDownTime"`
	Foreign  int            `json:"foreign"` // mac to container
	Callers  map[string]int `json:"callers"` // whom the Mac's server saw
	Starts   int            `json:"starts"`  // how often the calling container was started
	First    []string       `json:"first"`   // whom the Mac's server saw first after each
	Masked   int            `json:"masked"`  // connections of the calling container that came from another address than its own
	Timeline []Event        `json:"timeline,omitempty"`
}

func (b *bench) coldCost() time.Duration {
	return time.Duration(len(b.setups)*len(signals)) * (labCost + time.Duration(b.cold)*3500*time.Millisecond)
}

func (b *bench) coldRestart(ctx context.Context) {
	const section = "restart, no live-restore"
	for _, setup := range b.setups {
		for _, sig := range signals {
			if ctx.Err() != nil {
				return
			}
			name := fmt.Sprintf("%s, %s ×%d", setup, signalName(sig), b.cold)
			c, err := b.coldSeries(ctx, setup, sig)
			if err != nil {
				b.failed(section, name+", mac to container", Hard, err)
				b.failed(section, name+", container to mac", Hard, err)
				continue
			}
			into := Line{Section: section, Name: name + ", mac to container", Limit: "0, 0", Kind: Hard, Raw: c,
				OK: len(c.Outside) == 0 && c.Foreign == 0 && c.Mac.Total > c.Mac.Lost && c.Down.Total > c.Down.Lost,
				Measured: fmt.Sprintf("%d lost while it was up, %d foreign of %d; longest gap %.2f s, its own down time %.2f s",
					len(c.Outside), c.Foreign, c.Mac.Total, c.Mac.MaxGap/1000, c.Down.MaxGap/1000)}
			out := Line{Section: section, Name: name + ", container to mac", Limit: "0", Kind: Hard,
				OK: c.Masked == 0 && len(c.First) == c.Starts && c.Callers[callerAddr] > 0,
				Measured: fmt.Sprintf("%d SNATed of %d, seen from the first connection on after %d of %d starts",
					c.Masked, c.Masked+c.Callers[callerAddr], len(c.First), c.Starts)}
			b.add(into)
			b.add(out)
			if !into.OK || !out.OK {
				b.detail("%s: %s: first callers %v, all callers %v\n%s", section, name, c.First, c.Callers, story(c.Timeline))
			}
		}
	}
}

// coldSeries restarts dockerd, which takes the containers down with it. Which
// of the lost connections are the container's own doing is told by a loop that
// reaches it over the bridge alone, from the guest itself.
func (b *bench) coldSeries(ctx context.Context, setup lab.Setup, sig syscall.Signal) (c Cold, err error) {
	err = inLab(ctx, lab.Options{Setup: setup, NoLiveRestore: true}, func(t *bed, l *lab.Lab) {
		w := b.withAgent(t, l, lab.Spec{})
		mac := l.Serve(l.Mac, l.MacAddr()+":9001")
		caller := l.Run(lab.Spec{Name: "caller", Network: dockerNetwork, IP: callerAddr,
			Args: []string{"loop", "--for", "0", mac.Addr()}})
		var line timeline
		stop, err := watchCommits(l.VM, line.commit)
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		target := port(nodeAddr, lab.Port)
		into := start(l, []way{{name: "mac to container", from: l.Mac, target: target, want: l.MacAddr()}})
		control := l.Loop(l.VM, target, interval)
		rest(t, 500*time.Millisecond)
		var windows [][2]time.Time
		for range b.cold {
			d, begin := l.Docker(), time.Now()
			before := w.g.Status().Docker.Restarts
			line.add(time.Now(), "%s to dockerd", signalName(sig))
			if err := d.Stop(t.Context(), sig); err != nil {
				t.Fatal(err)
			}
			line.add(time.Now(), "dockerd has ended")
			if err := d.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			line.add(time.Now(), "Docker's API answers")
			if err := caller.WaitRunning(30 * time.Second); err != nil {
				t.Fatal(err)
			}
			if _, err := l.WaitGet(l.VM, target, 30*time.Second); err != nil {
				t.Fatalf("the container does not come back: %v", err)
			}
			line.add(time.Now(), "both containers run")
			w.g.WaitFor("the agent to notice the restart", 15*time.Second, func(s api.Status) bool {
				return s.Docker.Restarts > before && s.Docker.Running && s.Healthy()
			})
			rest(t, 1200*time.Millisecond) // longer than a connection of the loops takes
			windows = append(windows, [2]time.Time{begin, time.Now()})
		}
		traffic := into.stop()
		down := control.Stop()
		c.Mac, c.Foreign = traffic.Ways[0], traffic.Foreign
		c.Down = count(way{name: "guest to container", want: bridgeAddr}, down).Ways[0]
		c.Outside = outside(traffic.Losses, down, coldSlack)
		c.Callers = mac.Peers()
		c.Starts = b.cold + 1
		c.First, c.Masked = firstCallers(mac.Seen(), windows, callerAddr)
		if len(c.Outside) > 0 {
			line.logs("klimax-guest", w.g.Log)
			line.logs("dockerd", l.Docker().Log)
		}
		c.Timeline = line.around(c.Outside)
		if c.Down.Lost == 0 {
			t.Fatal("the container was never down: live-restore is on, or the control looks elsewhere")
		}
	})
	return c, err
}

// firstCallers lists who called first of all, and in each window first after
// the longest pause in it, which is the restart of the caller. masked counts
// the calls that did not come from its own address.
func firstCallers(seen []probe.Seen, windows [][2]time.Time, own string) (first []string, masked int) {
	for i, s := range seen {
		if i == 0 {
			first = append(first, s.Peer)
		}
		if s.Peer != own {
			masked++
		}
	}
	for _, w := range windows {
		var longest time.Duration
		peer := ""
		for i, s := range seen {
			if i == 0 || s.At.Before(w[0]) || s.At.After(w[1]) {
				continue
			}
			if pause := s.At.Sub(seen[i-1].At); pause > longest {
				longest, peer = pause, s.Peer
			}
		}
		if peer != "" {
			first = append(first, peer)
		}
	}
	return first, masked
}
