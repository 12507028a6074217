package machine

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// enterCgroups is shell text that moves the shell into the cgroup named $0 in
// every hierarchy, making it where it is missing. A cpuset must be given its
// CPUs and memory nodes before anything can enter.
const enterCgroups = `grep -E ' cgroup2? ' /proc/self/mounts | while read -r _ at _; do
  mkdir -p "$at/$0"
  if [ -f "$at/cpuset.cpus" ] && [ -z "$(cat "$at/$0/cpuset.cpus")" ]; then
    cat "$at/cpuset.cpus" >"$at/$0/cpuset.cpus"
    cat "$at/cpuset.mems" >"$at/$0/cpuset.mems"
  fi
  echo $$ >"$at/$0/cgroup.procs"
done
`

// removal takes away all that a machine named $1 with the directory $2
// consists of, once its standard input has come to an end. Its processes are
// found by their cgroup, so that a number that now belongs to somebody else is
// never hit. PID 1 of the machine takes all others with it.
const removal = `read -r _
hierarchies=$(grep -E ' cgroup2? ' /proc/self/mounts | cut -d' ' -f2)
for round in $(seq 100); do
  pids=$(for at in $hierarchies; do [ ! -d "$at/$1" ] || find "$at/$1" -name cgroup.procs -exec cat {} +; done 2>/dev/null | sort -un)
  [ "$pids" ] || break
  kill -KILL $pids 2>/dev/null
  sleep 0.05
done
for at in $hierarchies; do
  [ ! -d "$at/$1" ] || find "$at/$1" -depth -type d -exec rmdir {} \;
done
rm -f "/run/systemd/nspawn/locks/inode-$(stat -c %d:%i "$2/root")"
umount -l "$2/root" 2>/dev/null
[ ! -d "/run/systemd/nspawn/propagate/$1" ] || rmdir "/run/systemd/nspawn/propagate/$1"
for ns in "$1" "$1-mac"; do [ ! -e "/run/netns/$ns" ] || ip netns del "$ns"; done
rm -rf --one-file-system "$2"
[ ! -e "$2" ] || exit 1
`

// watch starts a process that removes the machine when the returned function
// is called, and also when this process ends without calling it.
func watch(name, dir string) (stop func() error, err error) {
	cmd := exec.Command("sh", "-c", removal, "machine-watchdog", name, dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // not reached by the terminal's interrupt
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer read.Close()
	var complaint bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = read, io.Discard, &complaint
	cmd.WaitDelay = time.Minute
	if err := cmd.Start(); err != nil {
		write.Close()
		return nil, err
	}
	return func() error {
		write.Close()
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("%w\n%s", err, complaint.String())
		}
		if text := strings.TrimSpace(complaint.String()); text != "" {
			return fmt.Errorf("%s", text)
		}
		return nil
	}, nil
}
