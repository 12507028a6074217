// Package apiserver answers the agent's HTTP API under /v1 on a unix socket.
package apiserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"klimax/shared/api"
	"klimax/shared/config"
	"klimax/shared/version"
)

// Backend is what the API shows and changes.
type Backend interface {
	Status() api.Status
	// Follow calls f with the status at once and after every change.
	Follow(ctx context.Context, f func(reason string, s api.Status) error) error
	// Config returns the configuration with its secrets; the error is that of
	// an invalid file.
	Config() (config.Config, error)
	// PutConfig stores another one; a non-empty ifMatch must be the ETag of
	// the one it replaces.
	PutConfig(c config.Config, ifMatch string) (api.ConfigPut, error)
	// Logs copies the last n log lines (n < 0: all that are kept) and, with
	// follow, new ones until the context ends.
	Logs(ctx context.Context, w io.Writer, n int, follow bool, flush func()) error
}

// Options of Serve.
type Options struct {
	Backend Backend
	Log     *slog.Logger
}

// Limits of the server.
const (
	maxConfig     = 1 << 20
	headerTimeout = 5 * time.Second
	endTimeout    = 500 * time.Millisecond
)

// Group is the group whose members may use the socket.
const Group = "klimax"

// Listen makes the socket, 0660, owned by root and the group klimax where that
// exists. A socket file that nobody listens on is replaced.
func Listen(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("make the socket's directory: %w", err)
	}
	if st, err := os.Lstat(path); err == nil {
		if st.Mode()&os.ModeSocket == 0 {
			return nil, fmt.Errorf("%s exists and is no socket: remove it, or choose another --socket", path)
		}
		c, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			_ = c.Close()
			return nil, fmt.Errorf("somebody is listening on %s already: stop that agent, or choose another --socket", path)
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			return nil, fmt.Errorf("%s is in the way: %w", path, err)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove the socket of an agent that is gone: %w", err)
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	if err := protect(path); err != nil {
		_ = l.Close()
		return nil, err
	}
	return l, nil
}

func protect(path string) error {
	if g, err := user.LookupGroup(Group); err == nil {
		if gid, err := strconv.Atoi(g.Gid); err == nil {
			if err := os.Chown(path, -1, gid); err != nil {
				return fmt.Errorf("give %s to group %s: %w", path, Group, err)
			}
		}
	}
	return os.Chmod(path, 0o660)
}

// Serve answers until the context ends.
func Serve(ctx context.Context, l net.Listener, o Options) error {
	s := &server{o: o}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", s.status)
	mux.HandleFunc("GET /v1/events", s.events)
	mux.HandleFunc("GET /v1/config", s.getConfig)
	mux.HandleFunc("PUT /v1/config", s.putConfig)
	mux.HandleFunc("GET /v1/metrics", s.metrics)
	mux.HandleFunc("GET /v1/logs", s.logs)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.fail(w, &api.Error{Code: api.CodeNotFound, Message: "no such path: " + r.Method + " " + r.URL.Path})
	})
	srv := &http.Server{
		Handler: s.versions(mux), ReadHeaderTimeout: headerTimeout,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(l) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve the API: %w", err)
	case <-ctx.Done():
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	if srv.Shutdown(end) != nil {
		_ = srv.Close()
	}
	return nil
}

type server struct{ o Options }

// versions sends ours with every answer and refuses a host that is too old or
// too new, before anything is changed.
func (s *server) versions(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(api.HeaderGuestVersion, version.Version)
		if host := r.Header.Get(api.HeaderHostVersion); host != "" {
			if err := version.Compatible(host, version.Version); err != nil {
				s.fail(w, &api.Error{Code: api.CodeVersionMismatch, Message: err.Error()})
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

func (s *server) status(w http.ResponseWriter, _ *http.Request) {
	s.json(w, http.StatusOK, s.o.Backend.Status())
}

func (s *server) events(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/x-ndjson")
	enc := json.NewEncoder(w)
	flush := http.NewResponseController(w)
	_ = s.o.Backend.Follow(r.Context(), func(reason string, st api.Status) error {
		if err := enc.Encode(api.Event{Time: time.Now(), Type: "status", Reason: reason, Status: &st}); err != nil {
			return err
		}
		return flush.Flush()
	})
}

func (s *server) logs(w http.ResponseWriter, r *http.Request) {
	n := -1
	if v := r.URL.Query().Get("lines"); v != "" {
		var err error
		if n, err = strconv.Atoi(v); err != nil {
			s.fail(w, &api.Error{Code: api.CodeBadRequest, Message: "lines=" + v + " is not a number"})
			return
		}
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	flush := http.NewResponseController(w)
	_ = s.o.Backend.Logs(r.Context(), w, n, r.URL.Query().Get("follow") == "true", func() { _ = flush.Flush() })
}

func (s *server) getConfig(w http.ResponseWriter, _ *http.Request) {
	c, err := s.o.Backend.Config()
	if err != nil {
		s.fail(w, &api.Error{Code: api.CodeInvalidConfig, Message: err.Error(), Hint: "put a valid one: klimax up"})
		return
	}
	w.Header().Set("ETag", strconv.Quote(c.ETag()))
	s.json(w, http.StatusOK, c.Redacted())
}

func (s *server) putConfig(w http.ResponseWriter, r *http.Request) {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxConfig))
	if err != nil {
		s.fail(w, &api.Error{Code: api.CodeBadRequest, Message: "read the configuration: " + err.Error()})
		return
	}
	c, err := config.Parse("request", b)
	if err != nil {
		s.fail(w, &api.Error{Code: api.CodeInvalidConfig, Message: err.Error()})
		return
	}
	out, err := s.o.Backend.PutConfig(c, strings.Trim(r.Header.Get("If-Match"), `"`))
	if err != nil {
		s.fail(w, err)
		return
	}
	w.Header().Set("ETag", strconv.Quote(out.ETag))
	s.json(w, http.StatusOK, out)
}

func (s *server) json(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(v)
}

func (s *server) fail(w http.ResponseWriter, err error) {
	var e *api.Error
	if !errors.As(err, &e) {
		s.o.Log.Error("request failed", "error", err)
		e = &api.Error{Code: api.CodeInternal, Message: err.Error()}
	}
	code := map[string]int{
		api.CodeBadRequest: http.StatusBadRequest, api.CodeNotFound: http.StatusNotFound,
		api.CodePreconditionFailed: http.StatusPreconditionFailed, api.CodeInvalidConfig: http.StatusUnprocessableEntity,
		api.CodeVersionMismatch: http.StatusConflict, api.CodeUnavailable: http.StatusServiceUnavailable,
	}[e.Code]
	if code == 0 {
		code = http.StatusInternalServerError
	}
	s.json(w, code, e)
}
