package config

import (
	"fmt"
	"math"
	"net/netip"
	"net/url"
	"path"
	"regexp"
	"strconv"
	"strings"

	"klimax/shared/netplan"
)

// Bounds of the virtual machine, in bytes: below them the guest does not start
// or cannot hold one cluster.
const (
	minMemory = 1 << 30
	minDisk   = 10 << 30
)

// maxWorkers leaves room for one control plane among a cluster's node addresses.
const maxWorkers = 97

// maxClusterName is kind's own limit for a cluster's name, in bytes.
const maxClusterName = 50

var (
	dnsLabel      = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	domainName    = regexp.MustCompile(`^([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?$`)
	dockerName    = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$`)
	interfaceName = regexp.MustCompile(`^[a-zA-Z0-9_.-]+(@[a-zA-Z0-9_.-]+)?$`)
	imageRef      = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_./:@-]*$`)
	sshTarget     = regexp.MustCompile(`^([A-Za-z0-9_][A-Za-z0-9_.-]*@)?([A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?$`)
	size          = regexp.MustCompile(`^([1-9][0-9]{0,9})(KiB|MiB|GiB|TiB)$`)
)

// ParseSize reads a size like "512MiB" or "8GiB" (units KiB, MiB, GiB, TiB)
// and returns it in bytes.
func ParseSize(s string) (int64, error) {
	m := size.FindStringSubmatch(s)
	if m == nil {
		return 0, fmt.Errorf("%q is not a size like 512MiB or 8GiB", s)
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%q is not a size like 512MiB or 8GiB", s)
	}
	shift := map[string]uint{"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[m[2]]
	if n > math.MaxInt64>>shift {
		return 0, fmt.Errorf("%q is larger than any disk", s)
	}
	return n << shift, nil
}

// Validate checks all values and what they mean together. The error is a
// *Problems with everything that is wrong.
func (c Config) Validate() error {
	var p Problems
	validate(c, func(key, format string, args ...any) {
		p.add(Problem{Key: key, Message: fmt.Sprintf(format, args...)})
	})
	return p.err()
}

// reporter takes one problem with the value of a key.
type reporter func(key, format string, args ...any)

func validate(c Config, report reporter) {
	if c.APIVersion != APIVersion {
		report("apiVersion", "is %q, this version of klimax reads %s only", c.APIVersion, APIVersion)
	}
	validateGuest(c, report)
	validateVM(c.VM, report)
	validatePlan(c, report)
	validateNetwork(c, report)
	validateKind(c.Kind, report)
	validateClusters(c.Clusters, report)
	validateRegistries(c.Registries, report)
}

func validateGuest(c Config, report reporter) {
	switch c.Guest.Type {
	case "", GuestLima, GuestLocal, GuestSSH:
	default:
		report("guest.type", "is %q, it must be lima, ssh or local (or absent, to choose by platform)", c.Guest.Type)
	}
	switch {
	case c.Guest.SSH == "":
		if c.Guest.Type == GuestSSH {
			report("guest.ssh", "is missing, guest.type ssh needs it: [user@]host[:port]")
		}
	case c.Guest.Type != GuestSSH:
		report("guest.ssh", "is used with guest.type: ssh only, set that or remove this")
	case !sshTarget.MatchString(c.Guest.SSH):
		report("guest.ssh", "%q is not [user@]host[:port]", c.Guest.SSH)
	}
}

func validateVM(vm VM, report reporter) {
	if !dnsLabel.MatchString(vm.Name) {
		report("vm.name", "%q is not a name of lower case letters, digits and inner dashes (at most 63)", vm.Name)
	}
	if vm.CPUs < 1 || vm.CPUs > 256 {
		report("vm.cpus", "is %d, it must be from 1 to 256", vm.CPUs)
	}
	for _, s := range []struct {
		key, value string
		least      int64
	}{{"vm.memory", vm.Memory, minMemory}, {"vm.disk", vm.Disk, minDisk}} {
		if n, err := ParseSize(s.value); err != nil {
			report(s.key, "%v", err)
		} else if n < s.least {
			report(s.key, "is %s, it must be at least %dGiB", s.value, s.least>>30)
		}
	}
	checkText("vm.image", vm.Image, report)
	seen := map[string]int{}
	for i, m := range vm.Mounts {
		key := fmt.Sprintf("vm.mounts[%d]", i)
		switch {
		case m.Location == "":
			report(key+".location", "is missing")
			continue
		case !path.IsAbs(m.Location) && m.Location != "~" && !strings.HasPrefix(m.Location, "~/"):
			report(key+".location", "%q must be an absolute path, or begin with ~/", m.Location)
		}
		if m.MountPoint != "" && (!path.IsAbs(m.MountPoint) || path.Clean(m.MountPoint) == "/") {
			report(key+".mountPoint", "%q must be an absolute path other than /", m.MountPoint)
		}
		where := m.MountPoint
		if where == "" {
			where = m.Location
		}
		checkUnique(key, "mount point", where, i, seen, "vm.mounts", report)
	}
	for i, f := range vm.CACerts {
		if !path.IsAbs(f) && !strings.HasPrefix(f, "~/") {
			report(fmt.Sprintf("vm.caCerts[%d]", i), "%q must be an absolute path, or begin with ~/", f)
		}
	}
}

// validatePlan reports what netplan says. Its errors begin with the key.
func validatePlan(c Config, report reporter) {
	_, err := c.Plan()
	if err == nil {
		for _, r := range []struct {
			key  string
			addr netip.Addr
		}{{keyBridge, c.Network.KindBridgeCIDR.Addr()}, {keyClusterCIDRBase, c.Kind.ClusterCIDRBase}} {
			if why := unusable(r.addr); why != "" {
				report(r.key, "%v is %s, use a private range like 172.30.0.0 or 10.100.0.0", r.addr, why)
			}
		}
		return
	}
	key, message, _ := strings.Cut(err.Error(), ": ")
	report(key, "%s", message)
	if key != keyBridge || !c.Kind.ClusterCIDRBase.Is4() {
		return
	}
	// netplan stops at the first error; look at the base as well, beside a
	// bridge that it cannot overlap.
	other := netip.PrefixFrom(netip.AddrFrom4([4]byte{c.Kind.ClusterCIDRBase.As4()[0] ^ 1, 0, 0, 0}), 16)
	if _, err := netplan.New(other, c.Kind.ClusterCIDRBase); err != nil {
		key, message, _ := strings.Cut(err.Error(), ": ")
		report(key, "%s", message)
	}
}

// unusable says why no host can have an address in a's range, "" if it can.
func unusable(a netip.Addr) string {
	switch {
	case a.IsLoopback():
		return "a loopback address"
	case a.IsMulticast():
		return "a multicast address"
	case a.IsLinkLocalUnicast():
		return "a link-local address"
	case a.Is4() && a.As4()[0] == 0, a.Is4() && a.As4()[0] >= 240:
		return "a reserved address"
	}
	return ""
}

func validateNetwork(c Config, report reporter) {
	n := c.Network
	switch n.DockerNetwork {
	case "bridge", "host", "none", "default":
		report("network.dockerNetwork", "%q is one of Docker's own networks, choose another name", n.DockerNetwork)
	default:
		if !dockerName.MatchString(n.DockerNetwork) {
			report("network.dockerNetwork", "%q is not a Docker network name: letters, digits, _ . and -, the first a letter or digit, at most 128", n.DockerNetwork)
		}
	}
	if n.Uplink != "" {
		switch {
		case len(n.Uplink) > maxInterfaceName:
			report("network.uplink", "%q has %d characters, an interface name has at most %d", n.Uplink, len(n.Uplink), maxInterfaceName)
		case !interfaceName.MatchString(n.Uplink), n.Uplink == ".", n.Uplink == "..":
			report("network.uplink", "%q is not an interface name", n.Uplink)
		case n.Uplink == "lo":
			report("network.uplink", "lo leads nowhere, name the interface towards the host (for example lima0 or eth0)")
		case n.Uplink == c.BridgeName():
			report("network.uplink", "%s is the bridge of network.dockerNetwork itself, name the interface towards the host", n.Uplink)
		}
	}
	validateAllow(c, report)
	for _, p := range []struct{ key, value string }{{"network.proxy.http", n.Proxy.HTTP}, {"network.proxy.https", n.Proxy.HTTPS}} {
		if p.value == "" {
			continue
		}
		u, err := url.Parse(p.value)
		switch {
		case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
			report(p.key, "is not a URL like http://proxy.example.com:3128") // not shown: a password may be in it
		case u.User != nil:
			// The proxy is needed before the agent runs, so it would stand in
			// the VM's definition, where no secret may be.
			report(p.key, "must not hold a user name or password")
		}
	}
	for i, s := range n.Proxy.NoProxy {
		if s == "" || strings.ContainsAny(s, " ,\t\r\n") {
			report(fmt.Sprintf("network.proxy.noProxy[%d]", i), "%q is not a host name, domain, address or network", s)
		}
	}
}

func validateAllow(c Config, report reporter) {
	plan, planErr := c.Plan()
	seen := map[string]int{}
	for i, p := range c.Network.AllowFrom {
		key := fmt.Sprintf("%s[%d]", keyAllowFrom, i)
		switch {
		case !p.IsValid():
			report(key, "is not a network")
			continue
		case !p.Addr().Is4():
			report(key, "%v is not IPv4, and only IPv4 is routed", p)
		case p.Bits() == 0:
			report(key, "%v would open every container to everybody, name the networks or addresses that may reach them", p)
		case p != p.Masked():
			report(key, "%v has host bits set, write %v for the network or %v for the address", p, p.Masked(), p.Addr())
		case unusable(p.Addr()) != "":
			report(key, "%v is %s", p, unusable(p.Addr()))
		case planErr == nil && p.Overlaps(plan.Bridge):
			report(key, "%v overlaps %s %v, whose containers are not the host", p, keyBridge, plan.Bridge)
		case planErr == nil && p.Addr().Compare(plan.ClusterSpan().To) <= 0 && last(p).Compare(plan.ClusterSpan().From) >= 0:
			report(key, "%v overlaps the clusters' ranges %v (from kind.clusterCIDRBase), whose pods are not the host", p, plan.ClusterSpan())
		}
		checkUnique(key, "network", p.String(), i, seen, keyAllowFrom, report)
	}
}

// last returns the last address of the IPv4 network p.
func last(p netip.Prefix) netip.Addr {
	b := p.Addr().As4()
	for i := p.Bits(); i < 32; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	return netip.AddrFrom4(b)
}

func validateKind(k Kind, report reporter) {
	checkImage("kind.nodeImage", k.NodeImage, report)
	checkText("kind.metalLBManifest", k.MetalLBManifest, report)
	seen := map[string]int{}
	for i, r := range k.CustomDNSResolvers {
		key := fmt.Sprintf("kind.customDnsResolvers[%d]", i)
		if len(r.Domain) > 253 || !domainName.MatchString(r.Domain) {
			report(key+".domain", "%q is not a domain like corp.example.com", r.Domain)
		} else {
			checkUnique(key+".domain", "domain", strings.ToLower(r.Domain), i, seen, "kind.customDnsResolvers", report)
		}
		if len(r.Resolvers) == 0 {
			report(key+".resolvers", "is missing, give the address of at least one resolver for %s", r.Domain)
		}
		for j, a := range r.Resolvers {
			if a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() {
				// A loopback address would be the pod's or the node's own.
				report(fmt.Sprintf("%s.resolvers[%d]", key, j), "%v is no resolver that a pod can reach", a)
			}
		}
	}
}

func validateClusters(clusters []Cluster, report reporter) {
	names, numbers := map[string]int{}, map[string]int{}
	for i, c := range clusters {
		key := fmt.Sprintf("clusters[%d]", i)
		switch {
		case c.Name == "":
			report(key+".name", "is missing")
		case len(c.Name) > maxClusterName || !dnsLabel.MatchString(c.Name):
			report(key+".name", "%q is not a name of lower case letters, digits and inner dashes (at most %d)", c.Name, maxClusterName)
		default:
			checkUnique(key+".name", "name", c.Name, i, names, "clusters", report)
		}
		switch {
		case c.Number == 0:
		case c.Number < netplan.MinCluster || c.Number > netplan.MaxCluster:
			report(key+".number", "is %d, it must be from %d to %d (or absent, for the lowest free one)", c.Number, netplan.MinCluster, netplan.MaxCluster)
		default:
			checkUnique(key+".number", "number", strconv.Itoa(c.Number), i, numbers, "clusters", report)
		}
		if c.Workers < 0 || c.Workers > maxWorkers {
			report(key+".workers", "is %d, it must be from 0 to %d", c.Workers, maxWorkers)
		}
		checkImage(key+".image", c.Image, report)
	}
	if len(clusters) > netplan.MaxCluster {
		report("clusters", "has %d entries, there is room for %d", len(clusters), netplan.MaxCluster)
	}
}

func validateRegistries(r Registries, report reporter) {
	if r.CacheStorage != CacheInGuest && r.CacheStorage != CacheOnHost {
		report("registries.cacheStorage", "is %q, it must be guest or host", r.CacheStorage)
	}
	checkImage("registries.image", r.Image, report)
	names, hosts, ports := map[string]int{}, map[string]int{}, map[string]int{}
	for i, m := range r.Mirrors {
		key := fmt.Sprintf("registries.mirrors[%d]", i)
		switch {
		case m.Name == "":
			report(key+".name", "is missing")
		case strings.Contains(m.Name, "."):
			// Containers resolve each other by name: the mirror would find
			// itself in place of the registry, and be bypassed without a word.
			report(key+".name", "%q looks like a host name and would hide that registry from the mirror itself, choose a name without dots like %q",
				m.Name, "mirror-"+strings.ReplaceAll(m.Name, ".", "-"))
		case !dnsLabel.MatchString(m.Name):
			report(key+".name", "%q is not a name of lower case letters, digits and inner dashes (at most 63)", m.Name)
		default:
			checkUnique(key+".name", "name", m.Name, i, names, "registries.mirrors", report)
		}
		host, port, hasPort := strings.Cut(m.Host, ":")
		switch {
		case m.Host == "":
			report(key+".host", "is missing, name the registry that is mirrored (for example docker.io)")
		case len(host) > 253 || !domainName.MatchString(host) || hasPort && !isPort(port):
			report(key+".host", "%q is not the host name of a registry (for example docker.io or registry.example.com:5000)", m.Host)
		case host == m.Name && dnsLabel.MatchString(m.Name): // one with dots is reported above
			report(key+".host", "is the same as the mirror's name, which would hide the registry from the mirror itself, choose another name")
		default:
			checkUnique(key+".host", "registry", strings.ToLower(m.Host), i, hosts, "registries.mirrors", report)
		}
		switch apiLast := netplan.APIPortBase + netplan.MaxCluster; {
		case m.Port < 1 || m.Port > 65535:
			report(key+".port", "is %d, it must be from 1 to 65535", m.Port)
		case m.Port > netplan.APIPortBase && m.Port <= apiLast:
			report(key+".port", "is %d, but %d to %d belong to the clusters' API servers", m.Port, netplan.APIPortBase+1, apiLast)
		default:
			checkUnique(key+".port", "port", strconv.Itoa(m.Port), i, ports, "registries.mirrors", report)
		}
		validateRemote(m, key, report)
		if m.MaxSize != "" {
			if _, err := ParseSize(m.MaxSize); err != nil {
				report(key+".maxSize", "%v", err)
			}
		}
	}
}

func validateRemote(m Mirror, key string, report reporter) {
	u, err := url.Parse(m.RemoteURL)
	switch {
	case m.RemoteURL == "":
		report(key+".remoteURL", "is missing (for example https://registry-1.docker.io)")
	case err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https":
		report(key+".remoteURL", "is not a URL like https://registry-1.docker.io")
	case u.User != nil:
		report(key+".remoteURL", "must not hold a user name or password, use username and passwordFile")
	case u.RawQuery != "" || u.Fragment != "":
		report(key+".remoteURL", "must not hold a query or a fragment")
	}
	switch {
	case m.Password != "" && m.PasswordFile != "":
		report(key+".passwordFile", "is given beside password, keep one of them")
	case m.Username == "" && (m.Password != "" || m.PasswordFile != ""):
		// The reverse is no error here: the guest's file holds user names only,
		// its passwords are kept apart. WithPasswords looks at that.
		report(key+".username", "is missing, a password alone is not enough")
	}
	if f := m.PasswordFile; f != "" && !path.IsAbs(f) && !strings.HasPrefix(f, "~/") {
		report(key+".passwordFile", "%q must be an absolute path, or begin with ~/", f)
	}
}

// checkUnique reports value of entry i of list when an earlier entry has it.
func checkUnique(key, what, value string, i int, seen map[string]int, list string, report reporter) {
	if before, ok := seen[value]; ok {
		report(key, "has the same %s as %s[%d]: %s", what, list, before, value)
		return
	}
	seen[value] = i
}

func checkImage(key, ref string, report reporter) {
	if ref != "" && !imageRef.MatchString(ref) {
		report(key, "%q is not an image reference like kindest/node:v1.34.0", ref)
	}
}

// checkText reports a path or URL that cannot be one.
func checkText(key, s string, report reporter) {
	if strings.ContainsAny(s, "\r\n\x00") || strings.HasPrefix(s, "-") || s != strings.TrimSpace(s) {
		report(key, "%q is neither a path nor a URL", s)
	}
}

func isPort(s string) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && n > 0
}
