package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/urfave/cli/v2"

	"klimax/shared/api"
	"klimax/shared/client"
	"klimax/shared/version"
)

func (p program) statusCommand() *cli.Command {
	return &cli.Command{
		Name:        "status",
		Usage:       "show what is routed, to whom, and whether the rules are in sync",
		Description: "Exits with 0 when all is well, 1 when something is degraded, 2 when the agent does not answer.",
		Flags: []cli.Flag{
			socketFlag(), outputFlag(),
			&cli.BoolFlag{Name: "watch", Aliases: []string{"w"}, Usage: "go on and show every change"},
		},
		Action: p.status,
	}
}

func (p program) status(x *cli.Context) error {
	asjson, err := asJSON(x)
	if err != nil {
		return err
	}
	c := client.Unix(x.Path("socket"), version.Version)
	defer c.Close()
	if x.Bool("watch") {
		return p.watchStatus(x, c, asjson)
	}
	s, err := c.Status(x.Context)
	if err != nil {
		return err
	}
	if err := p.printStatus(s, asjson); err != nil {
		return err
	}
	if !s.Healthy() {
		return exitError{code: api.ExitDegraded}
	}
	return nil
}

func (p program) watchStatus(x *cli.Context, c *client.Client, asjson bool) error {
	for e, err := range c.Events(x.Context) {
		if err != nil {
			if x.Context.Err() != nil {
				return nil
			}
			return err
		}
		if e.Status == nil {
			continue
		}
		if !asjson {
			_, _ = fmt.Fprintf(p.out, "--- %s  %s\n", e.Time.Format(time.TimeOnly), e.Reason)
		}
		if err := p.printStatus(*e.Status, asjson); err != nil {
			return err
		}
	}
	return nil
}

func (p program) printStatus(s api.Status, asjson bool) error {
	if asjson {
		return json.NewEncoder(p.out).Encode(s)
	}
	_, colour := p.terminal(p.out)
	return writeStatus(p.out, s, colour, time.Now())
}

// writeStatus is the form for a person in the VM or at the host.
func writeStatus(w io.Writer, s api.Status, colour bool, now time.Time) error {
	paint := func(code, text string) string {
		if !colour {
			return text
		}
		return "\x1b[" + code + "m" + text + "\x1b[0m"
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, a ...any) {
		_, _ = fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, a...))
	}

	if s.Network.InSync {
		row("Rules", "%s", paint("32", "in sync")+sinceText(s, now))
	} else {
		row("Rules", "%s: %s", paint("31", "NOT in sync"), conditionText(s, api.CondRules))
	}
	switch {
	case s.Uplink.Name == "":
		row("Uplink", "none")
	case s.Uplink.Address == "":
		row("Uplink", "%s, no IPv4 address yet", s.Uplink.Name)
	default:
		row("Uplink", "%s  %s  (network %s)", s.Uplink.Name, s.Uplink.Address, s.Uplink.Network)
	}
	host := "nobody (set network.allowFrom)"
	if len(s.Network.Allow) > 0 {
		host = strings.Join(s.Network.Allow, ", ")
	}
	row("Counts as host", "%s", host)
	row("Reachable", "%s", strings.Join(s.Network.Ranges, ", "))
	row("Docker", "%s", dockerText(s.Docker))
	row("Repairs", "%d since %s%s", s.Network.Repairs, s.Started.Local().Format("2006-01-02 15:04:05"), repairText(s.Network))
	row("Agent", "klimax-guest %s, PID %d", s.Version, s.PID)
	_, _ = fmt.Fprintln(t)
	if len(s.Clusters) > 0 {
		_, _ = fmt.Fprintln(t, "CLUSTER\tNUMBER\tNODES\tVIP\tPODS AND SERVICES")
		for _, c := range s.Clusters {
			_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", c.Name, dash(c.Number), dash(strings.Join(c.Nodes, ",")), dash(c.VIP), dash(c.Routed))
		}
		_, _ = fmt.Fprintln(t)
	}
	_, _ = fmt.Fprintln(t, "RULE\tWANTED\tPRESENT\tPACKETS")
	for _, r := range s.Network.Rules {
		line := fmt.Sprintf("%s\t%d\t%d\t%d", r.ID, r.Wanted, r.Present, r.Packets)
		_, _ = fmt.Fprintln(t, line)
	}
	bad := 0
	for _, c := range s.Conditions {
		if c.Status == api.True {
			continue
		}
		if bad == 0 {
			_, _ = fmt.Fprintln(t)
		}
		bad++
		_, _ = fmt.Fprintf(t, "%s\t%s: %s\n", paint("31", c.Type+"="+string(c.Status)), c.Reason, c.Message)
	}
	return t.Flush()
}

func sinceText(s api.Status, now time.Time) string {
	if s.Network.LastApplied.IsZero() {
		return ", nothing had to be changed so far"
	}
	return fmt.Sprintf(", last changed %s ago (%s)", now.Sub(s.Network.LastApplied).Round(time.Second), s.Network.LastReason)
}

func repairText(n api.Network) string {
	if n.Repairs == 0 {
		return ""
	}
	return fmt.Sprintf(", the last one took %.1f ms", n.LastRepairMillis)
}

func dockerText(d api.Docker) string {
	if !d.Running && d.Version == "" {
		return "not running"
	}
	state := "running"
	if !d.Running {
		state = "not running"
	}
	live := "without live-restore"
	if d.LiveRestore {
		live = "live-restore"
	}
	out := fmt.Sprintf("%s %s, %s backend, %s, network %s on %s", d.Version, state, d.FirewallBackend, live, d.Network, d.Bridge)
	if d.Access != "" {
		out += " (" + d.Access + ")"
	}
	if d.Restarts > 0 {
		out += fmt.Sprintf(", restarted %d times", d.Restarts)
	}
	return out
}

func conditionText(s api.Status, kind string) string {
	for _, c := range s.Conditions {
		if c.Type == kind {
			return c.Message
		}
	}
	return "not looked at yet"
}

func dash[T comparable](v T) string {
	var zero T
	if v == zero {
		return "-"
	}
	return fmt.Sprint(v)
}
