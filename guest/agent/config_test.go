package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"klimax/guest/state"
	"klimax/shared/config"
)

func store(t *testing.T) *configStore {
	t.Helper()
	dir := t.TempDir()
	return &configStore{path: filepath.Join(dir, "etc", "klimax.yaml"), dir: state.Dir(filepath.Join(dir, "state"))}
}

func TestConfigStore(t *testing.T) {
	s := store(t)
	c, err := s.load()
	if err != nil || c.ETag() != config.Default().ETag() {
		t.Fatalf("no file: %v", err)
	}
	c.Registries.Mirrors[0].Username, c.Registries.Mirrors[0].Password = "me", "hunter2"
	c.Network.RoutePods = false
	if _, err := s.put(c); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(s.path)
	if err != nil || strings.Contains(string(text), "hunter2") || !strings.Contains(string(text), "routePods: false") {
		t.Errorf("%v\n%s", err, text)
	}
	if st, err := os.Stat(s.dir.Secrets()); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("secrets: %v %v", st, err)
	}
	// read again, as the next agent does
	again := &configStore{path: s.path, dir: s.dir}
	c2, err := again.load()
	if err != nil || c2.ETag() != c.ETag() || c2.Registries.Mirrors[0].Password != "hunter2" {
		t.Errorf("read again: %+v %v", c2.Registries.Mirrors[0], err)
	}
	// what was answered as *** comes back as it was
	c3, err := again.put(c2.Redacted())
	if err != nil || c3.Registries.Mirrors[0].Password != "hunter2" {
		t.Errorf("put back redacted: %+v %v", c3.Registries.Mirrors[0], err)
	}
	// and a password that is taken out is gone from the disk
	c3.Registries.Mirrors[0].Password = ""
	if _, err := again.put(c3); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(s.dir.Secrets()); strings.Contains(string(b), "hunter2") {
		t.Errorf("the password is still stored: %s", b)
	}
}

func TestConfigStoreBroken(t *testing.T) {
	s := store(t)
	if err := state.WriteFile(s.path, []byte("netwrok: {}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := s.load(); err == nil || !strings.Contains(err.Error(), "klimax.yaml:1") {
		t.Errorf("%v", err)
	}
	if _, err := s.get(); err == nil {
		t.Error("a broken file gives a configuration")
	}
	if _, err := s.put(config.Default()); err != nil {
		t.Error(err)
	}
	if _, err := s.get(); err != nil {
		t.Errorf("after a put: %v", err)
	}
	if err := state.WriteFile(s.dir.Secrets(), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.load(); err == nil || !strings.Contains(err.Error(), "secrets.json") {
		t.Errorf("broken secrets: %v", err)
	}
}
