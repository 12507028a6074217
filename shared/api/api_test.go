package api

import (
	"bytes"
	"encoding/json"
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write testdata anew")

func sample() Status {
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	return Status{
		Version:    "0.1.0",
		PID:        4711,
		Started:    at,
		Generation: Generation{Desired: 3, Reconciled: 2},
		Uplink:     Uplink{Name: "lima0", Address: "192.168.64.3", Network: "192.168.64.0/24"},
		Docker: Docker{
			Running: true, Version: "29.0.0", FirewallBackend: "nftables", LiveRestore: true, Restarts: 2,
			Network: "kind", Bridge: "br-kind", Subnet: "172.30.0.0/16", Access: "nat-unprotected",
		},
		Network: Network{
			InSync: true, LastApplied: at.Add(time.Minute), LastReason: "docker-start", Repairs: 1, LastRepairMillis: 21.5,
			Allow: []string{"192.168.64.0/24"}, Ranges: []string{"172.30.0.0/16", "10.101.0.0/16"},
			Rules: []Rule{{ID: RuleSNATExempt, Wanted: 2, Present: 1, Packets: 12345}},
		},
		Clusters:   []Cluster{{Name: "demo", Number: 99, Nodes: []string{"172.30.99.2"}, VIP: "172.30.99.200", Routed: "10.199.0.0/16", Demo: true}},
		Mirrors:    []Mirror{{Name: "mirror-docker-io", Address: "127.0.0.1:5030"}},
		Callers:    []Caller{{ID: "c1", Name: "mac", Address: "192.168.64.1"}},
		Conditions: []Condition{{Type: CondDocker, Status: True, Reason: "Running", Message: "Docker 29.0.0 answers"}},
	}
}

// The wire format is a contract between builds of different age: a golden that
// changes is a decision, not an accident.
func TestGoldens(t *testing.T) {
	status := sample()
	for name, value := range map[string]any{
		"status":     status,
		"event":      Event{Time: status.Started, Type: "status", Reason: "docker-start", Status: &status},
		"config-put": ConfigPut{Generation: 3, ETag: "0123", Changed: true},
		"error":      Error{Code: CodeInvalidConfig, Message: "vm.cpus: is 0", Hint: "correct it"},
	} {
		t.Run(name, func(t *testing.T) {
			everyFieldIsSet(t, reflect.ValueOf(value), name)
			got, err := json.MarshalIndent(value, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, '\n')
			path := filepath.Join("testdata", name+".json")
			if *update {
				if err := os.WriteFile(path, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(want, got) {
				t.Errorf("%s differs (go test -update writes it anew):\ngot\n%s\nwant\n%s", path, got, want)
			}
			back := reflect.New(reflect.TypeOf(value))
			dec := json.NewDecoder(bytes.NewReader(want))
			dec.DisallowUnknownFields()
			if err := dec.Decode(back.Interface()); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(back.Elem().Interface(), value) {
				t.Errorf("read back: %+v\nwant %+v", back.Elem(), value)
			}
		})
	}
}

// everyFieldIsSet keeps the sample complete, so that no field is left out of
// the goldens when it is zero.
func everyFieldIsSet(t *testing.T, v reflect.Value, path string) {
	t.Helper()
	switch v.Kind() {
	case reflect.Pointer:
		everyFieldIsSet(t, v.Elem(), path)
	case reflect.Slice:
		if v.Len() == 0 {
			t.Errorf("%s is empty in the sample", path)
		}
		for i := range v.Len() {
			everyFieldIsSet(t, v.Index(i), path)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			return
		}
		for i := range v.NumField() {
			everyFieldIsSet(t, v.Field(i), path+"."+v.Type().Field(i).Name)
		}
	default:
		if v.IsZero() {
			t.Errorf("%s has no value in the sample", path)
		}
	}
}

func TestHealthy(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*Status)
		want   bool
	}{
		{"as it should be", func(*Status) {}, true},
		{"no conditions", func(s *Status) { s.Conditions = nil }, true},
		{"rules differ", func(s *Status) { s.Network.InSync = false }, false},
		{"a condition is False", func(s *Status) { s.Conditions = append(s.Conditions, Condition{Type: CondUplink, Status: False}) }, false},
		{"a condition is Unknown", func(s *Status) { s.Conditions = append(s.Conditions, Condition{Type: CondUplink, Status: Unknown}) }, false},
	} {
		s := sample()
		tc.change(&s)
		if got := s.Healthy(); got != tc.want {
			t.Errorf("%s: Healthy() = %v", tc.name, got)
		}
	}
}

func TestErrorText(t *testing.T) {
	for e, want := range map[Error]string{
		{Code: CodeInternal, Message: "no space"}:                         "no space",
		{Code: CodeInternal, Message: "no space", Hint: "delete a thing"}: "no space\n  delete a thing",
	} {
		if got := e.Error(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// Identifiers are kebab-case (rules, error codes) or CamelCase (conditions),
// and no two constants of a kind are the same.
func TestIdentifiers(t *testing.T) {
	kebab, camel := regexp.MustCompile(`^[a-z]+(-[a-z]+)*$`), regexp.MustCompile(`^([A-Z][a-z]+)+$`)
	file, err := parser.ParseFile(token.NewFileSet(), "api.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	seen := map[string]string{}
	for _, d := range file.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, spec := range g.Specs {
			v := spec.(*ast.ValueSpec)
			name := v.Names[0].Name
			for kind, form := range map[string]*regexp.Regexp{"Rule": kebab, "Code": kebab, "Cond": camel} {
				if len(name) <= len(kind) || name[:len(kind)] != kind {
					continue
				}
				value, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
				if err != nil || !form.MatchString(value) {
					t.Errorf("%s = %q has the wrong form", name, value)
				}
				if other, again := seen[kind+value]; again {
					t.Errorf("%s and %s are both %q", name, other, value)
				}
				seen[kind+value] = name
				count[kind]++
			}
		}
	}
	for _, kind := range []string{"Rule", "Code", "Cond"} {
		if count[kind] < 5 {
			t.Errorf("found %d constants of kind %s: does this test still look at the right ones?", count[kind], kind)
		}
	}
}
