package machine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"klimax/test/cache"
)

// recipe is part of the cache key: count it up when the way a root is made changes.
const recipe = "1"

// rootPackages are in every machine: an init with its bus, and what a person
// would look at a network with. Everything else is for provisioning to bring.
var rootPackages = []string{"ca-certificates", "dbus", "iproute2", "systemd", "systemd-sysv"}

// cgroupUnit makes the version 1 controllers writable inside, which
// systemd-nspawn mounts read-only and dockerd needs. It belongs to the test
// bed; real machines have them writable. Without version 1 it does nothing.
const cgroupUnit = `[Unit]
Description=Make cgroup v1 controllers writable (test machine)
DefaultDependencies=no
Before=sysinit.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c '` + remountCgroups + `'
[Install]
WantedBy=sysinit.target
`

const remountCgroups = `for c in cpu cpuacct cpuset memory devices freezer blkio pids; do [ ! -d /sys/fs/cgroup/$c ] || mount -o remount,bind,rw /sys/fs/cgroup/$c || exit 1; done`

// roots are the cached file systems that machines are overlays of.
type roots struct {
	bare   string // debootstrap's result, Docker's packages as files
	docker string // what installing Docker changed in bare, to lie over it
}

// prepare returns the cached roots and makes what is missing: a minute or two
// the first time, milliseconds afterwards.
func prepare(ctx context.Context, logf func(string, ...any)) (roots, error) {
	for program, pkg := range map[string]string{"debootstrap": "debootstrap", "systemd-nspawn": "systemd-container", "apt-config": "apt", "ip": "iproute2"} {
		if _, err := exec.LookPath(program); err != nil {
			return roots{}, fmt.Errorf("%w: apt-get install %s", err, pkg)
		}
	}
	suite, err := codename("/")
	if err != nil {
		return roots{}, err
	}
	all, err := ReadSources("/")
	if err != nil {
		return roots{}, err
	}
	sources := forSuite(all, suite)
	if len(sources) == 0 || sources[0].Suite != suite {
		return roots{}, fmt.Errorf("apt's sources on this computer name no mirror for %s: see /etc/apt/sources.list", suite)
	}
	settings, err := exec.CommandContext(ctx, "apt-config", "dump", "Acquire").Output()
	if err != nil {
		return roots{}, fmt.Errorf("apt-config dump Acquire: %w", err)
	}
	b := builder{suite: suite, sources: sources, settings: string(settings), logf: logf}
	parts := []string{recipe, suite, strings.Join(rootPackages, " "), cgroupUnit, b.settings}
	for _, s := range sources {
		parts = append(parts, s.Line())
	}
	// Both in one entry: a layer is only good over the very root it was made on.
	dir, err := cache.Get(ctx, "machine", cache.Key(parts...), func(ctx context.Context, dir string) error {
		if err := b.bare(ctx, filepath.Join(dir, "bare")); err != nil {
			return err
		}
		return b.docker(ctx, dir)
	})
	if err != nil {
		return roots{}, err
	}
	return roots{bare: filepath.Join(dir, "bare"), docker: filepath.Join(dir, "docker")}, nil
}

type builder struct {
	suite    string
	sources  []Source
	settings string // apt's Acquire settings (proxies, date checks), as apt-config prints them
	logf     func(string, ...any)
}

// bare makes the pristine root in dir.
func (b builder) bare(ctx context.Context, dir string) error {
	b.logf("making the machines' root file system (once, some two minutes)")
	cmd := exec.CommandContext(ctx, "nice", "debootstrap", "--variant=minbase",
		"--include="+strings.Join(rootPackages, ","), b.suite, dir, b.sources[0].URI)
	cmd.Env = os.Environ()
	for _, line := range strings.Split(b.settings, "\n") {
		if v, ok := strings.CutPrefix(line, `Acquire::http::Proxy "`); ok {
			cmd.Env = append(cmd.Env, "http_proxy="+strings.TrimSuffix(v, `";`))
		}
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("debootstrap %s: %w\n%s", b.suite, err, tail(out))
	}
	var list strings.Builder
	for _, s := range b.sources {
		if s.SignedBy != "" {
			if _, err := os.Stat(filepath.Join(dir, s.SignedBy)); err != nil {
				s.SignedBy = "" // a keyring that only this computer has
			}
		}
		fmt.Fprintln(&list, s.Line())
	}
	for name, content := range map[string]string{
		"etc/apt/sources.list":                        list.String(),
		"etc/apt/apt.conf.d/00test-machine":           b.settings,
		"etc/systemd/system/test-cgroup-rw.service":   cgroupUnit,
		"etc/hostname":                                "machine\n",
		"etc/machine-id":                              "", // made anew at each first boot
		"etc/systemd/journald.conf.d/volatile.conf":   "[Journal]\nStorage=volatile\n",
		"etc/systemd/system.conf.d/test-machine.conf": "[Manager]\nDefaultTimeoutStopSec=10s\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			return err
		}
	}
	// Timers and logins would only blur what a test sees.
	return b.chroot(ctx, dir, `systemctl enable test-cgroup-rw.service
systemctl mask apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer systemd-resolved.service systemd-networkd.service console-getty.service getty@.service
apt-get update
apt-get install -y --no-install-recommends --download-only `+b.dockerPackages())
}

// docker puts into dir/docker what installing Docker's packages adds to dir/bare.
func (b builder) docker(ctx context.Context, dir string) (err error) {
	layer, work, merged := filepath.Join(dir, "docker"), filepath.Join(dir, "work"), filepath.Join(dir, "merged")
	for _, d := range []string{layer, work, merged} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", filepath.Join(dir, "bare"), layer, work)
	if err := syscall.Mount("overlay", merged, "overlay", 0, options); err != nil {
		return fmt.Errorf("mounting an overlay of the root: %w", err)
	}
	defer func() {
		err = errors.Join(err, syscall.Unmount(merged, syscall.MNT_DETACH), os.Remove(merged), os.RemoveAll(work))
	}()
	return b.chroot(ctx, merged, "apt-get install -y --no-install-recommends --no-download "+b.dockerPackages()+"\napt-get clean")
}

// dockerPackages is a shell expression: docker-cli only where it is a package of its own.
func (b builder) dockerPackages() string {
	return `docker.io ca-certificates $(apt-cache show docker-cli >/dev/null 2>&1 && echo docker-cli)`
}

// chroot runs a shell script in a root that is not booted. Nothing is started by packages.
func (b builder) chroot(ctx context.Context, dir, script string) error {
	resolv, _ := os.ReadFile("/etc/resolv.conf")
	policy := filepath.Join(dir, "usr/sbin/policy-rc.d")
	inside := filepath.Join(dir, "etc/resolv.conf")
	os.Remove(inside) // it may be a link that leads nowhere in here
	if err := os.WriteFile(inside, resolv, 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(policy, []byte("#!/bin/sh\nexit 101\n"), 0o755); err != nil {
		return err
	}
	defer os.Remove(policy)
	defer os.WriteFile(inside, nil, 0o644)
	// A mount namespace of its own takes /proc away by itself at the end.
	cmd := exec.CommandContext(ctx, "nice", "unshare", "--mount", "sh", "-ec",
		`mount -t proc proc "$1/proc"; exec chroot "$1" sh -exc "$2"`, "sh", dir, script)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C", "HOME=/root"}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("in %s: %w\n%s", dir, err, tail(out))
	}
	return nil
}

func tail(out []byte) []byte { return out[max(0, len(out)-4000):] }
