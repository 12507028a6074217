package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"klimax/guest/agent"
	"klimax/guest/network"
	"klimax/guest/reconcile"
	"klimax/shared/api"
	"klimax/shared/config"
)

func (p program) networkCommand() *cli.Command {
	flags := func(more ...cli.Flag) []cli.Flag { return append([]cli.Flag{configFlag(), stateFlag()}, more...) }
	return &cli.Command{
		Name:   "network",
		Usage:  "look at the packet rules and change them, without the agent (as root)",
		Action: p.unknownSub,
		Subcommands: []*cli.Command{
			{
				Name: "apply", Usage: "bring the rules in sync; prints \"changed: …\" or \"unchanged\"",
				Flags: flags(outputFlag(),
					&cli.BoolFlag{Name: "boot", Usage: "do not ask Docker, and never fail: for the unit that runs before Docker"},
					&cli.DurationFlag{Name: "timeout", Value: 10 * time.Second, Usage: "give up after `DURATION`"}),
				Action: p.networkApply,
			},
			{Name: "show", Usage: "print wanted and present rules side by side, with what they matched", Flags: flags(outputFlag()), Action: p.networkShow},
			{Name: "check", Usage: "compare only: exits with 0 when in sync, 1 when not", Flags: flags(outputFlag()), Action: p.networkCheck},
			{Name: "remove", Usage: "take every rule of klimax out of all tables", Flags: flags(outputFlag()), Action: p.networkRemove},
		},
	}
}

func (p program) unknownSub(x *cli.Context) error {
	if name := x.Args().First(); name != "" {
		return usageError{fmt.Errorf("no such command: %s %s; see klimax-guest %s --help", x.Command.Name, name, x.Command.Name)}
	}
	return cli.ShowSubcommandHelp(x)
}

// oneShot begins a command that works without the agent: it reads the flag -o,
// checks root and reads the configuration.
func (p program) oneShot(x *cli.Context) (o agent.OneShot, asjson bool, err error) {
	if asjson, err = asJSON(x); err != nil {
		return o, asjson, err
	}
	if os.Geteuid() != 0 {
		return o, asjson, usageError{fmt.Errorf("reading and changing packet rules needs root: sudo klimax-guest %s %s", x.Lineage()[1].Command.Name, x.Command.Name)}
	}
	c, err := agent.ReadConfig(x.Path("config"))
	return agent.OneShot{Config: c, StateDir: x.Path("state-dir"), DockerHost: p.dockerHost()}, asjson, err
}

func (p program) networkApply(x *cli.Context) error {
	ctx, cancel := context.WithTimeout(x.Context, x.Duration("timeout"))
	defer cancel()
	o, asjson, err := p.oneShot(x)
	boot := x.Bool("boot")
	var usage usageError
	if boot && err != nil && !errors.As(err, &usage) {
		// The guard and forwarding of the defaults are better than none.
		_, _ = fmt.Fprintf(p.err, "klimax-guest: %v\nusing the defaults\n", err)
		o.Config, err = config.Default(), nil
	}
	if err != nil {
		return err
	}
	o.NoDocker = boot
	changed, err := o.Apply(ctx)
	if err != nil {
		if boot {
			_, _ = fmt.Fprintf(p.err, "klimax-guest: %v\n", err)
			return nil
		}
		return err
	}
	switch {
	case asjson:
		return json.NewEncoder(p.out).Encode(map[string]any{"changed": changed != "", "was": changed})
	case changed == "":
		_, _ = fmt.Fprintln(p.out, "unchanged")
	default:
		_, _ = fmt.Fprintln(p.out, "changed: "+changed)
	}
	return nil
}

func (p program) networkCheck(x *cli.Context) error {
	o, asjson, err := p.oneShot(x)
	if err != nil {
		return err
	}
	v, err := o.Look(x.Context)
	if err != nil {
		return err
	}
	ok := v.Change.Empty()
	switch {
	case asjson:
		err = json.NewEncoder(p.out).Encode(map[string]any{"inSync": ok, "differs": v.Change.String()})
	case ok:
		_, _ = fmt.Fprintln(p.out, "in sync")
	default:
		_, _ = fmt.Fprintln(p.out, "not in sync: "+v.Change.String())
	}
	if err == nil && !ok {
		return exitError{code: api.ExitDegraded}
	}
	return err
}

// shown is one line of `network show`.
type shown struct {
	ID      api.RuleID `json:"id"`
	Chain   string     `json:"chain"`
	Rule    string     `json:"rule"`
	Wanted  bool       `json:"wanted"`
	Present bool       `json:"present"`
	Packets uint64     `json:"packets"`
}

func (p program) networkShow(x *cli.Context) error {
	o, asjson, err := p.oneShot(x)
	if err != nil {
		return err
	}
	v, err := o.Look(x.Context)
	if err != nil {
		return err
	}
	lines := sideBySide(v)
	if asjson {
		sets := map[string]string{}
		for name, s := range v.Want.Sets {
			sets[name] = s.Format(name)
		}
		return json.NewEncoder(p.out).Encode(map[string]any{"inSync": v.Change.Empty(), "ipForward": v.Facts.IPForward, "sets": sets, "rules": lines})
	}
	t := tabwriter.NewWriter(p.out, 0, 0, 2, ' ', 0)
	mark := map[bool]string{true: "yes", false: "no"}
	_, _ = fmt.Fprintf(t, "ip_forward\twanted on\t%s\n\n", map[bool]string{true: "is on", false: "is OFF"}[v.Facts.IPForward])
	_, _ = fmt.Fprintln(t, "SET\tWANTED\tPRESENT")
	for _, name := range slices.Sorted(maps.Keys(v.Want.Sets)) {
		have := "(missing)"
		if s, ok := v.Have.Sets[name]; ok {
			have = "{ " + s.Format(name) + " }"
		}
		_, _ = fmt.Fprintf(t, "%s\t{ %s }\t%s\n", name, v.Want.Sets[name].Format(name), have)
	}
	_, _ = fmt.Fprintln(t, "\nWANTED\tPRESENT\tPACKETS\tCHAIN\tRULE")
	for _, l := range lines {
		_, _ = fmt.Fprintf(t, "%s\t%s\t%d\t%s\t%s\n", mark[l.Wanted], mark[l.Present], l.Packets, l.Chain, l.Rule)
	}
	_, _ = fmt.Fprintf(t, "\n%s\n", map[bool]string{true: "in sync", false: "not in sync: " + v.Change.String()}[v.Change.Empty()])
	return t.Flush()
}

// sideBySide lists wanted rules with what is there of them, then rules of ours
// that are there and not wanted.
func sideBySide(v reconcile.View) []shown {
	out := []shown{}
	wanted := map[network.Rule]bool{}
	for _, r := range v.Want.All() {
		n, packets := v.Have.Count(r)
		wanted[r] = true
		out = append(out, shown{ID: r.ID, Chain: string(r.Chain), Rule: r.String(), Wanted: true, Present: n > 0, Packets: packets})
	}
	for _, ch := range slices.Sorted(maps.Keys(v.Have.Rules)) {
		for _, r := range v.Have.Rules[ch] {
			if r.Ours && !(r.Exact && wanted[r.Rule]) || ch.Own() && !r.Ours {
				out = append(out, shown{ID: r.ID, Chain: string(ch), Rule: r.Rule.String(), Present: true, Packets: r.Packets})
			}
		}
	}
	return out
}

func (p program) networkRemove(x *cli.Context) error {
	o, asjson, err := p.oneShot(x)
	if err != nil {
		return err
	}
	r, err := o.Remove(x.Context)
	if err != nil {
		return err
	}
	if asjson {
		return json.NewEncoder(p.out).Encode(r)
	}
	if !r.Rules && !r.Forwarding {
		_, _ = fmt.Fprintln(p.out, "unchanged")
	}
	if r.Rules {
		_, _ = fmt.Fprintln(p.out, "changed: removed the rules of klimax")
	}
	if r.Forwarding {
		_, _ = fmt.Fprintln(p.out, "changed: net.ipv4.ip_forward is off again")
	}
	if r.ForwardingKept {
		_, _ = fmt.Fprintln(p.out, "net.ipv4.ip_forward stays on: Docker is running and needs it")
	}
	return nil
}
