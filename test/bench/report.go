//go:build linux

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Kind says what a miss of a line means.
type Kind string

// The kinds.
const (
	Hard Kind = "hard" // a miss fails the benchmark
	Aim  Kind = "aim"  // a miss needs a profile and a word in the notes
	Base Kind = "base" // something to compare with; it has no limit
)

// Line is one row of the table.
type Line struct {
	Section  string `json:"section"`
	Name     string `json:"name"`
	Measured string `json:"measured"`
	Limit    string `json:"limit,omitempty"`
	OK       bool   `json:"ok"`
	Kind     Kind   `json:"kind"`
	Raw      any    `json:"raw,omitempty"` // all figures behind it
}

func (l Line) verdict() string {
	switch {
	case l.Kind == Base:
		return "-"
	case l.OK:
		return "ok"
	}
	return "MISS"
}

// Report is everything that was measured in one run.
type Report struct {
	Version string    `json:"version"` // of klimax-guest
	Kernel  string    `json:"kernel"`
	CPUs    int       `json:"cpus"`
	Started time.Time `json:"started"`
	Seconds float64   `json:"seconds"`
	Load    [2]string `json:"load"` // /proc/loadavg at start and end: other work on the machine makes figures worse
	Args    []string  `json:"args"`
	Lines   []Line    `json:"lines"`
	Details []string  `json:"details,omitempty"` // what has to be said about misses, several lines each

	progress io.Writer
}

func newReport(progress io.Writer) *Report {
	r := &Report{CPUs: runtime.NumCPU(), Started: time.Now(), Args: os.Args[1:], progress: progress}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		r.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	r.Load[0] = loadavg()
	return r
}

func loadavg() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (r *Report) end() {
	r.Seconds = math.Round(time.Since(r.Started).Seconds())
	r.Load[1] = loadavg()
}

// say prints a line of progress, with the time since the start.
func (r *Report) say(format string, args ...any) {
	d := time.Since(r.Started).Round(time.Second)
	fmt.Fprintf(r.progress, "%02d:%02d  %s\n", int(d.Minutes()), int(d.Seconds())%60, fmt.Sprintf(format, args...))
}

// add takes a line and shows it as progress.
func (r *Report) add(l Line) {
	r.Lines = append(r.Lines, l)
	r.say("%s: %s: %s %s", l.Section, l.Name, l.Measured, l.verdict())
}

// failed adds a line for what could not be measured: a miss.
func (r *Report) failed(section, name string, k Kind, err error) {
	if k == Base {
		k = Aim // what is compared with has to be there
	}
	r.add(Line{Section: section, Name: name, Measured: "not measured, see below", Limit: "measured", Kind: k, Raw: err.Error()})
	text := err.Error()
	if !slices.ContainsFunc(r.Details, func(d string) bool { return strings.HasSuffix(d, text) }) {
		r.detail("%s: %s: %s", section, name, text)
	}
}

func (r *Report) detail(format string, args ...any) {
	r.Details = append(r.Details, fmt.Sprintf(format, args...))
}

// met counts the lines of a kind, and those that are within their limit.
func (r *Report) met(k Kind) (met, all int) {
	for _, l := range r.Lines {
		if l.Kind == k {
			all++
			if l.OK {
				met++
			}
		}
	}
	return met, all
}

// table prints the lines by section, the details and the sums.
func (r *Report) table(w io.Writer) {
	fmt.Fprintf(w, "\n%s, Linux %s, %d CPUs, %.0f s, load at start %s, at end %s\n", r.Version, r.Kernel, r.CPUs, r.Seconds, r.Load[0], r.Load[1])
	rows := [][5]string{}
	for i, l := range r.Lines {
		if i == 0 || l.Section != r.Lines[i-1].Section {
			rows = append(rows, [5]string{}, [5]string{strings.ToUpper(l.Section)})
			if i == 0 {
				rows[1] = [5]string{strings.ToUpper(l.Section), "measured", "limit", "", "kind"}
			}
		}
		rows = append(rows, [5]string{"  " + l.Name, l.Measured, l.Limit, l.verdict(), string(l.Kind)})
	}
	var width [5]int
	for _, row := range rows {
		for i, s := range row {
			width[i] = max(width[i], utf8.RuneCountInString(s))
		}
	}
	for _, row := range rows {
		var b strings.Builder
		for i, s := range row {
			b.WriteString(s + strings.Repeat(" ", width[i]-utf8.RuneCountInString(s)+2))
		}
		fmt.Fprintln(w, strings.TrimRight(b.String(), " "))
	}
	for _, d := range r.Details {
		fmt.Fprintf(w, "\n%s\n", d)
	}
	hard, allHard := r.met(Hard)
	aims, allAims := r.met(Aim)
	fmt.Fprintf(w, "\naims met: %d of %d\nhard lines met: %d of %d\n", aims, allAims, hard, allHard)
}

func (r *Report) json(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", " ")
	return e.Encode(r)
}

// quantile is the smallest of the values that at least the share q of them
// does not exceed (nearest rank). It is NaN for no values.
func quantile[T cmp.Ordered](values []T, q float64) T {
	var zero T
	if len(values) == 0 {
		return zero
	}
	s := slices.Sorted(slices.Values(values))
	return s[max(0, int(math.Ceil(q*float64(len(s))))-1)]
}

// spread is p50, p90, p99 and the maximum in words, for milliseconds.
func spread(ms []float64) string {
	return fmt.Sprintf("p50 %.1f, p90 %.1f, p99 %.1f, max %.1f ms", quantile(ms, 0.5), quantile(ms, 0.9), quantile(ms, 0.99), quantile(ms, 1))
}
