package dockerd

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const yes = "true"

func TestDesired(t *testing.T) {
	for version, want := range map[string][]string{
		"20.10.24+dfsg1":                {LiveRestore},
		"27.5.1":                        {LiveRestore},
		"28.0.0":                        {LiveRestore, NoForwardDrop},
		"5:29.1.2-1~debian.12~bookworm": {LiveRestore, NoForwardDrop},
		"v28.5.2":                       {LiveRestore, NoForwardDrop},
		"":                              {LiveRestore},
		"library-import":                {LiveRestore},
		"dev":                           {LiveRestore},
	} {
		var got []string
		for _, s := range Desired(version) {
			got = append(got, s.Key)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("engine %q (-want +got):\n%s", version, d)
		}
	}
}

func TestMerge(t *testing.T) {
	want := []Setting{{LiveRestore, json.RawMessage(yes)}, {NoForwardDrop, json.RawMessage(yes)}}
	for _, c := range []struct{ name, in, out string }{
		{"no file", "", "{\n  \"live-restore\": true,\n  \"ip-forward-no-drop\": true\n}\n"},
		{"blank", " \n", "{\n  \"live-restore\": true,\n  \"ip-forward-no-drop\": true\n}\n"},
		{"empty object", "{ }", "{\n  \"live-restore\": true,\n  \"ip-forward-no-drop\": true\n}"},
		{
			"unknown keys, order and layout are kept",
			"{\n\t\"zeta\": {\"b\":1,  \"a\":[1, 2]},\n\t\"alpha\": \"x\\\"y\"\n}\n",
			"{\n\t\"zeta\": {\"b\":1,  \"a\":[1, 2]},\n\t\"alpha\": \"x\\\"y\",\n\t\"live-restore\": true,\n\t\"ip-forward-no-drop\": true\n}\n",
		},
		{"one line", `{"debug":true}`, `{"debug":true, "live-restore": true, "ip-forward-no-drop": true}`},
		{"other value", `{"live-restore": false, "x": 1.50}`, `{"live-restore": true, "x": 1.50, "ip-forward-no-drop": true}`},
		{"a string is no boolean", `{"live-restore": "true"}`, `{"live-restore": true, "ip-forward-no-drop": true}`},
		{"the last of two counts", `{"live-restore": true, "live-restore": false}`, `{"live-restore": true, "live-restore": true, "ip-forward-no-drop": true}`},
		{"nothing to do", `{"live-restore":true,"ip-forward-no-drop" : true }`, `{"live-restore":true,"ip-forward-no-drop" : true }`},
		{"big numbers survive", `{"n": 12345678901234567890}`, `{"n": 12345678901234567890, "live-restore": true, "ip-forward-no-drop": true}`},
		{"the key inside something else", `{"x": {"live-restore": false}}`, `{"x": {"live-restore": false}, "live-restore": true, "ip-forward-no-drop": true}`},
		{"escapes in a key", `{"a\\\"b": 1}`, `{"a\\\"b": 1, "live-restore": true, "ip-forward-no-drop": true}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, err := Parse("daemon.json", []byte(c.in))
			if err != nil {
				t.Fatal(err)
			}
			changes := f.Diff(want)
			if err := f.Apply(changes); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.out, string(f.Bytes())); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if again := f.Diff(want); again != nil {
				t.Errorf("a second time changes %v", again)
			}
			if !json.Valid(f.Bytes()) {
				t.Error("the result is no JSON")
			}
			// Undoing gives back what was there, an empty object's inside excepted.
			if left, err := f.Revert(changes); err != nil || left != nil {
				t.Fatalf("revert: %v, left %v", err, left)
			}
			back, err := Parse("", []byte(c.in))
			if err != nil {
				t.Fatal(err)
			}
			if back.Empty() {
				if !f.Empty() {
					t.Errorf("reverted to %s", f.Bytes())
				}
			} else if d := cmp.Diff(c.in, string(f.Bytes())); d != "" {
				t.Errorf("reverted (-want +got):\n%s", d)
			}
		})
	}
}

func TestUnset(t *testing.T) {
	for in, want := range map[string]string{
		`{"k":1}`:                       `{}`,
		`{"k":1, "b":2}`:                `{"b":2}`,
		`{"a":1, "k":2}`:                `{"a":1}`,
		`{"a":1,"k":2,"b":3}`:           `{"a":1,"b":3}`,
		`{"k":1,"a":1,"k":2}`:           `{"a":1}`,
		"{\n  \"a\": 1,\n  \"k\": 2\n}": "{\n  \"a\": 1\n}",
	} {
		f, err := Parse("", []byte(in))
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Unset("k"); err != nil {
			t.Fatal(err)
		}
		if got := string(f.Bytes()); got != want {
			t.Errorf("%s without k is %s, want %s", in, got, want)
		}
	}
}

func TestRevertLeavesOthersAlone(t *testing.T) {
	f, _ := Parse("", []byte(`{"live-restore": true, "ip-forward-no-drop": false}`))
	left, err := f.Revert([]Change{
		{Key: LiveRestore, After: json.RawMessage(yes)},
		{Key: NoForwardDrop, After: json.RawMessage(yes)},
		{Key: "gone", Before: json.RawMessage("1"), After: json.RawMessage("2")},
	})
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{"gone", NoForwardDrop}, left); d != "" {
		t.Errorf("left alone (-want +got):\n%s", d)
	}
	if got := string(f.Bytes()); got != `{"ip-forward-no-drop": false}` {
		t.Errorf("reverted to %s", got)
	}
}

func TestNotJSON(t *testing.T) {
	for in, line := range map[string]int{
		"{\n  // comment\n}":       2,
		"{\"a\": 1,}":              1,
		"[]":                       0,
		"null":                     0,
		"\"text\"":                 0,
		"{} {}":                    1,
		"{\n\"a\":\n1\n":           4,
		"log-driver = json-file\n": 1,
	} {
		path := filepath.Join(t.TempDir(), "daemon.json")
		if err := os.WriteFile(path, []byte(in), 0o644); err != nil {
			t.Fatal(err)
		}
		_, _, err := Read(path)
		var bad *NotJSONError
		if !errors.As(err, &bad) || bad.Line != line || bad.Path != path {
			t.Errorf("%q: error = %v, want one at line %d", in, err, line)
		}
	}
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "daemon.json")
	f, exists, err := Read(path)
	if err != nil || exists {
		t.Fatalf("a missing file: %v, exists %v", err, exists)
	}
	if err := f.Apply(f.Diff(Desired("20.10"))); err != nil {
		t.Fatal(err)
	}
	if err := f.Write(path); err != nil {
		t.Fatal(err)
	}
	mode := func(p string) os.FileMode {
		t.Helper()
		i, err := os.Lstat(p)
		if err != nil {
			t.Fatal(err)
		}
		return i.Mode()
	}
	if m := mode(path); m != 0o644 {
		t.Errorf("a new file has mode %v", m)
	}
	// A private file stays private, a link a link.
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink("daemon.json", link); err != nil {
		t.Fatal(err)
	}
	if err := f.Set("x", json.RawMessage("1")); err != nil {
		t.Fatal(err)
	}
	if err := f.Write(link); err != nil {
		t.Fatal(err)
	}
	if m := mode(link); m&os.ModeSymlink == 0 {
		t.Errorf("the link became %v", m)
	}
	if m := mode(path); m != 0o600 {
		t.Errorf("the private file has mode %v", m)
	}
	if got, _, err := Read(path); err != nil || string(got.Bytes()) != string(f.Bytes()) {
		t.Errorf("read back %v, %v", got, err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".daemon*")); left != nil {
		t.Errorf("left behind: %v", left)
	}
}

func TestFlagConflicts(t *testing.T) {
	keys := []string{LiveRestore, NoForwardDrop}
	for text, want := range map[string][]string{
		"dockerd\x00-H\x00fd://":                                    nil,
		"dockerd\x00--live-restore\x00-H\x00fd://":                  {LiveRestore},
		"dockerd\x00--live-restore=false":                           {LiveRestore},
		"DOCKER_OPTS=\"--dns 1.1.1.1 --ip-forward-no-drop=true\"":   {NoForwardDrop},
		"DOCKER_OPTS=--live-restore":                                {LiveRestore},
		"ExecStart=/usr/bin/dockerd \\\n  --live-restore=true":      {LiveRestore},
		"# DOCKER_OPTS=--live-restore\nA=b":                         nil,
		"dockerd --live-restore-not-this --label=x--live-restore=1": nil,
	} {
		if d := cmp.Diff(want, FlagConflicts(text, keys)); d != "" {
			t.Errorf("%q (-want +got):\n%s", text, d)
		}
	}
}

func TestFind(t *testing.T) {
	root := t.TempDir()
	proc := filepath.Join(root, "proc/4711")
	if err := os.MkdirAll(proc, 0o755); err != nil {
		t.Fatal(err)
	}
	pidFile := filepath.Join(root, "docker.pid")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, ok := Find(root, pidFile); ok {
		t.Error("found a daemon without a pid file")
	}
	write(pidFile, "4711\n")
	write(filepath.Join(proc, "comm"), "dockerd\n")
	write(filepath.Join(proc, "cmdline"), "dockerd\x00--debug\x00")
	if d, ok := Find(root, pidFile); !ok || d.PID != 4711 || d.Command != "dockerd\x00--debug\x00" {
		t.Errorf("found %+v, %v", d, ok)
	}
	write(filepath.Join(proc, "comm"), "bash\n") // the number was given to another program
	if _, ok := Find(root, pidFile); ok {
		t.Error("took another program for the daemon")
	}
	for _, bad := range []string{"", "x", "-1", "1"} {
		write(pidFile, bad)
		if _, ok := Find(root, pidFile); ok {
			t.Errorf("pid file %q: found a daemon", bad)
		}
	}
}
