//go:build unix

// Package cache keeps what is expensive to build for tests (dockerd, helper binaries, images) in one
// directory of the machine, under names made from the content they were built from.
package cache

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// unusedFor is how long an entry that nobody asked for is kept, once a newer one of its name is built.
const unusedFor = 30 * 24 * time.Hour

// Dir is the cache's directory: $KLIMAX_CACHE, else klimax in the user's cache directory
// ($XDG_CACHE_HOME, else ~/.cache). It need not exist and may be emptied or removed at any time when
// no test runs.
func Dir() (string, error) {
	if d := os.Getenv("KLIMAX_CACHE"); d != "" {
		return filepath.Abs(d)
	}
	if d := os.Getenv("XDG_CACHE_HOME"); filepath.IsAbs(d) {
		return filepath.Join(d, "klimax"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("find the cache directory: %w; set KLIMAX_CACHE to a directory", err)
	}
	return filepath.Join(home, ".cache", "klimax"), nil
}

// Key is a short hash of its parts; the same parts in the same order give the same key.
func Key(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil))[:16]
}

// HashFiles is a hash of names and contents of the files named, and of all files under the directories
// named. Names are relative to root.
func HashFiles(root string, names ...string) (string, error) {
	var files []string
	for _, n := range names {
		err := filepath.WalkDir(filepath.Join(root, n), func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() {
				files = append(files, p)
			}
			return err
		})
		if err != nil {
			return "", fmt.Errorf("hash %s: %w", n, err)
		}
	}
	slices.Sort(files)
	var parts []string
	for _, f := range slices.Compact(files) {
		b, err := os.ReadFile(f)
		if err != nil {
			return "", fmt.Errorf("hash files: %w", err)
		}
		rel, err := filepath.Rel(root, f)
		if err != nil {
			return "", fmt.Errorf("hash files: %w", err)
		}
		parts = append(parts, rel, string(b))
	}
	return Key(parts...), nil
}

// Get returns the directory of the entry name-key. When it is not there, build fills an empty directory
// beside it, which then is renamed into place: an entry is there completely or not at all. Of several
// callers, in one process or in many, one builds and the others wait. A failed build leaves nothing.
func Get(ctx context.Context, name, key string, build func(ctx context.Context, dir string) error) (string, error) {
	root, err := Dir()
	if err != nil {
		return "", err
	}
	entry := filepath.Join(root, name+"-"+key)
	if found(entry) {
		return entry, nil
	}
	if err := os.MkdirAll(filepath.Join(root, "locks"), 0o755); err != nil {
		return "", fmt.Errorf("cache %s: %w", name, err)
	}
	unlock, err := lock(ctx, filepath.Join(root, "locks", name))
	if err != nil {
		return "", fmt.Errorf("cache %s: %w", name, err)
	}
	defer unlock()
	if found(entry) {
		return entry, nil
	}
	prune(root, name)
	tmp, err := os.MkdirTemp(root, name+".building-")
	if err != nil {
		return "", fmt.Errorf("cache %s: %w", name, err)
	}
	defer os.RemoveAll(tmp)
	if err := os.Chmod(tmp, 0o755); err != nil { // MkdirTemp makes it private
		return "", fmt.Errorf("cache %s: %w", name, err)
	}
	if err := build(ctx, tmp); err != nil {
		return "", fmt.Errorf("build %s for the cache: %w", name, err)
	}
	if err := os.Rename(tmp, entry); err != nil {
		return "", fmt.Errorf("cache %s: %w", name, err)
	}
	return entry, nil
}

// found says whether the entry is there, and notes its use.
func found(entry string) bool {
	now := time.Now()
	return os.Chtimes(entry, now, now) == nil
}

// lock takes the advisory lock of a file, which the kernel gives back when the process dies.
func lock(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("wait for the builder that holds %s: %w", path, context.Cause(ctx))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// prune removes what died builders of this name left and entries of this name that are long unused. It is
// called with the name's lock held, so nobody builds that name now.
func prune(root, name string) {
	list, err := os.ReadDir(root)
	if err != nil {
		return // the build that follows reports what is wrong with the directory
	}
	for _, e := range list {
		left := strings.HasPrefix(e.Name(), name+".building-")
		key, old := strings.CutPrefix(e.Name(), name+"-")
		if old = old && len(key) == 16 && !strings.Contains(key, "-"); old {
			i, err := e.Info()
			old = err == nil && time.Since(i.ModTime()) > unusedFor
		}
		if left || old {
			os.RemoveAll(filepath.Join(root, e.Name()))
		}
	}
}
