//go:build linux

// Command labdeps installs what the lab (package test/lab) needs and this machine lacks, on Debian and Ubuntu, and
// builds the lab's programs into the test cache. It starts no service and replaces no package.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"klimax/test/lab"
	"klimax/test/lab/sweep"
)

func main() {
	noBuild := flag.Bool("no-build", false, "install packages only; the first test then builds the programs")
	stale := flag.Bool("sweep", false, "only remove labs whose test process and watchdog are both gone")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: go run ./test/labdeps [--no-build | --sweep]\nInstalls the packages that the lab needs and builds its programs.")
		flag.PrintDefaults()
	}
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	m := machine{
		out:    os.Stdout,
		root:   "/",
		uid:    os.Getuid(),
		look:   look,
		aptGet: aptGet,
	}
	if *stale {
		os.Exit(sweepStale())
	}
	err := m.install(ctx)
	if err == nil && !*noBuild {
		begin := time.Now()
		err = lab.Prepare(ctx, func(s string) { fmt.Println("labdeps:", s) })
		if err == nil {
			fmt.Printf("labdeps: the lab's programs are built (%v)\n", time.Since(begin).Round(100*time.Millisecond))
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "labdeps:", err)
		os.Exit(1)
	}
}

// sweepStale removes what dead labs left; a lab that is just ending removes itself at the same time, which does no harm.
func sweepStale() (exit int) {
	for _, p := range sweep.Stale(lab.TempDir()) {
		if err := p.Sweep(); err != nil {
			fmt.Fprintln(os.Stderr, "labdeps:", err)
			exit = 1
			continue
		}
		os.Remove(p.Dir + ".not-removed")
		fmt.Println("labdeps: removed what was left of", p.Name)
	}
	return exit
}

// packageOf says which package has a command, on Debian and Ubuntu.
var packageOf = map[string]string{
	"dockerd":    "docker.io",
	"containerd": "containerd",
	"runc":       "runc",
	"nft":        "nftables",
	"iptables":   "iptables",
	"conntrack":  "conntrack",
	"ip":         "iproute2",
	"nsenter":    "util-linux",
	"sysctl":     "procps",
}

// machine is what install works on.
type machine struct {
	out    io.Writer
	root   string
	uid    int
	look   func(command string) bool
	aptGet func(ctx context.Context, out io.Writer, args ...string) error
}

func (m machine) install(ctx context.Context) error {
	pkgs, err := m.missing()
	if err != nil {
		return err
	}
	if len(pkgs) == 0 {
		fmt.Fprintln(m.out, "labdeps: everything that the lab needs is installed")
		return nil
	}
	manual := "install it by hand: " + strings.Join(pkgs, ", ")
	if err := m.debian(); err != nil {
		return fmt.Errorf("%w; %s", err, manual)
	}
	if m.uid != 0 {
		return fmt.Errorf("installing %s needs root: sudo apt-get install --no-install-recommends %s", strings.Join(pkgs, ", "), strings.Join(pkgs, " "))
	}
	fmt.Fprintln(m.out, "labdeps: installing", strings.Join(pkgs, " "))
	restore, err := m.noStart()
	if err != nil {
		return err
	}
	defer restore()
	args := append([]string{"install", "-y", "--no-install-recommends"}, pkgs...)
	if err := m.aptGet(ctx, io.Discard, args...); err != nil {
		if ctx.Err() != nil {
			return err
		}
		fmt.Fprintln(m.out, "labdeps: not found in the package lists of this machine; fetching new ones")
		if err := m.aptGet(ctx, m.out, "update"); err != nil {
			return err
		}
		if err := m.aptGet(ctx, m.out, args...); err != nil {
			return err
		}
	}
	if pkgs, err = m.missing(); err == nil && len(pkgs) > 0 {
		err = fmt.Errorf("apt-get succeeded, but what %s should bring is not there", strings.Join(pkgs, ", "))
	}
	if err == nil {
		fmt.Fprintln(m.out, "labdeps: installed")
	}
	return err
}

// missing are the packages to install.
func (m machine) missing() ([]string, error) {
	var pkgs []string
	for _, c := range lab.Commands() {
		p, ok := packageOf[c]
		if !ok {
			return nil, fmt.Errorf("no package is known for the command %s", c)
		}
		if !m.look(c) {
			pkgs = append(pkgs, p)
		}
	}
	if slices.Contains(pkgs, "docker.io") { // brings the two that fit it
		pkgs = slices.DeleteFunc(pkgs, func(p string) bool { return p == "containerd" || p == "runc" })
	}
	slices.Sort(pkgs)
	return pkgs, nil
}

// debian says whether packages come by apt-get here.
func (m machine) debian() error {
	b, err := os.ReadFile(filepath.Join(m.root, "etc/os-release"))
	if err != nil {
		return fmt.Errorf("this is no Debian or Ubuntu (%w)", err)
	}
	id := "unknown"
	for l := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(strings.TrimSpace(l), "=")
		if k != "ID" && k != "ID_LIKE" {
			continue
		}
		for name := range strings.FieldsSeq(strings.Trim(v, `"'`)) {
			if name == "debian" || name == "ubuntu" {
				return nil
			}
			if k == "ID" {
				id = name
			}
		}
	}
	return fmt.Errorf("packages are installed on Debian and Ubuntu only, and this is %s", id)
}

// noStart makes /usr/sbin/policy-rc.d say that no service may be started (Debian's way to install a daemon without
// running it), and returns what puts the former state back.
func (m machine) noStart() (restore func(), err error) {
	file := filepath.Join(m.root, "usr/sbin/policy-rc.d")
	aside := file + ".before-labdeps"
	had := true
	if err := os.Rename(file, aside); errors.Is(err, fs.ErrNotExist) {
		had = false
	} else if err != nil {
		return nil, fmt.Errorf("keep services from being started: %w", err)
	}
	restore = func() {
		os.Remove(file)
		if had {
			os.Rename(aside, file)
		}
	}
	if err := os.WriteFile(file, []byte("#!/bin/sh\nexit 101\n"), 0o755); err != nil {
		restore()
		return nil, fmt.Errorf("keep services from being started: %w", err)
	}
	return restore, nil
}

// look finds a command on the PATH and where root's programs are.
func look(command string) bool {
	if _, err := exec.LookPath(command); err == nil {
		return true
	}
	for _, d := range []string{"/usr/sbin", "/sbin"} {
		if i, err := os.Stat(filepath.Join(d, command)); err == nil && i.Mode()&0o111 != 0 {
			return true
		}
	}
	return false
}

func aptGet(ctx context.Context, out io.Writer, args ...string) error {
	c := exec.CommandContext(ctx, "apt-get", append([]string{"-q"}, args...)...)
	c.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGINT) } // dpkg must not be killed in the middle
	var said strings.Builder
	c.Stdout, c.Stderr = io.MultiWriter(out, &said), io.MultiWriter(out, &said)
	if err := c.Run(); err != nil {
		lines := strings.Split(strings.TrimSpace(said.String()), "\n")
		return fmt.Errorf("apt-get %s: %w: %s", strings.Join(args, " "), err, strings.Join(lines[max(0, len(lines)-3):], "; "))
	}
	return nil
}
