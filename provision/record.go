package provision

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"klimax/shared/atomicfile"
)

// Records say what Install itself brought, so that Uninstall takes back that
// and nothing else. Each is a small file in the state directory's folder
// "provision".
const (
	recordDirectories = "directories"   // directories that were made, one a line
	recordGroup       = "group"         // the group that was added
	recordPackages    = "packages"      // packages that were installed, one a line
	recordConfig      = "config.sha256" // of the configuration that was written
	recordDaemonJSON  = "daemon.json"   // what was changed in Docker's configuration
)

func (r *runner) recordPath(name string) string {
	return filepath.Join(r.at(r.Paths.StateDir), "provision", name)
}

// record returns a record's text, empty when there is none.
func (r *runner) record(name string) (string, error) {
	data, err := os.ReadFile(r.recordPath(name))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return string(data), err
}

func (r *runner) setRecord(name, text string) error {
	if err := os.MkdirAll(filepath.Dir(r.recordPath(name)), 0o700); err != nil {
		return err
	}
	return atomicfile.Write(r.recordPath(name), strings.NewReader(text), 0o600)
}

func (r *runner) dropRecord(name string) error {
	err := os.Remove(r.recordPath(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// addToRecord adds lines that are not there yet.
func (r *runner) addToRecord(name string, lines ...string) error {
	text, err := r.record(name)
	if err != nil {
		return err
	}
	have := strings.Fields(text)
	for _, l := range lines {
		if !slices.Contains(have, l) {
			have = append(have, l)
		}
	}
	return r.setRecord(name, strings.Join(have, "\n")+"\n")
}

// mkdirs makes a directory and its missing parents with mode 0755 and records
// them. path is without Root.
func (r *runner) mkdirs(path string) error {
	var missing []string
	for p := filepath.Clean(path); ; p = filepath.Dir(p) {
		_, err := os.Stat(r.at(p))
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		missing = append(missing, p)
		if p == filepath.Dir(p) {
			break
		}
	}
	if len(missing) == 0 {
		return nil
	}
	slices.Reverse(missing)
	for _, p := range missing {
		if err := os.Mkdir(r.at(p), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return r.addToRecord(recordDirectories, missing...)
}

// writeFile writes a file under Root, with its directory, in one step.
func (r *runner) writeFile(path string, data []byte, mode fs.FileMode) error {
	if err := r.mkdirs(filepath.Dir(path)); err != nil {
		return err
	}
	return atomicfile.Write(r.at(path), bytes.NewReader(data), mode)
}

// same reports whether a file under Root has this content and mode.
func (r *runner) same(path string, data []byte, mode fs.FileMode) (bool, error) {
	have, err := os.ReadFile(r.at(path))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	i, err := os.Stat(r.at(path))
	if err != nil {
		return false, err
	}
	return bytes.Equal(have, data) && i.Mode().Perm() == mode, nil
}

// remove removes a file under Root if it is there.
func (r *runner) remove(path string) (removed bool, err error) {
	err = os.Remove(r.at(path))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
