package main

import (
	"encoding/json"

	"github.com/urfave/cli/v2"

	"klimax/shared/version"
)

func (p *program) versionCommand() *cli.Command {
	return &cli.Command{Name: "version", Usage: "print the version of this program", Flags: []cli.Flag{outputFlag()}, Action: p.version,
		Description: "The guest's version is part of `klimax status`."}
}

func (p *program) version(c *cli.Context) error {
	info := version.Get()
	info.Version = p.env.Version
	if c.String("output") == "" { // klimax --version
		p.printf("klimax %s\n", info)
		return nil
	}
	j, err := asJSON(c)
	switch {
	case err != nil:
		return err
	case j:
		return p.json(info)
	}
	p.printf("klimax %s\n", info)
	return nil
}

// json prints a value for programs.
func (p *program) json(v any) error {
	enc := json.NewEncoder(p.Out)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}
