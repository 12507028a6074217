package main

import (
	"strings"

	"github.com/urfave/cli/v2"

	"klimax/host/route"
	"klimax/host/up"
	"klimax/shared/api"
)

func (p *program) routeCommand() *cli.Command {
	return &cli.Command{
		Name: "route", Usage: "show this computer's routes to the guest",
		Subcommands: []*cli.Command{
			{Name: "show", Usage: "list the routes that are wanted, each with its state", Action: p.routeShow, Flags: []cli.Flag{outputFlag()},
				Description: "Exit code 0: all are present, 1: some are not."},
			// The half of `klimax up` that runs as root. It takes its orders
			// from standard input alone.
			{Name: "apply", Usage: "change routes as root; the changes are read from standard input", Hidden: true, Action: p.routeApply},
		},
	}
}

func (p *program) routeShow(c *cli.Context) error {
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
	if asJSON {
		err = p.json(map[string]any{"local": v.Host.Local, "inSync": v.Host.InSync,
			"routes": orEmpty(v.Host.Routes), "conditions": orEmpty(v.Host.Conditions)})
	} else {
		p.printf("%s", routeTable(v.Host))
	}
	if err == nil && !v.Host.InSync {
		return silent(api.ExitDegraded)
	}
	return err
}

// routeTable is the routes for a person.
func routeTable(h up.HostView) string {
	var b strings.Builder
	if h.Local {
		b.WriteString("The guest is this computer: no route is needed.\n")
	}
	if len(h.Routes) > 0 {
		var s sheet
		routesText(&s, up.HostView{Routes: h.Routes})
		for line := range strings.Lines(s.String()) {
			b.WriteString(line[len("routes    "):])
		}
	}
	for _, c := range h.Conditions {
		if c.Status != api.True {
			b.WriteString(c.Type + ": " + indent(c.Message, "  ") + "\n")
		}
	}
	return b.String()
}

func (p *program) routeApply(c *cli.Context) error {
	q, err := route.ReadRequest(p.In)
	if err != nil {
		return &usageError{message: err.Error(), hint: "this command is run by klimax up, through sudo"}
	}
	if err := p.routes(c).ApplyRequest(c.Context, q); err != nil {
		return err
	}
	for _, ch := range q.Changes {
		p.printf("%v\n", ch)
	}
	return nil
}
