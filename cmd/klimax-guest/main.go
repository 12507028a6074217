// Command klimax-guest is the agent in the VM or on a Linux host: it keeps the
// Docker network routed and answers for its state.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/urfave/cli/v2"
	"golang.org/x/term"

	"klimax/shared/api"
	"klimax/shared/client"
	"klimax/shared/config"
	"klimax/shared/progress"
	"klimax/shared/version"
)

// Defaults of the paths. Each is a flag, so that many guests run on one machine.
const (
	defaultConfig   = "/etc/klimax/klimax.yaml"
	defaultSocket   = "/run/klimax/guest.sock"
	defaultStateDir = "/var/lib/klimax"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args, os.Stdout, os.Stderr, os.Getenv)
	stop()
	os.Exit(code)
}

// program is what the commands share: the program is a function of it.
type program struct {
	out, err io.Writer
	env      func(string) string
}

// usageError is bad input: nothing was changed.
type usageError struct{ error }

// exitError carries an exit code and, unless nil, a message.
type exitError struct {
	code int
	err  error
}

func (e exitError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func run(ctx context.Context, args []string, out, errOut io.Writer, env func(string) string) int {
	p := program{out, errOut, env}
	var helpless error // of `help` with a command that there is not
	app := &cli.App{
		Name:                   "klimax-guest",
		Usage:                  "keeps a Docker network routed to another computer",
		Description:            "The agent of klimax on the machine that runs Docker.\n\nExit codes: 0 done or in sync, 1 failed or degraded, 2 the agent does not answer, 3 wrong usage or configuration (nothing was changed), 130 interrupted.",
		Version:                version.Get().String(),
		HideVersion:            true,
		Suggest:                true,
		UseShortOptionHandling: true,
		Writer:                 out,
		ErrWriter:              errOut,
		ExitErrHandler:         func(*cli.Context, error) {},
		OnUsageError:           func(_ *cli.Context, err error, _ bool) error { return usageError{err} },
		CommandNotFound: func(_ *cli.Context, name string) {
			helpless = usageError{fmt.Errorf("no such command: %s; see klimax-guest --help", name)}
		},
		EnableBashCompletion: true,
		Action:               p.unknown,
		Commands: []*cli.Command{
			p.runCommand(), p.statusCommand(), p.networkCommand(), p.demoCommand(), p.logsCommand(),
			p.versionCommand(), p.completionCommand(),
		},
	}
	app.Commands = append(app.Commands, p.provisionCommands()...)
	for _, c := range app.Commands {
		hardenCommand(c)
	}
	err := app.RunContext(ctx, args)
	if err == nil {
		err = helpless
	}
	return p.report(ctx, err)
}

// hardenCommand makes bad flags and arguments of a command usage errors. One
// that only has subcommands says itself which of them it does not know.
func hardenCommand(c *cli.Command) {
	c.OnUsageError = func(_ *cli.Context, err error, _ bool) error { return usageError{err} }
	if action := c.Action; action != nil && !c.SkipFlagParsing && c.ArgsUsage == "" && len(c.Subcommands) == 0 {
		c.Action = func(x *cli.Context) error {
			if x.Args().Present() {
				return usageError{fmt.Errorf("%s: unexpected argument %q", c.Name, x.Args().First())}
			}
			return action(x)
		}
	}
	for _, sub := range c.Subcommands {
		hardenCommand(sub)
	}
}

// unknown is the action of a command that only has subcommands.
func (p program) unknown(x *cli.Context) error {
	if name := x.Args().First(); name != "" {
		hint := ""
		if s := cli.SuggestCommand(x.App.Commands, name); s != "" {
			hint = " (" + strings.ToLower(s[:1]) + s[1:] + ")"
		}
		return usageError{fmt.Errorf("no such command: %s%s; see klimax-guest --help", name, hint)}
	}
	return cli.ShowAppHelp(x)
}

// report prints an error and returns the exit code.
func (p program) report(ctx context.Context, err error) int {
	var exit exitError
	var usage usageError
	var problems *config.Problems
	var unreachable *client.UnreachableError
	code := api.ExitDegraded
	switch {
	case err == nil:
		return api.ExitOK
	case errors.As(err, &exit):
		if exit.err == nil {
			return exit.code
		}
		code = exit.code
	case errors.As(err, &usage), errors.As(err, &problems):
		code = api.ExitUsage
	case errors.As(err, &unreachable):
		code = api.ExitUnreachable
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		_, _ = fmt.Fprintln(p.err, "klimax-guest: interrupted")
		return api.ExitInterrupted
	}
	_, _ = fmt.Fprintln(p.err, "klimax-guest: "+strings.TrimSpace(err.Error()))
	return code
}

// Flags that several commands have.

func configFlag() cli.Flag {
	return &cli.PathFlag{Name: "config", Value: defaultConfig, Usage: "configuration `FILE`; one that does not exist means the defaults"}
}

func socketFlag() cli.Flag {
	return &cli.PathFlag{Name: "socket", Value: defaultSocket, Usage: "the agent's unix socket `PATH`"}
}

func stateFlag() cli.Flag {
	return &cli.PathFlag{Name: "state-dir", Value: defaultStateDir, Usage: "state `DIR`"}
}

func outputFlag() cli.Flag {
	return &cli.StringFlag{Name: "output", Aliases: []string{"o"}, Value: "text", Usage: "`FORMAT`: text or json"}
}

// asJSON reads the flag -o.
func asJSON(x *cli.Context) (bool, error) {
	switch v := x.String("output"); v {
	case "text", "":
		return false, nil
	case "json":
		return true, nil
	default:
		return false, usageError{fmt.Errorf("-o %s: choose text or json", v)}
	}
}

func (p program) dockerHost() string { return p.env("DOCKER_HOST") }

// colour reports whether w is a terminal whose user wants colour.
func (p program) terminal(w io.Writer) (tty, colour bool) {
	f, ok := w.(*os.File)
	tty = ok && term.IsTerminal(int(f.Fd()))
	return tty, tty && p.env("NO_COLOR") == "" && p.env("TERM") != "dumb"
}

func (p program) progress(json bool) progress.Sink {
	tty, colour := p.terminal(p.out)
	mode := progress.Plain
	switch {
	case json:
		mode = progress.JSON
	case colour:
		mode = progress.TerminalColor
	case tty:
		mode = progress.Terminal
	}
	return progress.New(p.out, mode, nil)
}

func (p program) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(p.err, &slog.HandlerOptions{Level: slog.LevelWarn}))
}
