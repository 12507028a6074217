package provision

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"klimax/shared/atomicfile"
)

// group adds the group whose members may use the agent's socket.
func (r *runner) group() Step {
	// Read now: when the turn of this step's Undo comes, the records are gone.
	added, err := r.record(recordGroup)
	return Step{
		ID: stepGroup, Title: "group " + r.Group,
		Check: func(context.Context) (bool, string, error) {
			_, ok, err := r.gid()
			if ok {
				return true, "there", err
			}
			return false, "add a system group; its members are as good as root", err
		},
		Apply: func(ctx context.Context) error {
			if _, err := r.Run(ctx, nil, "groupadd", "--system", r.Group); err != nil {
				return err
			}
			return r.setRecord(recordGroup, r.Group+"\n")
		},
		Undo: func(ctx context.Context) (bool, error) {
			if err != nil || strings.TrimSpace(added) != r.Group {
				return false, err
			}
			if _, ok, err := r.gid(); err != nil || !ok {
				return false, err
			}
			_, err := r.Run(ctx, nil, "groupdel", r.Group)
			return err == nil, err
		},
	}
}

// gid reads the group's number from the group file. Groups of a directory
// service are not seen there; a local one is then added, which is harmless.
func (r *runner) gid() (int, bool, error) {
	data, err := os.ReadFile(r.at("/etc/group"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	for _, line := range strings.Split(string(data), "\n") {
		f := strings.Split(line, ":")
		if len(f) >= 3 && f[0] == r.Group {
			n, err := strconv.Atoi(f[2])
			return n, err == nil, err
		}
	}
	return 0, false, nil
}

// wantedDir is a directory with what it must be.
type wantedDir struct {
	path    string
	mode    fs.FileMode
	grouped bool // belongs to the group; else the owner's group does not matter
}

func (r *runner) wantedDirs() []wantedDir {
	dirs := []wantedDir{
		{r.Paths.StateDir, 0o700, false},
		{filepath.Dir(r.Paths.Config), 0o755, false},
		{filepath.Dir(r.Paths.Socket), 0o750, true},
	}
	if !r.systemd() {
		dirs = append(dirs, wantedDir{r.Paths.LogDir, 0o750, true})
	}
	return dirs
}

// directories makes klimax's own directories.
func (r *runner) directories() Step {
	return Step{
		ID: stepDirectories, Title: "directories",
		Check: func(context.Context) (bool, string, error) {
			var wrong []string
			for _, d := range r.wantedDirs() {
				i, err := os.Stat(r.at(d.path))
				switch {
				case errors.Is(err, fs.ErrNotExist):
					wrong = append(wrong, d.path)
				case err != nil:
					return false, "", err
				case !i.IsDir():
					return false, "", fmt.Errorf("%s is in the way, it is not a directory: move it aside", d.path)
				case i.Mode().Perm() != d.mode, d.grouped && !r.grouped(i):
					wrong = append(wrong, d.path)
				}
			}
			if len(wrong) == 0 {
				return true, "there", nil
			}
			return false, "make " + strings.Join(wrong, ", "), nil
		},
		Apply: func(context.Context) error {
			gid, ok, err := r.gid()
			if err != nil {
				return err
			}
			for _, d := range r.wantedDirs() {
				if err := r.mkdirs(d.path); err != nil {
					return err
				}
				if d.grouped && ok {
					if err := r.chown(r.at(d.path), 0, gid); err != nil {
						return err
					}
				}
				if err := os.Chmod(r.at(d.path), d.mode); err != nil {
					return err
				}
			}
			return nil
		},
		Undo: func(context.Context) (bool, error) {
			made, err := r.record(recordDirectories)
			if err != nil {
				return false, err
			}
			// What lies in these is klimax's alone.
			changed := false
			for _, p := range []string{r.Paths.StateDir, filepath.Dir(r.Paths.Socket), r.Paths.LogDir} {
				if _, err := os.Lstat(r.at(p)); err != nil {
					continue
				}
				if err := os.RemoveAll(r.at(p)); err != nil {
					return changed, err
				}
				changed = true
			}
			// The others may hold somebody's files by now: only when empty.
			for _, p := range slices.Backward(strings.Fields(made)) {
				switch err := os.Remove(r.at(p)); {
				case err == nil:
					changed = true
				case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTEMPTY), errors.Is(err, fs.ErrExist):
				default:
					return changed, err
				}
			}
			return changed, nil
		},
	}
}

// grouped reports whether a directory belongs to the group, if there is one yet.
func (r *runner) grouped(i fs.FileInfo) bool {
	gid, ok, err := r.gid()
	s, isStat := i.Sys().(*syscall.Stat_t)
	return err != nil || !ok || !isStat || int(s.Gid) == gid
}

// config writes the default configuration when there is none.
func (r *runner) config() Step {
	return Step{
		ID: stepConfig, Title: "configuration",
		Check: func(context.Context) (bool, string, error) {
			_, err := os.Stat(r.at(r.Paths.Config))
			if errors.Is(err, fs.ErrNotExist) {
				return false, "write the defaults to " + r.Paths.Config, nil
			}
			return err == nil, r.Paths.Config, err
		},
		Apply: func(context.Context) error {
			if err := r.writeFile(r.Paths.Config, r.DefaultConfig, 0o640); err != nil {
				return err
			}
			if gid, ok, err := r.gid(); err == nil && ok {
				if err := r.chown(r.at(r.Paths.Config), 0, gid); err != nil {
					return err
				}
			}
			return r.setRecord(recordConfig, sum(r.DefaultConfig)+"\n")
		},
		Undo: func(context.Context) (bool, error) {
			wrote, err := r.record(recordConfig)
			if err != nil {
				return false, err
			}
			have, err := os.ReadFile(r.at(r.Paths.Config))
			switch {
			case errors.Is(err, fs.ErrNotExist):
				return false, nil
			case err != nil:
				return false, err
			case strings.TrimSpace(wrote) != sum(have):
				r.say(stepConfig, "%s stays: it is not what klimax wrote", r.Paths.Config)
				return false, nil
			}
			return r.remove(r.Paths.Config)
		},
	}
}

// binary copies the program to its place.
func (r *runner) binary() Step {
	return Step{
		ID: stepBinary, Title: "program",
		Check: func(context.Context) (bool, string, error) {
			plan := "copy this program to " + r.Paths.Binary
			to, err := os.Stat(r.at(r.Paths.Binary))
			if errors.Is(err, fs.ErrNotExist) {
				return false, plan, nil
			}
			if err != nil {
				return false, "", err
			}
			from, err := os.Stat(r.Self)
			if err != nil {
				return false, "", err
			}
			if os.SameFile(from, to) {
				return true, r.Paths.Binary, nil
			}
			if from.Size() != to.Size() || to.Mode().Perm() != 0o755 {
				return false, plan, nil
			}
			same, err := sameContent(r.Self, r.at(r.Paths.Binary))
			if same {
				plan = r.Paths.Binary
			}
			return same, plan, err
		},
		Apply: func(context.Context) error {
			if err := r.mkdirs(filepath.Dir(r.Paths.Binary)); err != nil {
				return err
			}
			r.restart = true
			return copyAtomic(r.Self, r.at(r.Paths.Binary), 0o755)
		},
		Undo: func(context.Context) (bool, error) { return r.remove(r.Paths.Binary) },
	}
}

func sum(data []byte) string {
	h := sha256.Sum256(data)
	return hex.EncodeToString(h[:])
}

func sameContent(a, b string) (bool, error) {
	var sums [2][]byte
	for i, name := range []string{a, b} {
		f, err := os.Open(name)
		if err != nil {
			return false, err
		}
		h := sha256.New()
		_, err = io.Copy(h, f)
		f.Close()
		if err != nil {
			return false, err
		}
		sums[i] = h.Sum(nil)
	}
	return bytes.Equal(sums[0], sums[1]), nil
}

// copyAtomic puts a copy of a file in place of another in one step. A program
// that runs keeps its old file until it ends.
func copyAtomic(from, to string, mode fs.FileMode) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	return atomicfile.Write(to, in, mode)
}
