// Deps compares what the two binaries are made of with docs/dependencies.md,
// and fails when a binary holds what it must not. `deps -update` writes the
// document anew; a person reviews the difference.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

const document = "docs/dependencies.md"

// binary is one program and the platforms it is built for.
type binary struct {
	name      string
	platforms []string // GOOS/GOARCH
	forbidden []string // import path prefixes that must not be in it
}

func binaries() []binary {
	return []binary{
		// The host binary runs on macOS too; the engine and its rules are the guest's.
		{"klimax", []string{"darwin/arm64", "darwin/amd64", "linux/amd64", "linux/arm64"},
			[]string{"klimax/guest/", "klimax/test/", "github.com/docker/", "github.com/moby/", "github.com/google/nftables"}},
		// The guest knows nothing of virtual machines.
		{"klimax-guest", []string{"linux/amd64", "linux/arm64"},
			[]string{"klimax/host/", "klimax/test/", "github.com/lima-vm/"}},
	}
}

// module is one row of the document.
type module struct {
	path, version, licence string
	in                     []string // binaries
}

func main() {
	update := flag.Bool("update", false, "write "+document+" anew")
	flag.Parse()
	if err := run(*update); err != nil {
		fmt.Fprintln(os.Stderr, "deps:", err)
		os.Exit(1)
	}
}

func run(update bool) error {
	modules := map[string]*module{}
	for _, b := range binaries() {
		if _, err := os.Stat(filepath.Join("cmd", b.name)); err != nil {
			return fmt.Errorf("run this at the root of the repository: %w", err)
		}
		if err := b.collect(modules); err != nil {
			return err
		}
	}
	want := render(modules)
	if update {
		return os.WriteFile(document, want, 0o644)
	}
	have, err := os.ReadFile(document)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if !bytes.Equal(have, want) {
		return fmt.Errorf("%s is not what the binaries are made of:\n%sreview it, then: go run ./tools/deps -update", document, difference(have, want))
	}
	return nil
}

// listed is what is used of `go list -json`.
type listed struct {
	ImportPath string
	Standard   bool
	Module     *struct {
		Path, Version, Dir string
		Main               bool
	}
}

// collect adds the modules of b, and fails when b holds a forbidden package
// or a module without a licence that goes with Apache-2.0.
func (b binary) collect(modules map[string]*module) error {
	var problems []error
	for _, p := range b.platforms {
		goos, goarch, _ := strings.Cut(p, "/")
		cmd := exec.Command("go", "list", "-deps", "-json=ImportPath,Standard,Module", "./cmd/"+b.name)
		cmd.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("%s for %s: %w", cmd, p, err)
		}
		dec := json.NewDecoder(bytes.NewReader(out))
		for {
			var l listed
			if err := dec.Decode(&l); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				return fmt.Errorf("%s: %w", cmd, err)
			}
			for _, f := range b.forbidden {
				if strings.HasPrefix(l.ImportPath, f) {
					problems = append(problems, fmt.Errorf("%s for %s must not contain %s", b.name, p, l.ImportPath))
				}
			}
			if l.Standard || l.Module == nil || l.Module.Main {
				continue
			}
			m := modules[l.Module.Path]
			if m == nil {
				name, err := licence(l.Module.Dir)
				if err != nil {
					problems = append(problems, fmt.Errorf("%s %s: %w", l.Module.Path, l.Module.Version, err))
				}
				m = &module{path: l.Module.Path, version: l.Module.Version, licence: name}
				modules[l.Module.Path] = m
			}
			if !slices.Contains(m.in, b.name) {
				m.in = append(m.in, b.name)
			}
		}
	}
	return errors.Join(problems...)
}

// licence recognises the licence in dir by its wording. Only those that may be
// linked into an Apache-2.0 program are known.
func licence(dir string) (string, error) {
	var text string
	for _, name := range []string{"LICENSE", "LICENSE.md", "LICENSE.txt", "LICENCE", "COPYING"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil {
			text = strings.Join(strings.Fields(string(b)), " ")
			break
		}
	}
	has := func(parts ...string) bool {
		for _, p := range parts {
			if !strings.Contains(text, p) {
				return false
			}
		}
		return true
	}
	switch {
	case text == "":
		return "", fmt.Errorf("no licence file in %s", dir)
	case has("Apache License", "Version 2.0") && has("Permission is hereby granted, free of charge"):
		return "Apache-2.0 and MIT", nil
	case has("Apache License", "Version 2.0"):
		return "Apache-2.0", nil
	case has("Permission is hereby granted, free of charge"):
		return "MIT", nil
	case has("Redistribution and use in source and binary forms", "Neither the name"):
		return "BSD-3-Clause", nil
	case has("Redistribution and use in source and binary forms"):
		return "BSD-2-Clause", nil
	case has("Permission to use, copy, modify, and/or distribute this software"), has("Permission to use, copy, modify, and distribute this software"):
		return "ISC", nil
	}
	return "", fmt.Errorf("the licence in %s is none of those known to go with Apache-2.0", dir)
}

func render(modules map[string]*module) []byte {
	var rows []*module
	for _, m := range modules {
		rows = append(rows, m)
	}
	slices.SortFunc(rows, func(a, b *module) int { return strings.Compare(a.path, b.path) })
	var b bytes.Buffer
	b.WriteString("# What the binaries are made of\n\n" +
		"All modules whose code is linked into a binary, on any platform it is built for, besides Go's standard library. " +
		"Each licence allows use in a program under Apache-2.0. " +
		"Written by `go run ./tools/deps -update`; `make test` fails when it is out of date.\n\n" +
		"| module | version | licence | in |\n|---|---|---|---|\n")
	for _, m := range rows {
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", m.path, m.version, m.licence, strings.Join(m.in, ", "))
	}
	return b.Bytes()
}

// difference lists the lines that only one of the two has.
func difference(have, want []byte) string {
	h, w := strings.Split(string(have), "\n"), strings.Split(string(want), "\n")
	var b strings.Builder
	for _, l := range h {
		if !slices.Contains(w, l) {
			b.WriteString("- " + l + "\n")
		}
	}
	for _, l := range w {
		if !slices.Contains(h, l) {
			b.WriteString("+ " + l + "\n")
		}
	}
	return b.String()
}
