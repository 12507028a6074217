// Package systemd holds klimax's unit files and the drop-in for
// docker.service, and renders them for given paths.
package systemd

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"text/template"
)

// Names of the units.
const (
	GuestUnit   = "klimax-guest.service"   // the agent
	NetworkUnit = "klimax-network.service" // the rules before Docker, once at each boot
	DockerUnit  = "docker.service"         // not ours; it gets a drop-in
)

//go:embed klimax-guest.service klimax-network.service docker.conf
var files embed.FS

// Options are the paths that the units name. All are absolute.
type Options struct {
	Binary   string // klimax-guest
	Config   string // klimax.yaml
	Socket   string // the agent's API
	StateDir string
	Group    string // owns the socket
	Timeout  string // coreutils' timeout
}

// Default returns the paths of an ordinary installation.
func Default() Options {
	return Options{
		Binary:   "/usr/local/bin/klimax-guest",
		Config:   "/etc/klimax/klimax.yaml",
		Socket:   "/run/klimax/guest.sock",
		StateDir: "/var/lib/klimax",
		Group:    "klimax",
		Timeout:  "/usr/bin/timeout",
	}
}

// File is a rendered file.
type File struct {
	Path    string // relative to systemd's directory for local units, /etc/systemd/system
	Mode    fs.FileMode
	Content []byte
}

// Render returns the unit files for o, always in the same order.
func Render(o Options) ([]File, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	t, err := template.ParseFS(files, "*")
	if err != nil {
		return nil, err
	}
	values := struct {
		Options
		ConfigDir        string
		RuntimeDirectory string // empty when the socket is not under /run
		StateDirectory   string // empty when the state is not under /var/lib
	}{Options: o, ConfigDir: path.Dir(o.Config)}
	if name, ok := strings.CutPrefix(path.Dir(o.Socket), "/run/"); ok {
		values.RuntimeDirectory = name
	}
	if name, ok := strings.CutPrefix(o.StateDir, "/var/lib/"); ok {
		values.StateDirectory = name
	}
	var out []File
	for _, f := range []struct{ source, target string }{
		{GuestUnit, GuestUnit},
		{NetworkUnit, NetworkUnit},
		{"docker.conf", DockerUnit + ".d/klimax.conf"},
	} {
		var b bytes.Buffer
		if err := t.ExecuteTemplate(&b, f.source, values); err != nil {
			return nil, err
		}
		out = append(out, File{Path: f.target, Mode: 0o644, Content: b.Bytes()})
	}
	return out, nil
}

// check refuses what would need quoting or escaping in a unit file, where a
// mistake could run something else. See systemd.syntax(7).
func (o Options) check() error {
	var problems []error
	for _, p := range []struct{ name, value string }{
		{"binary", o.Binary}, {"config", o.Config}, {"socket", o.Socket},
		{"state directory", o.StateDir}, {"timeout", o.Timeout},
	} {
		if !path.IsAbs(p.value) || path.Clean(p.value) != p.value || !plain(p.value) {
			problems = append(problems, fmt.Errorf("%s path %q cannot stand in a unit file: it must be absolute, "+
				"clean, and of letters, digits and ./_+@:- only", p.name, p.value))
		}
	}
	if o.Group == "" || !plain(o.Group) || strings.Contains(o.Group, "/") {
		problems = append(problems, fmt.Errorf("group name %q cannot stand in a unit file", o.Group))
	}
	return errors.Join(problems...)
}

func plain(s string) bool {
	for _, r := range s {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', strings.ContainsRune("./_+@:-", r):
		default:
			return false
		}
	}
	return true
}
