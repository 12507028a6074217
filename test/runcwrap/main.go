//go:build linux

// Command runcwrap is a container runtime that runs runc after taking out of the container's specification
// what an old runc or a confined test machine cannot do: the time namespace, which runc before 1.2 refuses,
// and, when the machine's own bounding set lacks it, the capability CAP_SYS_RESOURCE, which every privileged
// container asks for.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// sysResource is the number of CAP_SYS_RESOURCE (linux/capability.h).
const sysResource = 24

func main() {
	err := run(os.Args[1:])
	fmt.Fprintln(os.Stderr, "runcwrap:", err)
	os.Exit(1)
}

// run rewrites what the command will read and becomes runc; it returns on failure only.
func run(args []string) error {
	lacks, err := lacksSysResource("/proc/self/status")
	if err != nil {
		return err
	}
	for _, a := range args {
		if a == "create" || a == "run" || a == "restore" {
			bundle := option(args, "--bundle", "-b")
			err = rewrite(filepath.Join(bundle, "config.json"), func(spec map[string]any) { strip(spec, lacks) })
			break
		}
		if a == "exec" {
			// Without --process the process is given by flags, and takes the container's capabilities.
			if p := option(args, "--process", "-p"); p != "" && lacks {
				err = rewrite(p, dropSysResource)
			}
			break
		}
	}
	if err != nil {
		return err
	}
	runc, err := exec.LookPath("runc")
	if err != nil {
		return fmt.Errorf("%w; install it: apt-get install runc", err)
	}
	return fmt.Errorf("run %s: %w", runc, syscall.Exec(runc, append([]string{"runc"}, args...), os.Environ()))
}

// strip changes a container's specification (config.json).
func strip(spec map[string]any, lacks bool) {
	if l, ok := spec["linux"].(map[string]any); ok {
		if ns, ok := l["namespaces"].([]any); ok {
			l["namespaces"] = slices.DeleteFunc(ns, func(n any) bool {
				m, _ := n.(map[string]any)
				return m["type"] == "time"
			})
		}
	}
	if p, ok := spec["process"].(map[string]any); ok && lacks {
		dropSysResource(p)
	}
}

// dropSysResource changes the specification of one process.
func dropSysResource(process map[string]any) {
	caps, _ := process["capabilities"].(map[string]any)
	for set, v := range caps {
		if list, ok := v.([]any); ok {
			caps[set] = slices.DeleteFunc(list, func(c any) bool { return c == "CAP_SYS_RESOURCE" })
		}
	}
}

// option is the value of a flag that is given as "--name value" or "--name=value"; runc's default, the current
// directory, comes out right as the empty string.
func option(args []string, names ...string) string {
	for i, a := range args {
		for _, n := range names {
			if a == n && i+1 < len(args) {
				return args[i+1]
			}
			if v, ok := strings.CutPrefix(a, n+"="); ok {
				return v
			}
		}
	}
	return ""
}

// rewrite changes a JSON file. Numbers keep their digits: a 64-bit limit is no float. A file that is not there is
// left for runc to complain about.
func rewrite(path string, change func(map[string]any)) error {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var m map[string]any
	d := json.NewDecoder(strings.NewReader(string(b)))
	d.UseNumber()
	if err := d.Decode(&m); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	change(m)
	if b, err = json.Marshal(m); err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o600)
}

// lacksSysResource reads the bounding set out of a /proc/PID/status file.
func lacksSysResource(status string) (bool, error) {
	b, err := os.ReadFile(status)
	if err != nil {
		return false, err
	}
	for l := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(l, "CapBnd:"); ok {
			set, err := strconv.ParseUint(strings.TrimSpace(v), 16, 64)
			if err != nil {
				return false, fmt.Errorf("read %s: %w", status, err)
			}
			return set>>sysResource&1 == 0, nil
		}
	}
	return false, fmt.Errorf("read %s: no line CapBnd", status)
}
