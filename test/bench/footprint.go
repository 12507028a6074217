//go:build linux

package main

import (
	"context"
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"klimax/test/lab"
)

// How often commands are timed.
const (
	helpRuns = 20
	upRuns   = 10
)

func (b *bench) footprintCost() time.Duration {
	return labCost + b.idle + 10*time.Second
}

const footprintSection = "footprint"

func (b *bench) footprint(ctx context.Context) {
	b.binaries()
	b.help(ctx)
	err := inLab(ctx, lab.Options{Setup: lab.Debian}, func(t *bed, l *lab.Lab) {
		w := b.withAgent(t, l, lab.Spec{})
		w.works()
		b.noop(t, w)
		b.idleAgent(t, w)
	})
	if err != nil {
		b.failed(footprintSection, "agent and klimax up", Aim, err)
	}
}

// binaries looks at the programs' files.
func (b *bench) binaries() {
	for _, path := range []string{b.klimax, b.guest} {
		name := filepath.Base(path)
		size, faults, err := inspect(path)
		if err != nil {
			b.failed(footprintSection, name, Aim, err)
			continue
		}
		what := "static, stripped"
		if len(faults) > 0 {
			what = strings.Join(faults, ", ")
		}
		b.add(Line{Section: footprintSection, Name: name, Measured: megabytes(size) + ", " + what, Limit: "< 25 MB, static, stripped",
			OK: size < 25e6 && len(faults) == 0, Kind: Aim, Raw: size})
	}
}

// inspect returns a program's size in bytes, and what about it is not static or not
// stripped.
func inspect(path string) (size int64, faults []string, err error) {
	st, err := os.Stat(path)
	if err != nil {
		return 0, nil, err
	}
	f, err := elf.Open(path)
	if err != nil {
		return 0, nil, err
	}
	defer f.Close()
	for _, p := range f.Progs {
		switch p.Type {
		case elf.PT_INTERP:
			faults = append(faults, "has a program interpreter")
		case elf.PT_DYNAMIC:
			faults = append(faults, "has a dynamic section")
		}
	}
	for _, s := range f.Sections {
		if s.Type == elf.SHT_SYMTAB || strings.HasPrefix(s.Name, ".debug_") || strings.HasPrefix(s.Name, ".zdebug_") {
			faults = append(faults, "has section "+s.Name)
		}
	}
	return st.Size(), faults, nil
}

// help times `klimax --help`.
func (b *bench) help(ctx context.Context) {
	var took []float64
	for i := range helpRuns + 1 {
		begin := time.Now()
		out, err := exec.CommandContext(ctx, b.klimax, "--help").CombinedOutput()
		d := millis(time.Since(begin))
		if err != nil || !strings.Contains(string(out), "up") {
			b.failed(footprintSection, "klimax --help", Aim, fmt.Errorf("%w\n%s", err, out))
			return
		}
		if i > 0 { // the first reads the file
			took = append(took, d)
		}
	}
	median := quantile(took, 0.5)
	b.add(Line{Section: footprintSection, Name: fmt.Sprintf("klimax --help ×%d", helpRuns), Measured: fmt.Sprintf("median %.1f ms, max %.1f ms", median, quantile(took, 1)),
		Limit: "< 50 ms", OK: median < 50, Kind: Aim, Raw: took})
}

// noop times `klimax up` on the Mac when everything is in place.
func (b *bench) noop(t *bed, w *world) {
	home := filepath.Join(w.l.Dir, "home")
	if err := os.Mkdir(home, 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(home, "klimax.yaml")
	klimax := func(args ...string) (string, float64) {
		c := w.l.Mac.Command(t.Context(), b.klimax, append([]string{"--config", file, "--guest", "unix://" + w.g.Socket}, args...)...)
		c.Env = append(os.Environ(), "KLIMAX_HOME="+home)
		begin := time.Now()
		out, err := c.CombinedOutput()
		d := millis(time.Since(begin))
		if err != nil {
			t.Fatalf("klimax %v on the mac: %v\n%s", args, err, out)
		}
		return string(out), d
	}
	klimax("config", "init")
	klimax("up")
	var took []float64
	for range upRuns {
		out, d := klimax("up")
		if !strings.Contains(out, "Nothing had to be changed") {
			t.Fatalf("a further klimax up changed something:\n%s", out)
		}
		took = append(took, d)
	}
	w.works()
	median := quantile(took, 0.5)
	b.add(Line{Section: footprintSection, Name: fmt.Sprintf("klimax up, nothing to do ×%d", upRuns), Measured: fmt.Sprintf("median %.1f ms, max %.1f ms", median, quantile(took, 1)),
		Limit: "< 300 ms", OK: median < 300, Kind: Aim, Raw: took})
}

// idleAgent watches an agent with nothing to do.
func (b *bench) idleAgent(t *bed, w *world) {
	b.say("  the agent is left alone for %v", b.idle)
	rest(t, 2*time.Second)
	pid := w.g.PID()
	looks := func() time.Duration {
		d, err := cpuTime(pid)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	before, begin := looks(), time.Now()
	rest(t, b.idle)
	used, over := looks()-before, time.Since(begin)
	share := 100 * used.Seconds() / over.Seconds()
	b.add(Line{Section: footprintSection, Name: fmt.Sprintf("idle agent over %v", b.idle), Measured: fmt.Sprintf("%.3f %% of a core: %v", share, used),
		Limit: "< 0.1 %", OK: share < 0.1, Kind: Aim, Raw: used.Milliseconds()})
	rss, err := memory(pid)
	if err != nil {
		t.Fatal(err)
	}
	b.add(Line{Section: footprintSection, Name: "idle agent's memory", Measured: megabytes(rss), Limit: "< 30 MB", OK: rss < 30e6, Kind: Aim, Raw: rss})
}

// tick is the unit of CPU times in /proc, USER_HZ.
const tick = 10 * time.Millisecond

// cpuTime is what a process has used, in user and kernel mode, see proc(5).
func cpuTime(pid int) (time.Duration, error) {
	path := fmt.Sprintf("/proc/%d/stat", pid)
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	// The second field, the program's name, may hold spaces and parentheses.
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	const utime, stime = 14 - 3, 15 - 3 // counted from field 3, the state
	if len(fields) <= stime {
		return 0, fmt.Errorf("%s: %d fields", path, len(fields))
	}
	var ticks int64
	for _, i := range []int{utime, stime} {
		n, err := strconv.ParseInt(fields[i], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %w", path, err)
		}
		ticks += n
	}
	return time.Duration(ticks) * tick, nil
}
