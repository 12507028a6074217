package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"klimax/host/connect"
	"klimax/host/route"
	"klimax/host/up"
	"klimax/shared/api"
	"klimax/shared/client"
	"klimax/shared/config"
	"klimax/shared/version"
)

// environment is what the program takes from its surroundings.
type environment struct {
	Getenv  func(string) string
	HomeDir func() (string, error)
	GOOS    string
	Self    string // path of this program, for sudo

	// Nil for the real ones.
	Routes  routes
	Dial    func(ctx context.Context, network, address string) (net.Conn, error)
	Version string
}

// routes is all of this computer's routing table that commands use.
type routes interface {
	up.Routes
	ApplyRequest(ctx context.Context, q route.Request) error
}

// program is one run.
type program struct {
	streams
	env environment
}

// run is the whole program: a function of what it is given. It returns the
// exit code, see exitCodes.
func run(ctx context.Context, args []string, s streams, env environment) int {
	if env.Version == "" {
		env.Version = version.Version
	}
	if env.Dial == nil {
		var d net.Dialer
		env.Dial = d.DialContext
	}
	p := &program{streams: s, env: env}
	app := p.app()
	if len(args) > 0 && args[0] == completeCommand {
		p.complete(app, args[1:])
		return api.ExitOK
	}
	err := app.RunContext(ctx, append([]string{app.Name}, args...))
	if err != nil && ctx.Err() != nil {
		err = context.Canceled
	}
	return p.report(err)
}

func (p *program) app() *cli.App {
	app := &cli.App{
		Name:            "klimax",
		Usage:           "containers and Kubernetes clusters, reachable by their own addresses",
		Writer:          p.Out,
		ErrWriter:       p.Err,
		HideVersion:     true, // --version is a flag of our own, with our own text
		HideHelpCommand: true,
		ExitErrHandler:  func(*cli.Context, error) {}, // run returns the code
		OnUsageError:    onUsageError,
		Flags: append(globalFlags(), &cli.BoolFlag{Name: "version", Usage: "print the version", DisableDefaultText: true},
			// The cli package adds this one only where it adds its own help command.
			&cli.BoolFlag{Name: "help", Aliases: []string{"h"}, Usage: "show this", DisableDefaultText: true}),
		Action: func(c *cli.Context) error {
			switch {
			case c.Args().Present():
				return unknownCommand(c)
			case c.Bool("version"):
				return p.version(c)
			}
			return cli.ShowAppHelp(c)
		},
		Commands: []*cli.Command{
			p.upCommand(), p.downCommand(), p.statusCommand(), p.configCommand(), p.routeCommand(),
			p.versionCommand(), p.completionCommand(), p.helpCommand(),
		},
	}
	prepare(app)
	return app
}

// prepare gives every command what all of them have.
func prepare(app *cli.App) {
	var walk func(c *cli.Command, path string)
	walk = func(c *cli.Command, path string) {
		path += " " + c.Name
		c.HideHelpCommand = true
		c.OnUsageError = onUsageError
		c.Flags = append(c.Flags, globalFlags()...)
		if len(c.Subcommands) > 0 {
			c.Action = func(ctx *cli.Context) error {
				if ctx.Args().Present() {
					return unknownCommand(ctx)
				}
				return cli.ShowSubcommandHelp(ctx)
			}
		} else if c.Args = c.ArgsUsage != ""; !c.Args {
			c.Action = noArguments(c.Action)
		}
		for _, s := range c.Subcommands {
			walk(s, path)
		}
		c.CustomHelpTemplate = commandHelp(c, path)
	}
	for _, c := range app.Commands {
		walk(c, app.Name)
	}
	app.CustomAppHelpTemplate = appHelp(app)
}

func noArguments(next cli.ActionFunc) cli.ActionFunc {
	return func(c *cli.Context) error {
		if c.Args().Present() {
			return &usageError{message: fmt.Sprintf("%s takes no arguments, got %q", c.Command.HelpName, c.Args().First()),
				hint: "flags come before arguments; see: " + c.Command.HelpName + " --help"}
		}
		return next(c)
	}
}

// globalFlags are accepted before and after the command's name.
func globalFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "config", Usage: "configuration `FILE` (default: klimax.yaml in $KLIMAX_HOME or ~/.klimax; - is standard input)"},
		&cli.StringFlag{Name: "guest", Usage: "where the guest's agent is: unix:///`PATH` of its socket, or local (default: by guest.type)"},
		&cli.BoolFlag{Name: "verbose", Aliases: []string{"v"}, Usage: "tell more on standard error", DisableDefaultText: true},
	}
}

// global returns the value of a global flag, wherever it stands on the command
// line; the last one counts.
func global(c *cli.Context, name string) (value string, given bool) {
	for _, l := range c.Lineage() {
		if l.IsSet(name) {
			return l.String(name), true
		}
	}
	return "", false
}

func verbose(c *cli.Context) bool {
	for _, l := range c.Lineage() {
		if l.Bool("verbose") {
			return true
		}
	}
	return false
}

func outputFlag() *cli.StringFlag {
	return &cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "`FORMAT` of the output: text or json", Value: "text"}
}

// asJSON reports which of the two forms of output is wanted.
func asJSON(c *cli.Context) (bool, error) {
	switch o := c.String("output"); o {
	case "text":
		return false, nil
	case "json":
		return true, nil
	default:
		return false, &usageError{message: fmt.Sprintf("--output %q: it must be text or json", o), hint: "see: " + c.Command.HelpName + " --help"}
	}
}

// home is the directory of klimax's own files.
func (p *program) home() (string, error) {
	dir := p.env.Getenv("KLIMAX_HOME")
	if dir == "" {
		h, err := p.env.HomeDir()
		if err != nil {
			return "", &usageError{message: "there is no home directory: " + err.Error(), hint: "set KLIMAX_HOME or give --config"}
		}
		dir = filepath.Join(h, ".klimax")
	}
	return filepath.Abs(dir)
}

// configPath is the configuration file, and whether somebody named it.
func (p *program) configPath(c *cli.Context) (path string, named bool, err error) {
	if path, named = global(c, "config"); named {
		if path == "" {
			return "", true, &usageError{message: "--config is empty", hint: "give a file, or leave the flag out for the default"}
		}
		return path, true, nil
	}
	dir, err := p.home()
	return filepath.Join(dir, "klimax.yaml"), false, err
}

// readConfig returns the text of the configuration file. found is false when
// the default file is not there, which is no error.
func (p *program) readConfig(c *cli.Context) (path string, data []byte, found bool, err error) {
	path, named, err := p.configPath(c)
	if err != nil {
		return path, nil, false, err
	}
	if path == "-" {
		data, err = io.ReadAll(p.In)
		path = "standard input"
	} else {
		data, err = os.ReadFile(path)
	}
	switch {
	case err == nil:
		return path, data, true, nil
	case errors.Is(err, os.ErrNotExist) && !named:
		return path, nil, false, nil
	case errors.Is(err, os.ErrNotExist):
		return path, nil, false, &usageError{message: "there is no configuration file " + path, hint: "make one: klimax config init --config " + path}
	}
	return path, nil, false, &usageError{message: "the configuration cannot be read: " + err.Error(), hint: "give another file: --config FILE"}
}

// loadConfig reads the configuration; source says for a person where it is from.
func (p *program) loadConfig(c *cli.Context) (cfg config.Config, source string, err error) {
	path, data, found, err := p.readConfig(c)
	switch {
	case err != nil:
		return cfg, "", err
	case !found:
		return config.Default(), "defaults, there is no " + path, nil
	}
	cfg, err = config.Parse(path, data)
	return cfg, path, err
}

// session is what a command that talks to the guest works with.
type session struct {
	up.Options
	client *client.Client
	target connect.Target
}

// open loads the configuration and prepares a connection; nothing is dialled.
func (p *program) open(c *cli.Context) (session, error) {
	cfg, source, err := p.loadConfig(c)
	if err != nil {
		return session{}, err
	}
	flag, _ := global(c, "guest")
	target, err := connect.Resolve(flag, cfg.Guest, p.env.GOOS)
	if err != nil {
		return session{}, err
	}
	cl := target.Client(p.env.Version)
	return session{client: cl, target: target, Options: up.Options{
		Config: cfg, Source: source, Guest: cl, Routes: p.routes(c), Dial: p.env.Dial,
	}}, nil
}

func (p *program) routes(c *cli.Context) routes {
	if p.env.Routes != nil {
		return p.env.Routes
	}
	level := slog.LevelWarn
	if verbose(c) {
		level = slog.LevelDebug
	}
	return route.NewSystem(p.env.Self, slog.New(slog.NewTextHandler(p.Err, &slog.HandlerOptions{Level: level})))
}

// printf writes to standard output. A reader that went away (| head) is no
// reason to stop.
func (p *program) printf(format string, args ...any) {
	_, _ = fmt.Fprintf(p.Out, format, args...)
}

func indent(s, by string) string { return strings.ReplaceAll(s, "\n", "\n"+by) }
