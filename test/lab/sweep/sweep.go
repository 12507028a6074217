//go:build linux

// Package sweep removes everything that a lab has made: processes, mounts, network namespaces, cgroups and
// files. It needs to know nothing but the lab's name and directory, so it works after any kind of death.
package sweep

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// NetnsDir is where named network namespaces are mounted, as ip-netns(8) does it.
const NetnsDir = "/run/netns"

// patience is how long killed processes may take to be gone, and emptied cgroups to be removable.
const patience = 10 * time.Second

// Place says what belongs to a lab.
type Place struct {
	Name  string // cgroups have this name, network namespaces this name, a hyphen and a word
	Dir   string // all its files and mounts are below
	Owner int    // the process that made it, which is not killed though it may be in a namespace; 0 = none
}

// Sweep removes the lab. What cannot be removed is in the error; the rest is removed all the same.
func (p Place) Sweep() error {
	if !strings.HasPrefix(p.Name, "klx-") || len(p.Name) < 8 || filepath.Base(p.Dir) != p.Name {
		return fmt.Errorf("sweep: %q in %q is no lab", p.Name, p.Dir)
	}
	shims := p.shimSockets()
	errs := []error{p.kill(), p.unmount()}
	for _, f := range append(p.netns(), shims...) {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	errs = append(errs, p.removeCgroups(), os.RemoveAll(p.Dir))
	return errors.Join(errs...)
}

// Left lists what there is of the lab: nothing after a complete Sweep.
func (p Place) Left() []string {
	var left []string
	for pid, why := range p.processes() {
		cmd, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		left = append(left, fmt.Sprintf("process %d (%s): %s", pid, why, bytes.ReplaceAll(cmd, []byte{0}, []byte{' '})))
	}
	for _, m := range p.mounts() {
		left = append(left, "mount "+m)
	}
	for _, n := range p.netns() {
		left = append(left, "namespace "+n)
	}
	for _, c := range p.cgroups() {
		left = append(left, "cgroup "+c)
	}
	if _, err := os.Lstat(p.Dir); err == nil {
		left = append(left, "directory "+p.Dir)
	}
	slices.Sort(left)
	return left
}

// kill kills until nothing is left: what dies may have started something else just before, and dockerd restarts
// containers.
func (p Place) kill() error {
	end := time.Now().Add(patience)
	for {
		for _, c := range p.cgroups() {
			// All at once, in kernels since 5.14; the loop below is for older ones and for cgroup v1.
			os.WriteFile(filepath.Join(c, "cgroup.kill"), []byte("1"), 0)
		}
		pids := p.processes()
		if len(pids) == 0 {
			return nil
		}
		for pid := range pids {
			unix.Kill(pid, unix.SIGKILL)
		}
		if time.Now().After(end) {
			return fmt.Errorf("sweep %s: processes do not die: %v", p.Name, pids)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// processes are those in the lab's cgroups, in its network namespaces or those of its containers, or started
// from or working in its directory (the containers' shims), with the reason. Zombies are dead.
func (p Place) processes() map[int]string {
	found := map[int]string{}
	for _, top := range p.cgroups() {
		filepath.WalkDir(top, func(dir string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return nil // a cgroup may vanish meanwhile
			}
			b, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
			for _, s := range strings.Fields(string(b)) {
				if pid, err := strconv.Atoi(s); err == nil {
					found[pid] = "cgroup " + dir
				}
			}
			return nil
		})
	}
	ns := map[uint64]string{}
	sandboxes, _ := filepath.Glob(filepath.Join(p.Dir, "*", "netns", "*"))
	for _, f := range append(p.netns(), sandboxes...) {
		var st unix.Stat_t
		if unix.Stat(f, &st) == nil && isNetns(f) {
			ns[st.Ino] = f
		}
	}
	proc, _ := os.ReadDir("/proc")
	for _, e := range proc {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		dir := filepath.Join("/proc", e.Name())
		var st unix.Stat_t
		if unix.Stat(filepath.Join(dir, "ns/net"), &st) == nil {
			if f, ok := ns[st.Ino]; ok {
				found[pid] = "namespace " + f
			}
		}
		for _, l := range []string{"cwd", "exe"} {
			if t, err := os.Readlink(filepath.Join(dir, l)); err == nil && strings.HasPrefix(t, p.Dir+"/") {
				found[pid] = l + " " + t
			}
		}
	}
	for pid := range found {
		if pid <= 1 || pid == os.Getpid() || pid == p.Owner || dead(pid) {
			delete(found, pid)
		}
	}
	return found
}

// isNetns tells a mounted namespace from the plain file that is there before and after.
func isNetns(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type == unix.NSFS_MAGIC
}

func dead(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	state := b[bytes.LastIndexByte(b, ')')+1:] // the command's name before it may contain anything, brackets too
	return bytes.HasPrefix(state, []byte(" Z")) || bytes.HasPrefix(state, []byte(" X"))
}

func (p Place) netns() []string {
	list, _ := filepath.Glob(filepath.Join(NetnsDir, p.Name+"-*"))
	return list
}

// cgroups are the lab's own directories in every hierarchy, of version 1 (one per controller) and 2.
func (p Place) cgroups() []string {
	list, _ := filepath.Glob("/sys/fs/cgroup/*/" + p.Name)
	if _, err := os.Stat("/sys/fs/cgroup/" + p.Name); err == nil {
		list = append(list, "/sys/fs/cgroup/"+p.Name)
	}
	// cpu,cpuacct and its like are also there as links to the same hierarchy.
	return slices.DeleteFunc(list, func(c string) bool {
		i, err := os.Lstat(filepath.Dir(c))
		return err != nil || i.Mode()&fs.ModeSymlink != 0
	})
}

func (p Place) removeCgroups() error {
	end := time.Now().Add(patience)
	for {
		var errs []error
		for _, top := range p.cgroups() {
			var dirs []string
			filepath.WalkDir(top, func(dir string, d fs.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					dirs = append(dirs, dir)
				}
				return nil
			})
			for _, d := range slices.Backward(dirs) { // children first
				if err := unix.Rmdir(d); err != nil && !errors.Is(err, unix.ENOENT) {
					errs = append(errs, fmt.Errorf("remove cgroup %s: %w", d, err))
				}
			}
		}
		if len(errs) == 0 || time.Now().After(end) {
			return errors.Join(errs...)
		}
		time.Sleep(10 * time.Millisecond) // busy until the last killed process is reaped
	}
}

// mounts are the mount points of the lab, the latest first.
func (p Place) mounts() []string {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	var list []string
	for l := range strings.Lines(string(b)) {
		f := strings.Fields(l)
		if len(f) < 5 {
			continue
		}
		m := unescape(f[4])
		if m == p.Dir || strings.HasPrefix(m, p.Dir+"/") || strings.HasPrefix(m, filepath.Join(NetnsDir, p.Name)+"-") {
			list = append(list, m)
		}
	}
	slices.Reverse(list)
	return list
}

// unescape undoes mountinfo's octal escapes of blank, tab, newline and backslash (proc_pid_mountinfo(5)).
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

func (p Place) unmount() error {
	end := time.Now().Add(patience)
	for {
		list := p.mounts()
		if len(list) == 0 {
			return nil
		}
		var errs []error
		for _, m := range list {
			// Lazily: a namespace that a thread is still in, or a file that is still open, must not keep it.
			if err := unix.Unmount(m, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, fmt.Errorf("unmount %s: %w", m, err))
			}
		}
		if time.Now().After(end) {
			return errors.Join(append(errs, fmt.Errorf("sweep %s: mounts remain: %v", p.Name, p.mounts()))...)
		}
	}
}

// shimSockets are the sockets of containerd's shims, which lie in one directory for all containerds of the
// machine. A shim that is killed leaves its own behind; its name is noted in the container's bundle.
func (p Place) shimSockets() []string {
	re := regexp.MustCompile(`/run/containerd/s/[0-9a-f]{64}`)
	var list []string
	for _, name := range []string{"address", "bootstrap.json"} { // containerd 1.x, 2.x
		files, _ := filepath.Glob(filepath.Join(p.Dir, "containerd/state/io.containerd.runtime.v2.task/*/*", name))
		for _, f := range files {
			b, _ := os.ReadFile(f)
			list = append(list, re.FindAllString(string(b), -1)...)
		}
	}
	return list
}
