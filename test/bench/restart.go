//go:build linux

package main

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"time"

	"klimax/shared/api"
	"klimax/test/lab"
)

// signals are the two ways in which dockerd is ended.
var signals = []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}

func signalName(s syscall.Signal) string {
	if s == syscall.SIGKILL {
		return "kill -9"
	}
	return "SIGTERM"
}

// plan is one series of restarts.
type plan struct {
	setup   lab.Setup
	signals []syscall.Signal // in turn
	n       int              // restarts
	drop    bool             // FORWARD policy DROP, as Docker sets it when it switches ip_forward on itself
	usual   bool             // the usual design instead of the agent
}

func (p plan) name() string {
	var how []string
	for _, s := range p.signals {
		how = append(how, signalName(s))
	}
	name := string(p.setup)
	if p.usual {
		name += " usual design"
	}
	if p.drop {
		name += ", policy DROP"
	}
	return fmt.Sprintf("%s, %s ×%d", name, strings.Join(how, "/"), p.n)
}

func (p plan) kind() Kind {
	if p.usual {
		return Base
	}
	return Hard
}

// Series is what a series of restarts did to the connections.
type Series struct {
	Traffic
	Stop     []float64 `json:"stopMillis"`           // from the signal to dockerd's end
	Start    []float64 `json:"startMillis"`          // from dockerd's start to the API's answer
	Settle   []float64 `json:"settleMillis"`         // from the API's answer to an agent that says that all is well, or to the usual design's end
	Repairs  int       `json:"repairs"`              // rules the agent had to put back
	RSS      int64     `json:"agentRSSBytes"`        // at the end
	Timeline []Event   `json:"timeline,omitempty"`   // around losses
	Unclean  []int     `json:"uncleanRestarts"`      // which restarts lost something, from 1
	Before   int       `json:"lostBeforeAnyRestart"` // connections lost before the first signal: the machine's own fault
}

// plans lists the series: the agent's, then the usual design under the same
// conditions. A policy DROP is Docker's own doing where nobody switched
// ip_forward on before it; klimax does, and has to live with it where others
// set it.
func (b *bench) plans() []plan {
	var out []plan
	for _, s := range b.setups {
		for _, sig := range signals {
			out = append(out, plan{setup: s, signals: []syscall.Signal{sig}, n: b.restarts})
		}
		if s.Iptables() {
			out = append(out, plan{setup: s, signals: signals, n: max(2, b.restarts/5), drop: true})
		}
		out = append(out, plan{setup: s, signals: signals, n: b.usual, usual: true})
		if s.Iptables() {
			out = append(out, plan{setup: s, signals: signals, n: b.usual, usual: true, drop: true})
		}
	}
	return out
}

// Times on a quiet machine.
const (
	labCost     = 5 * time.Second
	restartCost = 1500 * time.Millisecond
)

func (b *bench) restartCost() time.Duration {
	var d time.Duration
	for _, p := range b.plans() {
		d += labCost + time.Duration(p.n)*restartCost
	}
	return d
}

func (b *bench) restart(ctx context.Context) {
	const section = "restart, live-restore"
	ours := map[lab.Setup]*Traffic{}
	rss := map[lab.Setup]int64{}
	for _, p := range b.plans() {
		if ctx.Err() != nil {
			return
		}
		s, err := b.series(ctx, p)
		if err != nil {
			b.failed(section, p.name(), p.kind(), err)
			continue
		}
		line := Line{Section: section, Name: p.name(), Measured: s.String(), Kind: p.kind(), Raw: s}
		if p.usual {
			line.Measured += usualRatio(s.Traffic, ours[p.setup])
		} else {
			line.Limit, line.OK = "0, 0, 0", s.clean()
			if ours[p.setup] == nil {
				ours[p.setup] = &Traffic{}
			}
			ours[p.setup].add(s.Traffic)
			rss[p.setup] = max(rss[p.setup], s.RSS)
		}
		b.add(line)
		if !p.usual && !s.clean() {
			b.detail("%s: %s lost something:\n%s", section, p.name(), s.story())
		}
	}
	for _, s := range b.setups {
		if n, ok := rss[s]; ok {
			b.add(Line{Section: section, Name: string(s) + ", agent's memory after restarts", Measured: megabytes(n),
				Limit: "< 30 MB", OK: n < 30e6, Kind: Aim, Raw: n})
		}
	}
}

// usualRatio compares the usual design's losses with the agent's, per
// connection made.
func usualRatio(usual Traffic, ours *Traffic) string {
	if ours == nil || ours.Total == 0 || usual.Total == 0 {
		return ""
	}
	share := func(t Traffic) float64 { return 100 * float64(t.Lost+t.Foreign) / float64(t.Total) }
	return fmt.Sprintf("; %.2f %% against klimax's %.3f %%", share(usual), share(*ours))
}

// series makes one lab and all restarts of a plan in it. The loops run all the
// time, from before the first restart until after the last.
func (b *bench) series(ctx context.Context, p plan) (s Series, err error) {
	err = inLab(ctx, lab.Options{Setup: p.setup, ForwardDrop: p.drop}, func(t *bed, l *lab.Lab) {
		var w *world
		if p.usual {
			w = usualWorld(t, l)
		} else {
			w = b.withAgent(t, l, lab.Spec{})
		}
		w.works()
		var line timeline
		stop, err := watchCommits(l.VM, line.commit)
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		r := start(l, w.ways())
		rest(t, time.Second) // everything is seen to work before the first restart
		s.Before = r.lost()
		for i := range p.n {
			lost := r.lost()
			w.restart(p.signals[i%len(p.signals)], p.usual, &line, &s)
			if r.lost() > lost {
				s.Unclean = append(s.Unclean, i+1)
			}
			if (i+1)%10 == 0 && i+1 < p.n {
				b.say("  %s: %d done, %d connections lost", p.name(), i+1, r.lost())
			}
		}
		s.Traffic = r.stop()
		if w.g != nil && !s.clean() {
			line.logs("klimax-guest", w.g.Log)
			line.logs("dockerd", l.Docker().Log)
		}
		s.Timeline = line.around(s.Losses)
		if w.g == nil {
			return
		}
		s.Repairs = w.g.Status().Network.Repairs
		if s.RSS, err = memory(w.g.PID()); err != nil {
			t.Errorf("%v", err)
		}
	})
	return s, err
}

// restart ends and starts dockerd once and waits until everything has settled.
func (w *world) restart(sig syscall.Signal, usual bool, line *timeline, s *Series) {
	t, d := w.t, w.l.Docker()
	var before int
	if w.g != nil {
		before = w.g.Status().Docker.Restarts
	}
	at := time.Now()
	line.add(at, "%s to dockerd", signalName(sig))
	if err := d.Stop(t.Context(), sig); err != nil {
		t.Fatal(err)
	}
	ended := time.Now()
	line.add(ended, "dockerd has ended")
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	up := time.Now()
	line.add(up, "Docker's API answers")
	if usual {
		reapply(w)
		line.add(time.Now(), "the usual design has applied its rules")
	} else {
		w.g.WaitFor("the agent to notice the restart", 15*time.Second, func(s api.Status) bool {
			return s.Docker.Restarts > before && s.Docker.Running && s.Healthy()
		})
		line.add(time.Now(), "the agent says that all is well")
	}
	s.Stop = append(s.Stop, millis(ended.Sub(at)))
	s.Start = append(s.Start, millis(up.Sub(ended)))
	s.Settle = append(s.Settle, millis(time.Since(up)))
	// Docker goes on putting its house in order; a connection that is lost now
	// still belongs to this restart.
	rest(t, 400*time.Millisecond)
}

// rest waits, and ends the part when the benchmark is interrupted.
func rest(t *bed, d time.Duration) {
	select {
	case <-t.Context().Done():
		t.Fatal("interrupted")
	case <-time.After(d):
	}
}

// story is what a person has to know about losses, with their timeline.
func (s Series) story() string {
	var b strings.Builder
	for _, e := range s.FlowErrors {
		fmt.Fprintf(&b, "  %s\n", e)
	}
	fmt.Fprintf(&b, "  restarts with losses: %v; before the first restart: %d\n", s.Unclean, s.Before)
	for _, w := range s.Ways {
		fmt.Fprintf(&b, "  %s: %d of %d lost, peers %v\n", w.Name, w.Lost, w.Total, w.Peers)
	}
	b.WriteString(story(s.Timeline))
	return b.String()
}
