package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"

	"github.com/urfave/cli/v2"

	"klimax/guest/demo"
)

func (p program) demoCommand() *cli.Command {
	return &cli.Command{
		Name:  "demo",
		Usage: "run a small workload that shows the routed network at work",
		Description: "Its image is made from this program, so no registry is needed. It answers HTTP on a\n" +
			"node address and on a VIP with the address that the peer has from there.",
		Action: p.unknownSub,
		Subcommands: []*cli.Command{
			{Name: "start", Usage: "start it", Flags: []cli.Flag{configFlag(), stateFlag(), outputFlag()}, Action: p.demoStart},
			{Name: "stop", Usage: "remove it with its image", Flags: []cli.Flag{configFlag(), stateFlag(), outputFlag()}, Action: p.demoStop},
			{Name: "serve", Hidden: true, Flags: []cli.Flag{&cli.StringFlag{Name: "vip", Required: true}}, Action: p.demoServe},
		},
	}
}

func (p program) demoStart(x *cli.Context) error {
	o, asjson, err := p.oneShot(x)
	if err != nil {
		return err
	}
	d, plan, err := o.Demo()
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program's file: %w", err)
	}
	at, changed, err := demo.Start(x.Context, d, o.Config, plan, self)
	if err != nil {
		return err
	}
	if asjson {
		return json.NewEncoder(p.out).Encode(map[string]any{"changed": changed, "node": at.Node, "vip": at.VIP})
	}
	verb := "is running"
	if changed {
		verb = "started"
	}
	_, _ = fmt.Fprintf(p.out, "demo %s: http://%v/ (node) and http://%v/ (VIP)\n", verb, at.Node, at.VIP)
	return nil
}

func (p program) demoStop(x *cli.Context) error {
	o, asjson, err := p.oneShot(x)
	if err != nil {
		return err
	}
	d, _, err := o.Demo()
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	changed, err := demo.Stop(x.Context, d)
	if err != nil {
		return err
	}
	switch {
	case asjson:
		return json.NewEncoder(p.out).Encode(map[string]any{"changed": changed})
	case changed:
		_, _ = fmt.Fprintln(p.out, "demo removed")
	default:
		_, _ = fmt.Fprintln(p.out, "demo was not there")
	}
	return nil
}

func (p program) demoServe(x *cli.Context) error {
	vip, err := netip.ParseAddr(x.String("vip"))
	if err != nil {
		return usageError{err}
	}
	return demo.Serve(x.Context, vip)
}
