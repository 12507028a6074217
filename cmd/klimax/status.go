package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"klimax/host/up"
	"klimax/shared/api"
)

func (p *program) statusCommand() *cli.Command {
	return &cli.Command{
		Name: "status", Usage: "show the state of the guest and of the way there",
		Description: `
Asks the agent and looks at this computer's routes; changes nothing. The exit
code is 0 when all is well, 1 when something is not as the configuration asks
for, 2 when the agent does not answer.

With -o json the guest's own status is printed (as klimax-guest status -o json
does), with this computer's side under the key "host".`,
		Flags: []cli.Flag{outputFlag()}, Action: p.status,
	}
}

// statusJSON is the output of `klimax status -o json`.
type statusJSON struct {
	api.Status
	Host up.HostView `json:"host"`
}

func (p *program) status(c *cli.Context) error {
	asJSON, err := asJSON(c)
	if err != nil {
		return err
	}
	s, err := p.open(c)
	if err != nil {
		return err
	}
	defer s.client.Close()
	v, err := up.Look(c.Context, s.Options)
	if err != nil {
		return err
	}
	v.Host.Version, v.Host.Guest = p.env.Version, s.target.String()
	if asJSON {
		v.Host.Routes, v.Host.Conditions = orEmpty(v.Host.Routes), orEmpty(v.Host.Conditions)
		err = p.json(statusJSON{v.Guest, v.Host})
	} else {
		p.printf("%s", statusText(v, time.Now()))
	}
	if err == nil && !v.Healthy() {
		return silent(api.ExitDegraded)
	}
	return err
}

// sheet is text in two columns; a label stands once for the lines below it.
type sheet struct{ strings.Builder }

func (s *sheet) row(label, format string, args ...any) {
	lines := strings.Split(fmt.Sprintf(format, args...), "\n")
	for i, l := range lines {
		if i > 0 {
			label = ""
		}
		fmt.Fprintf(s, "%-9s %s\n", label, l)
	}
}

// statusText is the state for a person.
func statusText(v up.View, now time.Time) string {
	var s sheet
	g := v.Guest
	s.row("guest", "klimax-guest %s, %s%s", g.Version, since(g.Started, now), at(v.Host.Guest))
	s.row("docker", "%s", dockerText(g.Docker))
	switch {
	case g.Uplink.Name == "":
		s.row("uplink", "none")
	case g.Uplink.Address == "":
		s.row("uplink", "%s, without an IPv4 address", g.Uplink.Name)
	default:
		s.row("uplink", "%s %s in %s", g.Uplink.Name, g.Uplink.Address, g.Uplink.Network)
	}
	s.row("rules", "%s", rulesText(g.Network, now))
	allowed := strings.Join(g.Network.Allow, ", ")
	if allowed == "" {
		allowed = "nobody but the guest itself (network.allowFrom)"
	}
	s.row("callers", "%s", allowed)
	routesText(&s, v.Host)
	clustersText(&s, g.Clusters)
	s.WriteString("\n")
	s.WriteString(verdict(v))
	return s.String()
}

func at(guest string) string {
	if guest == "" {
		return ""
	}
	return ", at " + guest
}

func since(t, now time.Time) string {
	if t.IsZero() {
		return "running"
	}
	return "running for " + forHowLong(now.Sub(t))
}

// forHowLong is a duration of any length in its one or two largest units.
func forHowLong(d time.Duration) string {
	s := max(0, int(d.Seconds()))
	switch {
	case s < 60:
		return fmt.Sprintf("%d s", s)
	case s < 3600:
		return fmt.Sprintf("%d min", s/60)
	case s < 24*3600:
		return fmt.Sprintf("%d h %d min", s/3600, s/60%60)
	}
	return fmt.Sprintf("%d d %d h", s/86400, s/3600%24)
}

func dockerText(d api.Docker) string {
	if !d.Running {
		return "not running"
	}
	text := "Docker " + d.Version
	if d.FirewallBackend != "" {
		text += ", " + d.FirewallBackend
	}
	if d.LiveRestore {
		text += ", live-restore"
	}
	if d.Restarts > 0 {
		text += fmt.Sprintf(", %s", count(d.Restarts, "restart"))
	}
	if d.Bridge != "" {
		text += fmt.Sprintf("\nnetwork %s: %s on %s", d.Network, d.Subnet, d.Bridge)
		if d.Access != "" {
			text += ", opened by " + d.Access
		}
	}
	return text
}

func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

func rulesText(n api.Network, now time.Time) string {
	text := "in place"
	if !n.InSync {
		text = "NOT in place"
	}
	if !n.LastApplied.IsZero() {
		text += fmt.Sprintf(", last written %s ago", forHowLong(now.Sub(n.LastApplied)))
		if n.LastReason != "" {
			text += " (" + n.LastReason + ")"
		}
	}
	if n.Repairs > 0 {
		text += fmt.Sprintf("\n%s, the last took %.1f ms", count(n.Repairs, "repair"), n.LastRepairMillis)
	}
	for _, r := range n.Rules {
		if r.Present < r.Wanted {
			text += fmt.Sprintf("\n%s: %d of %d present", r.ID, r.Present, r.Wanted)
		}
	}
	return text
}

func routesText(s *sheet, h up.HostView) {
	switch {
	case h.Local:
		s.row("routes", "none needed: the guest is this computer")
	case len(h.Routes) == 0:
		s.row("routes", "none")
	default:
		var lines []string
		for _, r := range h.Routes {
			state := r.State
			if r.State == "wrong-gateway" {
				state = "leads to " + r.Present.String()
			}
			lines = append(lines, fmt.Sprintf("%-18v via %-15v  %-10s %s", r.Dest, r.Gateway, state, r.For))
		}
		s.row("routes", "%s", strings.Join(lines, "\n"))
	}
}

func clustersText(s *sheet, cs []api.Cluster) {
	var lines []string
	for _, c := range cs {
		name := fmt.Sprintf("%s (number %d)", c.Name, c.Number)
		if c.Demo {
			name = "demo workload"
		}
		line := name + ": " + count(len(c.Nodes), "node")
		if len(c.Nodes) > 0 {
			line += " " + strings.Join(c.Nodes, ", ")
		}
		if c.VIP != "" {
			line += ", answers at " + c.VIP
		}
		lines = append(lines, line)
	}
	if len(lines) > 0 {
		s.row("clusters", "%s", strings.Join(lines, "\n"))
	}
}

// verdict lists what is wrong and what to do about it.
func verdict(v up.View) string {
	var b strings.Builder
	tell := func(side string, cs []api.Condition) {
		for _, c := range cs {
			if c.Status != api.True {
				fmt.Fprintf(&b, "%s: %s: %s\n", side, c.Type, indent(c.Message, "  "))
			}
		}
	}
	tell("guest", v.Guest.Conditions)
	tell("here", v.Host.Conditions)
	if b.Len() == 0 && !v.Guest.Network.InSync {
		b.WriteString("guest: the rules are not in place; the agent goes on trying\n")
	}
	for _, r := range v.Host.Routes {
		if r.State != "present" {
			b.WriteString("here: the routes are not as they should be\n  set them: klimax up\n")
			break
		}
	}
	if b.Len() == 0 {
		return "All is well.\n"
	}
	return b.String()
}
