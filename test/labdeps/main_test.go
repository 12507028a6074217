//go:build linux

package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"klimax/test/lab"
)

// fake is a machine with an apt-get that notes its calls and, from call number works on, installs.
type fake struct {
	machine
	out   strings.Builder
	has   map[string]bool
	calls []string
	works int
	guard []string // policy-rc.d at each call
}

func newFake(t *testing.T, osRelease string, lacks ...string) *fake {
	f := &fake{has: map[string]bool{}}
	for _, c := range lab.Commands() {
		f.has[c] = !slices.Contains(lacks, c)
	}
	root := t.TempDir()
	os.MkdirAll(filepath.Join(root, "usr/sbin"), 0o755)
	os.MkdirAll(filepath.Join(root, "etc"), 0o755)
	os.WriteFile(filepath.Join(root, "etc/os-release"), []byte(osRelease), 0o644)
	f.machine = machine{out: &f.out, root: root, look: func(c string) bool { return f.has[c] }, aptGet: f.apt}
	return f
}

func (f *fake) apt(_ context.Context, _ io.Writer, args ...string) error {
	f.calls = append(f.calls, strings.Join(args, " "))
	b, _ := os.ReadFile(filepath.Join(f.root, "usr/sbin/policy-rc.d"))
	f.guard = append(f.guard, string(b))
	if args[0] == "update" {
		return nil
	}
	if len(f.calls) <= f.works {
		return errors.New("not found")
	}
	for c, p := range packageOf {
		f.has[c] = f.has[c] || slices.Contains(args, p) || slices.Contains(args, "docker.io") && (c == "containerd" || c == "runc")
	}
	return nil
}

const debian = "PRETTY_NAME=\"Debian\"\nID=debian\n"

func TestInstall(t *testing.T) {
	tests := []struct {
		name, os string
		uid      int
		lacks    []string
		works    int
		calls    []string
		err      string
	}{
		{name: "all there", os: debian},
		{name: "all there, elsewhere, no root", os: "ID=fedora\n", uid: 1000},
		{name: "no docker", os: debian, lacks: []string{"dockerd", "containerd", "runc", "nft"},
			calls: []string{"install -y --no-install-recommends docker.io nftables"}},
		{name: "docker-ce there", os: "ID=ubuntu\nID_LIKE=debian\n", lacks: []string{"conntrack"},
			calls: []string{"install -y --no-install-recommends conntrack"}},
		{name: "old lists", os: "ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n", lacks: []string{"ip"}, works: 1,
			calls: []string{"install -y --no-install-recommends iproute2", "update", "install -y --no-install-recommends iproute2"}},
		{name: "fails twice", os: debian, lacks: []string{"ip"}, works: 9, err: "not found",
			calls: []string{"install -y --no-install-recommends iproute2", "update", "install -y --no-install-recommends iproute2"}},
		{name: "no root", os: debian, uid: 1000, lacks: []string{"ip"}, err: "sudo apt-get install --no-install-recommends iproute2"},
		{name: "fedora", os: "ID=\"fedora\"\n", lacks: []string{"ip"}, err: "this is fedora; install it by hand: iproute2"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFake(t, tt.os, tt.lacks...)
			f.uid, f.works = tt.uid, tt.works
			err := f.install(t.Context())
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
			if !slices.Equal(f.calls, tt.calls) {
				t.Errorf("calls %q, want %q", f.calls, tt.calls)
			}
			for _, g := range f.guard {
				if !strings.Contains(g, "exit 101") {
					t.Errorf("apt-get ran with policy-rc.d %q", g)
				}
			}
			if left, _ := filepath.Glob(filepath.Join(f.root, "usr/sbin/*")); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// TestPolicyKept: a policy-rc.d that was there is there again afterwards.
func TestPolicyKept(t *testing.T) {
	f := newFake(t, debian, "ip")
	p := filepath.Join(f.root, "usr/sbin/policy-rc.d")
	os.WriteFile(p, []byte("theirs"), 0o755)
	if err := f.install(t.Context()); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(p); string(b) != "theirs" || !strings.Contains(f.guard[0], "exit 101") {
		t.Errorf("policy-rc.d is %q, was %q during the installation", b, f.guard[0])
	}
}
