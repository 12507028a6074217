package systemd

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func render(t *testing.T, o Options) map[string]string {
	t.Helper()
	files, err := Render(o)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, f := range files {
		out[f.Path] = string(f.Content)
	}
	return out
}

// directives returns the values of a key in a unit file, comments left out.
func directives(unit, key string) []string {
	var out []string
	for _, line := range strings.Split(unit, "\n") {
		if v, ok := strings.CutPrefix(line, key+"="); ok {
			out = append(out, v)
		}
	}
	return out
}

func TestRenderDefault(t *testing.T) {
	got := render(t, Default())
	for _, c := range []struct{ file, key, want string }{
		{"klimax-guest.service", "ExecStart", "/usr/local/bin/klimax-guest run --config /etc/klimax/klimax.yaml --socket /run/klimax/guest.sock --state-dir /var/lib/klimax"},
		{"klimax-guest.service", "Type", "notify"},
		{"klimax-guest.service", "Restart", "always"},
		{"klimax-guest.service", "RuntimeDirectory", "klimax"},
		{"klimax-guest.service", "StateDirectory", "klimax"},
		{"klimax-guest.service", "ReadWritePaths", "-/etc/klimax"},
		{"klimax-network.service", "Before", "docker.service"},
		{"klimax-network.service", "ExecStart", "-/usr/bin/timeout -k 1 10 /usr/local/bin/klimax-guest network apply --boot --config /etc/klimax/klimax.yaml --state-dir /var/lib/klimax"},
		{"docker.service.d/klimax.conf", "ExecStartPost", "-/usr/bin/timeout -k 1 10 /usr/local/bin/klimax-guest network apply --config /etc/klimax/klimax.yaml --state-dir /var/lib/klimax"},
	} {
		if d := cmp.Diff([]string{c.want}, directives(got[c.file], c.key)); d != "" {
			t.Errorf("%s: %s (-want +got):\n%s", c.file, c.key, d)
		}
	}
	for name, unit := range got {
		for _, key := range []string{"Requires", "BindsTo", "PartOf", "Requisite"} {
			if v := directives(unit, key); v != nil {
				t.Errorf("%s: %s=%v: Docker's end must not end klimax, nor the reverse", name, key, v)
			}
		}
		if strings.Contains(unit, "{{") || strings.Contains(unit, "<no value>") {
			t.Errorf("%s is not fully rendered:\n%s", name, unit)
		}
	}
}

func TestRenderOtherPaths(t *testing.T) {
	o := Default()
	o.Socket, o.StateDir = "/srv/k/guest.sock", "/srv/k/state"
	unit := render(t, o)["klimax-guest.service"]
	for _, key := range []string{"RuntimeDirectory", "RuntimeDirectoryMode", "StateDirectory"} {
		if v := directives(unit, key); v != nil {
			t.Errorf("%s=%v for a path outside systemd's own directories", key, v)
		}
	}
}

func TestRenderRefuses(t *testing.T) {
	for _, bad := range []string{"", "relative", "/a b", "/a%n", "/a\nb", `/a"b`, "/a$b", "/a/../b", "/ä"} {
		o := Default()
		o.StateDir = bad
		if _, err := Render(o); err == nil || !strings.Contains(err.Error(), "state directory") {
			t.Errorf("state directory %q: error = %v", bad, err)
		}
	}
	o := Default()
	o.Group = "a b"
	if _, err := Render(o); err == nil {
		t.Error("a group name with a space was accepted")
	}
}
