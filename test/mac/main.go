// Command mac plays a whole set-up on one Linux machine: this machine is the
// guest, and a network namespace, connected by a veth called lima0 as Lima
// does it, is the Mac.
//
//	mac up             the network, then install, demo, klimax up, and a call to each of the demo's addresses
//	mac down           takes that down again
//	mac net up|down    the network only
//	mac run -- CMD …   a command on the Mac
//	mac curl URL       what a URL answers to the Mac; the host must be an IPv4 address
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

const usage = "usage: mac [--name NAMESPACE] [--bin DIR] up | down | net up | net down | run -- COMMAND … | curl URL"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "mac:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("mac", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	m := mac{}
	flags.StringVar(&m.name, "name", "klimax-mac", "the namespace")
	bin := flags.String("bin", "bin", "directory of klimax and klimax-guest")
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("%w\n%s", err, usage)
	}
	args = flags.Args()
	report := func(what string, changed bool, err error) error {
		if err != nil {
			return err
		}
		if !changed {
			what = "unchanged"
		}
		fmt.Fprintln(out, what)
		return nil
	}
	switch strings.Join(args[:min(2, len(args))], " ") {
	case "net up":
		changed, err := m.up()
		return report(fmt.Sprintf("%s %v here, %s %v in namespace %s", guestLink, guestAddr, macLink, macAddr, m.name), changed, err)
	case "net down":
		changed, err := m.down()
		return report("removed", changed, err)
	case "up":
		return playUp(ctx, m, *bin, out)
	case "down":
		return playDown(ctx, m, *bin, out)
	case "run --":
		if len(args) > 2 {
			return m.exec(args[2:])
		}
	}
	if len(args) == 2 && args[0] == "curl" {
		body, err := m.curl(args[1], 5*time.Second)
		fmt.Fprint(out, body)
		return err
	}
	return errors.New(usage)
}

// exec replaces this process by a command in the namespace.
func (m mac) exec(command []string) error {
	path, err := exec.LookPath(command[0])
	if err != nil {
		return err
	}
	if err := m.enter(); err != nil {
		return err
	}
	return fmt.Errorf("running %s: %w", path, syscall.Exec(path, command, os.Environ()))
}

// curl gets a URL from the namespace. Only the socket is made there: it keeps
// its network when the thread is gone.
func (m mac) curl(address string, limit time.Duration) (body string, err error) {
	u, err := url.Parse(address)
	if err != nil {
		return "", err
	}
	if ip := net.ParseIP(u.Hostname()); u.Scheme != "http" || ip == nil || ip.To4() == nil {
		return "", fmt.Errorf("%s: only http:// and an IPv4 address are understood", address)
	}
	port := u.Port()
	if port == "" {
		port = "80"
	}
	type result struct {
		conn net.Conn
		err  error
	}
	done := make(chan result)
	go func() { // its thread is not given back to others
		var r result
		if r.err = m.enter(); r.err == nil {
			r.conn, r.err = net.DialTimeout("tcp4", net.JoinHostPort(u.Hostname(), port), limit)
		}
		done <- r
	}()
	r := <-done
	if r.err != nil {
		return "", r.err
	}
	defer r.conn.Close()
	if err := r.conn.SetDeadline(time.Now().Add(limit)); err != nil {
		return "", err
	}
	req, err := http.NewRequest(http.MethodGet, address, nil)
	if err != nil {
		return "", err
	}
	req.Close = true
	if err := req.Write(r.conn); err != nil {
		return "", err
	}
	resp, err := http.ReadResponse(bufio.NewReader(r.conn), req)
	if err != nil {
		return "", fmt.Errorf("%s: %w", address, err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s answers %s", address, resp.Status)
	}
	return string(data), err
}
