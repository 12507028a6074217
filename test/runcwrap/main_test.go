//go:build linux

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const spec = `{"process":{"rlimits":[{"type":"RLIMIT_NOFILE","hard":18446744073709551615}],"capabilities":{"bounding":["CAP_CHOWN","CAP_SYS_RESOURCE"],"effective":["CAP_SYS_RESOURCE"]}},"linux":{"namespaces":[{"type":"pid"},{"type":"time"},{"type":"network","path":"/x"}]}}`

func TestRewrite(t *testing.T) {
	for _, lacks := range []bool{false, true} {
		p := filepath.Join(t.TempDir(), "config.json")
		os.WriteFile(p, []byte(spec), 0o600)
		if err := rewrite(p, func(m map[string]any) { strip(m, lacks) }); err != nil {
			t.Fatal(err)
		}
		b, _ := os.ReadFile(p)
		if strings.Contains(string(b), `"time"`) || !strings.Contains(string(b), `"pid"`) || !strings.Contains(string(b), `"/x"`) {
			t.Errorf("namespaces: %s", b)
		}
		if strings.Contains(string(b), "CAP_SYS_RESOURCE") == lacks || !strings.Contains(string(b), "CAP_CHOWN") {
			t.Errorf("lacks %v: capabilities: %s", lacks, b)
		}
		if !strings.Contains(string(b), "18446744073709551615") {
			t.Errorf("a 64-bit number lost digits: %s", b)
		}
		if !json.Valid(b) {
			t.Errorf("not JSON: %s", b)
		}
	}
	if err := rewrite(filepath.Join(t.TempDir(), "none"), nil); err != nil {
		t.Errorf("a missing file is runc's to report: %v", err)
	}
	p := filepath.Join(t.TempDir(), "config.json")
	os.WriteFile(p, []byte("{"), 0o600)
	if err := rewrite(p, nil); err == nil || !strings.Contains(err.Error(), p) {
		t.Errorf("broken file: %v", err)
	}
}

func TestOption(t *testing.T) {
	for _, tt := range []struct{ args, want string }{
		{"--root /r create --bundle /b id", "/b"},
		{"create --bundle=/b id", "/b"},
		{"create -b /b id", "/b"},
		{"create id", ""},
		{"create --bundle", ""},
	} {
		if got := option(strings.Fields(tt.args), "--bundle", "-b"); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.args, got, tt.want)
		}
	}
}

func TestLacksSysResource(t *testing.T) {
	for content, want := range map[string]bool{
		"Name:\tx\nCapBnd:\t000001ffffffffff\n": false,
		"Name:\tx\nCapBnd:\t000001fffeffffff\n": true,
	} {
		p := filepath.Join(t.TempDir(), "status")
		os.WriteFile(p, []byte(content), 0o600)
		if got, err := lacksSysResource(p); err != nil || got != want {
			t.Errorf("%q: %v, %v; want %v", content, got, err, want)
		}
	}
	p := filepath.Join(t.TempDir(), "status")
	os.WriteFile(p, []byte("Name:\tx\n"), 0o600)
	if _, err := lacksSysResource(p); err == nil {
		t.Error("no error without the line")
	}
}
