// Package config defines klimax.yaml: its types, defaults, strict parser,
// validation and canonical form. It is pure: it reads no files, no environment
// and no clock.
package config

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"klimax/shared/netplan"
)

// APIVersion is the only value of the key apiVersion so far.
const APIVersion = "klimax/v1"

// Hidden stands in place of a secret in everything that is shown.
const Hidden = "***"

// The values of guest.type. The empty string lets the host decide by platform.
const (
	GuestLima  = "lima"
	GuestSSH   = "ssh"
	GuestLocal = "local"
)

// The values of registries.cacheStorage.
const (
	CacheInGuest = "guest"
	CacheOnHost  = "host"
)

// Config is the whole configuration. A value made by Default or Parse has
// every default filled in. Each key is described in docs/config.md.
type Config struct {
	APIVersion string     `yaml:"apiVersion" json:"apiVersion"`
	Guest      Guest      `yaml:"guest" json:"guest"`
	VM         VM         `yaml:"vm" json:"vm"`
	Network    Network    `yaml:"network" json:"network"`
	Kind       Kind       `yaml:"kind" json:"kind"`
	Clusters   []Cluster  `yaml:"clusters" json:"clusters"`
	Registries Registries `yaml:"registries" json:"registries"`
}

// Guest says where the guest is. Only the host reads it.
type Guest struct {
	Type string `yaml:"type" json:"type"` // GuestLima, GuestSSH, GuestLocal or "" for automatic
	SSH  string `yaml:"ssh" json:"ssh"`   // [user@]host[:port], for GuestSSH
}

// VM is the virtual machine of a Lima guest. Only the host reads it.
type VM struct {
	Name    string   `yaml:"name" json:"name"`
	CPUs    int      `yaml:"cpus" json:"cpus"`
	Memory  string   `yaml:"memory" json:"memory"` // a size as ParseSize reads it
	Disk    string   `yaml:"disk" json:"disk"`     // a size as ParseSize reads it
	Rosetta bool     `yaml:"rosetta" json:"rosetta"`
	Image   string   `yaml:"image" json:"image"` // path or URL; "" is the built-in choice
	Mounts  []Mount  `yaml:"mounts" json:"mounts"`
	CACerts []string `yaml:"caCerts" json:"caCerts"` // paths of PEM files on the host
}

// Mount is one directory of the host that the VM sees.
type Mount struct {
	Location   string `yaml:"location" json:"location"`     // on the host, absolute or from ~
	MountPoint string `yaml:"mountPoint" json:"mountPoint"` // in the VM; "" is the same path
	Writable   bool   `yaml:"writable" json:"writable"`
}

// Network is the Docker network, who may reach it, and the way out.
type Network struct {
	KindBridgeCIDR       netip.Prefix `yaml:"kindBridgeCIDR" json:"kindBridgeCIDR"`
	DockerNetwork        string       `yaml:"dockerNetwork" json:"dockerNetwork"`
	DisablePortMirroring bool         `yaml:"disablePortMirroring" json:"disablePortMirroring"`
	Uplink               string       `yaml:"uplink" json:"uplink"` // interface name; "" is automatic
	// AllowFrom is who counts as the host. nil is automatic (see
	// docs/config.md), an empty list is nobody but registered callers.
	AllowFrom []netip.Prefix `yaml:"allowFrom" json:"allowFrom"`
	RoutePods bool           `yaml:"routePods" json:"routePods"`
	Proxy     Proxy          `yaml:"proxy" json:"proxy"`
}

// Proxy is the HTTP proxy that the guest has to use towards the internet.
type Proxy struct {
	HTTP    string   `yaml:"http" json:"http"`
	HTTPS   string   `yaml:"https" json:"https"`
	NoProxy []string `yaml:"noProxy" json:"noProxy"`
}

// Kind holds what all kind clusters share.
type Kind struct {
	NodeImage            string        `yaml:"nodeImage" json:"nodeImage"` // "" is the built-in choice
	ClusterCIDRBase      netip.Addr    `yaml:"clusterCIDRBase" json:"clusterCIDRBase"`
	MetalLBManifest      string        `yaml:"metalLBManifest" json:"metalLBManifest"` // path or URL; "" is the built-in one
	CustomDNSResolvers   []DNSResolver `yaml:"customDnsResolvers" json:"customDnsResolvers"`
	AutoMergeKubeconfig  bool          `yaml:"autoMergeKubeconfig" json:"autoMergeKubeconfig"`
	AutoRemoveKubeconfig bool          `yaml:"autoRemoveKubeconfig" json:"autoRemoveKubeconfig"`
	PreserveSourceIP     bool          `yaml:"preserveSourceIP" json:"preserveSourceIP"`
}

// DNSResolver sends the queries for one domain to resolvers of its own.
type DNSResolver struct {
	Domain    string       `yaml:"domain" json:"domain"`
	Resolvers []netip.Addr `yaml:"resolvers" json:"resolvers"`
}

// Cluster is one kind cluster that `klimax up` makes when it is missing.
type Cluster struct {
	Name    string `yaml:"name" json:"name"`
	Number  int    `yaml:"number" json:"number"` // 0 is the lowest free one
	Workers int    `yaml:"workers" json:"workers"`
	Image   string `yaml:"image" json:"image"` // "" is kind.nodeImage
}

// Registries holds the mirrors and where they keep what they fetched.
type Registries struct {
	CacheStorage string   `yaml:"cacheStorage" json:"cacheStorage"` // CacheInGuest or CacheOnHost
	Image        string   `yaml:"image" json:"image"`               // "" is the built-in choice
	Mirrors      []Mirror `yaml:"mirrors" json:"mirrors"`
}

// Mirror is one pull-through mirror of a registry.
type Mirror struct {
	Name         string `yaml:"name" json:"name"` // a DNS label, the container's name
	Host         string `yaml:"host" json:"host"` // the registry that nodes ask for
	Port         int    `yaml:"port" json:"port"` // on the guest's loopback
	RemoteURL    string `yaml:"remoteURL" json:"remoteURL"`
	Username     string `yaml:"username" json:"username"`
	Password     string `yaml:"password" json:"password"`         // secret
	PasswordFile string `yaml:"passwordFile" json:"passwordFile"` // on the host
	MaxSize      string `yaml:"maxSize" json:"maxSize"`           // a size as ParseSize reads it; "" is unlimited
}

// Default returns the configuration of an empty file.
func Default() Config {
	return Config{
		APIVersion: APIVersion,
		VM: VM{
			Name:    "klimax",
			CPUs:    4,
			Memory:  "8GiB",
			Disk:    "60GiB",
			Mounts:  []Mount{},
			CACerts: []string{},
		},
		Network: Network{
			KindBridgeCIDR:       netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 30, 0, 0}), 16),
			DockerNetwork:        "kind",
			DisablePortMirroring: true,
			RoutePods:            true,
			Proxy:                Proxy{NoProxy: []string{}},
		},
		Kind: Kind{
			ClusterCIDRBase:      netip.AddrFrom4([4]byte{10, 100, 0, 0}),
			CustomDNSResolvers:   []DNSResolver{},
			AutoMergeKubeconfig:  true,
			AutoRemoveKubeconfig: true,
			PreserveSourceIP:     true,
		},
		Clusters: []Cluster{},
		Registries: Registries{
			CacheStorage: CacheInGuest,
			Mirrors: []Mirror{
				{Name: "mirror-docker-io", Host: "docker.io", Port: 5030, RemoteURL: "https://registry-1.docker.io"},
				{Name: "mirror-quay-io", Host: "quay.io", Port: 5010, RemoteURL: "https://quay.io"},
				{Name: "mirror-gcr-io", Host: "gcr.io", Port: 5020, RemoteURL: "https://gcr.io"},
				{Name: "mirror-us-docker-pkg-dev", Host: "us-docker.pkg.dev", Port: 5040, RemoteURL: "https://us-docker.pkg.dev"},
				{Name: "mirror-us-central1-docker-pkg-dev", Host: "us-central1-docker.pkg.dev", Port: 5050, RemoteURL: "https://us-central1-docker.pkg.dev"},
			},
		},
	}
}

// Plan returns the address plan that the configuration describes. Errors name
// the key to change.
func (c Config) Plan() (netplan.Plan, error) {
	return netplan.New(c.Network.KindBridgeCIDR, c.Kind.ClusterCIDRBase)
}

// maxInterfaceName is Linux' IFNAMSIZ without the closing NUL.
const maxInterfaceName = 15

// BridgeName returns the fixed name of the Docker network's bridge interface:
// "br-" and the network's name where an interface name (at most 15 bytes) has
// room for it, else "br-" and 12 hexadecimal digits of the name's SHA-256.
func (c Config) BridgeName() string {
	if name := "br-" + c.Network.DockerNetwork; len(name) <= maxInterfaceName {
		return name
	}
	sum := sha256.Sum256([]byte(c.Network.DockerNetwork))
	return "br-" + hex.EncodeToString(sum[:6])
}

// ForGuest returns the configuration as it is sent to the guest: what only the
// host reads (guest, vm, kubeconfig handling, password files) is reset to its
// default. Call WithPasswords before, or mirrors lose their passwordFile
// without getting its content.
func (c Config) ForGuest() Config {
	d := Default()
	c.Guest = d.Guest
	c.VM = d.VM
	c.Kind.AutoMergeKubeconfig = d.Kind.AutoMergeKubeconfig
	c.Kind.AutoRemoveKubeconfig = d.Kind.AutoRemoveKubeconfig
	c.Registries.Mirrors = slices.Clone(c.Registries.Mirrors)
	for i := range c.Registries.Mirrors {
		c.Registries.Mirrors[i].PasswordFile = ""
	}
	return c
}

// WithPasswords returns the configuration with every passwordFile replaced by
// its content, as read returns it, without surrounding white space. The error
// names the key and the file; a user name without any password is one too.
func (c Config) WithPasswords(read func(path string) ([]byte, error)) (Config, error) {
	c.Registries.Mirrors = slices.Clone(c.Registries.Mirrors)
	for i := range c.Registries.Mirrors {
		m := &c.Registries.Mirrors[i]
		if m.PasswordFile == "" {
			if m.Username != "" && m.Password == "" {
				return Config{}, fmt.Errorf("registries.mirrors[%d].username: mirror %s has no password, give passwordFile or password", i, m.Name)
			}
			continue
		}
		b, err := read(m.PasswordFile)
		if err != nil {
			return Config{}, fmt.Errorf("registries.mirrors[%d].passwordFile: reading the password of mirror %s: %w", i, m.Name, err)
		}
		password := strings.TrimSpace(string(b))
		if password == "" {
			return Config{}, fmt.Errorf("registries.mirrors[%d].passwordFile: %s is empty, write the password of mirror %s into it", i, m.PasswordFile, m.Name)
		}
		m.Password, m.PasswordFile = password, ""
	}
	return c, nil
}

// Redacted returns the configuration with Hidden in place of every secret.
func (c Config) Redacted() Config {
	c.Registries.Mirrors = slices.Clone(c.Registries.Mirrors)
	for i := range c.Registries.Mirrors {
		if c.Registries.Mirrors[i].Password != "" {
			c.Registries.Mirrors[i].Password = Hidden
		}
	}
	return c
}

// YAML returns the configuration as a file that Parse reads back to the same
// value. Secrets are in it: show Redacted().YAML() to people.
func (c Config) YAML() ([]byte, error) {
	// By way of JSON, because yaml.Marshal writes a nil list as "[]" and the
	// two differ for network.allowFrom.
	j, err := json.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("encoding the configuration: %w", err)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(j, &doc); err != nil {
		return nil, fmt.Errorf("encoding the configuration: %w", err)
	}
	blockStyle(&doc)
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(&doc); err != nil {
		return nil, fmt.Errorf("encoding the configuration: %w", err)
	}
	if err := enc.Close(); err != nil {
		return nil, fmt.Errorf("encoding the configuration: %w", err)
	}
	return b.Bytes(), nil
}

// blockStyle turns nodes that came from JSON into what a person would write,
// and drops keys whose value is null.
func blockStyle(n *yaml.Node) {
	n.Style = 0
	if n.Kind == yaml.ScalarNode && n.Value == "" {
		n.Style = yaml.DoubleQuotedStyle
	}
	if n.Kind == yaml.SequenceNode && len(n.Content) == 0 {
		n.Style = yaml.FlowStyle
	}
	if n.Kind == yaml.MappingNode {
		var kept []*yaml.Node
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i+1].ShortTag() != "!!null" {
				kept = append(kept, n.Content[i], n.Content[i+1])
			}
		}
		n.Content = kept
	}
	for _, c := range n.Content {
		blockStyle(c)
	}
}

// ETag returns the SHA-256 of the canonical form (the JSON encoding, secrets
// included) in hexadecimal. Equal configurations have equal tags, however
// their files were written.
func (c Config) ETag() string {
	// Marshal fails for no value of these types: there are only strings,
	// numbers, booleans, addresses and lists of them.
	j, err := json.Marshal(c)
	if err != nil {
		j = []byte(err.Error())
	}
	sum := sha256.Sum256(j)
	return hex.EncodeToString(sum[:])
}
