// Package dockerd is the only writer of the Docker daemon's configuration
// file, /etc/docker/daemon.json. It changes single keys and leaves every other
// byte of the file as it is.
package dockerd

import (
	"encoding/json"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// Keys that klimax may write.
const (
	// LiveRestore keeps containers running while the daemon is down. Every
	// engine that klimax supports knows it, and a reload is enough.
	LiveRestore = "live-restore"
	// NoForwardDrop keeps the daemon from setting the FORWARD policy to DROP
	// when it turns on forwarding. Engine 28.0.0 brought it
	// (github.com/moby/moby pull request 48594); an older daemon does not start
	// when it finds a key it does not know.
	NoForwardDrop = "ip-forward-no-drop"
)

// Setting is a key with the value that klimax wants.
type Setting struct {
	Key   string          `json:"key"`
	Value json.RawMessage `json:"value"`
}

// Desired returns what klimax wants in the file of an engine of this version,
// in a fixed order. A version that cannot be read is taken for an old one,
// which every key that is left out is safe with.
func Desired(version string) []Setting {
	yes := json.RawMessage("true")
	want := []Setting{{LiveRestore, yes}}
	if major, ok := Major(version); ok && major >= 28 {
		want = append(want, Setting{NoForwardDrop, yes})
	}
	return want
}

// Reloadable reports whether a running daemon takes over all these keys on
// SIGHUP. The keys that it does are those of the engine's own
// daemon/reload.go; of ours only live-restore is among them.
func Reloadable(keys []string) bool {
	return !slices.ContainsFunc(keys, func(k string) bool { return k != LiveRestore })
}

// Major returns the first number of an engine's or a package's version:
// "20.10.24+dfsg1", "5:28.0.1-1~debian.12~bookworm", "v29.1.0".
func Major(version string) (int, bool) {
	if _, after, ok := strings.Cut(version, ":"); ok {
		version = after // a package's epoch
	}
	first, _, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	n, err := strconv.Atoi(first)
	return n, err == nil && n > 0
}

// Change is what was done to one key, enough to undo it.
type Change struct {
	Key    string          `json:"key"`
	Before json.RawMessage `json:"before,omitempty"` // absent: the key was not there
	After  json.RawMessage `json:"after"`
}

// Diff returns the changes that make the file hold the settings.
func (f *File) Diff(want []Setting) []Change {
	var out []Change
	for _, s := range want {
		have, ok := f.Get(s.Key)
		if ok && equal(have, s.Value) {
			continue
		}
		out = append(out, Change{Key: s.Key, Before: have, After: s.Value})
	}
	return out
}

// Apply carries out changes.
func (f *File) Apply(changes []Change) error {
	for _, c := range changes {
		if err := f.Set(c.Key, c.After); err != nil {
			return err
		}
	}
	return nil
}

// Revert undoes changes, those excepted whose value somebody has changed
// since: that value is theirs. It returns the keys it left alone.
func (f *File) Revert(changes []Change) (left []string, err error) {
	for _, c := range slices.Backward(changes) {
		have, ok := f.Get(c.Key)
		switch {
		case !ok:
			if c.Before != nil {
				left = append(left, c.Key) // removed by somebody
			}
		case !equal(have, c.After):
			left = append(left, c.Key)
		case c.Before != nil:
			err = f.Set(c.Key, c.Before)
		default:
			err = f.Unset(c.Key)
		}
		if err != nil {
			return left, err
		}
	}
	return left, nil
}

// FlagConflicts returns the keys that are also given as command line flags.
// The daemon refuses to start with a directive in both places, so klimax must
// not write these. text is a daemon's command line, an environment file or a
// unit file, whose commented lines do not count.
func FlagConflicts(text string, keys []string) []string {
	text = strings.Join(slices.DeleteFunc(strings.Split(text, "\n"), func(line string) bool {
		return strings.HasPrefix(strings.TrimSpace(line), "#")
	}), "\n")
	fields := strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" \t\n\"'\x00\\", r) })
	var out []string
	for _, k := range keys {
		if slices.ContainsFunc(fields, func(f string) bool {
			// An assignment like DOCKER_OPTS=--live-restore holds a flag too.
			_, flag, ok := strings.Cut("="+f, "=--")
			name, _, _ := strings.Cut(flag, "=")
			return ok && name == k
		}) {
			out = append(out, k)
		}
	}
	return out
}

func equal(a, b json.RawMessage) bool {
	var x, y any
	if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil {
		return false
	}
	return reflect.DeepEqual(x, y)
}
