// Package demo runs a workload that shows the routed network at work and needs
// no registry: its image is made in memory from the running binary.
package demo

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/network"

	"klimax/guest/docker"
	"klimax/shared/config"
	"klimax/shared/netplan"
)

// What the demo is called in Docker.
const (
	Name          = "demo"
	containerName = "klimax-demo"
	imageName     = "klimax/demo"
)

// Port is where it answers HTTP.
const Port = 80

// Addresses are where the demo answers.
type Addresses struct {
	Node netip.Addr `json:"node"`
	VIP  netip.Addr `json:"vip"`
}

// Where returns the demo's addresses by the plan.
func Where(p netplan.Plan) (Addresses, error) {
	c, err := p.Cluster(netplan.DemoCluster)
	return Addresses{Node: c.FirstNode, VIP: c.VIPAuto.From}, err
}

// Start makes image and container where they are missing or from another
// binary, and reports whether anything changed. binary is the path of this
// program, which must be static.
func Start(ctx context.Context, d *docker.Client, cfg config.Config, p netplan.Plan, binary string) (Addresses, bool, error) {
	at, err := Where(p)
	if err != nil {
		return at, false, err
	}
	if err := check(d.Read(ctx, cfg, p)); err != nil {
		return at, false, err
	}
	sum, err := hashFile(binary)
	if err != nil {
		return at, false, err
	}
	ref := imageName + ":" + sum[:12]
	have, err := d.API().ContainerInspect(ctx, containerName)
	switch {
	case err == nil && have.Config.Image == ref && have.State.Running:
		return at, false, nil
	case err == nil:
		if err := remove(ctx, d); err != nil {
			return at, false, err
		}
	case !errdefs.IsNotFound(err):
		return at, false, fmt.Errorf("look for the demo's container: %w", err)
	}
	if _, err := d.EnsureNetwork(ctx, cfg, p); err != nil {
		return at, false, err
	}
	if err := ensureImage(ctx, d, ref, binary); err != nil {
		return at, false, err
	}
	created, err := d.API().ContainerCreate(ctx, &container.Config{
		Image: ref,
		Cmd:   []string{"demo", "serve", "--vip", at.VIP.String()},
		Labels: map[string]string{
			docker.LabelRole: docker.RoleDemo, docker.LabelCluster: Name,
			docker.LabelClusterNumber: fmt.Sprint(netplan.DemoCluster),
		},
	}, &container.HostConfig{
		CapAdd:        []string{"NET_ADMIN"}, // it gives itself the VIP as a second address
		RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyUnlessStopped},
	}, &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{
		cfg.Network.DockerNetwork: {IPAMConfig: &network.EndpointIPAMConfig{IPv4Address: at.Node.String()}},
	}}, nil, containerName)
	if err != nil {
		return at, false, fmt.Errorf("create the demo's container: %w", err)
	}
	if err := d.API().ContainerStart(ctx, created.ID, container.StartOptions{}); err != nil {
		return at, false, errors.Join(fmt.Errorf("start the demo's container: %w", err), remove(context.WithoutCancel(ctx), d))
	}
	return at, true, nil
}

// Stop removes the demo's container and images, and reports whether there were any.
func Stop(ctx context.Context, d *docker.Client) (bool, error) {
	if err := d.Check(ctx); err != nil {
		return false, fmt.Errorf("stop the demo: %w", err)
	}
	changed := false
	if _, err := d.API().ContainerInspect(ctx, containerName); err == nil {
		changed = true
		if err := remove(ctx, d); err != nil {
			return true, err
		}
	}
	images, err := d.API().ImageList(ctx, image.ListOptions{})
	if err != nil {
		return changed, fmt.Errorf("list images: %w", err)
	}
	for _, i := range images {
		for _, tag := range i.RepoTags {
			if len(tag) > len(imageName) && tag[:len(imageName)+1] == imageName+":" {
				changed = true
				if _, err := d.API().ImageRemove(ctx, tag, image.RemoveOptions{}); err != nil {
					return true, fmt.Errorf("remove image %s: %w", tag, err)
				}
			}
		}
	}
	return changed, nil
}

func remove(ctx context.Context, d *docker.Client) error {
	if err := d.API().ContainerRemove(ctx, containerName, container.RemoveOptions{Force: true}); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("remove the demo's container: %w", err)
	}
	return nil
}

func ensureImage(ctx context.Context, d *docker.Client, ref, binary string) error {
	if _, err := d.API().ImageInspect(ctx, ref); err == nil {
		return nil
	}
	r, w := io.Pipe()
	go func() { _ = w.CloseWithError(writeImage(w, binary)) }()
	out, err := d.API().ImageImport(ctx, image.ImportSource{Source: r, SourceName: "-"}, ref, image.ImportOptions{
		Message: "klimax demo", Changes: []string{`ENTRYPOINT ["/klimax-guest"]`},
	})
	if err != nil {
		_ = r.CloseWithError(err)
		return fmt.Errorf("import the demo's image: %w", err)
	}
	defer func() { _ = out.Close() }()
	if _, err := io.Copy(io.Discard, out); err != nil {
		return fmt.Errorf("import the demo's image: %w", err)
	}
	return nil
}

// writeImage writes a root file system that holds the binary alone.
func writeImage(w io.Writer, binary string) error {
	f, err := os.Open(binary)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	if err := t.WriteHeader(&tar.Header{Name: "klimax-guest", Mode: 0o755, Size: st.Size(), Format: tar.FormatPAX}); err != nil {
		return err
	}
	if _, err := io.Copy(t, f); err != nil {
		return err
	}
	return t.Close()
}

func hashFile(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("read this program: %w", err)
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("read this program: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
