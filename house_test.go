// Package klimax_test guards the rules of the house that no compiler knows:
// who may import whom, and what belongs in which folder.
package klimax_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// source is one parsed Go file of the module, whatever it is built for.
type source struct {
	path  string // from the module's root, with slashes
	file  *ast.File
	fset  *token.FileSet
	lines int
}

func (s source) dir() string  { return path.Dir(s.path) }
func (s source) isTest() bool { return strings.HasSuffix(s.path, "_test.go") }

// area is the part of the house that s belongs to: "guest", "cmd/klimax".
func (s source) area() string { return areaOf(s.dir()) }

func areaOf(dir string) string {
	parts := strings.Split(dir, "/")
	if parts[0] == "cmd" && len(parts) > 1 {
		return parts[0] + "/" + parts[1]
	}
	return parts[0]
}

// mayImport holds the arrows between the areas. An area that is missing here,
// or an arrow to one, is an error.
func mayImport(area string) []string {
	return map[string][]string{
		".":                {},
		"shared":           {"shared"},
		"systemd":          {"systemd", "shared"},
		"cloud-init":       {"cloud-init", "shared"},
		"provision":        {"provision", "shared", "systemd"},
		"guest":            {"guest", "shared", "systemd", "provision"},
		"host":             {"host", "shared", "cloud-init", "provision"},
		"cmd/klimax":       {"cmd/klimax", "host", "shared", "cloud-init", "provision"},
		"cmd/klimax-guest": {"cmd/klimax-guest", "guest", "shared", "systemd", "provision"},
		"test":             {"test", "tools", "host", "guest", "provision", "systemd", "cloud-init", "shared"},
		"tools":            {"tools", "shared"},
	}[area]
}

// free are the areas that are programs or test beds: they print, read the
// environment, exit and run commands as they need.
func free(area string) bool {
	return strings.HasPrefix(area, "cmd/") || area == "test" || area == "tools"
}

// runsCommands are the packages that may use os/exec, with what lies below.
func runsCommands(dir string) bool {
	for _, allowed := range []string{"host/route", "host/vm", "provision", "guest/cluster", "test", "tools"} {
		if dir == allowed || strings.HasPrefix(dir, allowed+"/") {
			return true
		}
	}
	return false
}

// isPure reports whether s must do without system, network and clock: the
// packages of plain data, and the files that compute what is wanted.
func (s source) isPure() bool {
	switch s.dir() {
	case "shared/config", "shared/netplan", "shared/api":
		return true
	}
	return strings.HasPrefix(path.Base(s.path), "desired") && !free(s.area())
}

func (s source) imports() []string {
	var list []string
	for _, i := range s.file.Imports {
		p, err := strconv.Unquote(i.Path.Value)
		if err != nil {
			panic(err) // the parser has accepted it
		}
		list = append(list, p)
	}
	return list
}

// name returns under which name s knows the imported package, "" if it does not.
func (s source) name(imported string) string {
	for _, i := range s.file.Imports {
		if i.Path.Value != strconv.Quote(imported) {
			continue
		}
		if i.Name != nil {
			return i.Name.Name
		}
		return path.Base(imported)
	}
	return ""
}

// uses returns the places where s calls or names a member of the imported
// package that matches.
func (s source) uses(imported string, members *regexp.Regexp) []string {
	pkg := s.name(imported)
	if pkg == "" {
		return nil
	}
	var found []string
	ast.Inspect(s.file, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok || !members.MatchString(sel.Sel.Name) {
			return true
		}
		if x, ok := sel.X.(*ast.Ident); ok && x.Name == pkg {
			found = append(found, fmt.Sprintf("%s:%d: %s.%s", s.path, s.fset.Position(sel.Pos()).Line, imported, sel.Sel.Name))
		}
		return true
	})
	return found
}

var (
	prints    = regexp.MustCompile(`^Print(f|ln)?$`)
	processes = regexp.MustCompile(`^(Exit|Getenv|LookupEnv|ExpandEnv|Setenv|Unsetenv|Stdin|Stdout|Stderr|Args)$`)
	wholeEnv  = regexp.MustCompile(`^Environ$`) // what a child process is given
	clocks    = regexp.MustCompile(`^(Now|Since|Until|Sleep|After|AfterFunc|Tick|NewTimer|NewTicker)$`)
	dustbins  = regexp.MustCompile(`^(common|helpers?|misc|base|.*utils?)$`)
)

// violations returns everything in files that breaks a rule of the house.
func violations(files []source) []string {
	var bad []string
	docs := map[string][]string{} // files with a package comment, by directory
	for _, s := range files {
		if _, seen := docs[s.dir()]; !seen && !s.isTest() {
			docs[s.dir()] = nil
		}
		if !s.isTest() && s.file.Doc != nil {
			docs[s.dir()] = append(docs[s.dir()], s.path)
			name := s.file.Name.Name
			if text := s.file.Doc.Text(); name != "main" && !strings.HasPrefix(text, "Package "+name+" ") {
				bad = append(bad, fmt.Sprintf("%s: the package comment must begin with %q", s.path, "Package "+name))
			}
		}
		bad = append(bad, importViolations(s)...)
		bad = append(bad, contentViolations(s)...)
	}
	for dir, with := range docs {
		if len(with) != 1 {
			bad = append(bad, fmt.Sprintf("%s: %d package comments, want one: %v", dir, len(with), with))
		}
	}
	slices.Sort(bad)
	return bad
}

func importViolations(s source) []string {
	var bad []string
	allowed := mayImport(s.area())
	if allowed == nil {
		bad = append(bad, fmt.Sprintf("%s: the folder %s has no place in the house", s.path, s.area()))
	}
	for _, p := range s.imports() {
		if to, ok := strings.CutPrefix(p, "klimax/"); ok {
			area := areaOf(to)
			fine := slices.Contains(allowed, area) || s.isTest() && area == "test"
			if !fine {
				bad = append(bad, fmt.Sprintf("%s: %s must not import %s", s.path, s.area(), p))
			}
			if to == "guest/agent" && s.area() != "cmd/klimax-guest" && s.area() != "test" && s.dir() != to {
				bad = append(bad, fmt.Sprintf("%s: nobody but the program imports %s", s.path, p))
			}
		}
		if s.isTest() {
			continue
		}
		switch {
		case p == "os/exec" && !runsCommands(s.dir()):
			bad = append(bad, fmt.Sprintf("%s: os/exec has no place here", s.path))
		case p == "log":
			bad = append(bad, fmt.Sprintf("%s: log with an injected *slog.Logger instead of package log", s.path))
		case s.isPure() && slices.Contains([]string{"os", "os/exec", "net", "net/http", "syscall", "golang.org/x/sys/unix"}, p):
			bad = append(bad, fmt.Sprintf("%s: is pure and must not import %s", s.path, p))
		}
	}
	return bad
}

func contentViolations(s source) []string {
	var bad []string
	if dustbins.MatchString(path.Base(s.dir())) {
		bad = append(bad, fmt.Sprintf("%s: %q says nothing about what is in it", s.path, path.Base(s.dir())))
	}
	if limit := map[bool]int{false: 500, true: 700}[s.isTest()]; s.lines > limit {
		bad = append(bad, fmt.Sprintf("%s: %d lines, at most %d", s.path, s.lines, limit))
	}
	if s.isTest() {
		return bad
	}
	if !free(s.area()) {
		for _, u := range append(s.uses("fmt", prints), s.uses("os", processes)...) {
			bad = append(bad, u+" belongs in cmd only")
		}
	}
	if !runsCommands(s.dir()) && !free(s.area()) {
		for _, u := range s.uses("os", wholeEnv) {
			bad = append(bad, u+" belongs where commands are run")
		}
	}
	if s.isPure() {
		for _, u := range s.uses("time", clocks) {
			bad = append(bad, u+": is pure and must not look at the clock")
		}
	}
	for _, d := range s.file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil && d.Name.Name == "init" {
				bad = append(bad, fmt.Sprintf("%s:%d: init()", s.path, s.fset.Position(d.Pos()).Line))
			}
		case *ast.GenDecl:
			if d.Tok == token.VAR && !free(s.area()) {
				bad = append(bad, stateViolations(s, d)...)
			}
		}
	}
	return bad
}

// stateViolations finds package-level variables that can only be meant to
// change: without a value, made, or holding a lock. Tables, errors, patterns
// and embedded files are fine.
func stateViolations(s source, d *ast.GenDecl) []string {
	var bad []string
	for _, spec := range d.Specs {
		v := spec.(*ast.ValueSpec)
		if v.Names[0].Name == "_" || embeds(d.Doc) || embeds(v.Doc) {
			continue
		}
		isState := len(v.Values) == 0
		for _, value := range v.Values {
			switch e := value.(type) {
			case *ast.CallExpr:
				if f, ok := e.Fun.(*ast.Ident); ok && (f.Name == "make" || f.Name == "new") {
					isState = true
				}
			case *ast.UnaryExpr:
				isState = isState || e.Op == token.AND
			case *ast.CompositeLit:
				if sel, ok := e.Type.(*ast.SelectorExpr); ok {
					x, ok := sel.X.(*ast.Ident)
					isState = isState || ok && (x.Name == "sync" || x.Name == "atomic")
				}
			}
		}
		if isState {
			bad = append(bad, fmt.Sprintf("%s:%d: %s is package-level state", s.path, s.fset.Position(v.Pos()).Line, v.Names[0].Name))
		}
	}
	return bad
}

func embeds(doc *ast.CommentGroup) bool {
	return doc != nil && slices.ContainsFunc(doc.List, func(c *ast.Comment) bool { return strings.HasPrefix(c.Text, "//go:embed") })
}

func parse(t *testing.T, fset *token.FileSet, name string, text []byte) source {
	t.Helper()
	file, err := parser.ParseFile(fset, name, text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	return source{path: name, file: file, fset: fset, lines: strings.Count(string(text), "\n")}
}

// all returns every Go file of this module, for every platform and tag.
func all(t *testing.T) []source {
	t.Helper()
	var files []source
	fset := token.NewFileSet()
	err := filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := filepath.ToSlash(p)
		if d.IsDir() {
			if name != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || name == "bin") {
				return fs.SkipDir
			}
			if _, err := os.Stat(filepath.Join(p, "go.mod")); err == nil && name != "." {
				return fs.SkipDir // a module of its own
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		text, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		files = append(files, parse(t, fset, name, text))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestHouse(t *testing.T) {
	files := all(t)
	if len(files) < 20 {
		t.Fatalf("found only %d Go files: does this test run at the module's root?", len(files))
	}
	for _, v := range violations(files) {
		t.Error(v)
	}
}

// Every rule must be able to fail.
func TestHouseFindsWhatIsWrong(t *testing.T) {
	const doc = "// Package x does x.\npackage x\n"
	for _, tc := range []struct{ name, path, text, want string }{
		{"fine", "guest/x/x.go", doc + "import _ \"klimax/shared/config\"\nvar e = f()\nvar _ I = T{}\n//go:embed a\nvar a []byte\n", ""},
		{"fine darwin", "host/x/x_darwin.go", doc + "import _ \"klimax/shared/config\"\n", ""},
		{"fine program", "cmd/klimax/main.go", "// Klimax is a program.\npackage main\nimport (\"fmt\"; \"os\")\nfunc main() { fmt.Println(os.Args); os.Exit(1) }\n", ""},
		{"fine route", "host/route/x.go", doc + "import _ \"os/exec\"\n", ""},
		{"fine test file", "guest/x/x_test.go", "package x\nimport (_ \"os/exec\"; _ \"klimax/test/lab\")\n", ""},
		{"no comment", "guest/x/x.go", "package x\n", "guest/x: 0 package comments"},
		{"wrong comment", "guest/x/x.go", "// X does x.\npackage x\n", "must begin with \"Package x\""},
		{"guest to host", "guest/x/x.go", doc + "import _ \"klimax/host/up\"\n", "guest must not import klimax/host/up"},
		{"host to guest for macOS", "host/x/x_darwin.go", "//go:build darwin\n\n" + doc + "import _ \"klimax/guest/facts\"\n", "host must not import klimax/guest/facts"},
		{"shared to provision", "shared/x/x.go", doc + "import _ \"klimax/provision\"\n", "shared must not import klimax/provision"},
		{"provision to guest", "provision/x.go", doc + "import _ \"klimax/guest/network\"\n", "provision must not import"},
		{"program to the other side", "cmd/klimax/main.go", "// Klimax is a program.\npackage main\nimport _ \"klimax/guest/facts\"\n", "cmd/klimax must not import klimax/guest/facts"},
		{"product to test", "guest/x/x.go", doc + "import _ \"klimax/test/lab\"\n", "guest must not import klimax/test/lab"},
		{"test file to the other side", "guest/x/x_test.go", "package x\nimport _ \"klimax/host/up\"\n", "guest must not import klimax/host/up"},
		{"agent", "guest/x/x.go", doc + "import _ \"klimax/guest/agent\"\n", "nobody but the program imports klimax/guest/agent"},
		{"unknown folder", "pkg/x/x.go", doc, "no place in the house"},
		{"dustbin", "guest/netutil/x.go", "// Package netutil is.\npackage netutil\n", "says nothing"},
		{"os/exec", "guest/x/x.go", doc + "import _ \"os/exec\"\n", "os/exec has no place"},
		{"os/exec in a program", "cmd/klimax/main.go", "// Klimax is a program.\npackage main\nimport _ \"os/exec\"\n", "os/exec has no place"},
		{"log", "guest/x/x.go", doc + "import _ \"log\"\n", "injected"},
		{"print", "guest/x/x.go", doc + "import \"fmt\"\nfunc f() { fmt.Println() }\n", "guest/x/x.go:4: fmt.Println belongs in cmd only"},
		{"print by another name", "guest/x/x.go", doc + "import p \"fmt\"\nfunc f() { p.Print() }\n", "fmt.Print belongs"},
		{"environment", "host/x/x.go", doc + "import \"os\"\nvar home = os.Getenv(\"HOME\")\n", "os.Getenv belongs in cmd only"},
		{"whole environment", "host/x/x.go", doc + "import \"os\"\nvar e = os.Environ()\n", "os.Environ belongs where commands are run"},
		{"fine child environment", "provision/x.go", doc + "import \"os\"\nvar e = os.Environ()\n", ""},
		{"exit", "shared/x/x.go", doc + "import \"os\"\nfunc f() { os.Exit(1) }\n", "os.Exit belongs"},
		{"config and os", "shared/config/x.go", "// Package config is.\npackage config\nimport _ \"os\"\n", "is pure and must not import os"},
		{"netplan and the clock", "shared/netplan/x.go", "// Package netplan is.\npackage netplan\nimport \"time\"\nvar t = time.Now()\n", "must not look at the clock"},
		{"desired and net", "guest/x/desired.go", doc + "import _ \"net\"\n", "is pure and must not import net"},
		{"init", "guest/x/x.go", doc + "func init() {}\n", "x.go:3: init()"},
		{"long", "guest/x/x.go", doc + strings.Repeat("//\n", 499), "501 lines, at most 500"},
		{"long test", "guest/x/x_test.go", "package x\n" + strings.Repeat("//\n", 700), "701 lines, at most 700"},
		{"state", "guest/x/x.go", doc + "var n int\n", "n is package-level state"},
		{"made state", "guest/x/x.go", doc + "var m = make(map[string]int)\n", "m is package-level state"},
		{"lock", "guest/x/x.go", doc + "import \"sync\"\nvar mu = sync.Mutex{}\n", "mu is package-level state"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := violations([]source{parse(t, token.NewFileSet(), tc.path, []byte(tc.text))})
			switch {
			case tc.want == "" && len(got) > 0:
				t.Errorf("finds fault with what is right: %v", got)
			case tc.want != "" && (len(got) != 1 || !strings.Contains(got[0], tc.want)):
				t.Errorf("got %q, want one with %q", got, tc.want)
			}
		})
	}
	two := []source{
		parse(t, token.NewFileSet(), "guest/x/x.go", []byte(doc)),
		parse(t, token.NewFileSet(), "guest/x/x_linux.go", []byte(doc)),
	}
	if got := violations(two); len(got) != 1 || !strings.Contains(got[0], "2 package comments") {
		t.Errorf("two package comments: %q", got)
	}
}
