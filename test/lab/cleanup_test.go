//go:build lab && linux

package lab

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"klimax/test/lab/sweep"
)

// childEnv tells this test binary, run by TestCleanup, how its test is to end.
const childEnv = "KLIMAX_LAB_TEST_END"

// TestCleanup lets a test process end in every way and expects nothing to remain of its lab.
func TestCleanup(t *testing.T) {
	for _, end := range []string{"return", "fail", "panic", "panic-elsewhere", "exit", "kill"} {
		t.Run(end, func(t *testing.T) {
			sockets, _ := filepath.Glob("/run/containerd/s/*")
			c := exec.Command(os.Args[0], "-test.run=^TestCleanupChild$", "-test.v")
			c.Env = append(os.Environ(), childEnv+"="+end)
			out, err := c.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			c.Stderr = nil
			if err := c.Start(); err != nil {
				t.Fatal(err)
			}
			defer c.Process.Kill()
			var p sweep.Place
			var said []string
			for s := bufio.NewScanner(out); s.Scan(); {
				said = append(said, s.Text())
				if _, err := fmt.Sscanf(s.Text(), "LAB %s %s", &p.Name, &p.Dir); err == nil {
					if n := len(p.Left()); n < 8 {
						t.Errorf("the lab is up, but only %d things are there: %v", n, p.Left())
					}
					if end == "kill" {
						c.Process.Kill()
					}
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
			if after, _ := filepath.Glob("/run/containerd/s/*"); len(after) > len(sockets) {
				t.Errorf("shim sockets: %d before, %d after", len(sockets), len(after))
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
	case "kill":
		time.Sleep(time.Minute)
	}
}
