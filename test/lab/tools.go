//go:build linux

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"klimax/test/cache"
)

// tools are the programs that a lab runs.
type tools struct {
	prober, runcwrap, watchdog string
	dockerd, dockerProxy       string // of Docker 29; empty for the distribution's
}

// Prober is the path of the static binary that the containers run; `prober get|loop|flow|serve` works in any namespace.
func (l *Lab) Prober() string { return l.tools.prober }

// moduleRoot is the directory of klimax's go.mod: the working directory of a test is its package's.
func moduleRoot() (string, error) {
	wd, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for d := wd; ; d = filepath.Dir(d) {
		b, err := os.ReadFile(filepath.Join(d, "go.mod"))
		if err == nil && bytes.HasPrefix(b, []byte("module klimax\n")) {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("no go.mod of klimax above %s; run the test inside the repository", wd)
		}
	}
}

func buildTools(ctx context.Context, s Setup, say func(string)) (tools, error) {
	root, err := moduleRoot()
	if err != nil {
		return tools{}, err
	}
	var t tools
	for _, b := range []struct {
		to  *string
		dir string
		src []string // what the key is made from
	}{
		{&t.prober, "test/prober", []string{"test/prober", "test/lab/probe", "go.mod"}},
		{&t.runcwrap, "test/runcwrap", []string{"test/runcwrap"}},
		{&t.watchdog, "test/lab/watchdog", []string{"test/lab/watchdog", "test/lab/sweep", "go.mod"}},
	} {
		dir, err := goBuild(ctx, root, filepath.Base(b.dir), b.src, nil, []string{"./" + b.dir}, []string{"CGO_ENABLED=0"}, func(string) {})
		if err != nil {
			return tools{}, err
		}
		*b.to = filepath.Join(dir, filepath.Base(b.dir))
	}
	if !s.Moby29() {
		return t, nil
	}
	dir, err := Docker29(ctx, say)
	t.dockerd, t.dockerProxy = filepath.Join(dir, "dockerd"), filepath.Join(dir, "docker-proxy")
	return t, err
}

// Prepare builds everything that any lab needs and that is not in the cache yet. say gets lines for a person who waits.
func Prepare(ctx context.Context, say func(string)) error {
	_, err := buildTools(ctx, Iptables, say)
	return err
}

// version29 is what the engine built from tools/docker29 calls itself: a module's source does not know which release it
// is, and who asks an engine for its version must find a number.
const version29 = "29.0.0+lab"

// Docker29 is a directory with dockerd and docker-proxy of Docker 29. They are built when they are not in the
// cache, which takes minutes, and say gets lines for a person who waits.
func Docker29(ctx context.Context, say func(string)) (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	return goBuild(ctx, filepath.Join(root, "tools/docker29"), "docker29", []string{"go.mod", "go.sum"},
		[]string{"-X", "github.com/moby/moby/v2/dockerversion.Version=" + version29},
		[]string{"github.com/moby/moby/v2/cmd/dockerd", "github.com/moby/moby/v2/cmd/docker-proxy"}, nil, say)
}

// goBuild builds Go programs of the module in root into a cache entry. Its key is made from the sources named and
// the Go version.
func goBuild(ctx context.Context, root, name string, src, ldflags, pkgs, env []string, say func(string)) (string, error) {
	sum, err := cache.HashFiles(root, src...)
	if err != nil {
		return "", err
	}
	return cache.Get(ctx, name, cache.Key(sum, runtime.Version(), runtime.GOARCH, strings.Join(ldflags, " ")), func(ctx context.Context, dir string) error {
		say("building " + name + ": a few minutes when Go's build cache is empty")
		begin := time.Now()
		done := make(chan struct{})
		defer close(done)
		go func() {
			for {
				select {
				case <-done:
					return
				case <-time.After(20 * time.Second):
					say(fmt.Sprintf("still building %s, %v", name, time.Since(begin).Round(time.Second)))
				}
			}
		}()
		args := append([]string{"build", "-mod=readonly", "-buildvcs=false", "-ldflags=" + strings.Join(append([]string{"-s", "-w"}, ldflags...), " "), "-o", dir + "/"}, pkgs...)
		c := exec.CommandContext(ctx, "go", args...)
		c.Dir, c.Env = root, append(os.Environ(), env...)
		if out, err := c.CombinedOutput(); err != nil {
			if errors.Is(err, exec.ErrNotFound) {
				return fmt.Errorf("%w; Go must be on the PATH", err)
			}
			return fmt.Errorf("%s, in %s: %w\n%s", c, root, err, out)
		}
		say(fmt.Sprintf("built %s in %v", name, time.Since(begin).Round(time.Second)))
		return nil
	})
}
