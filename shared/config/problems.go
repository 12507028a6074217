package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is one thing that is wrong with a configuration.
type Problem struct {
	File    string `json:"file,omitempty"` // as given to Parse; empty when there is no file
	Line    int    `json:"line,omitempty"` // from 1; 0 when unknown
	Key     string `json:"key,omitempty"`  // full path, for example "registries.mirrors[0].port"
	Message string `json:"message"`
	Nearest string `json:"nearest,omitempty"` // for an unknown key: full path of the most similar known one
}

func (p Problem) String() string {
	var b strings.Builder
	if p.File != "" {
		b.WriteString(p.File)
		if p.Line > 0 {
			fmt.Fprintf(&b, ":%d", p.Line)
		}
		b.WriteString(": ")
	} else if p.Line > 0 {
		fmt.Fprintf(&b, "line %d: ", p.Line)
	}
	if p.Key != "" {
		b.WriteString(p.Key + ": ")
	}
	b.WriteString(p.Message)
	if p.Nearest != "" {
		fmt.Fprintf(&b, ", did you mean %s?", p.Nearest)
	}
	return b.String()
}

// Problems is everything that is wrong with one configuration, in the order of
// its lines. Parse and Validate return it as their error.
type Problems struct {
	List []Problem
}

// Error has one line for each problem.
func (p *Problems) Error() string {
	lines := make([]string, len(p.List))
	for i, q := range p.List {
		lines[i] = q.String()
	}
	return strings.Join(lines, "\n")
}

func (p *Problems) add(q Problem) { p.List = append(p.List, q) }

// err returns p sorted, nil when there is no problem.
func (p *Problems) err() error {
	if len(p.List) == 0 {
		return nil
	}
	slices.SortStableFunc(p.List, func(a, b Problem) int { return cmp.Compare(a.Line, b.Line) })
	return p
}

// nearest returns the candidate that is most likely meant by the misspelt word
// got, "" when none is close enough to be worth naming.
func nearest(got string, candidates []string) string {
	best, bestDistance := "", 1+len(got)/3
	for _, c := range candidates {
		if len(got)-len(c) > bestDistance || len(c)-len(got) > bestDistance {
			continue
		}
		d := distance(strings.ToLower(got), strings.ToLower(c))
		if d <= bestDistance && (best == "" || d < bestDistance) {
			best, bestDistance = c, d
		}
	}
	return best
}

// distance is the Levenshtein distance of a and b in bytes.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			substitute := diagonal
			if a[i] != b[j] {
				substitute++
			}
			diagonal = row[j+1]
			row[j+1] = min(substitute, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
