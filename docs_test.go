package klimax_test

import (
	"go/ast"
	"go/token"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// literals returns the string constants and composite literal values in the
// file at path whose name or field matches.
func literals(t *testing.T, path string, name *regexp.Regexp) []string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	add := func(name *ast.Ident, value ast.Expr, re *regexp.Regexp) {
		lit, ok := value.(*ast.BasicLit)
		if !ok || lit.Kind != token.STRING || !re.MatchString(name.Name) {
			return
		}
		if s, err := strconv.Unquote(lit.Value); err == nil {
			found = append(found, s)
		}
	}
	ast.Inspect(parse(t, token.NewFileSet(), path, text).file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ValueSpec:
			for i, v := range n.Values {
				add(n.Names[i], v, name)
			}
		case *ast.KeyValueExpr:
			if k, ok := n.Key.(*ast.Ident); ok {
				add(k, n.Value, name)
			}
		}
		return true
	})
	return found
}

// Every file that the code names has a line in docs/files.md, and every rule
// one in docs/network.md.
func TestDocumentsNameEverything(t *testing.T) {
	for _, tc := range []struct {
		document, source, names string
		least                   int // so that the test notices when it looks at nothing
		ignore                  string
	}{
		{"docs/files.md", "provision/provision.go", `^(Binary|Config|Socket|SysctlFile|DaemonJSON|PolicyRC)$`, 6, ""},
		{"docs/files.md", "provision/record.go", `^record`, 5, ""},
		{"docs/files.md", "provision/forwarding.go", `^previousForward$`, 1, ""},
		{"docs/files.md", "guest/state/state.go", `^file`, 3, ""},
		{"docs/files.md", "systemd/systemd.go", `Unit$`, 3, "docker.service"},
		{"docs/network.md", "shared/api/api.go", `^Rule[A-Z]`, 11, ""},
		{"docs/network.md", "shared/api/api.go", `^Cond[A-Z]`, 11, ""},
		{"docs/network.md", "guest/network/desired.go", `^Access[A-Z]`, 4, ""},
	} {
		text, err := os.ReadFile(tc.document)
		if err != nil {
			t.Fatal(err)
		}
		names := literals(t, tc.source, regexp.MustCompile(tc.names))
		if len(names) < tc.least {
			t.Errorf("%s: found %d names like %s, want %d or more: %v", tc.source, len(names), tc.names, tc.least, names)
		}
		for _, n := range names {
			if n != "" && n != tc.ignore && !regexp.MustCompile("[`/]"+regexp.QuoteMeta(n)+"`").MatchString(string(text)) && !strings.Contains(string(text), "`"+n+"`") {
				t.Errorf("%s does not name `%s` of %s", tc.document, n, tc.source)
			}
		}
	}
}

// Links between the documents lead somewhere.
func TestDocumentsExist(t *testing.T) {
	for _, from := range []string{"README.md", "ARCHITECTURE.md", "docs/config.md", "docs/network.md", "docs/files.md", "docs/exit-codes.md"} {
		text, err := os.ReadFile(from)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, to := range regexp.MustCompile(`\b(docs/[a-z-]+\.md|ARCHITECTURE\.md)`).FindAllString(string(text), -1) {
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s names %s: %v", from, to, err)
			}
		}
	}
}
