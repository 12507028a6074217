package provision

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"klimax/provision/supervise"
)

// SuperviseCommand is the hidden command of klimax-guest that must pass its
// arguments to supervise.FromArgs and supervise.Run.
const SuperviseCommand = "supervise"

func (r *runner) dockerProcessOptions() supervise.Process {
	command := []string{r.at(r.dockerdProgram())}
	if r.Paths.DockerSocket != DefaultPaths().DockerSocket {
		// Not where it is the daemon's own default: "hosts" in daemon.json and
		// this flag exclude each other.
		command = append(command, "--host", "unix://"+r.at(r.Paths.DockerSocket))
	}
	return supervise.Process{
		Name: "dockerd", RunDir: filepath.Dir(r.at(r.Paths.Socket)), LogFile: filepath.Join(r.at(r.Paths.LogDir), "dockerd.log"),
		// dockerd gives its containers 10 s when live-restore is off.
		Grace:   15 * time.Second,
		Command: append(command, r.DockerdArgs...),
	}
}

func (r *runner) agentProcessOptions() supervise.Process {
	return supervise.Process{
		Name: "guest", RunDir: filepath.Dir(r.at(r.Paths.Socket)), LogFile: filepath.Join(r.at(r.Paths.LogDir), "guest.log"),
		Grace: 5 * time.Second,
		Command: []string{r.at(r.Paths.Binary), "run", "--config", r.at(r.Paths.Config),
			"--socket", r.at(r.Paths.Socket), "--state-dir", r.at(r.Paths.StateDir)},
	}
}

func (r *runner) supervisor() []string { return []string{r.at(r.Paths.Binary), SuperviseCommand} }

// dockerProcess runs dockerd as a supervised process, unless an engine answers already.
func (r *runner) dockerProcess() Step {
	return Step{
		ID: stepDocker, Title: "Docker",
		Check: func(ctx context.Context) (bool, string, error) {
			if err := r.EngineAnswers(ctx); err != nil {
				return false, "start dockerd, supervised because there is no systemd", nil
			}
			return true, "answers", nil
		},
		Apply: func(ctx context.Context) error {
			if err := r.cgroups(); err != nil {
				return err
			}
			p := r.dockerProcessOptions()
			if err := supervise.Start(ctx, r.supervisor(), p); err != nil {
				return err
			}
			if err := wait(ctx, r.DockerTimeout, r.EngineAnswers); err != nil {
				return fmt.Errorf("dockerd: %w\n%s\n  more in %s", err, lastLines(p.LogFile, 5), p.LogFile)
			}
			return nil
		},
		Undo: func(context.Context) (bool, error) { return supervise.Stop(r.dockerProcessOptions()) },
	}
}

// agentProcess runs the agent as a supervised process.
func (r *runner) agentProcess() Step {
	return Step{
		ID: stepAgent, Title: "agent",
		Check: func(context.Context) (bool, string, error) {
			id, runs, err := supervise.Running(r.agentProcessOptions())
			switch {
			case err != nil:
				return false, "", err
			case !runs:
				return false, "start it, supervised because there is no systemd", nil
			case r.outdated(id.PID):
				return false, "restart it: it runs an older program", nil
			}
			return true, "runs", nil
		},
		Apply: func(ctx context.Context) error {
			p := r.agentProcessOptions()
			if _, err := supervise.Stop(p); err != nil {
				return err
			}
			r.restart = false
			return supervise.Start(ctx, r.supervisor(), p)
		},
		Undo: func(context.Context) (bool, error) { return supervise.Stop(r.agentProcessOptions()) },
	}
}

// cgroups makes sure that the cgroup file systems are mounted, which systemd
// would have done and without which no container starts.
func (r *runner) cgroups() error {
	mounts, err := os.ReadFile(r.at("/proc/self/mounts"))
	if err != nil {
		return err
	}
	for _, line := range strings.Split(string(mounts), "\n") {
		f := strings.Fields(line)
		if len(f) > 2 && (f[2] == "cgroup" || f[2] == "cgroup2") {
			return nil
		}
	}
	return errors.New("no cgroup file system is mounted, and Docker cannot run without: mount -t cgroup2 cgroup2 /sys/fs/cgroup")
}

func lastLines(file string, n int) string {
	data, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
