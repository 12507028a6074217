package provision

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"klimax/provision/dockerd"
)

// daemonRecord remembers what was changed in Docker's configuration.
type daemonRecord struct {
	Created bool             `json:"created"` // the file was not there
	Changes []dockerd.Change `json:"changes"`
}

// daemonJSON manages Docker's configuration where Docker is new here, so that
// its very first start has it, and leaves an existing Docker's alone unless it
// was asked to change it.
func (r *runner) daemonJSON() Step {
	return Step{
		ID: stepDaemonJSON, Title: "Docker's configuration",
		Check: func(ctx context.Context) (bool, string, error) {
			p, err := r.planDaemonJSON(ctx)
			return len(p.changes) == 0, p.text, err
		},
		Apply: func(ctx context.Context) error {
			p, err := r.planDaemonJSON(ctx)
			if err != nil {
				return err
			}
			if err := r.mkdirs(filepath.Dir(r.Paths.DaemonJSON)); err != nil {
				return err
			}
			// The record first: a crash in between leaves one that undoes nothing.
			for _, c := range p.changes {
				if !slices.ContainsFunc(p.record.Changes, func(o dockerd.Change) bool { return o.Key == c.Key }) {
					p.record.Changes = append(p.record.Changes, c)
				}
			}
			if err := r.setDaemonRecord(p.record); err != nil {
				return err
			}
			if err := p.file.Apply(p.changes); err != nil {
				return err
			}
			if err := p.file.Write(r.at(r.Paths.DaemonJSON)); err != nil {
				return err
			}
			return r.reloadDaemon(keys(p.changes))
		},
		Undo: func(context.Context) (bool, error) {
			record, ok, err := r.daemonRecord()
			if err != nil || !ok {
				return false, err
			}
			file, exists, err := dockerd.Read(r.at(r.Paths.DaemonJSON))
			if err != nil {
				return false, err
			}
			if !exists {
				return false, r.dropRecord(recordDaemonJSON)
			}
			left, err := file.Revert(record.Changes)
			if err != nil {
				return false, err
			}
			if len(left) > 0 {
				r.say(stepDaemonJSON, "%s: %s was changed by somebody else and stays", r.Paths.DaemonJSON, strings.Join(left, ", "))
			}
			if record.Created && file.Empty() {
				_, err = r.remove(r.Paths.DaemonJSON)
			} else {
				err = file.Write(r.at(r.Paths.DaemonJSON))
			}
			if err != nil {
				return false, err
			}
			if err := r.reloadDaemon(keys(record.Changes)); err != nil {
				return true, err
			}
			return true, r.dropRecord(recordDaemonJSON)
		},
	}
}

type daemonPlan struct {
	file    *dockerd.File
	record  daemonRecord
	changes []dockerd.Change
	text    string
}

// planDaemonJSON decides which keys are to be changed.
func (r *runner) planDaemonJSON(ctx context.Context) (daemonPlan, error) {
	var p daemonPlan
	path := r.Paths.DaemonJSON
	file, exists, err := dockerd.Read(r.at(path))
	if err != nil {
		return p, err
	}
	p.file = file
	var managed bool
	if p.record, managed, err = r.daemonRecord(); err != nil {
		return p, err
	}
	if !managed {
		p.record.Created = !exists
	}
	version, installed, err := r.engineVersion(ctx)
	if err != nil {
		return p, err
	}
	wanted := file.Diff(dockerd.Desired(version))

	// A daemon does not start with a directive both as a flag and in the file.
	flags := dockerd.FlagConflicts(r.daemonFlags(), keys(wanted))
	wanted = slices.DeleteFunc(wanted, func(c dockerd.Change) bool { return slices.Contains(flags, c.Key) })

	// What klimax wrote once and somebody changed since is theirs.
	wanted = slices.DeleteFunc(wanted, func(c dockerd.Change) bool {
		return c.Before != nil && slices.ContainsFunc(p.record.Changes, func(o dockerd.Change) bool { return o.Key == c.Key })
	})

	p.text = path
	if len(flags) > 0 {
		p.text += "; " + strings.Join(flags, ", ") + " is given to dockerd as a flag and not written"
	}
	if len(wanted) == 0 {
		return p, nil
	}
	list := "\"" + strings.Join(keys(wanted), "\": true and \"") + "\": true"
	if r.LiveRestore == Yes || r.LiveRestore == Auto && (managed || !installed) {
		p.changes = wanted
		p.text = "write " + list + " to " + path
		return p, nil
	}
	if wanted[0].Key == dockerd.LiveRestore {
		p.text = fmt.Sprintf("%s stays as it is. With %s in it containers keep running while Docker restarts: "+
			"add it, or run the installation with --live-restore", path, "\"live-restore\": true")
	}
	return p, nil
}

// engineVersion is the version of the engine that is, or is about to be,
// installed; installed tells which.
func (r *runner) engineVersion(ctx context.Context) (version string, installed bool, err error) {
	e, err := r.engine(ctx)
	if err != nil {
		return "", false, err
	}
	if e.Answers {
		return e.Version, true, nil
	}
	if program := r.dockerdProgram(); program != "" {
		// "Docker version 20.10.24+dfsg1, build 5d6db84"
		out, err := r.Run(ctx, nil, program, "--version")
		if err != nil {
			return "", true, err
		}
		if _, rest, ok := strings.Cut(out, "version "); ok {
			version, _, _ = strings.Cut(rest, ",")
		}
		return version, true, nil
	}
	candidates, err := r.candidates(ctx, dockerPackage)
	return candidates[dockerPackage], false, err
}

// daemonFlags is all text from which dockerd gets command line flags.
func (r *runner) daemonFlags() string {
	var text strings.Builder
	if d, ok := dockerd.Find(r.Root, r.at(r.Paths.DockerPID)); ok {
		text.WriteString(d.Command + "\n")
	}
	names := []string{r.at("/etc/default/docker"), r.at("/etc/sysconfig/docker")}
	for _, dir := range []string{r.Paths.UnitDir, "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"} {
		names = append(names, filepath.Join(r.at(dir), "docker.service"))
		dropIns, _ := filepath.Glob(filepath.Join(r.at(dir), "docker.service.d", "*.conf"))
		names = append(names, dropIns...)
	}
	for _, name := range names {
		data, _ := os.ReadFile(name)
		text.Write(data)
		text.WriteString("\n")
	}
	text.WriteString(strings.Join(r.DockerdArgs, "\n"))
	return text.String()
}

// reloadDaemon lets a running daemon take over changed keys.
func (r *runner) reloadDaemon(changed []string) error {
	d, ok := dockerd.Find(r.Root, r.at(r.Paths.DockerPID))
	if !ok {
		return nil // it reads the file when it starts
	}
	if !dockerd.Reloadable(changed) {
		restart := "stop and start dockerd"
		if r.systemd() {
			restart = "systemctl restart docker"
		}
		r.say(stepDaemonJSON, "Docker takes %s over at its next start: %s", strings.Join(changed, ", "), restart)
	}
	return d.Reload()
}

func (r *runner) daemonRecord() (daemonRecord, bool, error) {
	var record daemonRecord
	text, err := r.record(recordDaemonJSON)
	if err != nil || text == "" {
		return record, false, err
	}
	if err := json.Unmarshal([]byte(text), &record); err != nil {
		return record, false, fmt.Errorf("%s is damaged, remove it: %w", r.recordPath(recordDaemonJSON), err)
	}
	return record, true, nil
}

func (r *runner) setDaemonRecord(record daemonRecord) error {
	data, err := json.Marshal(record)
	if err != nil {
		return err
	}
	return r.setRecord(recordDaemonJSON, string(data)+"\n")
}

func keys(changes []dockerd.Change) []string {
	var out []string
	for _, c := range changes {
		out = append(out, c.Key)
	}
	return out
}
