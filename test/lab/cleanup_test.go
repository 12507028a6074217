//go:build lab && linux

package lab

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"klimax/test/lab/sweep"
)

// TestStaleSweep: when the watchdog is killed with its owner, the lab remains, counts as stale and can be removed by name.
func TestStaleSweep(t *testing.T) {
	c := exec.Command(os.Args[0], "-test.run=^TestCleanupChild$", "-test.v")
	c.Env = append(os.Environ(), childEnv+"=kill-both")
	out, err := c.Output()
	var p sweep.Place
	for l := range strings.Lines(string(out)) {
		fmt.Sscanf(l, "LAB %s %s", &p.Name, &p.Dir)
	}
	if err == nil || p.Name == "" {
		t.Fatalf("child: %v\n%s", err, out)
	}
	time.Sleep(200 * time.Millisecond)
	if n := len(p.Left()); n < 8 {
		t.Errorf("only %d things are left: %v", n, p.Left())
	}
	if !slices.ContainsFunc(sweep.Stale(TempDir()), func(s sweep.Place) bool { return s.Name == p.Name }) {
		t.Errorf("%s is not stale", p.Name)
	}
	if err := p.Sweep(); err != nil {
		t.Error(err)
	}
	if left := p.Left(); len(left) > 0 {
		t.Errorf("left:\n%s", strings.Join(left, "\n"))
	}
}

// childEnv tells this test binary, run by TestCleanup, how its test is to end.
const childEnv = "KLIMAX_LAB_TEST_END"

// TestCleanup lets a test process end in every way and expects nothing to remain of its lab.
func TestCleanup(t *testing.T) {
	for _, end := range []string{"return", "fail", "panic", "panic-elsewhere", "exit", "kill"} {
		t.Run(end, func(t *testing.T) {
			c := exec.Command(os.Args[0], "-test.run=^TestCleanupChild$", "-test.v")
			c.Env = append(os.Environ(), childEnv+"="+end)
			out, err := c.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			goOn, err := c.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			defer c.Process.Kill()
			var p sweep.Place
			var said, sockets []string
			for s := bufio.NewScanner(out); s.Scan(); {
				said = append(said, s.Text())
				if _, err := fmt.Sscanf(s.Text(), "LAB %s %s", &p.Name, &p.Dir); err == nil {
					if n := len(p.Left()); n < 8 {
						t.Errorf("the lab is up, but only %d things are there: %v", n, p.Left())
					}
					// Of the containers' shims; they lie outside of the lab's directory.
					notes, _ := filepath.Glob(p.Dir + "/containerd/state/io.containerd.runtime.v2.task/*/*/address")
					for _, f := range notes {
						b, _ := os.ReadFile(f)
						s := strings.TrimPrefix(strings.TrimSpace(string(b)), "unix://")
						if _, err := os.Stat(s); err == nil {
							sockets = append(sockets, s)
						}
					}
					if len(sockets) != 2 {
						t.Errorf("shims' sockets of two containers: %v (in %v)", sockets, notes)
					}
					if end == "kill" {
						c.Process.Kill()
					}
					fmt.Fprintln(goOn)
				}
			}
			if err := c.Wait(); (err == nil) != (end == "return") {
				t.Errorf("child ended with %v:\n%s", err, strings.Join(said, "\n"))
			}
			if p.Name == "" {
				t.Fatalf("no lab in the child:\n%s", strings.Join(said, "\n"))
			}
			begin := time.Now()
			gone := wait(t.Context(), 10*time.Second, func() bool { return len(p.Left()) == 0 })
			t.Logf("gone %v after the process", time.Since(begin).Round(time.Millisecond))
			if !gone {
				t.Errorf("left:\n%s", strings.Join(p.Left(), "\n"))
			}
			if b, err := os.ReadFile(p.Dir + ".not-removed"); err == nil {
				t.Errorf("the watchdog reports: %s", b)
			}
			for _, s := range sockets {
				if _, err := os.Stat(s); err == nil {
					t.Errorf("left: %s", s)
				}
			}
		})
	}
}

// TestCleanupChild is the child of TestCleanup.
func TestCleanupChild(t *testing.T) {
	end := os.Getenv(childEnv)
	if end == "" {
		t.Skip("run by TestCleanup")
	}
	l := New(t, Options{})
	kindNet(l)
	c := l.RunServer("c1", "kind", "172.30.5.2", nil)
	c.AddVIP("172.30.1.200")
	l.RunServer("c2", "bridge", "", nil)
	l.Loop(l.Mac, l.VMAddr()+":22", 20*time.Millisecond)
	if err := l.Mac.Command(t.Context(), "setsid", "sleep", "600").Start(); err != nil {
		t.Fatal(err)
	}
	// A daemon that has left its session and namespace: only the cgroup tells.
	if err := l.VM.Command(t.Context(), "nsenter", "--net=/proc/1/ns/net", "setsid", "sleep", "600").Start(); err != nil {
		t.Fatal(err)
	}
	fmt.Printf("LAB %s %s\n", l.Name, l.Dir)
	bufio.NewReader(os.Stdin).ReadString('\n') // until the parent has looked
	switch end {
	case "fail":
		t.Fatal("as wanted")
	case "panic":
		panic("as wanted")
	case "panic-elsewhere":
		go panic("as wanted")
		time.Sleep(time.Minute)
	case "exit":
		os.Exit(3)
	case "kill-both":
		l.dog.Process.Kill()
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "kill":
		time.Sleep(time.Minute)
	}
}
