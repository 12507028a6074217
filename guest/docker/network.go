package docker

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/network"

	"klimax/guest/facts"
	"klimax/shared/config"
	"klimax/shared/netplan"
)

// Options of Docker's bridge driver.
const (
	optionBridgeName  = "com.docker.network.bridge.name"
	optionMasquerade  = "com.docker.network.bridge.enable_ip_masquerade"
	optionMTU         = "com.docker.network.driver.mtu"
	optionGatewayMode = "com.docker.network.bridge.gateway_mode_ipv4"
)

// gatewayModeSince is the first engine that knows gateway mode nat-unprotected
// and keeps it (moby 28.0; 27 and older may refuse the option).
const gatewayModeSince = 28

// network looks for the routed network by its name.
func (c *Client) network(ctx context.Context, cfg config.Config, p netplan.Plan) (facts.DockerNetwork, error) {
	name := cfg.Network.DockerNetwork
	n, err := c.API().NetworkInspect(ctx, name, network.InspectOptions{})
	if errdefs.IsNotFound(err) {
		return facts.DockerNetwork{Reason: "Missing", Problem: fmt.Sprintf("the Docker network %s does not exist", name)}, nil
	}
	if err != nil {
		return facts.DockerNetwork{}, fmt.Errorf("inspect Docker network %s: %w", name, err)
	}
	return describe(n, p), nil
}

// former finds the networks that klimax made with another range than the
// plan's, and adds the names of those that are called otherwise to names.
func (c *Client) former(ctx context.Context, p netplan.Plan, names *[]string) ([]facts.DockerNetwork, error) {
	list, err := c.API().NetworkList(ctx, network.ListOptions{Filters: filters.NewArgs(filters.Arg("label", LabelRole+"="+RoleNetwork))})
	if err != nil {
		return nil, fmt.Errorf("list Docker networks: %w", err)
	}
	var out []facts.DockerNetwork
	for _, n := range list {
		d := describe(n, p)
		if d.Subnet == p.Bridge {
			continue
		}
		d.Problem, d.Reason = "", "" // is it not the one that is wanted, it need not fit
		out = append(out, d)
		if !slices.Contains(*names, n.Name) {
			*names = append(*names, n.Name)
		}
	}
	slices.SortFunc(out, func(a, b facts.DockerNetwork) int { return strings.Compare(a.ID, b.ID) })
	return out, nil
}

// describe tells whether a network of the right name is one klimax can route.
func describe(n network.Inspect, p netplan.Plan) facts.DockerNetwork {
	out := facts.DockerNetwork{
		ID: n.ID, Bridge: n.Options[optionBridgeName], GatewayMode: n.Options[optionGatewayMode],
		Ours: n.Labels[LabelRole] == RoleNetwork,
	}
	if out.Bridge == "" {
		out.Bridge = "br-" + n.ID[:min(12, len(n.ID))]
	}
	for _, i := range n.IPAM.Config {
		s, err := netip.ParsePrefix(i.Subnet)
		if err != nil || !s.Addr().Is4() {
			continue
		}
		out.Subnet = s.Masked()
		if g, err := netip.ParseAddr(i.Gateway); err == nil {
			out.Gateway = g
		} else {
			out.Gateway = s.Masked().Addr().Next()
		}
	}
	on := make([]string, 0, len(n.Containers))
	for _, k := range n.Containers {
		on = append(on, k.Name)
	}
	slices.Sort(on)
	what := "no running container is on it"
	if len(on) > 0 {
		what = "on it: " + strings.Join(on[:min(5, len(on))], ", ")
		if len(on) > 5 {
			what += fmt.Sprintf(" and %d more", len(on)-5)
		}
	}
	switch {
	case n.Driver != "bridge":
		out.Reason = "WrongDriver"
		out.Problem = fmt.Sprintf("the Docker network %s has driver %q, klimax needs a bridge; it is left alone (%s): set network.dockerNetwork to another name, for example klimax", n.Name, n.Driver, what)
	case out.Subnet != p.Bridge:
		out.Reason = "OtherSubnet"
		out.Problem = fmt.Sprintf("the Docker network %s has subnet %v, network.kindBridgeCIDR is %v; it is left alone (%s): set network.dockerNetwork to another name, for example klimax, or remove that network (docker network rm %s)", n.Name, out.Subnet, p.Bridge, what, n.Name)
	default:
		out.Found = true
	}
	return out
}

// EnsureNetwork makes the routed network when none of its name exists, and
// reports whether it did. A network of that name is never changed; whether it
// can be used is what Read tells.
func (c *Client) EnsureNetwork(ctx context.Context, cfg config.Config, p netplan.Plan) (created bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	name := cfg.Network.DockerNetwork
	_, err = c.API().NetworkInspect(ctx, name, network.InspectOptions{})
	if !errdefs.IsNotFound(err) {
		return false, err
	}
	v, err := c.API().ServerVersion(ctx)
	if err != nil {
		return false, fmt.Errorf("ask the engine for its version: %w", err)
	}
	opts := map[string]string{
		optionBridgeName: cfg.BridgeName(),
		optionMasquerade: "true",
	}
	// kind gives its network the MTU of Docker's default bridge (kind,
	// pkg/cluster/internal/providers/docker/network.go).
	if d, err := c.API().NetworkInspect(ctx, "bridge", network.InspectOptions{}); err == nil && d.Options[optionMTU] != "" {
		opts[optionMTU] = d.Options[optionMTU]
	}
	if supportsUnprotected(v.Version) {
		opts[optionGatewayMode] = "nat-unprotected"
	}
	_, err = c.API().NetworkCreate(ctx, name, network.CreateOptions{
		Driver: "bridge",
		IPAM: &network.IPAM{Config: []network.IPAMConfig{{
			Subnet: p.Bridge.String(), IPRange: p.Containers().String(), Gateway: p.Gateway().String(),
		}}},
		Options: opts,
		Labels:  map[string]string{LabelRole: RoleNetwork},
	})
	if err != nil && c.appeared(ctx, name) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("create Docker network %s (%v): %w%s", name, p.Bridge, err, c.overlapHint(ctx, p.Bridge))
	}
	return true, nil
}

// raceWait is how long a network that another process is making may take.
const raceWait = 2 * time.Second

// appeared reports whether the network is there after all: the agent and a
// command may make it at the same time.
func (c *Client) appeared(ctx context.Context, name string) bool {
	for end := time.Now().Add(raceWait); time.Now().Before(end) && ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		if _, err := c.API().NetworkInspect(ctx, name, network.InspectOptions{}); err == nil {
			return true
		}
	}
	return false
}

func supportsUnprotected(version string) bool {
	major, _, _ := strings.Cut(version, ".")
	n, err := strconv.Atoi(major)
	return err == nil && n >= gatewayModeSince
}

// overlapHint names the Docker network that has the wanted range.
func (c *Client) overlapHint(ctx context.Context, want netip.Prefix) string {
	all, err := c.API().NetworkList(ctx, network.ListOptions{})
	if err != nil {
		return ""
	}
	for _, n := range all {
		for _, i := range n.IPAM.Config {
			if s, err := netip.ParsePrefix(i.Subnet); err == nil && s.Overlaps(want) {
				return fmt.Sprintf("; the Docker network %s has %v: choose another network.kindBridgeCIDR, or docker network rm %s", n.Name, s, n.Name)
			}
		}
	}
	return ""
}

// members finds clusters and mirrors on these networks by the labels of
// containers, stopped ones included: their rules must be there before they
// start.
func (c *Client) members(ctx context.Context, networks []string, p netplan.Plan) ([]facts.Cluster, []facts.Mirror, error) {
	on := filters.NewArgs()
	for _, name := range networks {
		on.Add("network", name)
	}
	list, err := c.API().ContainerList(ctx, container.ListOptions{All: true, Filters: on})
	if err != nil {
		return nil, nil, err
	}
	clusters, mirrors := group(list, networks, p)
	return clusters, mirrors, nil
}

func group(list []container.Summary, networks []string, p netplan.Plan) ([]facts.Cluster, []facts.Mirror) {
	byName := map[string]*facts.Cluster{}
	var mirrors []facts.Mirror
	for _, k := range list {
		addr := addressOn(k, networks)
		name := strings.TrimPrefix(strings.Join(k.Names[:min(1, len(k.Names))], ""), "/")
		if k.Labels[LabelRole] == RoleMirror && addr.IsValid() {
			mirrors = append(mirrors, facts.Mirror{Name: name, Address: addr})
			continue
		}
		cluster := k.Labels[LabelCluster]
		if cluster == "" {
			cluster = k.Labels[labelKindCluster]
		}
		if cluster == "" {
			continue
		}
		number, _ := strconv.Atoi(k.Labels[LabelClusterNumber])
		f := byName[cluster]
		if f == nil {
			f = &facts.Cluster{Name: cluster, Number: number, Foreign: k.Labels[LabelRole] == ""}
			byName[cluster] = f
		}
		if addr.IsValid() {
			f.Nodes = append(f.Nodes, addr)
		}
		f.HasAPI = f.HasAPI || number > 0 && k.Labels[labelKindRole] == "control-plane"
		if k.Labels[LabelRole] == RoleDemo {
			f.Demo = true
			if pc, err := p.Cluster(number); err == nil {
				f.VIP = pc.VIPAuto.From
			}
		}
	}
	clusters := make([]facts.Cluster, 0, len(byName))
	for _, f := range byName {
		slices.SortFunc(f.Nodes, netip.Addr.Compare)
		clusters = append(clusters, *f)
	}
	slices.SortFunc(clusters, func(a, b facts.Cluster) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(mirrors, func(a, b facts.Mirror) int { return strings.Compare(a.Name, b.Name) })
	return clusters, mirrors
}

// addressOn is a container's fixed address on the first of these networks that
// it is on, else the one it has there now.
func addressOn(k container.Summary, networks []string) netip.Addr {
	if k.NetworkSettings == nil {
		return netip.Addr{}
	}
	for _, name := range networks {
		ep := k.NetworkSettings.Networks[name]
		if ep == nil {
			continue
		}
		if ep.IPAMConfig != nil {
			if a, err := netip.ParseAddr(ep.IPAMConfig.IPv4Address); err == nil {
				return a
			}
		}
		a, _ := netip.ParseAddr(ep.IPAddress)
		return a
	}
	return netip.Addr{}
}
