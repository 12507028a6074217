package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"klimax/host/up"
	"klimax/shared/api"
	"klimax/shared/progress"
)

func (p *program) upCommand() *cli.Command {
	return &cli.Command{
		Name: "up", Usage: "configure the guest and make it reachable from here",
		Description: `
Gives the guest the configuration, waits until it has applied it, sets the
routes to it on this computer and tries them. What is in place already is left
alone: a second "klimax up" changes nothing.

Changing routes needs root. Without it, one sudo is used, only when something
must change, and the commands are shown first.

With -o json each step's events are printed as JSON, one object a line; the last
line is an object with the key "result".`,
		Flags:  []cli.Flag{outputFlag()},
		Action: p.up,
	}
}

func (p *program) up(c *cli.Context) error {
	asJSON, err := asJSON(c)
	if err != nil {
		return err
	}
	s, err := p.open(c)
	if err != nil {
		return err
	}
	defer s.client.Close()
	if s.Config, err = s.Config.WithPasswords(p.readFile); err != nil {
		return &usageError{message: err.Error(), hint: "correct " + s.Source}
	}
	p.watch(&s.Options, asJSON)
	start := time.Now()
	res, err := up.Up(c.Context, s.Options)
	took := time.Since(start)
	switch {
	case err != nil:
		return p.stepError(err, asJSON)
	case asJSON:
		err = json.NewEncoder(p.Out).Encode(map[string]any{"result": map[string]any{"changed": res.Changed, "local": res.Local,
			"reachable": res.Reachable, "demo": res.Demo, "conditions": orEmpty(res.Conditions), "millis": took.Milliseconds()}})
	default:
		p.printUp(res, took)
	}
	if err == nil && len(res.Conditions) > 0 {
		return silent(api.ExitDegraded)
	}
	return err
}

// watch makes the steps visible and lets root be asked for.
func (p *program) watch(o *up.Options, asJSON bool) {
	o.Sink = progress.New(p.Out, p.mode(asJSON), nil)
	o.AskRoot = func(commands []string) {
		_, _ = fmt.Fprintf(p.Err, "Changing this computer's routes needs root:\n  %s\n", strings.Join(commands, "\n  "))
	}
}

func (p *program) mode(asJSON bool) progress.Mode {
	switch {
	case asJSON:
		return progress.JSON
	case !p.OutTerminal || p.env.Getenv("TERM") == "dumb":
		return progress.Plain
	case p.env.Getenv("NO_COLOR") != "":
		return progress.Terminal
	}
	return progress.TerminalColor
}

// stepError marks an error of a step that a person has seen already.
func (p *program) stepError(err error, asJSON bool) error {
	if asJSON {
		return err
	}
	return shown{err}
}

func (p *program) printUp(res up.Result, took time.Duration) {
	p.printf("\n")
	if len(res.Reachable) > 0 {
		p.printf("From this computer, by their own addresses:\n")
		var rows [][2]string
		for _, r := range res.Reachable {
			rows = append(rows, [2]string{r.What, r.For})
		}
		p.printf("%s", columns(rows))
	}
	for _, c := range res.Conditions {
		p.printf("Not as it should be: %s: %s\n", c.Type, indent(c.Message, "  "))
	}
	if !res.Changed {
		p.printf("Nothing had to be changed (%d ms).\n", took.Milliseconds())
	}
	if res.Demo != "" {
		p.printf("Next: curl %s\n", res.Demo)
	} else {
		p.printf("Next: klimax-guest demo start (in the guest) runs something to try; klimax status shows the state\n")
	}
}

// readFile reads a file of the host that the configuration names.
func (p *program) readFile(path string) ([]byte, error) {
	if rest, ok := strings.CutPrefix(path, "~/"); ok {
		home, err := p.env.HomeDir()
		if err != nil {
			return nil, err
		}
		path = filepath.Join(home, rest)
	}
	return os.ReadFile(path)
}

// orEmpty makes sure that a list is printed as [] and not as null.
func orEmpty[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}
