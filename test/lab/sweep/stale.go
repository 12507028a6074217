//go:build linux

package sweep

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// ownerFile is in a lab's directory: the process that made it, and when that was started, in clock ticks since boot
// (process numbers come again).
const ownerFile = "owner"

// WriteOwner notes this process as the owner of the lab.
func (p Place) WriteOwner() error {
	return os.WriteFile(filepath.Join(p.Dir, ownerFile), fmt.Appendf(nil, "%d %s\n", os.Getpid(), started(os.Getpid())), 0o644)
}

// started is the start time of a process (field 22 of /proc/PID/stat), empty when there is none.
func started(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 20 {
		return ""
	}
	return f[19] // the first one here is field 3
}

// Stale are the labs below tmp that nobody owns any more: their process and their watchdog were killed both, or the
// watchdog could not remove everything.
func Stale(tmp string) []Place {
	name := regexp.MustCompile(`^klx-[0-9a-f]{6}$`)
	found := map[string]Place{}
	for _, glob := range []string{tmp + "/klx-*", NetnsDir + "/klx-*", "/sys/fs/cgroup/klx-*", "/sys/fs/cgroup/*/klx-*"} {
		list, _ := filepath.Glob(glob)
		for _, f := range list {
			n := filepath.Base(f)
			if i := strings.LastIndexByte(n, '-'); strings.HasPrefix(f, NetnsDir) && i > len("klx-") {
				n = n[:i]
			}
			if name.MatchString(n) {
				found[n] = Place{Name: n, Dir: filepath.Join(tmp, n)}
			}
		}
	}
	var stale []Place
	for _, p := range found {
		b, _ := os.ReadFile(filepath.Join(p.Dir, ownerFile))
		pid, at, _ := strings.Cut(strings.TrimSpace(string(b)), " ")
		n, _ := strconv.Atoi(pid)
		if at == "" || started(n) != at {
			stale = append(stale, p)
		}
	}
	slices.SortFunc(stale, func(a, b Place) int { return strings.Compare(a.Name, b.Name) })
	return stale
}
