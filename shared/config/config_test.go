package config

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var byValue = cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})

func mustParse(t *testing.T, text string) Config {
	t.Helper()
	c, err := Parse("klimax.yaml", []byte(text))
	if err != nil {
		t.Fatalf("Parse: %v\n%s", err, text)
	}
	return c
}

func problemsOf(t *testing.T, text string) []Problem {
	t.Helper()
	c, err := Parse("klimax.yaml", []byte(text))
	var p *Problems
	if !errors.As(err, &p) {
		t.Fatalf("Parse = %+v, %v; want *Problems for\n%s", c, err, text)
	}
	return p.List
}

func TestEmptyFilesAreTheDefault(t *testing.T) {
	for _, text := range []string{"", "\n", "# only a comment\n", "---\n", "null\n", "{}", "apiVersion: klimax/v1\n", "vm:\nnetwork:\n  proxy:\n", "registries: {mirrors: null}"} {
		if diff := cmp.Diff(Default(), mustParse(t, text), byValue); diff != "" {
			t.Errorf("%q differs from the default (-default +got):\n%s", text, diff)
		}
	}
	if err := Default().Validate(); err != nil {
		t.Errorf("Default().Validate() = %v", err)
	}
}

// full sets every key to something that is not its default.
const full = `apiVersion: klimax/v1
guest: {type: ssh, ssh: "me@box.example.com:2222"}
vm:
  name: other
  cpus: 2
  memory: 2048MiB
  disk: 1TiB
  rosetta: true
  image: ~/images/debian.qcow2
  mounts:
    - {location: ~/src, mountPoint: /src, writable: true}
    - location: /data
  caCerts: [~/ca.pem, /etc/ssl/company.pem]
network:
  kindBridgeCIDR: 172.31.0.0/16
  dockerNetwork: klimax
  disablePortMirroring: false
  uplink: eth0
  allowFrom: [192.168.1.20, 10.8.0.0/24]
  routePods: false
  proxy:
    http: http://proxy.example.com:3128
    https: http://proxy.example.com:3129
    noProxy: [.example.com, 10.0.0.0/8]
kind:
  nodeImage: kindest/node:v1.34.0@sha256:0123
  clusterCIDRBase: 10.0.0.0/16
  metalLBManifest: https://example.com/metallb.yaml
  customDnsResolvers:
    - {domain: corp.example.com, resolvers: [192.168.7.53, 'fd00::53']}
  autoMergeKubeconfig: false
  autoRemoveKubeconfig: false
  preserveSourceIP: false
clusters:
  - {name: dev, number: 7, workers: 2, image: 'kindest/node:v1.33.0'}
  - name: test
registries:
  cacheStorage: host
  image: registry:3
  mirrors:
    - name: hub
      host: docker.io
      port: 6000
      remoteURL: https://registry-1.docker.io
      username: me
      password: "s3cret"
      maxSize: 20GiB
    - name: quay
      host: quay.io
      port: 6001
      remoteURL: https://quay.io
      username: me
      passwordFile: ~/.quay
`

func fullConfig() Config {
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	return Config{
		APIVersion: "klimax/v1",
		Guest:      Guest{Type: "ssh", SSH: "me@box.example.com:2222"},
		VM: VM{
			Name: "other", CPUs: 2, Memory: "2048MiB", Disk: "1TiB", Rosetta: true, Image: "~/images/debian.qcow2",
			Mounts:  []Mount{{Location: "~/src", MountPoint: "/src", Writable: true}, {Location: "/data"}},
			CACerts: []string{"~/ca.pem", "/etc/ssl/company.pem"},
		},
		Network: Network{
			KindBridgeCIDR: prefix("172.31.0.0/16"), DockerNetwork: "klimax", Uplink: "eth0",
			AllowFrom: []netip.Prefix{prefix("192.168.1.20/32"), prefix("10.8.0.0/24")},
			Proxy:     Proxy{HTTP: "http://proxy.example.com:3128", HTTPS: "http://proxy.example.com:3129", NoProxy: []string{".example.com", "10.0.0.0/8"}},
		},
		Kind: Kind{
			NodeImage: "kindest/node:v1.34.0@sha256:0123", ClusterCIDRBase: addr("10.0.0.0"), MetalLBManifest: "https://example.com/metallb.yaml",
			CustomDNSResolvers: []DNSResolver{{Domain: "corp.example.com", Resolvers: []netip.Addr{addr("192.168.7.53"), addr("fd00::53")}}},
		},
		Clusters: []Cluster{{Name: "dev", Number: 7, Workers: 2, Image: "kindest/node:v1.33.0"}, {Name: "test"}},
		Registries: Registries{
			CacheStorage: "host", Image: "registry:3",
			Mirrors: []Mirror{
				{Name: "hub", Host: "docker.io", Port: 6000, RemoteURL: "https://registry-1.docker.io", Username: "me", Password: "s3cret", MaxSize: "20GiB"},
				{Name: "quay", Host: "quay.io", Port: 6001, RemoteURL: "https://quay.io", Username: "me", PasswordFile: "~/.quay"},
			},
		},
	}
}

// The full file names every key there is, so that no key goes untested.
func TestEveryKeyIsRead(t *testing.T) {
	// 10.8.0.0/24 lies within the clusters' ranges of base 10.0.0.0.
	text := strings.Replace(full, "clusterCIDRBase: 10.0.0.0/16", "clusterCIDRBase: 10.100.0.0/16", 1)
	want := fullConfig()
	want.Kind.ClusterCIDRBase = netip.MustParseAddr("10.100.0.0")
	if diff := cmp.Diff(want, mustParse(t, text), byValue); diff != "" {
		t.Errorf("differs (-want +got):\n%s", diff)
	}
	got := problemsOf(t, full)
	if len(got) != 1 || got[0].Key != "network.allowFrom[1]" || got[0].Line != 19 || !strings.Contains(got[0].Message, "kind.clusterCIDRBase") {
		t.Errorf("problems of a caller within the clusters' ranges: %v", got)
	}
	for _, key := range Keys() {
		leaf := strings.TrimSuffix(key[strings.LastIndex(key, ".")+1:], "[]")
		if !regexp.MustCompile(`\b` + leaf + `:`).MatchString(text) {
			t.Errorf("the full file of this test lacks the key %s", key)
		}
	}
	assertNoDefaults(t, reflect.ValueOf(mustParse(t, text)), reflect.ValueOf(Default()), "")
}

// assertNoDefaults fails for every field that has the same value in both.
func assertNoDefaults(t *testing.T, got, def reflect.Value, key string) {
	for i := range got.NumField() {
		name := join(key, got.Type().Field(i).Tag.Get("yaml"))
		if name == "apiVersion" || name == "kind.clusterCIDRBase" { // one has a single value, the other's own test is below
			continue
		}
		if isSection(got.Field(i).Type()) {
			assertNoDefaults(t, got.Field(i), def.Field(i), name)
		} else if reflect.DeepEqual(got.Field(i).Interface(), def.Field(i).Interface()) {
			t.Errorf("%s has its default in the full file of this test", name)
		}
	}
}

func TestClusterCIDRBaseForms(t *testing.T) {
	for _, text := range []string{"10.40.0.0", "10.40.0.0/16"} {
		if got := mustParse(t, "kind: {clusterCIDRBase: "+text+"}").Kind.ClusterCIDRBase; got != netip.MustParseAddr("10.40.0.0") {
			t.Errorf("%s = %v", text, got)
		}
	}
}

func TestAbsentEmptyAndGivenLists(t *testing.T) {
	if got := mustParse(t, "").Network.AllowFrom; got != nil {
		t.Errorf("absent allowFrom = %v, want nil (automatic)", got)
	}
	if got := mustParse(t, "network: {allowFrom: []}").Network.AllowFrom; got == nil || len(got) != 0 {
		t.Errorf("empty allowFrom = %#v, want an empty list (nobody)", got)
	}
	if got := len(mustParse(t, "registries: {image: x}").Registries.Mirrors); got != 5 {
		t.Errorf("absent mirrors: %d, want 5", got)
	}
	if got := mustParse(t, "registries: {mirrors: []}").Registries.Mirrors; got == nil || len(got) != 0 {
		t.Errorf("empty mirrors = %#v, want none", got)
	}
	one := "registries: {mirrors: [{name: m, host: docker.io, port: 1, remoteURL: 'http://x'}]}"
	if got := mustParse(t, one).Registries.Mirrors; len(got) != 1 || got[0].Name != "m" {
		t.Errorf("one mirror given = %v", got)
	}
}

func TestRoundTrips(t *testing.T) {
	nobody := Default()
	nobody.Network.AllowFrom = []netip.Prefix{}
	nobody.Registries.Mirrors = []Mirror{}
	odd := Default()
	odd.VM.Image = "true" // text that YAML would read as something else
	odd.Network.DockerNetwork = "0123"
	odd.Clusters = []Cluster{{Name: "null"}, {Name: "1e3"}}
	other := fullConfig()
	other.Kind.ClusterCIDRBase = netip.MustParseAddr("10.100.0.0")
	for name, c := range map[string]Config{"default": Default(), "full": other, "nobody": nobody, "odd": odd} {
		j, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		y, err := c.YAML()
		if err != nil {
			t.Fatal(err)
		}
		for form, data := range map[string][]byte{"JSON": j, "YAML": y} {
			got, err := Parse(name, data)
			if err != nil {
				t.Errorf("%s as %s: %v\n%s", name, form, err, data)
				continue
			}
			if diff := cmp.Diff(c, got, byValue); diff != "" {
				t.Errorf("%s as %s differs (-want +got):\n%s", name, form, diff)
			}
			if c.ETag() != got.ETag() {
				t.Errorf("%s as %s has another ETag", name, form)
			}
		}
	}
}

func TestETag(t *testing.T) {
	a, b := mustParse(t, "vm: {cpus: 4}"), mustParse(t, "# written differently\napiVersion: klimax/v1\n")
	if a.ETag() != b.ETag() || len(a.ETag()) != 64 {
		t.Errorf("equal configurations: %s and %s", a.ETag(), b.ETag())
	}
	if c := mustParse(t, "vm: {cpus: 5}"); c.ETag() == a.ETag() {
		t.Error("different configurations have the same ETag")
	}
}

func TestBridgeName(t *testing.T) {
	for name, want := range map[string]string{
		"kind":                "br-kind",
		"twelve-chars":        "br-twelve-chars",
		"thirteen-char":       "br-3adc6cba4867",
		"kind-for-the-office": "br-ac8de36c12f6",
	} {
		c := Default()
		c.Network.DockerNetwork = name
		got := c.BridgeName()
		if len(got) > 15 {
			t.Errorf("%s: %s has more than 15 characters", name, got)
		}
		if got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

func TestForGuestDropsWhatIsTheHosts(t *testing.T) {
	c := fullConfig()
	g := c.ForGuest()
	if g.Guest != (Guest{}) || !reflect.DeepEqual(g.VM, Default().VM) || !g.Kind.AutoMergeKubeconfig || !g.Kind.AutoRemoveKubeconfig {
		t.Errorf("host-only keys are left: %+v", g)
	}
	if g.Registries.Mirrors[1].PasswordFile != "" || g.Registries.Mirrors[0].Password != "s3cret" {
		t.Errorf("mirrors: %+v", g.Registries.Mirrors)
	}
	if c.Registries.Mirrors[1].PasswordFile == "" {
		t.Error("the receiver was changed")
	}
	if !reflect.DeepEqual(g.Clusters, c.Clusters) || !reflect.DeepEqual(g.Network, c.Network) {
		t.Error("keys of the guest were changed")
	}
}

func TestSecrets(t *testing.T) {
	c := fullConfig()
	y, err := c.Redacted().YAML()
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(y), "s3cret") || !strings.Contains(string(y), Hidden) {
		t.Errorf("not redacted:\n%s", y)
	}
	if c.Registries.Mirrors[0].Password != "s3cret" {
		t.Error("the receiver was changed")
	}

	got, err := c.WithPasswords(func(path string) ([]byte, error) { return []byte(" from " + path + "\n"), nil })
	if err != nil || got.Registries.Mirrors[1].Password != "from ~/.quay" || got.Registries.Mirrors[1].PasswordFile != "" {
		t.Errorf("WithPasswords = %+v, %v", got.Registries.Mirrors, err)
	}
	c.Registries.Mirrors[0].Password = ""
	if _, err := c.WithPasswords(nil); err == nil || !strings.Contains(err.Error(), "registries.mirrors[0].username") {
		t.Errorf("WithPasswords of a user name alone = %v", err)
	}
	c.Registries.Mirrors[0].Password = "s3cret"
	for _, read := range []func(string) ([]byte, error){
		func(string) ([]byte, error) { return nil, fs.ErrNotExist },
		func(string) ([]byte, error) { return []byte("\n"), nil },
	} {
		if _, err := c.WithPasswords(read); err == nil || !strings.Contains(err.Error(), "registries.mirrors[1].passwordFile") {
			t.Errorf("WithPasswords with an unreadable file = %v", err)
		}
	}
}

func TestTemplate(t *testing.T) {
	if diff := cmp.Diff(Default(), mustParse(t, Template()), byValue); diff != "" {
		t.Errorf("the template is not the default (-default +template):\n%s", diff)
	}
	// With all settings switched on it still is, so it shows no wrong default.
	on := regexp.MustCompile(`(?m)^#((?:  +(?:- )?)?[a-zA-Z]+:)`).ReplaceAllString(Template(), "$1")
	if on == Template() {
		t.Fatal("no setting was switched on")
	}
	if diff := cmp.Diff(Default(), mustParse(t, on), byValue); diff != "" {
		t.Errorf("the template's settings are not the default (-default +template):\n%s", diff)
	}
	for _, key := range Keys() {
		leaf := strings.TrimSuffix(key[strings.LastIndex(key, ".")+1:], "[]")
		if !regexp.MustCompile(`\b` + leaf + `\b`).MatchString(Template()) {
			t.Errorf("the template lacks %s", key)
		}
	}
}

// Each key has a row in docs/config.md, and each row is a key.
func TestDocumentNamesEveryKey(t *testing.T) {
	text, err := os.ReadFile("../../docs/config.md")
	if err != nil {
		t.Fatal(err)
	}
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|(.*)\\|$").FindAllStringSubmatch(string(text), -1) {
		documented = append(documented, row[1])
		if cells := strings.Split(row[2], "|"); len(cells) != 4 {
			t.Errorf("row %s has %d cells after the key, want type, default, effect and when", row[1], len(cells))
		} else if when := strings.TrimSpace(cells[3]); !slices.Contains([]string{"live", "new clusters", "new VM", "restart", "host", "new network", "–"}, when) {
			t.Errorf("row %s: %q is none of the words explained above the tables", row[1], when)
		}
	}
	for _, key := range Keys() {
		if !slices.Contains(documented, key) {
			t.Errorf("docs/config.md has no row for %s", key)
		}
	}
	for _, key := range documented {
		if !slices.Contains(Keys(), key) {
			t.Errorf("docs/config.md has a row for %s, which is no key", key)
		}
	}
}
