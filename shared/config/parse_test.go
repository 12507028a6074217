package config

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

// Each case is one bad file and the problems that it must be told: line, key,
// a part of the message, and the nearest key.
func TestProblems(t *testing.T) {
	mirror := "registries:\n  mirrors:\n    - "
	ok := "name: m, host: docker.io, port: 5000, remoteURL: 'https://x'"
	for _, tc := range []struct {
		name, text string
		want       []Problem
	}{
		// The form of the file.
		{"unknown key", "network:\n  kindBridgCIDR: 172.30.0.0/16\n", []Problem{{Line: 2, Key: "network.kindBridgCIDR", Message: "unknown key", Nearest: "network.kindBridgeCIDR"}}},
		{"unknown section", "netwrk: {}\n", []Problem{{Line: 1, Key: "netwrk", Message: "unknown key", Nearest: "network"}}},
		{"key in the wrong section", "uplink: eth0\n", []Problem{{Line: 1, Key: "uplink", Message: "unknown key", Nearest: "network.uplink"}}},
		{"key of another case", "vm: {CPUs: 2}\n", []Problem{{Line: 1, Key: "vm.CPUs", Message: "unknown key", Nearest: "vm.cpus"}}},
		{"key like no other", "zzzzzz: 1\n", []Problem{{Line: 1, Key: "zzzzzz", Message: "unknown key"}}},
		{"unknown key in a list", "clusters:\n  - name: a\n    worker: 2\n", []Problem{{Line: 3, Key: "clusters[0].worker", Message: "unknown key", Nearest: "clusters[0].workers"}}},
		{"repeated key", "vm:\n  cpus: 2\n  cpus: 3\n", []Problem{{Line: 3, Key: "vm.cpus", Message: "is there twice, first in line 2"}}},
		{"alias", "vm: &x {cpus: 2}\nkind: *x\n", []Problem{{Line: 2, Key: "kind", Message: "is an alias (*x), write the value itself"}}},
		{"merge key", "vm: {<<: {cpus: 2}}\n", []Problem{{Line: 1, Key: "vm.<<", Message: "unknown key"}}},
		{"list key", "[a]: 1\n", []Problem{{Line: 1, Message: "has a key that is a list"}}},
		{"a list", "- a\n", []Problem{{Line: 1, Message: "the file must be a mapping"}}},
		{"a word", "hello\n", []Problem{{Line: 1, Message: "the file must be a mapping"}}},
		{"two documents", "vm: {}\n---\nvm: {}\n", []Problem{{Line: 2, Message: "a second YAML document"}}},
		{"no YAML", "vm:\n  cpus: [1\n", []Problem{{Line: 1, Message: "is not valid YAML"}}},
		{"tab", "vm:\n\tcpus: 1\n", []Problem{{Line: 2, Message: "is not valid YAML"}}},
		{"huge", strings.Repeat("#\n", maxFileSize), []Problem{{Message: "larger than"}}},
		{"all at once, in the order of lines", "network:\n  dockerNetwork: host\n  foo: 1\nvm: {cpus: many, memory: 1}\nclusters: 3\n", []Problem{
			{Line: 2, Key: "network.dockerNetwork", Message: "Docker's own"},
			{Line: 3, Key: "network.foo", Message: "unknown key"},
			{Line: 4, Key: "vm.cpus", Message: "must be a whole number, but is the text \"many\""},
			{Line: 4, Key: "vm.memory", Message: "must be text, but is the number 1, write it in quotes"},
			{Line: 5, Key: "clusters", Message: "must be a list, but is the number 3"},
		}},

		// Types.
		{"section is text", "vm: big\n", []Problem{{Line: 1, Key: "vm", Message: "must be a mapping of keys, but is the text \"big\""}}},
		{"text is a list", "vm:\n  name: [a]\n", []Problem{{Line: 2, Key: "vm.name", Message: "must be text, but is a list"}}},
		{"number in quotes", "vm: {cpus: '4'}\n", []Problem{{Line: 1, Key: "vm.cpus", Message: "write it without quotes"}}},
		{"number with a fraction", "vm: {cpus: 1.5}\n", []Problem{{Line: 1, Key: "vm.cpus", Message: "must be a whole number, but is the number 1.5"}}},
		{"hexadecimal", "vm: {cpus: 0x4}\n", []Problem{{Line: 1, Key: "vm.cpus", Message: "decimal digits"}}},
		{"yes", "network: {routePods: yes}\n", []Problem{{Line: 1, Key: "network.routePods", Message: "must be true or false"}}},
		{"empty entry", "clusters:\n  - name: a\n  -\n", []Problem{{Line: 3, Key: "clusters[1]", Message: "is empty"}}},

		// One bad value for each key.
		{"apiVersion", "apiVersion: klimax/v2\n", []Problem{{Line: 1, Key: "apiVersion", Message: "klimax/v1 only"}}},
		{"guest.type", "guest: {type: docker}\n", []Problem{{Line: 1, Key: "guest.type", Message: "lima, ssh or local"}}},
		{"guest.ssh missing", "guest:\n  type: ssh\n", []Problem{{Line: 1, Key: "guest.ssh", Message: "is missing"}}},
		{"guest.ssh without its type", "guest: {ssh: box}\n", []Problem{{Line: 1, Key: "guest.ssh", Message: "guest.type: ssh only"}}},
		{"guest.ssh as an option", "guest: {type: ssh, ssh: -oProxyCommand=x}\n", []Problem{{Line: 1, Key: "guest.ssh", Message: "is not [user@]host[:port]"}}},
		{"vm.name", "vm: {name: Klimax_1}\n", []Problem{{Line: 1, Key: "vm.name", Message: "lower case"}}},
		{"vm.cpus", "vm: {cpus: 0}\n", []Problem{{Line: 1, Key: "vm.cpus", Message: "from 1 to 256"}}},
		{"vm.memory", "vm: {memory: 8GB}\n", []Problem{{Line: 1, Key: "vm.memory", Message: "is not a size"}}},
		{"vm.memory too small", "vm: {memory: 1023MiB}\n", []Problem{{Line: 1, Key: "vm.memory", Message: "at least 1GiB"}}},
		{"vm.disk too small", "vm: {disk: 9GiB}\n", []Problem{{Line: 1, Key: "vm.disk", Message: "at least 10GiB"}}},
		{"vm.rosetta", "vm: {rosetta: 1}\n", []Problem{{Line: 1, Key: "vm.rosetta", Message: "true or false"}}},
		{"vm.image", "vm: {image: '-x'}\n", []Problem{{Line: 1, Key: "vm.image", Message: "neither a path nor a URL"}}},
		{"vm.mounts location", "vm: {mounts: [{location: src}, {}]}\n", []Problem{{Line: 1, Key: "vm.mounts[0].location", Message: "absolute path"}, {Line: 1, Key: "vm.mounts[1].location", Message: "is missing"}}},
		{"vm.mounts mountPoint", "vm: {mounts: [{location: /a, mountPoint: /}, {location: /b, mountPoint: x}]}\n", []Problem{{Line: 1, Key: "vm.mounts[0].mountPoint", Message: "other than /"}, {Line: 1, Key: "vm.mounts[1].mountPoint", Message: "absolute"}}},
		{"vm.mounts twice", "vm: {mounts: [{location: /a}, {location: /b, mountPoint: /a}]}\n", []Problem{{Line: 1, Key: "vm.mounts[1]", Message: "the same mount point as vm.mounts[0]"}}},
		{"vm.mounts writable", "vm: {mounts: [{location: /a, writable: 2}]}\n", []Problem{{Line: 1, Key: "vm.mounts[0].writable", Message: "true or false"}}},
		{"vm.caCerts", "vm: {caCerts: [ca.pem]}\n", []Problem{{Line: 1, Key: "vm.caCerts[0]", Message: "absolute path"}}},
		{"network.kindBridgeCIDR no network", "network:\n  kindBridgeCIDR: 172.30.0.0\n", []Problem{{Line: 2, Key: "network.kindBridgeCIDR", Message: "is not a network"}}},
		{"network.kindBridgeCIDR /24", "network:\n  kindBridgeCIDR: 172.30.0.0/24\n", []Problem{{Line: 2, Key: "network.kindBridgeCIDR", Message: "must be a /16"}}},
		{"network.kindBridgeCIDR host bits", "network: {kindBridgeCIDR: 172.30.0.1/16}\n", []Problem{{Line: 1, Key: "network.kindBridgeCIDR", Message: "write 172.30.0.0/16"}}},
		{"network.kindBridgeCIDR IPv6", "network: {kindBridgeCIDR: 'fd00::/16'}\n", []Problem{{Line: 1, Key: "network.kindBridgeCIDR", Message: "not an IPv4"}}},
		{"network.kindBridgeCIDR loopback", "network: {kindBridgeCIDR: 127.0.0.0/16}\n", []Problem{{Line: 1, Key: "network.kindBridgeCIDR", Message: "loopback"}}},
		{"both ranges", "network: {kindBridgeCIDR: 172.30.0.0/24}\nkind: {clusterCIDRBase: 10.200.0.0}\n", []Problem{{Line: 1, Key: "network.kindBridgeCIDR", Message: "must be a /16"}, {Line: 2, Key: "kind.clusterCIDRBase", Message: "at most 156"}}},
		{"network.dockerNetwork", "network: {dockerNetwork: 'a b'}\n", []Problem{{Line: 1, Key: "network.dockerNetwork", Message: "not a Docker network name"}}},
		{"network.dockerNetwork Docker's own", "network: {dockerNetwork: bridge}\n", []Problem{{Line: 1, Key: "network.dockerNetwork", Message: "Docker's own"}}},
		{"network.disablePortMirroring", "network: {disablePortMirroring: 'true'}\n", []Problem{{Line: 1, Key: "network.disablePortMirroring", Message: "true or false"}}},
		{"network.uplink too long", "network: {uplink: sixteen-chars-xx}\n", []Problem{{Line: 1, Key: "network.uplink", Message: "at most 15"}}},
		{"network.uplink no name", "network: {uplink: 'a/b'}\n", []Problem{{Line: 1, Key: "network.uplink", Message: "not an interface name"}}},
		{"network.uplink lo", "network: {uplink: lo}\n", []Problem{{Line: 1, Key: "network.uplink", Message: "leads nowhere"}}},
		{"network.uplink the bridge", "network: {uplink: br-kind}\n", []Problem{{Line: 1, Key: "network.uplink", Message: "bridge of network.dockerNetwork"}}},
		{"network.allowFrom word", "network:\n  allowFrom:\n    - 10.8.0.1\n    - mac.local\n", []Problem{{Line: 4, Key: "network.allowFrom[1]", Message: "neither an address"}}},
		{"network.allowFrom everybody", "network: {allowFrom: [0.0.0.0/0]}\n", []Problem{{Line: 1, Key: "network.allowFrom[0]", Message: "to everybody"}}},
		{"network.allowFrom host bits", "network: {allowFrom: [192.168.1.20/24]}\n", []Problem{{Line: 1, Key: "network.allowFrom[0]", Message: "write 192.168.1.0/24 for the network or 192.168.1.20 for the address"}}},
		{"network.allowFrom IPv6", "network: {allowFrom: ['fd00::1']}\n", []Problem{{Line: 1, Key: "network.allowFrom[0]", Message: "not IPv4"}}},
		{"network.allowFrom multicast", "network: {allowFrom: [224.0.0.1]}\n", []Problem{{Line: 1, Key: "network.allowFrom[0]", Message: "multicast"}}},
		{"network.allowFrom the bridge", "network: {allowFrom: [172.16.0.0/12]}\n", []Problem{{Line: 1, Key: "network.allowFrom[0]", Message: "overlaps network.kindBridgeCIDR"}}},
		{"network.allowFrom clusters", "network: {allowFrom: [10.0.0.0/8]}\n", []Problem{{Line: 1, Key: "network.allowFrom[0]", Message: "overlaps the clusters' ranges"}}},
		{"network.allowFrom twice", "network: {allowFrom: [10.8.0.1, 10.8.0.1/32]}\n", []Problem{{Line: 1, Key: "network.allowFrom[1]", Message: "the same network as network.allowFrom[0]"}}},
		{"network.routePods", "network: {routePods: 3}\n", []Problem{{Line: 1, Key: "network.routePods", Message: "true or false"}}},
		{"network.proxy", "network: {proxy: http://x}\n", []Problem{{Line: 1, Key: "network.proxy", Message: "must be a mapping"}}},
		{"network.proxy.http", "network: {proxy: {http: 'proxy:3128'}}\n", []Problem{{Line: 1, Key: "network.proxy.http", Message: "not a URL"}}},
		{"network.proxy.https", "network: {proxy: {https: 'http://me:pw@proxy'}}\n", []Problem{{Line: 1, Key: "network.proxy.https", Message: "must not hold a user name"}}},
		{"network.proxy.noProxy", "network: {proxy: {noProxy: ['a, b']}}\n", []Problem{{Line: 1, Key: "network.proxy.noProxy[0]", Message: "not a host name"}}},
		{"kind.nodeImage", "kind: {nodeImage: 'a b'}\n", []Problem{{Line: 1, Key: "kind.nodeImage", Message: "not an image reference"}}},
		{"kind.clusterCIDRBase word", "kind: {clusterCIDRBase: ten}\n", []Problem{{Line: 1, Key: "kind.clusterCIDRBase", Message: "is not an address"}}},
		{"kind.clusterCIDRBase /8", "kind: {clusterCIDRBase: 10.0.0.0/8}\n", []Problem{{Line: 1, Key: "kind.clusterCIDRBase", Message: "is not an address"}}},
		{"kind.clusterCIDRBase end", "kind: {clusterCIDRBase: 10.100.1.0}\n", []Problem{{Line: 1, Key: "kind.clusterCIDRBase", Message: "must end in .0.0"}}},
		{"kind.clusterCIDRBase overlap", "kind: {clusterCIDRBase: 172.20.0.0}\n", []Problem{{Line: 1, Key: "kind.clusterCIDRBase", Message: "overlap network.kindBridgeCIDR"}}},
		{"kind.metalLBManifest", "kind: {metalLBManifest: ' x'}\n", []Problem{{Line: 1, Key: "kind.metalLBManifest", Message: "neither a path nor a URL"}}},
		{"kind.customDnsResolvers domain", "kind: {customDnsResolvers: [{domain: 'a..b', resolvers: [10.0.0.53]}]}\n", []Problem{{Line: 1, Key: "kind.customDnsResolvers[0].domain", Message: "not a domain"}}},
		{"kind.customDnsResolvers resolvers", "kind: {customDnsResolvers: [{domain: a.example}, {domain: b.example, resolvers: [127.0.0.1]}]}\n", []Problem{{Line: 1, Key: "kind.customDnsResolvers[0].resolvers", Message: "is missing"}, {Line: 1, Key: "kind.customDnsResolvers[1].resolvers[0]", Message: "no resolver"}}},
		{"kind.customDnsResolvers twice", "kind: {customDnsResolvers: [{domain: a.b, resolvers: [1.1.1.1]}, {domain: A.b, resolvers: [1.1.1.1]}]}\n", []Problem{{Line: 1, Key: "kind.customDnsResolvers[1].domain", Message: "the same domain"}}},
		{"kind.autoMergeKubeconfig", "kind: {autoMergeKubeconfig: on}\n", []Problem{{Line: 1, Key: "kind.autoMergeKubeconfig", Message: "true or false"}}},
		{"kind.autoRemoveKubeconfig", "kind: {autoRemoveKubeconfig: []}\n", []Problem{{Line: 1, Key: "kind.autoRemoveKubeconfig", Message: "true or false"}}},
		{"kind.preserveSourceIP", "kind: {preserveSourceIP: 0}\n", []Problem{{Line: 1, Key: "kind.preserveSourceIP", Message: "true or false"}}},
		{"clusters name", "clusters:\n  - name: Dev\n  - {}\n", []Problem{{Line: 2, Key: "clusters[0].name", Message: "lower case"}, {Line: 3, Key: "clusters[1].name", Message: "is missing"}}},
		{"clusters names twice", "clusters:\n  - name: dev\n  - name: dev\n", []Problem{{Line: 3, Key: "clusters[1].name", Message: "the same name as clusters[0]: dev"}}},
		{"clusters number", "clusters: [{name: a, number: 100}, {name: b, number: -1}]\n", []Problem{{Line: 1, Key: "clusters[0].number", Message: "from 1 to 99"}, {Line: 1, Key: "clusters[1].number", Message: "from 1 to 99"}}},
		{"clusters numbers twice", "clusters:\n  - {name: a, number: 3}\n  - {name: b, number: 3}\n", []Problem{{Line: 3, Key: "clusters[1].number", Message: "the same number as clusters[0]: 3"}}},
		{"clusters workers", "clusters: [{name: a, workers: -1}, {name: b, workers: 98}]\n", []Problem{{Line: 1, Key: "clusters[0].workers", Message: "from 0 to 97"}, {Line: 1, Key: "clusters[1].workers", Message: "from 0 to 97"}}},
		{"clusters image", "clusters: [{name: a, image: '--x'}]\n", []Problem{{Line: 1, Key: "clusters[0].image", Message: "not an image reference"}}},
		{"registries.cacheStorage", "registries: {cacheStorage: cloud}\n", []Problem{{Line: 1, Key: "registries.cacheStorage", Message: "guest or host"}}},
		{"registries.image", "registries: {image: '!'}\n", []Problem{{Line: 1, Key: "registries.image", Message: "not an image reference"}}},
		{"mirror of nothing", mirror + "{}\n", []Problem{
			{Line: 3, Key: "registries.mirrors[0].name", Message: "is missing"},
			{Line: 3, Key: "registries.mirrors[0].host", Message: "is missing"},
			{Line: 3, Key: "registries.mirrors[0].port", Message: "from 1 to 65535"},
			{Line: 3, Key: "registries.mirrors[0].remoteURL", Message: "is missing"},
		}},
		{"mirror name is a host name", mirror + "{name: docker.io, host: docker.io, port: 5000, remoteURL: 'https://x'}\n", []Problem{{Line: 3, Key: "registries.mirrors[0].name", Message: "mirror-docker-io"}}},
		{"mirror name is no label", mirror + "{name: -m, host: docker.io, port: 5000, remoteURL: 'https://x'}\n", []Problem{{Line: 3, Key: "registries.mirrors[0].name", Message: "lower case"}}},
		{"mirror name is its host", mirror + "{name: hub, host: 'hub:5000', port: 5000, remoteURL: 'https://x'}\n", []Problem{{Line: 3, Key: "registries.mirrors[0].host", Message: "same as the mirror's name"}}},
		{"mirror host", mirror + "{name: m, host: 'https://docker.io', port: 5000, remoteURL: 'https://x'}\n", []Problem{{Line: 3, Key: "registries.mirrors[0].host", Message: "not the host name of a registry"}}},
		{"mirror port of an API server", mirror + "{name: m, host: docker.io, port: 7001, remoteURL: 'https://x'}\n", []Problem{{Line: 3, Key: "registries.mirrors[0].port", Message: "API servers"}}},
		{"mirror remoteURL", mirror + "{name: m, host: docker.io, port: 5000, remoteURL: 'docker.io'}\n", []Problem{{Line: 3, Key: "registries.mirrors[0].remoteURL", Message: "not a URL"}}},
		{"mirror remoteURL with a password", mirror + "{name: m, host: docker.io, port: 5000, remoteURL: 'https://a:b@x'}\n", []Problem{{Line: 3, Key: "registries.mirrors[0].remoteURL", Message: "use username and passwordFile"}}},
		{"mirror remoteURL with a query", mirror + "{name: m, host: docker.io, port: 5000, remoteURL: 'https://x?y'}\n", []Problem{{Line: 3, Key: "registries.mirrors[0].remoteURL", Message: "query"}}},
		{"mirror password alone", mirror + "{" + ok + ", password: a}\n", []Problem{{Line: 3, Key: "registries.mirrors[0].username", Message: "is missing"}}},
		{"mirror password twice", mirror + "{" + ok + ", username: a, password: b, passwordFile: /c}\n", []Problem{{Line: 3, Key: "registries.mirrors[0].passwordFile", Message: "beside password"}}},
		{"mirror passwordFile", mirror + "{" + ok + ", username: a, passwordFile: c}\n", []Problem{{Line: 3, Key: "registries.mirrors[0].passwordFile", Message: "absolute path"}}},
		{"mirror maxSize", mirror + "{" + ok + ", maxSize: 10}\n", []Problem{{Line: 3, Key: "registries.mirrors[0].maxSize", Message: "must be text"}}},
		{"mirror maxSize no size", mirror + "{" + ok + ", maxSize: big}\n", []Problem{{Line: 3, Key: "registries.mirrors[0].maxSize", Message: "not a size"}}},
		{"mirrors twice", mirror + "{" + ok + "}\n    - {" + ok + "}\n", []Problem{
			{Line: 4, Key: "registries.mirrors[1].name", Message: "the same name"},
			{Line: 4, Key: "registries.mirrors[1].host", Message: "the same registry"},
			{Line: 4, Key: "registries.mirrors[1].port", Message: "the same port"},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := problemsOf(t, tc.text)
			if len(got) != len(tc.want) {
				t.Fatalf("%d problems, want %d:\n%v", len(got), len(tc.want), got)
			}
			for i, want := range tc.want {
				g := got[i]
				if g.Line != want.Line || g.Key != want.Key || g.Nearest != want.Nearest || !strings.Contains(g.Message, want.Message) {
					t.Errorf("problem %d:\n got %+v\nwant %+v", i, g, want)
				}
				if g.File != "klimax.yaml" {
					t.Errorf("problem %d has file %q", i, g.File)
				}
			}
		})
	}
}

func TestSecretsAreNotInMessages(t *testing.T) {
	for _, text := range []string{
		"network: {proxy: {http: 'ftp://me:s3cret@proxy'}}",
		"registries: {mirrors: [{name: m, host: h.io, port: 1, remoteURL: 'ftp://me:s3cret@x'}]}",
		"registries: {mirrors: [{name: m, host: h.io, port: 1, remoteURL: 'https://x', password: s3cret}]}",
	} {
		for _, p := range problemsOf(t, text) {
			if strings.Contains(p.String(), "s3cret") {
				t.Errorf("%s", p)
			}
		}
	}
}

func TestProblemText(t *testing.T) {
	p := &Problems{List: []Problem{
		{File: "klimax.yaml", Line: 2, Key: "network.kindBridgCIDR", Message: "unknown key", Nearest: "network.kindBridgeCIDR"},
		{File: "klimax.yaml", Message: "is too large"},
		{Key: "vm.cpus", Message: "is 0"},
	}}
	want := "klimax.yaml:2: network.kindBridgCIDR: unknown key, did you mean network.kindBridgeCIDR?\n" +
		"klimax.yaml: is too large\n" +
		"vm.cpus: is 0"
	if p.Error() != want {
		t.Errorf("got\n%s\nwant\n%s", p.Error(), want)
	}
}

func TestParseSize(t *testing.T) {
	for s, want := range map[string]int64{"1KiB": 1 << 10, "512MiB": 512 << 20, "8GiB": 8 << 30, "2TiB": 2 << 40} {
		if got, err := ParseSize(s); err != nil || got != want {
			t.Errorf("ParseSize(%s) = %d, %v; want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "8", "8GB", "8 GiB", "-1GiB", "0GiB", "1.5GiB", "9999999999TiB"} {
		if got, err := ParseSize(s); err == nil {
			t.Errorf("ParseSize(%q) = %d, want an error", s, got)
		}
	}
}

// A file of many mistakes is answered in time that grows with its size only.
func TestManyProblemsAreQuick(t *testing.T) {
	for name, text := range map[string]string{
		"entries": "clusters: [" + strings.Repeat("1,", 20000) + "]",
		"keys":    strings.Repeat("abc: 1\n", 20000),
		"deep":    strings.Repeat("[", 200000),
	} {
		start := time.Now()
		if _, err := Parse("x", []byte(text)); err == nil {
			t.Errorf("%s: no error", name)
		}
		if d := time.Since(start); d > 5*time.Second {
			t.Errorf("%s: took %v", name, d)
		}
	}
}

// Whatever Parse is given it returns, and what it accepts survives its own
// canonical form.
func FuzzParse(f *testing.F) {
	f.Add([]byte(full))
	f.Add([]byte(Template()))
	for _, s := range []string{"", "a: &a [*a]", "{", "vm: {cpus: 1", "? [a]\n: b", "!!binary x", "a: !!int 'x'", "\xff\xfe", "registries: {mirrors: [{}]}", "kind: {clusterCIDRBase: ''}", "network: {allowFrom: ['::1%a', 1.2.3.4]}"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse("fuzz.yaml", data)
		if err != nil {
			return
		}
		y, err := c.YAML()
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse("again.yaml", y)
		if err != nil {
			t.Fatalf("%v in\n%s", err, y)
		}
		if !reflect.DeepEqual(c, again) {
			t.Fatalf("differs after a round trip:\n%+v\n%+v", c, again)
		}
	})
}
