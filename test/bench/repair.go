//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"klimax/test/lab"
)

// repairLimit is when a repair is given up.
const repairLimit = 5 * time.Second

// slowRepair is from when on a round's events are kept.
const slowRepair = 100 * time.Millisecond

// damage is one way to delete rules of klimax.
type damage struct {
	command []string
	table   string // where the rules are that come back
	chains  []string
}

func damages() []damage {
	own := []string{"guard", "postrouting"}
	return []damage{
		{[]string{"nft", "delete", "table", "ip", "klimax"}, "klimax", own},
		{[]string{"nft", "flush", "chain", "ip", "klimax", "guard"}, "klimax", own},
		{[]string{"iptables", "-F", "DOCKER-USER"}, "filter", []string{"DOCKER-USER"}},
	}
}

// Repair is all rounds of one kind of damage. Times are in milliseconds since
// the deleting command was started.
type Repair struct {
	Command string    `json:"command"`
	Gone    []float64 `json:"goneMillis"`     // the command's own transaction was made
	Back    []float64 `json:"backMillis"`     // the agent's transaction was made, after which all rules were read back
	Slow    []Event   `json:"slow,omitempty"` // what happened in rounds of more than slowRepair
}

func (b *bench) repairCost() time.Duration {
	return labCost + time.Duration(len(damages())*b.rounds)*260*time.Millisecond
}

// repair runs on the distribution's engine with FORWARD policy DROP, where all
// three kinds of rules matter.
func (b *bench) repair(ctx context.Context) {
	const section = "repair, debian, policy DROP"
	done := map[string]bool{}
	err := inLab(ctx, lab.Options{Setup: lab.Debian, ForwardDrop: true}, func(t *bed, l *lab.Lab) {
		w := b.withAgent(t, l, lab.Spec{})
		w.works()
		commits := make(chan commit, 1000)
		stop, err := watchCommits(l.VM, func(c commit) {
			select {
			case commits <- c:
			default: // nobody looks between rounds
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		for _, d := range damages() {
			r := Repair{Command: strings.Join(d.command, " ")}
			want, err := fingerprint(l.VM, d)
			if err != nil || !strings.Contains(want, "klimax:") {
				t.Fatalf("rules before the damage: %q, %v", want, err)
			}
			for i := range b.rounds {
				// Long enough for calm at times, and at others not.
				rest(t, time.Duration(50+rand.IntN(350))*time.Millisecond)
				if err := r.round(ctx, w, d, want, commits); err != nil {
					t.Fatalf("%s, round %d: %v", r.Command, i+1, err)
				}
			}
			w.works()
			p99 := quantile(r.Back, 0.99)
			measured := spread(r.Back)
			name := fmt.Sprintf("%s ×%d", r.Command, len(r.Back))
			b.add(Line{Section: section, Name: name, Measured: measured, Limit: "p99 < 100 ms", OK: p99 < 100, Kind: Hard, Raw: r})
			b.add(Line{Section: section, Name: "  the same, aim", Measured: fmt.Sprintf("p99 %.1f ms, of which the command itself p50 %.1f ms", p99, quantile(r.Gone, 0.5)),
				Limit: "p99 < 50 ms", OK: p99 < 50, Kind: Aim})
			if len(r.Slow) > 0 {
				b.detail("%s: %s: rounds of more than %v:\n%s", section, r.Command, slowRepair, story(r.Slow))
			}
			done[r.Command] = true
		}
	})
	if err == nil {
		return
	}
	for _, d := range damages() {
		if c := strings.Join(d.command, " "); !done[c] {
			b.failed(section, c, Hard, err)
		}
	}
}

// round deletes rules once and waits until they are back.
func (r *Repair) round(ctx context.Context, w *world, d damage, want string, commits <-chan commit) error {
	for len(commits) > 0 {
		<-commits
	}
	limit := time.After(repairLimit)
	var out strings.Builder
	cmd := exec.CommandContext(ctx, d.command[0], d.command[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &out
	var began time.Time
	var line timeline
	// A child is born in its parent thread's namespace: no nsenter's time is measured.
	err := w.l.VM.Do(func() error {
		began = time.Now()
		return cmd.Start()
	})
	if err != nil {
		return err
	}
	exit := make(chan error, 1)
	go func() { exit <- cmd.Wait() }()
	var gone time.Time
	for {
		select {
		case c := <-commits:
			line.commit(c)
			if c.pid == 0 && strings.Contains(c.what, "lost") {
				return errors.New(c.what)
			}
			if !hasThread(w.g.PID(), c.pid) {
				if gone.IsZero() {
					gone = c.at
				}
				continue
			}
			if gone.IsZero() {
				continue // for another reason, before the damage was done
			}
			got, err := fingerprint(w.l.VM, d)
			if err != nil {
				return err
			}
			if got != want {
				continue
			}
			if err := <-exit; err != nil {
				return fmt.Errorf("%w: %s", err, out.String())
			}
			r.Gone = append(r.Gone, millis(gone.Sub(began)))
			r.Back = append(r.Back, millis(c.at.Sub(began)))
			if c.at.Sub(began) > slowRepair {
				line.add(began, "%s was started", r.Command)
				line.logs("klimax-guest", w.g.Log)
				r.Slow = append(r.Slow, line.between(began, c.at.Add(slowRepair))...)
			}
			return nil
		case <-limit:
			got, err := fingerprint(w.l.VM, d)
			return fmt.Errorf("not repaired within %v: have %q, want %q (%v; the command said %q)", repairLimit, got, want, err, out.String())
		}
	}
}

// hasThread reports whether a process has a thread of this number: what the
// kernel names as the process of a commit is the thread that made it.
func hasThread(pid int, thread uint32) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", pid, thread))
	return err == nil
}

// fingerprint lists the rules of klimax in the chains that a damage concerns,
// and what is in the sets of the own table. A table that is missing has none.
func fingerprint(ns *lab.NS, d damage) (string, error) {
	file, err := os.Open(ns.Path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	c, err := nftables.New(nftables.WithNetNSFd(int(file.Fd())), nftables.AsLasting())
	if err != nil {
		return "", err
	}
	defer c.CloseLasting()
	var out strings.Builder
	table := &nftables.Table{Name: d.table, Family: nftables.TableFamilyIPv4}
	for _, name := range d.chains {
		rules, err := c.GetRules(table, &nftables.Chain{Name: name, Table: table})
		if errors.Is(err, unix.ENOENT) {
			return "", nil
		}
		if err != nil {
			return "", fmt.Errorf("rules of %s: %w", name, err)
		}
		for _, r := range rules {
			if comment, ok := userdata.GetString(r.UserData, userdata.TypeComment); ok {
				fmt.Fprintf(&out, "%s %s, ", name, comment)
			}
		}
	}
	if d.table != "klimax" {
		return out.String(), nil
	}
	sets, err := c.GetSets(table)
	if err != nil {
		return "", fmt.Errorf("sets: %w", err)
	}
	for _, s := range sets {
		elements, err := c.GetSetElements(s)
		if err != nil {
			return "", fmt.Errorf("set %s: %w", s.Name, err)
		}
		fmt.Fprintf(&out, "%s: %d elements, ", s.Name, len(elements))
	}
	return out.String(), nil
}
