// Command klimax runs on a person's computer: it configures a guest, sets the
// routes to it and shows its state.
package main

import (
	"context"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/term"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// After the first interrupt the next one ends the program at once.
	context.AfterFunc(ctx, stop)
	self, err := os.Executable()
	if err != nil {
		self = os.Args[0]
	}
	os.Exit(run(ctx, os.Args[1:],
		streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr, OutTerminal: isTerminal(os.Stdout), ErrTerminal: isTerminal(os.Stderr)},
		environment{Getenv: os.Getenv, HomeDir: os.UserHomeDir, GOOS: runtime.GOOS, Self: self}))
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// streams are where the program reads and writes.
type streams struct {
	In       io.Reader
	Out, Err io.Writer
	// Whether a person watches; these decide about colour and redrawing.
	OutTerminal, ErrTerminal bool
}
