// Package docker is the only client of the Docker engine: it finds the engine,
// tells what kind it is, keeps the routed network, and follows events.
package docker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/docker/docker/api/types/system"
	"github.com/docker/docker/client"
	"golang.org/x/sys/unix"

	"klimax/guest/facts"
	"klimax/shared/config"
	"klimax/shared/netplan"
)

// DefaultHost is where Docker listens on Linux.
const DefaultHost = "unix:///var/run/docker.sock"

// callTimeout bounds one call: an engine that starts accepts connections
// before it answers.
const callTimeout = 5 * time.Second

// Labels of containers and networks that klimax makes, beside kind's own.
const (
	LabelRole          = "klimax.role" // "network", "node", "mirror" or "demo"
	LabelCluster       = "klimax.cluster"
	LabelClusterNumber = "klimax.cluster-number"

	labelKindCluster = "io.x-k8s.kind.cluster"
	labelKindRole    = "io.x-k8s.kind.role"
)

// Values of LabelRole.
const (
	RoleNetwork = "network"
	RoleNode    = "node"
	RoleMirror  = "mirror"
	RoleDemo    = "demo"
)

// Client talks to one engine. It is safe for concurrent use and needs no
// engine to be there when it is made.
type Client struct {
	api  atomic.Pointer[client.Client]
	host string
	gate gate
}

// Open makes a client for a DOCKER_HOST value, the default for an empty one.
// Only unix sockets will do: a routed network has to be on this machine.
func Open(host string) (*Client, error) {
	if host == "" {
		host = DefaultHost
	}
	u, err := url.Parse(host)
	if err != nil || u.Scheme != "unix" {
		return nil, fmt.Errorf("DOCKER_HOST=%s is a remote engine: klimax routes a network of this machine, so it needs the engine of this machine; unset DOCKER_HOST or set it to %s", host, DefaultHost)
	}
	c := &Client{host: host, gate: gate{wake: make(chan struct{}, 1)}}
	return c, c.renew()
}

// renew makes the engine's client library anew: it negotiates the API version
// once and later only downwards, but another engine may answer at the socket.
func (c *Client) renew() error {
	// No idle connections: an engine that shuts down waits for those that have
	// not sent a request yet, and Go's transport may dial such ones ahead.
	transport := &http.Transport{DisableKeepAlives: true}
	api, err := client.NewClientWithOpts(client.WithHTTPClient(&http.Client{Transport: transport}),
		client.WithHost(c.host), client.WithAPIVersionNegotiation())
	if err != nil {
		return fmt.Errorf("docker client for %s: %w", c.host, err)
	}
	// Each connection passes the gate: the engine may begin to stop between
	// two calls of one look at it.
	dial := transport.DialContext
	transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if c.gate.isClosed() {
			return nil, errStopped
		}
		return dial(ctx, network, addr)
	}
	c.api.Store(api)
	return nil
}

// Close releases idle connections.
func (c *Client) Close() error { return c.API().Close() }

// Socket is the path of the engine's socket.
func (c *Client) Socket() string { return strings.TrimPrefix(c.host, "unix://") }

// API is the engine's client library, for packages that make containers.
func (c *Client) API() *client.Client { return c.api.Load() }

// errStopped stands for an engine whose unit is stopped.
var errStopped = errors.New("docker.service is stopped: systemctl start docker")

// OddKindError says that this Docker cannot be used and why.
type OddKindError struct {
	Kind   string // one CamelCase word
	Detail string
}

func (e *OddKindError) Error() string { return e.Detail }

// Read asks the engine for everything the rules depend on. It does not fail:
// an engine that does not answer, or not everything (Known is false then), is a
// fact, with the reason in Problem.
func (c *Client) Read(ctx context.Context, cfg config.Config, p netplan.Plan) facts.Engine {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	e := facts.Engine{}
	if !c.gate.allows(ctx) {
		e.Reason, e.Problem = c.explain(errStopped)
		return e
	}
	info, err := c.info(ctx)
	if err != nil {
		e.Reason, e.Problem = c.explain(err)
		return e
	}
	e.Running = true
	e.Version, e.API, e.LiveRestore = info.ServerVersion, c.API().ClientVersion(), info.LiveRestoreEnabled
	e.Backend = backend(info)
	// A part that cannot be read is not the same as an empty one: rules that
	// guard what is in it must not go.
	if e.Network, err = c.network(ctx, cfg, p); err != nil {
		e.Reason, e.Problem = "NetworkUnreadable", err.Error()
		return e
	}
	names := []string{cfg.Network.DockerNetwork}
	if e.Former, err = c.former(ctx, p, &names); err != nil {
		e.Reason, e.Problem = "NetworkUnreadable", err.Error()
		return e
	}
	if e.Clusters, e.Mirrors, err = c.members(ctx, names, p); err != nil {
		e.Reason, e.Problem = "ContainersUnreadable", fmt.Sprintf("list containers: %v", err)
		return e
	}
	e.Known = true
	return e
}

// Check asks the engine whether it is one that klimax can work with. The error
// is an *OddKindError for an engine that it can not.
func (c *Client) Check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := c.info(ctx)
	return err
}

func (c *Client) info(ctx context.Context) (system.Info, error) {
	info, err := c.API().Info(ctx)
	if err != nil {
		return info, err
	}
	v, err := c.API().ServerVersion(ctx)
	if err != nil {
		return info, err
	}
	components := make([]string, 0, len(v.Components))
	for _, k := range v.Components {
		components = append(components, k.Name)
	}
	if odd := oddKind(info, components); odd != nil {
		return info, odd
	}
	return info, nil
}

// oddKind recognises the engines whose network is not this machine's.
func oddKind(info system.Info, components []string) *OddKindError {
	switch {
	case slices.ContainsFunc(components, func(n string) bool { return strings.Contains(n, "Podman") }):
		return &OddKindError{"Podman", "the Docker socket is served by Podman, whose networks work differently: install Docker (apt-get install docker.io) or point DOCKER_HOST at its socket"}
	case slices.ContainsFunc(info.SecurityOptions, func(o string) bool { return strings.Contains(o, "name=rootless") }):
		return &OddKindError{"Rootless", "this Docker runs rootless: its containers live in a network namespace of their own that nothing can be routed into; use the system's Docker (DOCKER_HOST=" + DefaultHost + ")"}
	case strings.Contains(info.OperatingSystem, "Docker Desktop"):
		return &OddKindError{"DockerDesktop", "this is Docker Desktop: its containers live in a VM of its own that nothing can be routed into; use Docker Engine (docker context use default)"}
	case strings.HasPrefix(info.DockerRootDir, "/var/snap/"):
		return &OddKindError{"Snap", "this Docker is the snap package, which keeps its configuration where klimax cannot write it: snap remove docker, then apt-get install docker.io"}
	}
	return nil
}

func backend(info system.Info) string {
	if info.FirewallBackend != nil && strings.HasPrefix(info.FirewallBackend.Driver, "nftables") {
		return "nftables"
	}
	return "iptables"
}

// explain turns an error of a call into a reason and a sentence with a fix.
func (c *Client) explain(err error) (reason, message string) {
	var odd *OddKindError
	sock := c.Socket()
	switch {
	case errors.Is(err, errStopped):
		return "Stopped", errStopped.Error()
	case errors.As(err, &odd):
		return odd.Kind, odd.Detail
	case errors.Is(err, context.DeadlineExceeded):
		return "NotAnswering", fmt.Sprintf("the engine at %s accepts connections and does not answer (it may be starting)", sock)
	}
	switch st, serr := os.Stat(sock); {
	case errors.Is(serr, os.ErrNotExist):
		return "NotFound", fmt.Sprintf("no Docker engine: %s does not exist; install Docker (apt-get install docker.io) or start it (systemctl start docker)", sock)
	case serr == nil && st.Mode()&os.ModeSocket == 0:
		return "NotASocket", fmt.Sprintf("%s is not a socket", sock)
	case errors.Is(err, unix.EACCES) || strings.Contains(err.Error(), "permission denied"):
		return "PermissionDenied", fmt.Sprintf("no permission to use %s: run as root, or add the user to the group docker", sock)
	}
	if client.IsErrConnectionFailed(err) {
		return "NotRunning", fmt.Sprintf("the Docker engine is not running: nothing listens on %s (systemctl start docker)", sock)
	}
	return "Error", fmt.Sprintf("the engine at %s answers with an error: %v", sock, err)
}
