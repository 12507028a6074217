// Package client is the typed client of the agent's HTTP API under /v1, over
// whatever connection the caller can dial.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"mime"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"klimax/shared/api"
	"klimax/shared/config"
	"klimax/shared/version"
)

// headerTimeout is how long an agent that took the connection may take to
// begin its answer; it answers within milliseconds unless it hangs.
const headerTimeout = 15 * time.Second

// bodyLimit bounds an answer that is read at once, in bytes. A status with 99
// clusters has some 100 kB.
const bodyLimit = 16 << 20

// Client talks to one agent. Make it with New or Unix; it may be used by
// several goroutines.
type Client struct {
	http    *http.Client
	version string
}

// New returns a client that dials each connection with dial. hostVersion is
// sent with each request; an answer from a guest of a version that does not go
// with it is an error (*version.MismatchError) whatever it says. A failed dial
// comes back as an *UnreachableError; dial may return one itself to name the
// socket.
func New(dial func(ctx context.Context) (net.Conn, error), hostVersion string) *Client {
	return &Client{version: hostVersion, http: &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			conn, err := dial(ctx)
			var u *UnreachableError
			if err != nil && !errors.As(err, &u) {
				err = &UnreachableError{Err: err}
			}
			return conn, err
		},
		ResponseHeaderTimeout: headerTimeout,
		DisableCompression:    true,
	}}}
}

// Unix returns a client for the agent that listens on a unix socket.
func Unix(path, hostVersion string) *Client {
	return New(func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", path)
		if err == nil {
			return conn, nil
		}
		// A plain file refuses connections just as an abandoned socket does.
		if st, serr := os.Stat(path); serr == nil && st.Mode()&os.ModeSocket == 0 {
			err = syscall.ENOTSOCK
		}
		return nil, &UnreachableError{Socket: path, Err: err}
	}, hostVersion)
}

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Status asks for the state of the guest.
func (c *Client) Status(ctx context.Context) (api.Status, error) {
	var st api.Status
	_, err := c.call(ctx, http.MethodGet, "/v1/status", nil, nil, &st)
	return st, err
}

// Config asks for the guest's configuration, secrets hidden, and its ETag,
// which is that of the configuration with secrets.
func (c *Client) Config(ctx context.Context) (config.Config, string, error) {
	var cfg config.Config
	h, err := c.call(ctx, http.MethodGet, "/v1/config", nil, nil, &cfg)
	return cfg, strings.Trim(h.Get("ETag"), `"`), err
}

// PutConfig replaces the guest's configuration. With ifMatch, an ETag, it does
// so only while the guest still has that one; else the error is an *api.Error
// with CodePreconditionFailed.
func (c *Client) PutConfig(ctx context.Context, cfg config.Config, ifMatch string) (api.ConfigPut, error) {
	var out api.ConfigPut
	body, err := json.Marshal(cfg)
	if err != nil {
		return out, fmt.Errorf("encoding the configuration: %w", err)
	}
	h := http.Header{"Content-Type": {"application/json"}}
	if ifMatch != "" {
		h.Set("If-Match", `"`+ifMatch+`"`)
	}
	_, err = c.call(ctx, http.MethodPut, "/v1/config", h, body, &out)
	return out, err
}

// Events follows the guest's events, the first one being its state at once.
// The sequence ends with an error: io.ErrUnexpectedEOF when the agent ended
// the stream, the context's when that is done.
func (c *Client) Events(ctx context.Context) iter.Seq2[api.Event, error] {
	return func(yield func(api.Event, error) bool) {
		resp, err := c.do(ctx, http.MethodGet, "/v1/events", nil, nil)
		if err != nil {
			yield(api.Event{}, err)
			return
		}
		defer resp.Body.Close()
		for d := json.NewDecoder(resp.Body); ; {
			var e api.Event
			if err := d.Decode(&e); err != nil {
				switch {
				case ctx.Err() != nil:
					err = ctx.Err()
				case errors.Is(err, io.EOF):
					err = io.ErrUnexpectedEOF
				}
				yield(api.Event{}, fmt.Errorf("following the guest's events: %w", err))
				return
			}
			if !yield(e, nil) {
				return
			}
		}
	}
}

// call makes one request and decodes its answer into out.
func (c *Client) call(ctx context.Context, method, path string, h http.Header, body []byte, out any) (http.Header, error) {
	resp, err := c.do(ctx, method, path, h, body)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(io.LimitReader(resp.Body, bodyLimit))
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil:
		return nil, fmt.Errorf("%s %s: reading the agent's answer: %w", method, path, err)
	}
	if err := json.Unmarshal(data, out); err != nil {
		return nil, fmt.Errorf("%s %s: the answer is not that of a klimax agent: %w", method, path, err)
	}
	return resp.Header, nil
}

// do makes one request and returns an answer of status 2xx from a guest of a
// fitting version; everything else is an error.
func (c *Client) do(ctx context.Context, method, path string, h http.Header, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://guest"+path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	for k, v := range h {
		req.Header[k] = v
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set(api.HeaderHostVersion, c.version)
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.requestError(ctx, method, path, err)
	}
	guest := resp.Header.Get(api.HeaderGuestVersion)
	if err := version.Compatible(c.version, guest); guest != "" && err != nil {
		resp.Body.Close()
		return nil, err
	}
	if resp.StatusCode/100 == 2 && guest != "" {
		return resp, nil
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 == 2 {
		return nil, fmt.Errorf("%s %s: the answer is not that of a klimax agent: it has no %s header", method, path, api.HeaderGuestVersion)
	}
	return nil, answerError(resp, method, path, guest)
}

// requestError says why there was no answer at all.
func (c *Client) requestError(ctx context.Context, method, path string, err error) error {
	var u *UnreachableError
	var timeout net.Error
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &u):
		return u
	case errors.As(err, &timeout) && timeout.Timeout():
		return &UnreachableError{Err: fmt.Errorf("%s %s: the agent took the connection and did not answer within %v", method, path, headerTimeout)}
	}
	return &UnreachableError{Err: fmt.Errorf("%s %s: the agent took the connection and did not answer: %w", method, path, err)}
}

// answerError makes an error of an answer that is not 2xx.
func answerError(resp *http.Response, method, path, guest string) error {
	data, err := io.ReadAll(io.LimitReader(resp.Body, bodyLimit))
	if err != nil {
		data = nil
	}
	var e api.Error
	if t, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err == nil && t == "application/json" &&
		json.Unmarshal(data, &e) == nil && e.Code != "" {
		if resp.StatusCode != http.StatusNotFound || e.Code != api.CodeNotFound {
			return &e
		}
	}
	// Every path that this client asks for is known to an agent of its version.
	if resp.StatusCode == http.StatusNotFound {
		if guest == "" {
			guest = "of an unknown version"
		}
		return &api.Error{Code: api.CodeNotFound,
			Message: fmt.Sprintf("the agent (klimax-guest %s) does not know %s %s: it is older than this klimax", guest, method, path),
			Hint:    "upgrade the guest: install this klimax's klimax-guest there and restart the agent"}
	}
	text := strings.TrimSpace(string(data))
	if text == "" {
		text = "(empty answer)"
	}
	const most = 200 // of a proxy's error page, bytes
	if len(text) > most {
		text = text[:most] + "…"
	}
	return &api.Error{Code: api.CodeInternal, Message: fmt.Sprintf("%s %s: %s: %s", method, path, resp.Status, text)}
}
