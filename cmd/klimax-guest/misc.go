package main

import (
	"encoding/json"
	"fmt"

	"github.com/urfave/cli/v2"

	"klimax/shared/client"
	"klimax/shared/version"
)

func (p program) logsCommand() *cli.Command {
	return &cli.Command{
		Name:  "logs",
		Usage: "print the agent's log",
		Description: "The agent keeps its last lines in memory; older ones and those of agents before it are in\n" +
			"the journal (journalctl -u klimax-guest) or in the log file.",
		Flags: []cli.Flag{
			socketFlag(),
			&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "go on with new lines"},
			&cli.IntFlag{Name: "lines", Aliases: []string{"n"}, Value: -1, Usage: "only the last `N`"},
		},
		Action: func(x *cli.Context) error {
			c := client.Unix(x.Path("socket"), version.Version)
			defer c.Close()
			err := c.Logs(x.Context, p.out, x.Int("lines"), x.Bool("follow"))
			if x.Context.Err() != nil {
				return nil
			}
			return err
		},
	}
}

func (p program) versionCommand() *cli.Command {
	return &cli.Command{
		Name: "version", Usage: "print the version", Flags: []cli.Flag{outputFlag()},
		Action: func(x *cli.Context) error {
			asjson, err := asJSON(x)
			if err != nil {
				return err
			}
			if asjson {
				return json.NewEncoder(p.out).Encode(version.Get())
			}
			_, err = fmt.Fprintln(p.out, "klimax-guest "+version.Get().String())
			return err
		},
	}
}
