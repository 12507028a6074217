// Package atomicfile replaces files in one step.
package atomicfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Write replaces the file at path by what is read from r: a reader, a crash or
// a full disk sees the old content or the new one, never a part of it. The
// directory must exist. Each function of prepare is called with the new file
// before it takes its name.
func Write(path string, r io.Reader, mode fs.FileMode, prepare ...func(*os.File) error) error {
	t, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() { _ = os.Remove(t.Name()) }() // it is gone when all went well
	_, err = io.Copy(t, r)
	err = errors.Join(err, t.Chmod(mode))
	for _, f := range prepare {
		err = errors.Join(err, f(t))
	}
	if err = errors.Join(err, t.Sync(), t.Close()); err == nil {
		err = os.Rename(t.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
