package docker

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/system"

	"klimax/shared/config"
	"klimax/shared/netplan"
)

func plan(t *testing.T) netplan.Plan {
	t.Helper()
	p, err := config.Default().Plan()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestOddKinds(t *testing.T) {
	for want, c := range map[string]struct {
		info       system.Info
		components []string
	}{
		"":              {system.Info{OperatingSystem: "Debian GNU/Linux 12", DockerRootDir: "/var/lib/docker", SecurityOptions: []string{"name=seccomp,profile=default"}}, []string{"Engine", "containerd"}},
		"Rootless":      {system.Info{SecurityOptions: []string{"name=seccomp", "name=rootless"}}, nil},
		"DockerDesktop": {system.Info{OperatingSystem: "Docker Desktop"}, nil},
		"Snap":          {system.Info{DockerRootDir: "/var/snap/docker/common/var-lib-docker"}, nil},
		"Podman":        {system.Info{OperatingSystem: "fedora"}, []string{"Podman Engine", "Conmon"}},
	} {
		got := ""
		if odd := oddKind(c.info, c.components); odd != nil {
			got = odd.Kind
		}
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestRemoteEngineIsRefused(t *testing.T) {
	for _, host := range []string{"tcp://10.0.0.1:2375", "ssh://me@box", "http://x", "://"} {
		if _, err := Open(host); err == nil || !strings.Contains(err.Error(), DefaultHost) {
			t.Errorf("%s: %v", host, err)
		}
	}
	if c, err := Open(""); err != nil || c.Socket() != "/var/run/docker.sock" {
		t.Errorf("the default: %v", err)
	}
}

func inspect(subnet, gateway string) network.Inspect {
	return network.Inspect{Name: "kind", ID: "0123456789abcdef", Driver: "bridge",
		IPAM: network.IPAM{Config: []network.IPAMConfig{{Subnet: "fc00:f853::/64"}, {Subnet: subnet, Gateway: gateway}}}}
}

func TestDescribe(t *testing.T) {
	p := plan(t)
	n := describe(inspect("172.30.0.0/16", ""), p)
	if !n.Found || n.Ours || n.Bridge != "br-0123456789ab" || n.Gateway.String() != "172.30.0.1" {
		t.Errorf("a foreign network: %+v", n)
	}
	in := inspect("172.30.0.0/16", "172.30.0.254")
	in.Labels = map[string]string{LabelRole: RoleNetwork}
	in.Options = map[string]string{optionBridgeName: "br-kind", optionGatewayMode: "nat-unprotected"}
	if n = describe(in, p); !n.Ours || n.Bridge != "br-kind" || n.GatewayMode != "nat-unprotected" || n.Gateway.String() != "172.30.0.254" {
		t.Errorf("our network: %+v", n)
	}
	in = inspect("172.18.0.0/16", "172.18.0.1")
	in.Containers = map[string]network.EndpointResource{}
	for _, name := range []string{"f", "a", "b", "c", "d", "e", "g"} {
		in.Containers[name] = network.EndpointResource{Name: name}
	}
	n = describe(in, p)
	for _, part := range []string{"172.18.0.0/16", "on it: a, b, c, d, e and 2 more", "network.dockerNetwork", "docker network rm kind"} {
		if n.Found || !strings.Contains(n.Problem, part) {
			t.Errorf("%q is not in %q", part, n.Problem)
		}
	}
	in = inspect("172.30.0.0/16", "")
	in.Driver = "macvlan"
	if n = describe(in, p); n.Found || n.Reason != "WrongDriver" {
		t.Errorf("macvlan: %+v", n)
	}
}

func TestGroup(t *testing.T) {
	on := func(ip, fixed string) *container.NetworkSettingsSummary {
		e := &network.EndpointSettings{IPAddress: ip}
		if fixed != "" {
			e.IPAMConfig = &network.EndpointIPAMConfig{IPv4Address: fixed}
		}
		return &container.NetworkSettingsSummary{Networks: map[string]*network.EndpointSettings{"kind": e}}
	}
	labels := func(kv ...string) map[string]string {
		m := map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			m[kv[i]] = kv[i+1]
		}
		return m
	}
	clusters, mirrors := group([]container.Summary{
		{Names: []string{"/dev-worker"}, NetworkSettings: on("", "172.30.1.3"), Labels: labels(LabelRole, RoleNode, LabelCluster, "dev", LabelClusterNumber, "1", labelKindRole, "worker")},
		{Names: []string{"/dev-control-plane"}, NetworkSettings: on("172.30.1.2", "172.30.1.2"), Labels: labels(LabelRole, RoleNode, LabelCluster, "dev", LabelClusterNumber, "1", labelKindRole, "control-plane")},
		{Names: []string{"/theirs-control-plane"}, NetworkSettings: on("172.30.0.4", ""), Labels: labels(labelKindCluster, "theirs", labelKindRole, "control-plane")},
		{Names: []string{"/klimax-demo"}, NetworkSettings: on("172.30.99.2", ""), Labels: labels(LabelRole, RoleDemo, LabelCluster, "demo", LabelClusterNumber, "99")},
		{Names: []string{"/hub"}, NetworkSettings: on("172.30.0.9", ""), Labels: labels(LabelRole, RoleMirror)},
		{Names: []string{"/plain"}, NetworkSettings: on("172.30.0.5", "")},
		{Names: []string{"/odd"}, Labels: labels(LabelRole, RoleMirror)},
	}, []string{"kind"}, plan(t))
	if len(clusters) != 3 || len(mirrors) != 1 || mirrors[0].Address != netip.MustParseAddr("172.30.0.9") || mirrors[0].Name != "hub" {
		t.Fatalf("%+v %+v", clusters, mirrors)
	}
	demo, dev, theirs := clusters[0], clusters[1], clusters[2]
	if !demo.Demo || demo.VIP.String() != "172.30.99.200" || demo.HasAPI {
		t.Errorf("demo: %+v", demo)
	}
	if dev.Number != 1 || !dev.HasAPI || dev.Foreign || len(dev.Nodes) != 2 || dev.Nodes[0].String() != "172.30.1.2" {
		t.Errorf("dev: %+v", dev)
	}
	if !theirs.Foreign || theirs.HasAPI || theirs.Number != 0 {
		t.Errorf("theirs: %+v", theirs)
	}
}

// TestStoppedUnitIsLeftAlone: with socket activation a connection would start
// the engine that somebody just stopped.
func TestStoppedUnitIsLeftAlone(t *testing.T) {
	sock := filepath.Join(t.TempDir(), "d.sock")
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan string, 100)
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.URL.Path
		http.Error(w, "{}", http.StatusInternalServerError)
	})}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	c, err := Open("unix://" + sock)
	if err != nil {
		t.Fatal(err)
	}
	c.UnitState("inactive")
	ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
	defer cancel()
	c.Follow(ctx, func(Signal) {})
	if e := c.Read(t.Context(), config.Default(), plan(t)); e.Running || e.Reason != "Stopped" {
		t.Errorf("%+v", e)
	}
	if len(asked) != 0 {
		t.Errorf("a stopped engine was asked %s", <-asked)
	}
	c.UnitState("active")
	if e := c.Read(t.Context(), config.Default(), plan(t)); e.Reason == "Stopped" || len(asked) == 0 {
		t.Errorf("an active engine is not asked: %+v", e)
	}
}

func TestExplain(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{filepath.Join(dir, "none"): "NotFound", file: "NotASocket"} {
		c, err := Open("unix://" + path)
		if err != nil {
			t.Fatal(err)
		}
		if e := c.Read(t.Context(), config.Default(), plan(t)); e.Reason != want || e.Running || e.Known || e.Problem == "" {
			t.Errorf("%s: %+v", path, e)
		}
	}
}
