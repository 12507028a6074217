package main

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/urfave/cli/v2"

	"klimax/guest/agent"
	"klimax/guest/logring"
	"klimax/guest/reconcile"
)

// keptLines is how many log lines `klimax-guest logs` can show.
const keptLines = 5000

func (p program) runCommand() *cli.Command {
	return &cli.Command{
		Name:  "run",
		Usage: "run the agent in the foreground (as root)",
		Description: "Watches Docker, systemd, interfaces and nftables, and keeps the rules in place.\n" +
			"SIGHUP reads the configuration again; SIGTERM ends it and leaves the rules.",
		Flags: []cli.Flag{
			configFlag(), socketFlag(), stateFlag(),
			&cli.PathFlag{Name: "log-file", Usage: "append the log to `FILE` instead of standard error"},
			&cli.BoolFlag{Name: "debug", Usage: "log more"},
		},
		Action: p.runAgent,
	}
}

func (p program) runAgent(x *cli.Context) error {
	if os.Geteuid() != 0 {
		return usageError{fmt.Errorf("the agent changes packet rules and must run as root: sudo klimax-guest run")}
	}
	out, journald := p.err, p.env("JOURNAL_STREAM") != ""
	if path := x.Path("log-file"); path != "" {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("make the log's directory: %w", err)
		}
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o640)
		if err != nil {
			return fmt.Errorf("open the log: %w", err)
		}
		defer func() { _ = f.Close() }()
		out, journald = io.Writer(f), false
	}
	level := slog.LevelInfo
	if x.Bool("debug") {
		level = slog.LevelDebug
	}
	ring := logring.New(keptLines)
	reload := make(chan os.Signal, 1)
	signal.Notify(reload, syscall.SIGHUP)
	defer signal.Stop(reload)
	return agent.Run(x.Context, agent.Options{
		Config: x.Path("config"), Socket: x.Path("socket"), StateDir: x.Path("state-dir"),
		DockerHost: p.dockerHost(), Log: slog.New(logring.Handler(out, journald, level, ring)), Ring: ring,
		Timing: reconcile.Defaults(), Reload: reload,
	})
}
