//go:build linux

package lab

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/go-connections/nat"
)

// Image is the image of the lab's containers: the prober's static binary and nothing else.
const Image = "klimax-lab/prober:1"

// Ports that a server container listens on.
const (
	Port     = 8080 // one line with the peer's address at once, then an echo (Get, Loop, Flow)
	HTTPPort = 80   // the peer's address as the answer to any request
	SinkPort = 8081 // reads whatever comes (Throughput)
)

// Spec says what kind of container Run makes.
type Spec struct {
	Name       string
	Network    string
	IP         string            // empty: Docker chooses
	Labels     map[string]string //
	Args       []string          // the prober's arguments; default: the server
	Publish    map[string]string // port on the VM → port of the container ("18080": "8080")
	Privileged bool
	NoRestart  bool // the default is restart=always
}

// Container is a running container.
type Container struct {
	Name, ID string
	IP       string // on its network, as Docker assigned it

	lab *Lab
}

// RunServer runs a container that answers with its caller's address on the ports above.
func (l *Lab) RunServer(name, network, ip string, labels map[string]string) *Container {
	l.t.Helper()
	return l.Run(Spec{Name: name, Network: network, IP: ip, Labels: labels})
}

// Run makes and starts a container of the lab's image and, when it is a server, waits until it listens; what goes wrong
// ends the test.
func (l *Lab) Run(s Spec) *Container {
	l.t.Helper()
	c, err := l.run(l.t.Context(), s)
	if err != nil {
		l.t.Fatalf("lab: container %s: %v", s.Name, err)
	}
	return c
}

func (l *Lab) run(ctx context.Context, s Spec) (*Container, error) {
	if err := l.docker.LoadImage(ctx); err != nil {
		return nil, err
	}
	server := len(s.Args) == 0
	if server {
		s.Args = []string{"serve", "--http", fmt.Sprintf(":%d", HTTPPort), "--sink", fmt.Sprintf(":%d", SinkPort), fmt.Sprintf(":%d", Port)}
	}
	cfg := &container.Config{Image: Image, Cmd: s.Args, Labels: s.Labels, ExposedPorts: nat.PortSet{}}
	host := &container.HostConfig{Privileged: s.Privileged, PortBindings: nat.PortMap{}}
	if !s.NoRestart {
		host.RestartPolicy.Name = container.RestartPolicyAlways
	}
	for _, p := range slices.Sorted(maps.Keys(s.Publish)) {
		inside := nat.Port(s.Publish[p] + "/tcp")
		cfg.ExposedPorts[inside] = struct{}{}
		host.PortBindings[inside] = append(host.PortBindings[inside], nat.PortBinding{HostPort: p})
	}
	nets := &network.NetworkingConfig{}
	if s.Network != "" {
		host.NetworkMode = container.NetworkMode(s.Network)
		e := &network.EndpointSettings{}
		if s.IP != "" {
			e.IPAMConfig = &network.EndpointIPAMConfig{IPv4Address: s.IP}
		}
		nets.EndpointsConfig = map[string]*network.EndpointSettings{s.Network: e}
	}
	cli := l.docker.Client()
	made, err := cli.ContainerCreate(ctx, cfg, host, nets, nil, s.Name)
	if err != nil {
		return nil, err
	}
	if err := cli.ContainerStart(ctx, made.ID, container.StartOptions{}); err != nil {
		return nil, err
	}
	i, err := cli.ContainerInspect(ctx, made.ID)
	if err != nil {
		return nil, err
	}
	c := &Container{Name: s.Name, ID: made.ID, lab: l}
	for _, e := range i.NetworkSettings.Networks {
		c.IP = e.IPAddress
	}
	if server && !wait(ctx, 10*time.Second, func() bool { return listens(i.State.Pid, Port, HTTPPort, SinkPort) }) {
		return nil, errors.New("the server does not listen after 10 s")
	}
	return c, nil
}

// listens looks for TCP listeners in a process's network namespace, without a packet that a rule might count.
func listens(pid int, ports ...int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", pid))
	if err != nil {
		return false
	}
	for _, p := range ports {
		if !strings.Contains(string(b), fmt.Sprintf(":%04X 00000000:0000 0A ", p)) { // proc_net_tcp: local, remote, LISTEN
			return false
		}
	}
	return true
}

// LoadImage imports the lab's image; calls after the first do nothing.
func (d *Docker) LoadImage(ctx context.Context) error {
	d.once.Do(func() {
		var buf bytes.Buffer
		if d.ierr = imageTar(&buf, d.lab.tools.prober); d.ierr != nil {
			return
		}
		r, err := d.Client().ImageImport(ctx, image.ImportSource{Source: &buf, SourceName: "-"}, Image,
			image.ImportOptions{Changes: []string{`ENTRYPOINT ["/prober"]`}})
		if err != nil {
			d.ierr = fmt.Errorf("import %s: %w", Image, err)
			return
		}
		defer r.Close()
		out, err := io.ReadAll(r)
		if err == nil && bytes.Contains(out, []byte(`"error"`)) {
			err = errors.New(string(out))
		}
		if err != nil {
			d.ierr = fmt.Errorf("import %s: %w", Image, err)
		}
	})
	return d.ierr
}

func imageTar(w io.Writer, binary string) error {
	b, err := os.ReadFile(binary)
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	if err := t.WriteHeader(&tar.Header{Name: "prober", Mode: 0o755, Size: int64(len(b))}); err != nil {
		return err
	}
	if _, err := t.Write(b); err != nil {
		return err
	}
	return t.Close()
}

// CreateNetwork makes a bridge network with the subnet's first address as its gateway, as kind would (masquerade, MTU
// 1500), with the bridge interface br-NAME and the further driver options.
func (l *Lab) CreateNetwork(name, subnet string, options map[string]string) string {
	l.t.Helper()
	p, err := netip.ParsePrefix(subnet)
	if err != nil {
		l.t.Fatalf("lab: network %s: %v", name, err)
	}
	o := map[string]string{
		"com.docker.network.bridge.enable_ip_masquerade": "true",
		"com.docker.network.driver.mtu":                  "1500",
		"com.docker.network.bridge.name":                 "br-" + name,
	}
	maps.Copy(o, options)
	n, err := l.docker.Client().NetworkCreate(l.t.Context(), name, network.CreateOptions{
		Driver:  "bridge",
		Options: o,
		IPAM:    &network.IPAM{Driver: "default", Config: []network.IPAMConfig{{Subnet: p.Masked().String(), Gateway: p.Masked().Addr().Next().String()}}},
	})
	if err != nil {
		l.t.Fatalf("lab: network %s: %v", name, err)
	}
	return n.ID
}

// PID is the container's first process, as Docker says; 0 when it does not run.
func (c *Container) PID() int {
	c.lab.t.Helper()
	i, err := c.lab.docker.Client().ContainerInspect(c.lab.t.Context(), c.ID)
	if err != nil {
		c.lab.t.Fatalf("lab: container %s: %v", c.Name, err)
	}
	return i.State.Pid
}

// NS is the container's network namespace as it is now: it goes with the container's process.
func (c *Container) NS() *NS {
	c.lab.t.Helper()
	pid := c.PID()
	if pid == 0 {
		c.lab.t.Fatalf("lab: container %s does not run", c.Name)
	}
	return &NS{Name: c.Name, Path: fmt.Sprintf("/proc/%d/ns/net", pid), lab: c.lab}
}

// AddVIP gives the container a second address (a /32 on eth0), which it then answers ARP for: what a LoadBalancer's
// address in a node is.
func (c *Container) AddVIP(addr string) {
	c.lab.t.Helper()
	c.NS().MustRun("ip", "address", "replace", addr+"/32", "dev", "eth0")
}

// Addr is the container's address and a port, for Get, Loop and Flow.
func (c *Container) Addr() string { return fmt.Sprintf("%s:%d", c.IP, Port) }

// WaitRunning waits until Docker says that the container runs and has a process.
func (c *Container) WaitRunning(limit time.Duration) error {
	var last string
	ok := wait(c.lab.t.Context(), limit, func() bool {
		i, err := c.lab.docker.Client().ContainerInspect(c.lab.t.Context(), c.ID)
		if err != nil {
			last = err.Error()
			return false
		}
		last = i.State.Status
		return i.State.Running && i.State.Pid > 0
	})
	if !ok {
		return fmt.Errorf("container %s does not run after %v: %s", c.Name, limit, strings.TrimSpace(last))
	}
	return nil
}

// Remove kills and removes the container.
func (c *Container) Remove() {
	c.lab.t.Helper()
	err := c.lab.docker.Client().ContainerRemove(c.lab.t.Context(), c.ID, container.RemoveOptions{Force: true})
	if err != nil {
		c.lab.t.Fatalf("lab: remove container %s: %v", c.Name, err)
	}
}
