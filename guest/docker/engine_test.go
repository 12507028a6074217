package docker

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/system"

	"klimax/shared/config"
)

// fakeEngine answers what klimax asks of an engine.
type fakeEngine struct {
	mu         sync.Mutex
	version    string         // of the API
	fail       map[string]int // status by the path's last part
	asked      []string       // paths
	networks   []network.Inspect
	containers []container.Summary
}

func (e *fakeEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	what := r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]
	e.mu.Lock()
	e.asked = append(e.asked, r.URL.Path)
	status, version := e.fail[what], e.version
	e.mu.Unlock()
	w.Header().Set("Api-Version", version)
	w.Header().Set("Content-Type", "application/json")
	if status != 0 {
		http.Error(w, `{"message": "no"}`, status)
		return
	}
	var answer any
	switch {
	case what == "_ping":
		return
	case what == "events":
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		return
	case what == "info":
		answer = system.Info{ServerVersion: "29.0.0"}
	case what == "version":
		answer = types.Version{Version: "29.0.0"}
	case what == "networks":
		answer = e.networks
	case what == "json":
		answer = e.containers
	default:
		for _, n := range e.networks {
			if n.Name == what {
				answer = n
			}
		}
	}
	if answer == nil {
		http.Error(w, `{"message": "not found"}`, http.StatusNotFound)
		return
	}
	_ = json.NewEncoder(w).Encode(answer)
}

func (e *fakeEngine) set(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
}

func (e *fakeEngine) count(what string) (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, p := range e.asked {
		if strings.HasSuffix(p, "/"+what) {
			n++
		}
	}
	return n
}

// listen serves at a socket until the test's end.
func (e *fakeEngine) listen(t *testing.T, sock string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(sock), 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	srv := &http.Server{Handler: e}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
}

// follow runs Follow until the test's end and returns its signals.
func follow(t *testing.T, sock string) (*Client, <-chan Signal) {
	t.Helper()
	c, err := Open("unix://" + sock)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	signals, done := make(chan Signal, 100), make(chan struct{})
	go func() { defer close(done); c.Follow(ctx, func(s Signal) { signals <- s }) }()
	t.Cleanup(func() { cancel(); <-done })
	return c, signals
}

func expect(t *testing.T, signals <-chan Signal, want Signal) {
	t.Helper()
	select {
	case s := <-signals:
		if s != want {
			t.Errorf("signal %s, want %s", s, want)
		}
	case <-time.After(3 * time.Second):
		t.Fatalf("no signal, want %s", want)
	}
}

// TestRefusedEventsAreNoStream: an engine that answers but refuses its events
// did not start, and is not asked without pauses.
func TestRefusedEventsAreNoStream(t *testing.T) {
	e := &fakeEngine{version: "1.47", fail: map[string]int{"events": http.StatusForbidden}}
	sock := filepath.Join(t.TempDir(), "d.sock")
	e.listen(t, sock)
	_, signals := follow(t, sock)
	time.Sleep(800 * time.Millisecond)
	if n := e.count("events"); len(signals) > 0 || n == 0 || n > 6 {
		t.Errorf("%d signals, asked %d times", len(signals), n)
	}
	e.set(func() { e.fail = nil })
	expect(t, signals, Connected)
}

// TestSocketsDirectory comes and goes with the engine, behind a symbolic link.
func TestSocketsDirectory(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink(filepath.Join(dir, "run"), filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	_, signals := follow(t, filepath.Join(dir, "link", "d.sock"))
	time.Sleep(100 * time.Millisecond) // there is no directory yet
	for range 3 {
		e := &fakeEngine{version: "1.47"}
		e.listen(t, filepath.Join(dir, "run", "d.sock"))
		expect(t, signals, Connected)
		// the engine keeps the connection open: only its socket goes
		if err := os.RemoveAll(filepath.Join(dir, "run")); err != nil {
			t.Fatal(err)
		}
		expect(t, signals, Lost)
	}
}

// TestAnotherEngine: the API version is negotiated with the one that answers now.
func TestAnotherEngine(t *testing.T) {
	e := &fakeEngine{version: "1.41"}
	sock := filepath.Join(t.TempDir(), "d.sock")
	e.listen(t, sock)
	c, signals := follow(t, sock)
	expect(t, signals, Connected)
	if v := c.Read(t.Context(), config.Default(), plan(t)).API; v != "1.41" {
		t.Errorf("version %s", v)
	}
	if err := os.Remove(sock); err != nil {
		t.Fatal(err)
	}
	expect(t, signals, Lost)
	(&fakeEngine{version: "1.47"}).listen(t, sock)
	expect(t, signals, Connected)
	if v := c.Read(t.Context(), config.Default(), plan(t)).API; v != "1.47" {
		t.Errorf("version %s with the newer engine", v)
	}
}

// TestPartialAnswer: a part that cannot be read is not the same as an empty one.
func TestPartialAnswer(t *testing.T) {
	kind := inspect("172.30.0.0/16", "172.30.0.1")
	e := &fakeEngine{version: "1.47", networks: []network.Inspect{kind}}
	sock := filepath.Join(t.TempDir(), "d.sock")
	e.listen(t, sock)
	c, err := Open("unix://" + sock)
	if err != nil {
		t.Fatal(err)
	}
	for what, reason := range map[string]string{"": "", "kind": "NetworkUnreadable", "networks": "NetworkUnreadable", "json": "ContainersUnreadable"} {
		e.set(func() { e.fail = map[string]int{what: http.StatusInternalServerError} })
		got := c.Read(t.Context(), config.Default(), plan(t))
		if got.Reason != reason || !got.Running || got.Known != (reason == "") || (got.Problem == "") != (reason == "") {
			t.Errorf("%s fails: %+v", what, got)
		}
	}
}

// TestFormerNetworks: what klimax made for another configuration is still
// known, with the clusters on it.
func TestFormerNetworks(t *testing.T) {
	ours := func(name, subnet string) network.Inspect {
		n := inspect(subnet, "")
		n.Name, n.ID, n.Labels = name, name+"-id", map[string]string{LabelRole: RoleNetwork}
		n.Options = map[string]string{optionBridgeName: "br-" + name}
		return n
	}
	e := &fakeEngine{version: "1.47", networks: []network.Inspect{ours("kind", "172.30.0.0/16"), ours("old", "172.29.0.0/16")},
		containers: []container.Summary{{Names: []string{"/dev-control-plane"},
			Labels:          map[string]string{LabelRole: RoleNode, LabelCluster: "dev", LabelClusterNumber: "1", labelKindRole: "control-plane"},
			NetworkSettings: &container.NetworkSettingsSummary{Networks: map[string]*network.EndpointSettings{"old": {IPAddress: "172.29.1.2"}}}}}}
	sock := filepath.Join(t.TempDir(), "d.sock")
	e.listen(t, sock)
	c, err := Open("unix://" + sock)
	if err != nil {
		t.Fatal(err)
	}
	got := c.Read(t.Context(), config.Default(), plan(t))
	if !got.Network.Found || len(got.Former) != 1 || got.Former[0].Bridge != "br-old" || got.Former[0].Subnet.String() != "172.29.0.0/16" {
		t.Errorf("%+v", got)
	}
	if len(got.Clusters) != 1 || !got.Clusters[0].HasAPI || len(got.Clusters[0].Nodes) != 1 {
		t.Errorf("%+v", got.Clusters)
	}
}
