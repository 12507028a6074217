package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"klimax/shared/api"
	"klimax/shared/client"
	"klimax/shared/config"
	"klimax/shared/version"
)

type fakeBackend struct {
	status  api.Status
	config  config.Config
	invalid error
	put     config.Config
	ifMatch string
	putErr  error
}

func (b *fakeBackend) Status() api.Status { return b.status }

func (b *fakeBackend) Follow(ctx context.Context, f func(string, api.Status) error) error {
	if err := f("first", b.status); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func (b *fakeBackend) Config() (config.Config, error) { return b.config, b.invalid }

func (b *fakeBackend) PutConfig(c config.Config, ifMatch string) (api.ConfigPut, error) {
	b.put, b.ifMatch = c, ifMatch
	return api.ConfigPut{Generation: 7, ETag: "new", Changed: true}, b.putErr
}

func (b *fakeBackend) Logs(_ context.Context, w io.Writer, n int, follow bool, flush func()) error {
	_ = json.NewEncoder(w).Encode([]any{n, follow})
	flush()
	return nil
}

func serve(t *testing.T, b *fakeBackend) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "g.sock")
	l, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, l, Options{Backend: b, Log: slog.New(slog.DiscardHandler)}) }()
	t.Cleanup(func() {
		begin := time.Now()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if d := time.Since(begin); d > 900*time.Millisecond {
			t.Errorf("the end took %v", d)
		}
	})
	return socket
}

func TestAPI(t *testing.T) {
	b := &fakeBackend{status: api.Status{Version: "x", Network: api.Network{InSync: true}}, config: config.Default()}
	b.config.Registries.Mirrors[0].Username, b.config.Registries.Mirrors[0].Password = "me", "hunter2"
	socket := serve(t, b)
	c := client.Unix(socket, version.Version)
	if s, err := c.Status(t.Context()); err != nil || s.Version != "x" {
		t.Errorf("status: %+v %v", s, err)
	}
	cfg, etag, err := c.Config(t.Context())
	if err != nil || etag != b.config.ETag() {
		t.Errorf("config: %s %v", etag, err)
	}
	if cfg.Registries.Mirrors[0].Password != config.Hidden {
		t.Errorf("the password is answered: %q", cfg.Registries.Mirrors[0].Password)
	}
	put, err := c.PutConfig(t.Context(), b.config, etag)
	if err != nil || put.Generation != 7 || b.ifMatch != etag || b.put.Registries.Mirrors[0].Password != "hunter2" {
		t.Errorf("put: %+v %q %v", put, b.ifMatch, err)
	}
	for e, err := range c.Events(t.Context()) {
		if err != nil || e.Reason != "first" || e.Status == nil || e.Status.Version != "x" {
			t.Errorf("event: %+v %v", e, err)
		}
		break
	}
	var log strings.Builder
	if err := c.Logs(t.Context(), &log, 5, true); err != nil || log.String() != "[5,true]\n" {
		t.Errorf("logs: %q %v", log.String(), err)
	}
	// open streams must not keep the end waiting: see serve
	go func() {
		for range c.Events(context.Background()) {
		}
	}()
	time.Sleep(20 * time.Millisecond)
}

func raw(t *testing.T, socket, method, path, body string, header ...string) (int, string) {
	t.Helper()
	h := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	req, err := http.NewRequest(method, "http://g"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := h.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.Header.Get(api.HeaderGuestVersion) != version.Version {
		t.Errorf("%s %s: no version in the answer", method, path)
	}
	text, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text)
}

func TestAPIErrors(t *testing.T) {
	b := &fakeBackend{config: config.Default()}
	socket := serve(t, b)
	for _, c := range []struct {
		name, method, path, body string
		header                   []string
		putErr                   error
		invalid                  error
		status                   int
		has                      string
	}{
		{name: "unknown path", method: "GET", path: "/v1/nonsense", status: 404, has: api.CodeNotFound},
		{name: "wrong method", method: "DELETE", path: "/v1/status", status: 404, has: api.CodeNotFound},
		{name: "unknown key", method: "PUT", path: "/v1/config", body: `{"netwrok":{}}`, status: 422, has: "netwrok"},
		{name: "not JSON", method: "PUT", path: "/v1/config", body: `{`, status: 422, has: api.CodeInvalidConfig},
		{name: "too large", method: "PUT", path: "/v1/config", body: strings.Repeat(" ", maxConfig+1), status: 400, has: api.CodeBadRequest},
		{name: "stale", method: "PUT", path: "/v1/config", body: `{}`, putErr: &api.Error{Code: api.CodePreconditionFailed, Message: "m"}, status: 412, has: api.CodePreconditionFailed},
		{name: "disk", method: "PUT", path: "/v1/config", body: `{}`, putErr: errors.New("no space"), status: 500, has: "no space"},
		{name: "invalid file", method: "GET", path: "/v1/config", invalid: errors.New("line 3"), status: 422, has: "line 3"},
		{name: "lines", method: "GET", path: "/v1/logs?lines=many", status: 400, has: "many"},
		{name: "other version", method: "GET", path: "/v1/status", header: []string{api.HeaderHostVersion, "99.0.0"}, status: 409, has: "upgrade the guest"},
	} {
		b.putErr, b.invalid = c.putErr, c.invalid
		code, text := raw(t, socket, c.method, c.path, c.body, c.header...)
		if code != c.status || !strings.Contains(text, c.has) {
			t.Errorf("%s: %d %s", c.name, code, text)
		}
		var e api.Error
		if err := json.Unmarshal([]byte(text), &e); err != nil || e.Code == "" || e.Message == "" {
			t.Errorf("%s: not an error body: %s", c.name, text)
		}
	}
}

func TestListen(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "sub", "g.sock")
	l, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(socket); err != nil || st.Mode().Perm() != 0o660 {
		t.Errorf("mode %v %v", st.Mode(), err)
	}
	if _, err := Listen(socket); err == nil || !strings.Contains(err.Error(), "already") {
		t.Errorf("a socket in use: %v", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	_ = l.Close()
	if l, err = Listen(socket); err != nil {
		t.Errorf("a dead socket file: %v", err)
	} else {
		_ = l.Close()
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(file); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("a file: %v", err)
	}
	if b, _ := os.ReadFile(file); string(b) != "precious" {
		t.Error("the file was touched")
	}
}

func TestMetrics(t *testing.T) {
	text := metricsText(api.Status{
		Network: api.Network{InSync: true, Repairs: 3, LastRepairMillis: 12.5, Rules: []api.Rule{{ID: api.RuleGuard, Packets: 42}}},
		Docker:  api.Docker{Running: true, Restarts: 2},
		Conditions: []api.Condition{{Type: api.CondDocker, Status: api.True, Reason: "OK"},
			{Type: api.CondDockerNetwork, Status: api.Unknown, Reason: "NoEngine"}},
	})
	for _, want := range []string{
		"\nklimax_network_in_sync 1\n", "\nklimax_network_repairs_total 3\n", "\nklimax_network_last_repair_seconds 0.0125\n",
		"\nklimax_rule_packets_total{rule=\"guard\"} 42\n", "\nklimax_docker_restarts_total 2\n",
		"\nklimax_condition{type=\"DockerNetworkReady\",reason=\"NoEngine\"} -1\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
}
