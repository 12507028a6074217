package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"klimax/shared/api"
	"klimax/shared/config"
	"klimax/shared/version"
)

const ours = "0.1.0"

// serve runs an agent's stand-in on a unix socket and returns its path.
func serve(t *testing.T, guest string, h http.HandlerFunc) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "guest.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if guest != "" {
			w.Header().Set(api.HeaderGuestVersion, guest)
		}
		h(w, r)
	})}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close() })
	return path
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

func TestCalls(t *testing.T) {
	cfg := config.Default()
	cfg.Network.DockerNetwork = "other"
	var seen []string
	path := serve(t, ours, func(w http.ResponseWriter, r *http.Request) {
		seen = append(seen, fmt.Sprintf("%s %s host=%s match=%s", r.Method, r.URL, r.Header.Get(api.HeaderHostVersion), r.Header.Get("If-Match")))
		switch r.Method + " " + r.URL.Path {
		case "GET /v1/status":
			answer(w, 200, api.Status{PID: 7, Uplink: api.Uplink{Name: "lima0"}})
		case "GET /v1/config":
			w.Header().Set("ETag", `"abc"`)
			answer(w, 200, cfg)
		case "PUT /v1/config":
			var got config.Config
			if err := json.NewDecoder(r.Body).Decode(&got); err != nil || got.ETag() != cfg.ETag() {
				t.Errorf("put %+v, %v", got, err)
			}
			answer(w, 200, api.ConfigPut{Generation: 3, ETag: "abd", Changed: true})
		}
	})
	c := Unix(path, ours)
	defer c.Close()
	if st, err := c.Status(t.Context()); err != nil || st.PID != 7 || st.Uplink.Name != "lima0" {
		t.Errorf("status %+v, %v", st, err)
	}
	got, etag, err := c.Config(t.Context())
	if err != nil || etag != "abc" || got.ETag() != cfg.ETag() {
		t.Errorf("config %+v, %q, %v", got, etag, err)
	}
	put, err := c.PutConfig(t.Context(), cfg, etag)
	if err != nil || put.Generation != 3 || !put.Changed {
		t.Errorf("put %+v, %v", put, err)
	}
	if _, err := c.PutConfig(t.Context(), cfg, ""); err != nil {
		t.Error(err)
	}
	want := []string{"GET /v1/status host=0.1.0 match=", "GET /v1/config host=0.1.0 match=",
		`PUT /v1/config host=0.1.0 match="abc"`, "PUT /v1/config host=0.1.0 match="}
	if fmt.Sprint(seen) != fmt.Sprint(want) {
		t.Errorf("requests %q, want %q", seen, want)
	}
}

func TestErrorsFromTheAgent(t *testing.T) {
	for _, code := range []string{api.CodeBadRequest, api.CodeInternal, api.CodePreconditionFailed,
		api.CodeInvalidConfig, api.CodeVersionMismatch, api.CodeUnavailable} {
		c := Unix(serve(t, ours, func(w http.ResponseWriter, _ *http.Request) {
			answer(w, 422, api.Error{Code: code, Message: "no", Hint: "do that"})
		}), ours)
		_, err := c.PutConfig(t.Context(), config.Default(), "x")
		var e *api.Error
		if !errors.As(err, &e) || e.Code != code || e.Message != "no" || e.Hint != "do that" {
			t.Errorf("%s: got %v", code, err)
		}
	}
	for name, c := range map[string]struct {
		guest string
		h     http.HandlerFunc
		want  string
	}{
		"older agent": {ours, http.NotFound, "the agent (klimax-guest 0.1.0) does not know GET /v1/status: it is older than this klimax\n  upgrade the guest"},
		"older agent in json": {ours, func(w http.ResponseWriter, _ *http.Request) {
			answer(w, 404, api.Error{Code: api.CodeNotFound, Message: "no such path"})
		}, "does not know GET /v1/status"},
		"nameless 404": {"", http.NotFound, "klimax-guest of an unknown version"},
		"text":         {ours, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "boom", 500) }, "500 Internal Server Error: boom"},
		"nothing":      {ours, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }, "503 Service Unavailable: (empty answer)"},
		"long": {ours, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, strings.Repeat("x", 5000), 500) },
			strings.Repeat("x", 200) + "…"},
		"json that is no error": {ours, func(w http.ResponseWriter, _ *http.Request) { answer(w, 500, []int{1}) }, "500 Internal Server Error: [1]"},
		"no json":               {ours, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") }, "not that of a klimax agent"},
		"another server":        {"", func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, api.Status{}) }, "it has no Klimax-Guest-Version header"},
	} {
		cl := Unix(serve(t, c.guest, c.h), ours)
		if _, err := cl.Status(t.Context()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
	}
}

func TestVersionMismatch(t *testing.T) {
	for _, c := range []struct {
		host, guest string
		status      int
		upgrade     version.Side // "" is compatible
	}{
		{"0.1.0", "0.1.9", 200, ""},
		{"0.1.0", "0.2.0", 200, version.Host},
		{"0.2.0", "0.1.0", 200, version.Guest},
		{"0.2.0", "0.1.0", 404, version.Guest},
		{"0.2.0", "dev", 200, ""},
	} {
		cl := Unix(serve(t, c.guest, func(w http.ResponseWriter, _ *http.Request) { answer(w, c.status, api.Status{}) }), c.host)
		_, err := cl.Status(t.Context())
		var m *version.MismatchError
		switch {
		case c.upgrade == "" && err != nil:
			t.Errorf("%v: %v", c, err)
		case c.upgrade != "" && (!errors.As(err, &m) || m.Upgrade != c.upgrade):
			t.Errorf("%v: got %v", c, err)
		}
	}
}

func TestUnreachable(t *testing.T) {
	dir := t.TempDir()
	dead := filepath.Join(dir, "dead.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		path string
		want []string
	}{
		"none":      {filepath.Join(dir, "none.sock"), []string{"there is no agent: the socket ", "none.sock does not exist", "systemctl start klimax-guest"}},
		"abandoned": {dead, []string{"nobody listens on the agent's socket ", "systemctl restart klimax-guest"}},
		"a file":    {file, []string{"is not the socket of an agent", "klimax --guest unix:///PATH"}},
	} {
		_, err := Unix(c.path, ours).Status(t.Context())
		var u *UnreachableError
		if !errors.As(err, &u) || u.Socket != c.path {
			t.Errorf("%s: got %v", name, err)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: got %v, want %q in it", name, err, w)
			}
		}
	}

	// Permission: as root the kernel lets everything pass, so the dialer says it.
	c := New(func(context.Context) (net.Conn, error) {
		return nil, &UnreachableError{Socket: "/run/klimax/guest.sock", Err: &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.EACCES)}}
	}, ours)
	if _, err := c.Status(t.Context()); err == nil || !strings.Contains(err.Error(), "usermod -aG klimax") {
		t.Errorf("permission: %v", err)
	}
	c = New(func(context.Context) (net.Conn, error) { return nil, errors.New("ssh is gone") }, ours)
	var u *UnreachableError
	if _, err := c.Status(t.Context()); !errors.As(err, &u) || u.Socket != "" || !strings.Contains(err.Error(), "ssh is gone") {
		t.Errorf("another dialer: %v", err)
	}
	// An agent that takes the connection and dies.
	path := filepath.Join(dir, "short.sock")
	l2, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l2.Close()
	go func() {
		for {
			conn, err := l2.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	if _, err := Unix(path, ours).Status(t.Context()); !errors.As(err, &u) {
		t.Errorf("hung up: %v", err)
	}
}

func TestSilentAgentAndCancel(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	path := serve(t, ours, func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-release:
		case <-r.Context().Done():
		}
	})
	c := Unix(path, ours)
	c.http.Transport.(*http.Transport).ResponseHeaderTimeout = 20 * time.Millisecond
	var u *UnreachableError
	if _, err := c.Status(t.Context()); !errors.As(err, &u) || !strings.Contains(err.Error(), "did not answer within") {
		t.Errorf("silent: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := Unix(path, ours).Status(ctx); !errors.Is(err, context.DeadlineExceeded) || errors.As(err, &u) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestEvents(t *testing.T) {
	path := serve(t, ours, func(w http.ResponseWriter, _ *http.Request) {
		for i := range 3 {
			fmt.Fprintf(w, `{"type":"status","reason":"r%d","status":{"pid":%d}}`+"\n", i, i)
			w.(http.Flusher).Flush()
		}
	})
	var got []string
	var last error
	for e, err := range Unix(path, ours).Events(t.Context()) {
		if last = err; err == nil {
			got = append(got, e.Reason)
		}
	}
	if fmt.Sprint(got) != "[r0 r1 r2]" || !errors.Is(last, io.ErrUnexpectedEOF) {
		t.Errorf("got %v, then %v", got, last)
	}
	for _, err := range Unix(path, ours).Events(t.Context()) {
		if err != nil {
			t.Errorf("broke off after the first: %v", err)
		}
		break
	}
	n := 0
	for _, err := range Unix(filepath.Join(t.TempDir(), "x"), ours).Events(t.Context()) {
		var u *UnreachableError
		if n++; !errors.As(err, &u) {
			t.Errorf("no agent: %v", err)
		}
	}
	if n != 1 {
		t.Errorf("%d errors", n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	hang := serve(t, ours, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, `{"type":"status"}`)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	for _, err := range Unix(hang, ours).Events(ctx) {
		if last = err; err == nil {
			cancel()
		}
	}
	if !errors.Is(last, context.Canceled) {
		t.Errorf("cancelled: %v", last)
	}
}
