package machine

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReadSources(t *testing.T) {
	root := t.TempDir()
	write := func(name, data string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("etc/os-release", "ID=debian\nVERSION_CODENAME=bookworm\n")
	write("etc/apt/sources.list", `# a comment
deb http://mirror.example/debian bookworm main contrib # trailing
deb-src http://mirror.example/debian bookworm main
debs http://never.example x y
deb [arch=amd64 signed-by=/k.gpg] http://third.example/apt stable main
`)
	write("etc/apt/sources.list.d/b.sources", `Types: deb deb-src
# in between
URIs: http://b.example/debian
Suites: bookworm-updates
 bookworm-security
Components: main
Signed-By: /usr/share/keyrings/k.gpg

Enabled: no
Types: deb
URIs: http://off.example
Suites: bookworm

Types: deb-src
URIs: http://src.example
Suites: bookworm
`)
	write("etc/apt/sources.list.d/a.list", "deb http://a.example/debian ./\n")
	write("etc/apt/sources.list.d/c.disabled", "deb http://disabled.example bookworm main\n")

	all, err := ReadSources(root)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range all {
		got = append(got, s.Line())
	}
	want := []string{
		"deb http://mirror.example/debian bookworm main contrib",
		"deb [signed-by=/k.gpg] http://third.example/apt stable main",
		"deb http://a.example/debian ./",
		"deb [signed-by=/usr/share/keyrings/k.gpg] http://b.example/debian bookworm-updates main",
		"deb [signed-by=/usr/share/keyrings/k.gpg] http://b.example/debian bookworm-security main",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("sources (-want +got):\n%s", d)
	}

	suite, err := codename(root)
	if err != nil || suite != "bookworm" {
		t.Fatalf("codename = %q, %v", suite, err)
	}
	got = nil
	for _, s := range forSuite(all, suite) {
		got = append(got, s.Suite)
	}
	if d := cmp.Diff([]string{"bookworm", "bookworm-updates", "bookworm-security"}, got); d != "" {
		t.Errorf("sources of the suite (-want +got):\n%s", d)
	}
}

func TestBadSources(t *testing.T) {
	for name, parse := range map[string]func() ([]Source, error){
		"bracket":      func() ([]Source, error) { return parseList("deb [arch=amd64 http://x y z\n") },
		"no suite":     func() ([]Source, error) { return parseList("deb http://x\n") },
		"no suites":    func() ([]Source, error) { return parseDeb822("Types: deb\nURIs: http://x\n") },
		"continuation": func() ([]Source, error) { return parseDeb822(" main\n") },
		"no field":     func() ([]Source, error) { return parseDeb822("Types deb\n") },
	} {
		if got, err := parse(); err == nil {
			t.Errorf("%s: parsed as %v, want an error", name, got)
		}
	}
}

func TestInlineKey(t *testing.T) {
	got, err := parseDeb822("Types: deb\nURIs: http://x\nSuites: s\nComponents: c\nSigned-By:\n -----BEGIN\n .\n abc\n")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]Source{{URI: "http://x", Suite: "s", Components: []string{"c"}}}, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
