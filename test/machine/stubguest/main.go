// Command stubguest stands in for klimax-guest in tests of provisioning: the
// same commands with the same flags, a table that is empty but for one chain,
// and a note in /run/klimax/applied of each time the rules were asked for.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/google/nftables"

	"klimax/provision"
	"klimax/provision/supervise"
	"klimax/shared/progress"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := do(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func do(ctx context.Context, args []string) error {
	o := options()
	var changed bool
	var err error
	switch {
	case args[0] == "run":
		return run(ctx)
	case args[0] == "network":
		return apply(args)
	case args[0] == provision.SuperviseCommand:
		p, err := supervise.FromArgs(args[1:])
		if err != nil {
			return err
		}
		return supervise.Run(ctx, p, os.Stdout, slog.Default())
	case args[0] == "install":
		if slices.Contains(args, "--check") {
			planned, err := provision.Plan(ctx, o)
			for _, p := range planned {
				fmt.Println(p)
			}
			return err
		}
		if slices.Contains(args, "--live-restore") {
			o.LiveRestore = provision.Yes
		}
		changed, err = provision.Install(ctx, o)
	case args[0] == "stop":
		changed, err = provision.Stop(ctx, o)
	case args[0] == "uninstall":
		o.RemovePackages = slices.Contains(args, "--packages")
		changed, err = provision.Uninstall(ctx, o)
	default:
		return fmt.Errorf("unknown command %s", args[0])
	}
	if changed {
		fmt.Println("changed")
	} else {
		fmt.Println("unchanged")
	}
	return err
}

func options() provision.Options {
	self, _ := os.Executable()
	paths := provision.DefaultPaths()
	return provision.Options{
		Self: self, DefaultConfig: []byte("apiVersion: klimax/v1\n"),
		Preflight: func(ctx context.Context) (provision.Engine, error) {
			if engine(ctx) != nil {
				return provision.Engine{}, nil
			}
			return provision.Engine{Answers: true, Version: "20.10.24"}, nil
		},
		EngineAnswers: engine,
		RulesApplied:  func(context.Context) (bool, error) { return table() },
		ApplyRules:    func(context.Context) error { return apply([]string{"network", "apply"}) },
		RemoveRules: func(context.Context) (bool, error) {
			there, err := table()
			if err != nil || !there {
				return false, err
			}
			c := &nftables.Conn{}
			c.DelTable(&nftables.Table{Name: "klimax", Family: nftables.TableFamilyIPv4})
			return true, c.Flush()
		},
		AgentAnswers: func(context.Context) error { return dial(paths.Socket, "") },
		Progress:     printer{},
	}
}

type printer struct{}

func (printer) Event(e progress.Event) {
	if e.State != progress.Started {
		fmt.Printf("%-7s %-12s %s\n", e.State, e.Step, e.Message)
	}
}

// dial asks an HTTP server on a unix socket for path; with an empty one, being
// connected is enough.
func dial(socket, path string) error {
	c, err := net.DialTimeout("unix", socket, time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	if path == "" {
		return nil
	}
	c.SetDeadline(time.Now().Add(2 * time.Second))
	fmt.Fprintf(c, "GET %s HTTP/1.0\r\n\r\n", path)
	answer := make([]byte, 64)
	n, err := c.Read(answer)
	if err != nil || !bytes.Contains(answer[:n], []byte("200 OK")) {
		return fmt.Errorf("%s answers %q, %v", socket, answer[:n], err)
	}
	return nil
}

func engine(context.Context) error { return dial("/run/docker.sock", "/_ping") }

func table() (bool, error) {
	tables, err := (&nftables.Conn{}).ListTablesOfFamily(nftables.TableFamilyIPv4)
	return slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == "klimax" }), err
}

// apply raises forwarding and writes the table.
func apply(args []string) error {
	uptime, _ := os.ReadFile("/proc/uptime")
	now, _, _ := strings.Cut(string(uptime), " ")
	engineUp := engine(context.Background()) == nil
	os.MkdirAll("/run/klimax", 0o750)
	f, err := os.OpenFile("/run/klimax/applied", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	fmt.Fprintln(f, now, "docker:", engineUp, strings.Join(args, " "))
	f.Close()
	config, err := os.ReadFile(provision.DefaultPaths().Config)
	if err != nil {
		return err
	}
	switch {
	case bytes.Contains(config, []byte("broken")):
		return errors.New("klimax.yaml:1: broken")
	case bytes.Contains(config, []byte("hang")):
		signal.Ignore(syscall.SIGTERM)
		time.Sleep(time.Hour)
	}
	if _, err := provision.RaiseForwarding("", provision.DefaultPaths().StateDir); err != nil {
		return err
	}
	c := &nftables.Conn{}
	t := c.AddTable(&nftables.Table{Name: "klimax", Family: nftables.TableFamilyIPv4})
	c.AddChain(&nftables.Chain{
		Name: "guard", Table: t, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRef(-310),
	})
	return c.Flush()
}

// run is the agent: a socket, and a word to systemd now and then.
func run(ctx context.Context) error {
	path := provision.DefaultPaths().Socket
	os.Remove(path)
	l, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	defer l.Close()
	if err := os.Chmod(path, 0o660); err != nil {
		return err
	}
	// What the unit's sandbox must let through.
	if err := apply([]string{"agent"}); err != nil {
		return err
	}
	daemon.SdNotify(false, daemon.SdNotifyReady)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	tick := time.NewTicker(5 * time.Second)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			daemon.SdNotify(false, daemon.SdNotifyWatchdog)
		}
	}
}
