//go:build linux

// Command prober is the static binary of the lab's containers: a server that tells each caller the address it
// sees, and the clients that measure with it.
package main

import (
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"klimax/test/lab/probe"
)

const usage = `prober serve [--http ADDR] [--sink ADDR] ADDR      answer each connection with its peer's address
prober get [--timeout 1.5s] ADDR                    connect once, print the address the server saw
prober loop [--interval 20ms] [--for 1s] ADDR       connect every interval, print what became of it
prober flow [--interval 20ms] [--for 1s] ADDR       keep one connection busy; fails when it breaks

ADDR is an IPv4 address and a port; serve also takes ":8080". loop and flow end early on SIGTERM and SIGINT;
--for 0 lasts until then.
`

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "prober:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("no command\n%s", usage)
	}
	f := flag.NewFlagSet(args[0], flag.ContinueOnError)
	f.SetOutput(os.Stderr)
	f.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	web := f.String("http", "", "")
	sink := f.String("sink", "", "")
	timeout := f.Duration("timeout", 1500*time.Millisecond, "")
	interval := f.Duration("interval", 20*time.Millisecond, "")
	length := f.Duration("for", time.Second, "")
	if err := f.Parse(args[1:]); err != nil {
		return err
	}
	if f.NArg() != 1 {
		return fmt.Errorf("%s takes one address\n%s", args[0], usage)
	}
	addr := f.Arg(0)
	// Process 1 of a container gets no signal that it does not handle: docker stop would wait 10 s.
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
	switch args[0] {
	case "serve":
		return serve(addr, *web, *sink, end)
	case "get":
		peer, err := probe.Get(probe.Here, addr, *timeout)
		if err != nil {
			return err
		}
		fmt.Println(peer)
		return nil
	case "loop":
		l, err := probe.NewLoop(probe.Here, addr, *interval)
		if err != nil {
			return err
		}
		wait(end, *length)
		r := l.Stop()
		fmt.Println(r)
		if r.Lost > 0 {
			return fmt.Errorf("%d of %d connections to %s were lost", r.Lost, r.Total, addr)
		}
		return nil
	case "flow":
		l, err := probe.NewFlow(probe.Here, addr, *interval)
		if err != nil {
			return err
		}
		wait(end, *length)
		if err := l.Stop(); err != nil {
			return err
		}
		n, slowest := l.Exchanges()
		fmt.Printf("%s: whole, peer %s, %d exchanges, slowest %v\n", addr, l.Peer(), n, slowest)
		return nil
	}
	return fmt.Errorf("no command %q\n%s", args[0], usage)
}

func serve(addr, web, sink string, end <-chan os.Signal) error {
	for _, s := range []struct {
		addr  string
		start func(net.Listener) *probe.Server
	}{
		{addr, func(l net.Listener) *probe.Server { return probe.Serve(l, false) }},
		{web, probe.ServeHTTP},
		{sink, probe.ServeSink},
	} {
		if s.addr == "" {
			continue
		}
		ln, err := net.Listen("tcp4", s.addr)
		if err != nil {
			return fmt.Errorf("serve: %w", err)
		}
		defer s.start(ln).Close()
	}
	<-end
	return nil
}

// wait returns after d (for d = 0: never) or when a signal comes.
func wait(end <-chan os.Signal, d time.Duration) {
	var over <-chan time.Time
	if d > 0 {
		over = time.After(d)
	}
	select {
	case <-end:
	case <-over:
	}
}
