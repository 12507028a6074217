package main

import (
	"encoding/json"

	"github.com/urfave/cli/v2"

	"klimax/host/up"
)

func (p *program) downCommand() *cli.Command {
	return &cli.Command{
		Name: "down", Usage: "undo what `klimax up` did on this computer",
		Description: `
With --remove-route the routes to the guest are removed from this computer; only
those that klimax set. Without it they stay: they do no harm while the guest is
away, and the next "klimax up" needs no root.

A guest that klimax did not start (guest.type local, --guest unix://) goes on
running, and so do its containers.`,
		Flags: []cli.Flag{outputFlag(),
			&cli.BoolFlag{Name: "remove-route", Usage: "remove the routes to the guest", DisableDefaultText: true}},
		Action: p.down,
	}
}

func (p *program) down(c *cli.Context) error {
	asJSON, err := asJSON(c)
	if err != nil {
		return err
	}
	s, err := p.open(c)
	if err != nil {
		return err
	}
	defer s.client.Close()
	p.watch(&s.Options, asJSON)
	res, err := up.Down(c.Context, s.Options, c.Bool("remove-route"))
	switch {
	case err != nil:
		return p.stepError(err, asJSON)
	case asJSON:
		kept := []string{}
		for _, r := range res.Kept {
			kept = append(kept, r.Dest.String())
		}
		return json.NewEncoder(p.Out).Encode(map[string]any{"result": map[string]any{
			"removed": orEmpty(res.Removed), "kept": kept, "guestRunning": res.Guest != nil}})
	}
	p.printf("\n")
	switch {
	case len(res.Removed) > 0:
		p.printf("The guest's addresses are no longer reachable from here.\n")
	case len(res.Kept) > 0:
		p.printf("The routes to the guest stay; remove them: klimax down --remove-route\n")
	default:
		p.printf("There was nothing to undo on this computer.\n")
	}
	if res.Guest != nil {
		p.printf("The guest goes on running. To stop its agent, in the guest: klimax-guest stop\n")
	}
	return nil
}
