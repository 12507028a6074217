package provision

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
)

const (
	dockerPackage = "docker.io"
	// cliPackage holds the docker command where it is a package of its own
	// (Debian 13); elsewhere docker.io brings it.
	cliPackage = "docker-cli"
)

// programDirs is where packages and people put programs.
var programDirs = [...]string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}

func (r *runner) program(name string) string {
	for _, dir := range programDirs {
		if i, err := os.Stat(r.at(dir + "/" + name)); err == nil && i.Mode().IsRegular() && i.Mode().Perm()&0o111 != 0 {
			return dir + "/" + name
		}
	}
	return ""
}

func (r *runner) dockerdProgram() string { return r.program("dockerd") }

// packages installs Docker from the distribution. A Docker that is there,
// from wherever, is left alone.
func (r *runner) packages() Step {
	return Step{
		ID: stepPackages, Title: "Docker's packages",
		Check: func(ctx context.Context) (bool, string, error) {
			switch missing := r.missingPrograms(ctx); {
			case len(missing) > 0:
				return false, "install what is missing with apt: " + strings.Join(missing, ", "), nil
			case r.dockerdProgram() != "":
				return true, r.dockerdProgram(), nil
			}
			return true, "Docker answers", nil
		},
		Apply: r.installPackages,
		Undo: func(ctx context.Context) (bool, error) {
			text, err := r.record(recordPackages)
			names := strings.Fields(text)
			if err != nil || len(names) == 0 {
				return false, err
			}
			if !r.RemovePackages {
				r.say(stepPackages, "Docker stays installed")
				return false, nil
			}
			if err := r.withoutStarting(func() error {
				_, err := r.Run(ctx, aptEnv(), "apt-get", append(aptArgs("purge"), names...)...)
				return err
			}); err != nil {
				return false, err
			}
			return true, r.dropRecord(recordPackages)
		},
	}
}

// missingPrograms names the programs that packages must bring. An engine that
// answers without a dockerd here (another machine's socket, mounted) is
// enough; the docker command is needed in every case, kind runs it.
func (r *runner) missingPrograms(ctx context.Context) []string {
	var missing []string
	if r.dockerdProgram() == "" {
		if e, err := r.engine(ctx); err != nil || !e.Answers {
			missing = append(missing, "dockerd")
		}
	}
	if r.program("docker") == "" {
		missing = append(missing, "docker")
	}
	return missing
}

func (r *runner) installPackages(ctx context.Context) error {
	if r.program("apt-get") == "" {
		return errors.New("this is no Debian or Ubuntu (there is no apt-get): install Docker as your distribution does, then run this again")
	}
	missing := r.missingPrograms(ctx)
	var want []string
	if slices.Contains(missing, "dockerd") {
		want = append(want, dockerPackage)
	}
	if r.program("update-ca-certificates") == "" {
		// dockerd pulls from registries over TLS. Where the certificates are,
		// naming the package would bring in another version of it.
		want = append(want, "ca-certificates")
	}
	if r.apparmor() && r.program("apparmor_parser") == "" {
		// With AppArmor in the kernel and without its tools, no container starts.
		want = append(want, "apparmor")
	}
	have, err := r.candidates(ctx, append(want, cliPackage)...)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(want, func(p string) bool { return have[p] == "" }) {
		r.say(stepPackages, "reading the package lists")
		if _, err := r.Run(ctx, aptEnv(), "apt-get", aptArgs("update")...); err != nil {
			return err
		}
		if have, err = r.candidates(ctx, append(want, cliPackage)...); err != nil {
			return err
		}
	}
	for _, p := range want {
		if have[p] == "" {
			return fmt.Errorf("apt knows no package %s: check /etc/apt/sources.list", p)
		}
	}
	switch {
	case slices.Contains(missing, "docker") && have[cliPackage] != "":
		want = append(want, cliPackage)
	case slices.Equal(missing, []string{"docker"}):
		return errors.New("dockerd is here but the docker command is not, and apt knows no package for it: " +
			"install the command that belongs to your Docker (docker-ce-cli for Docker's own packages)")
	}
	before, err := r.installed(ctx)
	if err != nil {
		return err
	}
	r.say(stepPackages, "apt-get install %s", strings.Join(want, " "))
	install := func() error {
		_, err := r.Run(ctx, aptEnv(), "apt-get", append(aptArgs("install", "--no-install-recommends"), want...)...)
		return err
	}
	err = r.withoutStarting(func() error {
		if install() == nil {
			return nil
		}
		// Old lists name files that the mirror no longer has.
		if _, err := r.Run(ctx, aptEnv(), "apt-get", aptArgs("update")...); err != nil {
			r.Logger.Warn("the package lists could not be read again", "error", err)
		}
		return install()
	})
	// What did get installed is recorded even when the whole failed.
	if after, listErr := r.installed(context.WithoutCancel(ctx)); listErr == nil {
		added := slices.DeleteFunc(after, func(p string) bool { return slices.Contains(before, p) })
		if len(added) > 0 {
			err = errors.Join(err, r.addToRecord(recordPackages, added...))
		}
	}
	return err
}

// candidates returns the versions that apt would install, by package; a
// package that it does not know, or has no version of, is not in it.
func (r *runner) candidates(ctx context.Context, names ...string) (map[string]string, error) {
	if r.program("apt-cache") == "" {
		return nil, nil
	}
	out, err := r.Run(ctx, nil, "apt-cache", append([]string{"policy"}, names...)...)
	if err != nil {
		return nil, err
	}
	return parsePolicy(out), nil
}

// parsePolicy reads what apt-cache policy prints:
//
//	docker.io:
//	  Installed: (none)
//	  Candidate: 20.10.24+dfsg1-1+deb12u1
func parsePolicy(out string) map[string]string {
	versions := map[string]string{}
	name := ""
	for _, line := range strings.Split(out, "\n") {
		if n, ok := strings.CutSuffix(line, ":"); ok && !strings.HasPrefix(line, " ") {
			name = n
		}
		if v, ok := strings.CutPrefix(line, "  Candidate: "); ok && name != "" && v != "(none)" {
			versions[name] = v
		}
	}
	return versions
}

// installed lists the packages that are installed.
func (r *runner) installed(ctx context.Context) ([]string, error) {
	out, err := r.Run(ctx, nil, "dpkg-query", "--show", "--showformat", "${db:Status-Abbrev}${Package}\n")
	if err != nil {
		return nil, err
	}
	var names []string
	for _, line := range strings.Split(out, "\n") {
		if rest, ok := strings.CutPrefix(line, "ii "); ok {
			names = append(names, strings.TrimSpace(rest))
		}
	}
	return names, nil
}

func (r *runner) apparmor() bool {
	on, err := os.ReadFile(r.at("/sys/module/apparmor/parameters/enabled"))
	return err == nil && strings.HasPrefix(string(on), "Y")
}

func aptEnv() []string { return []string{"DEBIAN_FRONTEND=noninteractive"} }

// aptArgs makes apt wait for another one's lock and keep configuration files
// that somebody has changed.
func aptArgs(verb string, more ...string) []string {
	args := []string{"-q", "-y", "-o", "DPkg::Lock::Timeout=120",
		"-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold", verb}
	return append(args, more...)
}

// policyMark tells a policy-rc.d of ours from somebody else's.
const policyMark = "# klimax: nothing is started while packages are installed. Remove this file if no installation is under way.\n"

// withoutStarting runs f while packages do not start services, on a machine
// where no systemd would be there to run them: klimax starts dockerd itself.
// A policy that was there is put back afterwards.
func (r *runner) withoutStarting(f func() error) (err error) {
	if r.systemd() {
		return f()
	}
	path := r.Paths.PolicyRC
	aside := path + ".klimax-saved"
	if text, err := os.ReadFile(r.at(path)); err == nil && !strings.Contains(string(text), policyMark) {
		if err := os.Rename(r.at(path), r.at(aside)); err != nil {
			return err
		}
	} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	defer func() {
		// A saved one may also be left from a run that was killed.
		e := os.Rename(r.at(aside), r.at(path))
		if errors.Is(e, fs.ErrNotExist) {
			_, e = r.remove(path)
		}
		err = errors.Join(err, e)
	}()
	if err := r.writeFile(path, []byte("#!/bin/sh\n"+policyMark+"exit 101\n"), 0o755); err != nil {
		return err
	}
	return f()
}
