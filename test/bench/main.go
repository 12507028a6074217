//go:build linux

// Command bench measures what klimax promises, side by side with what it is
// better than, and prints one table. It needs root and what `go run
// ./test/labdeps` installs. A hard line that is missed makes its exit code 1.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"klimax/test/lab"
)

// Exit codes.
const (
	exitMiss        = 1 // a hard line was missed
	exitUsage       = 2
	exitInterrupted = 130
)

// options are the flags.
type options struct {
	only     string
	setups   string
	bin      string
	output   string
	file     string
	quick    bool
	restarts int
	cold     int
	usual    int
	rounds   int
	pairs    int
	idle     time.Duration
}

// bench is one run.
type bench struct {
	*Report
	options
	setups        []lab.Setup
	klimax, guest string // copies of the programs: a build meanwhile changes nothing
}

// section is a part of the benchmark that can be selected.
type section struct {
	name  string
	about string
	run   func(*bench, context.Context)
	cost  func(*bench) time.Duration // on a quiet machine
}

func sections() []section {
	return []section{
		{"restart", "Docker restarts with live-restore, and the usual design beside it", (*bench).restart, (*bench).restartCost},
		{"cold", "Docker restarts without live-restore", (*bench).coldRestart, (*bench).coldCost},
		{"repair", "from deleting rules to rules back", (*bench).repair, (*bench).repairCost},
		{"throughput", "mac to VIP, no firewall, docker-proxy", (*bench).throughput, (*bench).throughputCost},
		{"footprint", "memory, CPU, binaries, times of commands", (*bench).footprint, (*bench).footprintCost},
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

func run(ctx context.Context, args []string, out, progress io.Writer) int {
	b, chosen, err := setUp(args, out, progress)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		fmt.Fprintln(progress, "bench:", err)
		return exitUsage
	}
	defer os.RemoveAll(filepath.Dir(b.guest))
	var expected time.Duration
	for _, s := range chosen {
		expected += s.cost(b)
	}
	b.say("takes about %v on a quiet machine; load now: %s", expected.Round(time.Minute/2), b.Load[0])
	for _, s := range chosen {
		if ctx.Err() != nil {
			break
		}
		b.say("%s: %s, about %v", s.name, s.about, s.cost(b).Round(time.Second))
		s.run(b, ctx)
	}
	b.end()
	if b.output == "json" {
		err = b.json(out)
	} else {
		b.table(out)
	}
	if err == nil && b.file != "" {
		err = writeFile(b.file, b.json)
	}
	met, all := b.met(Hard)
	switch {
	case err != nil:
		fmt.Fprintln(progress, "bench:", err)
		return exitMiss
	case ctx.Err() != nil:
		fmt.Fprintln(progress, "bench: interrupted")
		return exitInterrupted
	case met < all:
		return exitMiss
	}
	return 0
}

func writeFile(path string, write func(io.Writer) error) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}

// setUp reads the flags and prepares the run.
func setUp(args []string, out, progress io.Writer) (*bench, []section, error) {
	b := &bench{Report: newReport(progress)}
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.SetOutput(progress)
	var names []string
	for _, s := range sections() {
		names = append(names, s.name)
	}
	o := &b.options
	f.StringVar(&o.only, "only", "", "sections to run, separated by commas: "+strings.Join(names, ", "))
	f.StringVar(&o.setups, "setups", os.Getenv("KLIMAX_LAB_SETUPS"), "engines to run on: debian, 29-iptables, 29-nftables; also $KLIMAX_LAB_SETUPS")
	f.StringVar(&o.bin, "bin", "bin", "directory of klimax and klimax-guest, see make build")
	f.StringVar(&o.output, "o", "text", "output: text or json")
	f.StringVar(&o.file, "json", "", "write all raw figures to this file as well")
	f.BoolVar(&o.quick, "quick", false, "a few of everything, to see that it works; counts given by their own flags are kept")
	f.IntVar(&o.restarts, "restarts", envInt("KLIMAX_BENCH_RESTARTS", 50), "restarts per engine and signal; also $KLIMAX_BENCH_RESTARTS")
	f.IntVar(&o.cold, "cold", 5, "restarts without live-restore per engine and signal")
	f.IntVar(&o.usual, "usual", 10, "restarts of the usual design per engine and FORWARD policy")
	f.IntVar(&o.rounds, "rounds", 200, "repairs per kind of damage")
	f.IntVar(&o.pairs, "pairs", 41, "rounds of throughput, each path once per round")
	f.DurationVar(&o.idle, "idle", time.Minute, "how long the idle agent is watched")
	if err := f.Parse(args); err != nil {
		return nil, nil, err
	}
	if f.NArg() > 0 {
		return nil, nil, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	if o.output != "text" && o.output != "json" {
		return nil, nil, fmt.Errorf("-o %s: choose text or json", o.output)
	}
	if o.quick {
		given := map[string]bool{}
		f.Visit(func(f *flag.Flag) { given[f.Name] = true })
		for name, v := range map[string]string{"restarts": "3", "cold": "1", "usual": "2", "rounds": "20", "pairs": "5", "idle": "10s"} {
			if !given[name] {
				if err := f.Set(name, v); err != nil {
					return nil, nil, err
				}
			}
		}
	}
	for _, n := range []int{o.restarts, o.cold, o.usual, o.rounds, o.pairs} {
		if n < 1 {
			return nil, nil, fmt.Errorf("counts start at 1")
		}
	}
	chosen, err := choose(o.only)
	if err != nil {
		return nil, nil, err
	}
	// The lab reads the list from the environment.
	if err := os.Setenv("KLIMAX_LAB_SETUPS", o.setups); err != nil {
		return nil, nil, err
	}
	if err := inBed(context.Background(), func(t *bed) { b.setups = lab.Setups(t) }); err != nil {
		return nil, nil, err
	}
	if os.Getuid() != 0 {
		return nil, nil, errors.New("needs root: network namespaces and Docker engines are made")
	}
	return b, chosen, b.copyPrograms()
}

func choose(only string) ([]section, error) {
	all := sections()
	if only == "" {
		return all, nil
	}
	var chosen []section
	for name := range strings.SplitSeq(only, ",") {
		i := slices.IndexFunc(all, func(s section) bool { return s.name == strings.TrimSpace(name) })
		if i < 0 {
			return nil, fmt.Errorf("-only %s: there is no section %q", only, name)
		}
		chosen = append(chosen, all[i])
	}
	return chosen, nil
}

// copyPrograms copies the programs to a directory of their own.
func (b *bench) copyPrograms() error {
	dir, err := os.MkdirTemp(lab.TempDir(), "klimax-bench-")
	if err != nil {
		return err
	}
	for name, to := range map[string]*string{"klimax": &b.klimax, "klimax-guest": &b.guest} {
		data, err := os.ReadFile(filepath.Join(b.bin, name))
		if err == nil {
			*to = filepath.Join(dir, name)
			err = os.WriteFile(*to, data, 0o755)
		}
		if err != nil {
			os.RemoveAll(dir)
			return fmt.Errorf("%w; build the programs first: make build", err)
		}
	}
	if out, err := exec.Command(b.guest, "version").Output(); err == nil {
		b.Version = strings.TrimSpace(string(out))
	}
	return nil
}

func envInt(name string, otherwise int) int {
	var n int
	if _, err := fmt.Sscan(os.Getenv(name), &n); err != nil {
		return otherwise
	}
	return n
}
