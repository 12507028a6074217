package machine

import (
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
)

// Source is one package source of apt: one URI and one suite.
type Source struct {
	URI        string
	Suite      string
	Components []string
	SignedBy   string // path of a keyring, empty for the trusted ones
}

// Line is the source in apt's one-line format.
func (s Source) Line() string {
	option := ""
	if s.SignedBy != "" {
		option = "[signed-by=" + s.SignedBy + "] "
	}
	return strings.TrimRight("deb "+option+s.URI+" "+s.Suite+" "+strings.Join(s.Components, " "), " ")
}

// ReadSources returns the binary package sources that apt under root uses, in
// apt's order: sources.list, then the files of sources.list.d by name.
// The formats are those of sources.list(5).
func ReadSources(root string) ([]Source, error) {
	dir := filepath.Join(root, "etc/apt")
	names := []string{filepath.Join(dir, "sources.list")}
	for _, pattern := range []string{"*.list", "*.sources"} {
		found, err := filepath.Glob(filepath.Join(dir, "sources.list.d", pattern))
		if err != nil {
			return nil, err
		}
		names = append(names, found...)
	}
	sort.Strings(names[1:])
	var all []Source
	for _, name := range names {
		data, err := os.ReadFile(name)
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		parse := parseList
		if strings.HasSuffix(name, ".sources") {
			parse = parseDeb822
		}
		found, err := parse(string(data))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		all = append(all, found...)
	}
	return all, nil
}

// parseList reads the one-line format: deb [option=value …] URI suite [component …].
func parseList(data string) ([]Source, error) {
	var all []Source
	for i, line := range strings.Split(data, "\n") {
		line, _, _ = strings.Cut(line, "#")
		line = strings.TrimSpace(line)
		rest, ok := strings.CutPrefix(line, "deb")
		if !ok || rest == "" || rest[0] != ' ' && rest[0] != '\t' {
			continue // empty, or deb-src
		}
		rest = strings.TrimSpace(rest)
		var s Source
		if strings.HasPrefix(rest, "[") {
			options, after, ok := strings.Cut(rest[1:], "]")
			if !ok {
				return nil, fmt.Errorf("line %d: an option list without its closing bracket", i+1)
			}
			rest = after
			for _, o := range strings.Fields(options) {
				if v, ok := strings.CutPrefix(o, "signed-by="); ok {
					s.SignedBy = v
				}
			}
		}
		fields := strings.Fields(rest)
		if len(fields) < 2 {
			return nil, fmt.Errorf("line %d: a source needs a URI and a suite", i+1)
		}
		s.URI, s.Suite, s.Components = fields[0], fields[1], fields[2:]
		all = append(all, s)
	}
	return all, nil
}

// parseDeb822 reads the paragraphs of the newer format. Each pair of URI and
// suite becomes one Source. A Signed-By that holds the key itself instead of
// a path is left out: apt then falls back to the trusted keyrings.
func parseDeb822(data string) ([]Source, error) {
	var all []Source
	fields := map[string]string{}
	key := ""
	flush := func() error {
		defer func() { fields, key = map[string]string{}, "" }()
		if len(fields) == 0 || strings.EqualFold(fields["enabled"], "no") {
			return nil
		}
		binary := false
		for _, t := range strings.Fields(fields["types"]) {
			binary = binary || t == "deb"
		}
		if !binary {
			return nil
		}
		uris, suites := strings.Fields(fields["uris"]), strings.Fields(fields["suites"])
		if len(uris) == 0 || len(suites) == 0 {
			return fmt.Errorf("a paragraph without URIs or Suites")
		}
		signed := strings.TrimSpace(fields["signed-by"])
		if strings.ContainsAny(signed, "\n ") {
			signed = ""
		}
		for _, u := range uris {
			for _, s := range suites {
				all = append(all, Source{URI: u, Suite: s, Components: strings.Fields(fields["components"]), SignedBy: signed})
			}
		}
		return nil
	}
	for i, line := range strings.Split(data, "\n") {
		switch {
		case strings.TrimSpace(line) == "":
			if err := flush(); err != nil {
				return nil, err
			}
		case line[0] == '#':
		case line[0] == ' ' || line[0] == '\t':
			if key == "" {
				return nil, fmt.Errorf("line %d: a continuation of nothing", i+1)
			}
			fields[key] += "\n" + strings.TrimSpace(line)
		default:
			k, v, ok := strings.Cut(line, ":")
			if !ok {
				return nil, fmt.Errorf("line %d: no field name", i+1)
			}
			key = strings.ToLower(strings.TrimSpace(k))
			fields[key] = strings.TrimSpace(v)
		}
	}
	if err := flush(); err != nil {
		return nil, err
	}
	return all, nil
}

// forSuite keeps the sources of a distribution's release: the suite itself and
// those derived from it (-updates, -security, …). Sources of third parties,
// whose suites are named otherwise, are left out.
func forSuite(all []Source, suite string) []Source {
	var out []Source
	for _, s := range all {
		if s.Suite == suite || strings.HasPrefix(s.Suite, suite+"-") {
			out = append(out, s)
		}
	}
	return out
}

// codename reads VERSION_CODENAME from the os-release file under root.
func codename(root string) (string, error) {
	data, err := os.ReadFile(filepath.Join(root, "etc/os-release"))
	if err != nil {
		return "", err
	}
	for _, line := range strings.Split(string(data), "\n") {
		if v, ok := strings.CutPrefix(line, "VERSION_CODENAME="); ok {
			return strings.Trim(v, `"' `), nil
		}
	}
	return "", fmt.Errorf("%s names no VERSION_CODENAME", filepath.Join(root, "etc/os-release"))
}
