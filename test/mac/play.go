package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"klimax/shared/api"
	"klimax/shared/client"
	"klimax/shared/config"
	"klimax/shared/netplan"
	"klimax/shared/version"
)

const (
	socket     = "/run/klimax/guest.sock"
	configFile = "/etc/klimax/klimax.yaml"
)

// playUp is `make up`: it ends with both of the demo's addresses answering the Mac.
func playUp(ctx context.Context, m mac, bin string, out io.Writer) error {
	if _, err := m.up(); err != nil { // first: it may refuse, and nothing is installed then
		return err
	}
	if err := program(ctx, out, filepath.Join(bin, "klimax-guest"), "install"); err != nil {
		return err
	}
	if err := settled(ctx, 15*time.Second); err != nil {
		return err
	}
	if err := program(ctx, out, filepath.Join(bin, "klimax-guest"), "demo", "start"); err != nil {
		return err
	}
	if err := m.klimax(ctx, out, bin, "up"); err != nil {
		return err
	}
	targets, err := demoAddresses()
	if err != nil {
		return err
	}
	for _, t := range targets {
		body, err := m.wait(ctx, "http://"+t.addr.String()+"/", 10*time.Second)
		if err != nil {
			return fmt.Errorf("the demo's %s does not answer the Mac: %w\n  look at: klimax-guest status", t.what, err)
		}
		fmt.Fprintf(out, "\nMac %v → http://%v/ (%s):\n%s\n", macAddr.Addr(), t.addr, t.what, strings.TrimSpace(body))
		if !strings.Contains(body, macAddr.Addr().String()) {
			return fmt.Errorf("the demo's %s answers, but does not see the Mac's address %v", t.what, macAddr.Addr())
		}
	}
	fmt.Fprintf(out, "\nBoth see the Mac's own address. More from there: go run ./test/mac curl http://%v/\nThe end: make down\n", targets[0].addr)
	return nil
}

// playDown is `make down`: the reverse. A part that is not there is no error,
// and one that fails does not keep the others from being taken down.
func playDown(ctx context.Context, m mac, bin string, out io.Writer) error {
	var problems []error
	if _, err := os.Stat(m.path()); err == nil {
		if _, err := os.Stat(socket); err == nil {
			problems = append(problems, m.klimax(ctx, out, bin, "down"))
		}
	}
	guest := filepath.Join(bin, "klimax-guest")
	if engineListens() {
		problems = append(problems, program(ctx, out, guest, "demo", "stop"))
	}
	problems = append(problems, program(ctx, out, guest, "stop"))
	_, err := m.down()
	return errors.Join(append(problems, err)...)
}

// settled waits until the agent has made the Docker network and says that all is well.
func settled(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	c := client.Unix(socket, version.Version)
	defer c.Close()
	for {
		s, err := c.Status(ctx)
		if err == nil && s.Healthy() {
			return nil
		}
		select {
		case <-ctx.Done():
			for _, c := range s.Conditions {
				if c.Status != api.True {
					err = errors.Join(err, fmt.Errorf("%s: %s", c.Type, c.Message))
				}
			}
			return fmt.Errorf("the agent is not well after %v: %w", limit, errors.Join(err, ctx.Err()))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// engineListens reports whether somebody listens on Docker's socket.
func engineListens() bool {
	path, ok := strings.CutPrefix(os.Getenv("DOCKER_HOST"), "unix://")
	if !ok {
		path = "/var/run/docker.sock"
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		return false
	}
	return c.Close() == nil
}

// klimax runs the host's program on the Mac.
func (m mac) klimax(ctx context.Context, out io.Writer, bin string, args ...string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	path, err := filepath.Abs(filepath.Join(bin, "klimax"))
	if err != nil {
		return err
	}
	return program(ctx, out, self, append([]string{"--name", m.name, "run", "--", path, "--guest", "unix://" + socket}, args...)...)
}

// program runs a program and shows what it prints.
func program(ctx context.Context, out io.Writer, path string, args ...string) error {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 30 * time.Second
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w", filepath.Base(path), strings.Join(args, " "), err)
	}
	return nil
}

type target struct {
	what string
	addr netip.Addr
}

// demoAddresses are those of the plan of the guest's configuration.
func demoAddresses() ([]target, error) {
	cfg := config.Default()
	if data, err := os.ReadFile(configFile); err == nil {
		if cfg, err = config.Parse(configFile, data); err != nil {
			return nil, err
		}
	}
	plan, err := cfg.Plan()
	if err != nil {
		return nil, err
	}
	c, err := plan.Cluster(netplan.DemoCluster)
	if err != nil {
		return nil, err
	}
	return []target{{"node", c.FirstNode}, {"VIP", c.VIPAuto.From}}, nil
}

// wait asks until there is an answer.
func (m mac) wait(ctx context.Context, address string, limit time.Duration) (string, error) {
	for end := time.Now().Add(limit); ; {
		body, err := m.curl(address, 2*time.Second)
		if err == nil || time.Now().After(end) || ctx.Err() != nil {
			return body, err
		}
		time.Sleep(100 * time.Millisecond)
	}
}
