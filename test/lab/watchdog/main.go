//go:build linux

// Command watchdog removes a lab when the process that made it has ended, in whatever way: it waits for the
// end of its standard input, a pipe that only that process holds open.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"klimax/test/lab/sweep"
)

// main takes the lab's name, its directory and the owner's process number. It says "ready" when no signal to
// the owner's terminal or session can end it any more, and after the sweep "swept", or what went wrong.
func main() {
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE)
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: watchdog NAME DIR OWNER <pipe")
		os.Exit(2)
	}
	p := sweep.Place{Name: os.Args[1], Dir: os.Args[2]}
	p.Owner, _ = strconv.Atoi(os.Args[3])
	fmt.Println("ready")
	io.Copy(io.Discard, os.Stdin)
	err := p.Sweep()
	for _, l := range p.Left() {
		err = errors.Join(err, errors.New("left: "+l))
	}
	if err == nil {
		fmt.Println("swept")
		return
	}
	if _, werr := fmt.Println(err); werr != nil { // nobody listens any more
		os.WriteFile(p.Dir+".not-removed", []byte(err.Error()+"\n"), 0o644)
	}
	os.Exit(1)
}
