package config

// Template returns the file that `klimax config init` writes: every key with
// its default, commented out. A "#" before one space is prose, one before a key
// or its indentation (two spaces or more) switches a setting off.
func Template() string { return template }

const template = `# klimax.yaml: every key is optional and shown with its default.
# To change one, remove the "#" before it and before the section it is in.
# docs/config.md explains each.
apiVersion: klimax/v1

# Where the guest is: lima (a VM on this computer), ssh (a Linux host) or local
# (this Linux machine). Empty: lima on macOS, local on Linux.
#guest:
#  type: ""
# With type ssh, where to: [user@]host[:port].
#  ssh: ""

# The virtual machine, with guest.type lima only.
#vm:
#  name: klimax
#  cpus: 4
#  memory: 8GiB
#  disk: 60GiB
# Run amd64 images on Apple silicon.
#  rosetta: false
# Path or URL of the disk image. Empty: chosen by klimax.
#  image: ""
# Directories of this computer that the VM sees, for example
#   - {location: ~/src, mountPoint: /src, writable: false}
#  mounts: []
# PEM files of certificate authorities that the VM trusts.
#  caCerts: []

#network:
# The Docker network's range, always a /16. It must not overlap any network
# that this computer or the guest has a route to.
#  kindBridgeCIDR: 172.30.0.0/16
#  dockerNetwork: kind
# Do not open the guest's ports on this computer's 127.0.0.1 as well.
#  disablePortMirroring: true
# The guest's interface towards this computer. Empty: lima0, else the one of
# the default route.
#  uplink: ""
# Who may reach containers, addresses or networks, for example
# [192.168.1.20, 10.8.0.0/24]. Absent: on lima0 its own network, else nobody.
#  allowFrom:
# Route pods and Services from this computer as well.
#  routePods: true
# The guest's way to the internet, for example http://proxy.example.com:3128.
#  proxy:
#    http: ""
#    https: ""
#    noProxy: []

#kind:
# Empty: chosen by klimax.
#  nodeImage: ""
# Cluster N gets the /16 that is N above this: 10.101.0.0/16 for the first.
#  clusterCIDRBase: 10.100.0.0
# Path or URL. Empty: the one built in.
#  metalLBManifest: ""
# Domains with resolvers of their own, for example
#   - {domain: corp.example.com, resolvers: [10.0.0.53]}
#  customDnsResolvers: []
# Keep the kubeconfig in step when clusters come and go.
#  autoMergeKubeconfig: true
#  autoRemoveKubeconfig: true
# New LoadBalancer Services see the caller's own address.
#  preserveSourceIP: true

# Clusters to make on "klimax up", for example
#   - {name: dev, number: 1, workers: 2, image: ""}
#clusters: []

#registries:
# Where mirrors keep what they fetched: guest or host.
#  cacheStorage: guest
# Empty: chosen by klimax.
#  image: ""
# Absent: these five. A list here replaces them, [] is none. An entry may have
# username with password or passwordFile, and maxSize (for example 20GiB).
#  mirrors:
#    - name: mirror-docker-io
#      host: docker.io
#      port: 5030
#      remoteURL: https://registry-1.docker.io
#    - name: mirror-quay-io
#      host: quay.io
#      port: 5010
#      remoteURL: https://quay.io
#    - name: mirror-gcr-io
#      host: gcr.io
#      port: 5020
#      remoteURL: https://gcr.io
#    - name: mirror-us-docker-pkg-dev
#      host: us-docker.pkg.dev
#      port: 5040
#      remoteURL: https://us-docker.pkg.dev
#    - name: mirror-us-central1-docker-pkg-dev
#      host: us-central1-docker.pkg.dev
#      port: 5050
#      remoteURL: https://us-central1-docker.pkg.dev
`
