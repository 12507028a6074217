package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"text/tabwriter"

	"github.com/urfave/cli/v2"

	"klimax/guest/agent"
	"klimax/guest/docker"
	"klimax/provision"
	"klimax/provision/supervise"
	"klimax/shared/client"
	"klimax/shared/config"
	"klimax/shared/progress"
	"klimax/shared/version"
)

func (p program) provisionCommands() []*cli.Command {
	paths := func(more ...cli.Flag) []cli.Flag {
		return append([]cli.Flag{configFlag(), socketFlag(), stateFlag(), outputFlag()}, more...)
	}
	return []*cli.Command{
		{
			Name:  "install",
			Usage: "turn this machine into a guest: Docker, agent, units (as root)",
			Description: "For Debian and Ubuntu. A Docker that is there is left as it is. With systemd the agent\n" +
				"becomes a service, without it a supervised process. A second time changes nothing.",
			Flags: paths(
				&cli.BoolFlag{Name: "check", Usage: "only say what would be done"},
				&cli.StringFlag{Name: "live-restore", Value: "auto", Usage: "manage live-restore in Docker's daemon.json: `CHOICE` auto (only where Docker is new here), yes or no"}),
			Action: p.install,
		},
		{Name: "stop", Usage: "stop the agent, and dockerd where install started it; rules stay (as root)", Flags: paths(), Action: p.stop},
		{
			Name: "uninstall", Usage: "take back what install did (as root)",
			Flags:  paths(&cli.BoolFlag{Name: "remove-packages", Usage: "also remove the packages that install installed, Docker among them; Docker's data stays"}),
			Action: p.uninstall,
		},
		{Name: provision.SuperviseCommand, Hidden: true, SkipFlagParsing: true, ArgsUsage: "…", Action: p.supervise},
	}
}

func (p program) supervise(x *cli.Context) error {
	process, err := supervise.FromArgs(x.Args().Slice())
	if err != nil {
		return usageError{err}
	}
	return supervise.Run(x.Context, process, p.out, slog.New(slog.NewTextHandler(p.err, nil)))
}

// provisioning puts the injected functions together.
func (p program) provisioning(x *cli.Context) (provision.Options, error) {
	asjson, err := asJSON(x)
	if err != nil {
		return provision.Options{}, err
	}
	if os.Geteuid() != 0 {
		return provision.Options{}, usageError{fmt.Errorf("this changes the system and needs root: sudo klimax-guest %s", x.Command.Name)}
	}
	self, err := os.Executable()
	if err != nil {
		return provision.Options{}, fmt.Errorf("find this program's file: %w", err)
	}
	defaults, err := config.Default().YAML()
	if err != nil {
		return provision.Options{}, err
	}
	engine, err := docker.Open(p.dockerHost())
	if err != nil {
		return provision.Options{}, err
	}
	paths := provision.DefaultPaths()
	paths.Config, paths.Socket, paths.StateDir = x.Path("config"), x.Path("socket"), x.Path("state-dir")
	oneShot := func() (agent.OneShot, error) {
		c, err := agent.ReadConfig(paths.Config)
		return agent.OneShot{Config: c, StateDir: paths.StateDir, DockerHost: p.dockerHost()}, err
	}
	return provision.Options{
		Paths: paths, Self: self, DefaultConfig: defaults, Progress: p.progress(asjson), Logger: p.logger(),
		Preflight: func(ctx context.Context) (provision.Engine, error) {
			var odd *docker.OddKindError
			err := engine.Check(ctx)
			switch {
			case errors.As(err, &odd):
				return provision.Engine{}, err
			case err != nil:
				return provision.Engine{}, nil // not there, or not running: provisioning sees to it
			}
			v, err := engine.API().ServerVersion(ctx)
			return provision.Engine{Answers: true, Version: v.Version}, err
		},
		EngineAnswers: engine.Check,
		RulesApplied: func(ctx context.Context) (bool, error) {
			o, err := oneShot()
			if err != nil {
				return false, err
			}
			v, err := o.Look(ctx)
			return v.Change.Empty(), err
		},
		ApplyRules: func(ctx context.Context) error {
			o, err := oneShot()
			if err == nil {
				_, err = o.Apply(ctx)
			}
			return err
		},
		RemoveRules: func(ctx context.Context) (bool, error) {
			o, err := oneShot()
			if err != nil {
				o.Config = config.Default() // a broken configuration must not keep the rules
			}
			r, err := o.Remove(ctx)
			return r.Rules || r.Forwarding, err
		},
		AgentAnswers: func(ctx context.Context) error {
			_, err := client.Unix(paths.Socket, version.Version).Status(ctx)
			return err
		},
	}, nil
}

func (p program) install(x *cli.Context) error {
	o, err := p.provisioning(x)
	if err != nil {
		return err
	}
	switch v := x.String("live-restore"); v {
	case "auto":
	case "yes":
		o.LiveRestore = provision.Yes
	case "no":
		o.LiveRestore = provision.No
	default:
		return usageError{fmt.Errorf("--live-restore %s: choose auto, yes or no", v)}
	}
	if x.Bool("check") {
		planned, err := provision.Plan(x.Context, o)
		if err != nil {
			return err
		}
		if json, _ := asJSON(x); json {
			return printJSON(p.out, planned)
		}
		return printPlan(p.out, planned)
	}
	changed, err := provision.Install(x.Context, o)
	return p.outcome(o.Progress, changed, err)
}

func (p program) stop(x *cli.Context) error {
	o, err := p.provisioning(x)
	if err != nil {
		return err
	}
	changed, err := provision.Stop(x.Context, o)
	return p.outcome(o.Progress, changed, err)
}

func (p program) uninstall(x *cli.Context) error {
	o, err := p.provisioning(x)
	if err != nil {
		return err
	}
	o.RemovePackages = x.Bool("remove-packages")
	changed, err := provision.Uninstall(x.Context, o)
	return p.outcome(o.Progress, changed, err)
}

func (p program) outcome(sink progress.Sink, changed bool, err error) error {
	if c, ok := sink.(io.Closer); ok {
		_ = c.Close()
	}
	if err == nil && !changed {
		_, _ = fmt.Fprintln(p.err, "nothing had to be changed")
	}
	return err
}

func printPlan(w io.Writer, planned []provision.Planned) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, s := range planned {
		state, text := "to do", s.Plan
		switch {
		case s.Error != "":
			state, text = "ERROR", s.Error
		case s.Satisfied:
			state = "ok"
		}
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\n", state, s.Title, text)
	}
	return t.Flush()
}

func printJSON(w io.Writer, v any) error { return json.NewEncoder(w).Encode(v) }
