package main

import (
	"context"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"klimax/shared/api"
)

// call runs the program and returns its exit code and what it printed.
func call(t *testing.T, args ...string) (code int, out, errOut string) {
	t.Helper()
	var o, e strings.Builder
	code = run(context.Background(), append([]string{"klimax-guest"}, args...), &o, &e, func(string) string { return "" })
	return code, o.String(), e.String()
}

func TestExitCodes(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none.sock")
	for _, c := range []struct {
		args string
		want int
		text string // on standard error
	}{
		{"--help", api.ExitOK, ""},
		{"help status", api.ExitOK, ""},
		{"help nosuch", api.ExitUsage, "no such command: nosuch"},
		{"statsu", api.ExitUsage, `no such command: statsu (did you mean "status"?)`},
		{"--nosuch", api.ExitUsage, "nosuch"},
		{"status extra", api.ExitUsage, `unexpected argument "extra"`},
		{"status -o yaml", api.ExitUsage, "choose text or json"},
		{"status --socket " + none, api.ExitUnreachable, "does not exist"},
		{"status --watch -o json --socket " + none, api.ExitUnreachable, "does not exist"},
		{"logs --socket " + none, api.ExitUnreachable, "does not exist"},
		{"logs -n x", api.ExitUsage, "invalid value"},
		{"network", api.ExitOK, ""},
		{"network nosuch", api.ExitUsage, "no such command: network nosuch"},
		{"network apply extra", api.ExitUsage, `unexpected argument "extra"`},
		{"network apply --timeout x", api.ExitUsage, "invalid value"},
		{"demo nosuch", api.ExitUsage, "no such command: demo nosuch"},
		{"completion tcsh", api.ExitUsage, "bash, zsh or fish"},
		{"completion bash extra", api.ExitUsage, "name one shell"},
		{"version extra", api.ExitUsage, "unexpected argument"},
	} {
		code, out, errOut := call(t, strings.Fields(c.args)...)
		if code != c.want || !strings.Contains(errOut, c.text) || (c.text == "") != (errOut == "") {
			t.Errorf("%s: exit %d, want %d; %q, want %q", c.args, code, c.want, errOut, c.text)
		}
		if code != api.ExitOK && out != "" {
			t.Errorf("%s: on standard output: %q", c.args, out)
		}
	}
	code, out, _ := call(t, "version", "-o", "json")
	if code != api.ExitOK || !json.Valid([]byte(out)) {
		t.Errorf("version: exit %d, %s", code, out)
	}
}
