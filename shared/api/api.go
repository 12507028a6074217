// Package api holds the wire types of the agent's HTTP API under /v1 and the
// identifiers that rules, conditions, doctor checks and documents share.
package api

import "time"

// Headers in which both sides send their version.
const (
	HeaderHostVersion  = "Klimax-Host-Version"
	HeaderGuestVersion = "Klimax-Guest-Version"
)

// RuleID identifies one purpose of the network set-up. The same identifiers
// stand in the comments of nftables rules (as "klimax:<id>"), in conditions,
// in `status` and in the documents.
type RuleID string

// Every purpose there is.
const (
	RuleIPForward     RuleID = "ip-forward"     // the kernel forwards IPv4
	RuleSNATExempt    RuleID = "snat-exempt"    // containers keep their address towards the host
	RuleGuardLocal    RuleID = "guard-local"    // the bridge's and the guest's own traffic passes the guard
	RuleGuardAllow    RuleID = "guard-allow"    // the host's traffic passes the guard
	RuleGuard         RuleID = "guard"          // everybody else is dropped
	RuleGuardAPI      RuleID = "guard-api"      // API server ports: for the host and the guest only
	RuleGuardMirrors  RuleID = "guard-mirrors"  // mirrors: for nodes and the guest only
	RuleDirectMark    RuleID = "direct-mark"    // the mark that Docker's bridge-accept-fwmark looks for
	RuleRawAccept     RuleID = "raw-accept"     // past Docker's raw drop of direct routing
	RuleForwardAccept RuleID = "forward-accept" // host → containers in Docker's or iptables' chains
	RuleForwardReturn RuleID = "forward-return" // containers → host in Docker's or iptables' chains
)

// Rule is the state of one purpose: how many kernel rules it wants, how many
// of them are there as wanted, and what they have matched since they were put
// there.
type Rule struct {
	ID      RuleID `json:"id"`
	Wanted  int    `json:"wanted"`
	Present int    `json:"present"`
	Packets uint64 `json:"packets"`
}

// Uplink is the guest's interface towards the host.
type Uplink struct {
	Name    string `json:"name"`
	Address string `json:"address"` // empty while it has none
	Network string `json:"network"` // CIDR
}

// Docker is what the agent knows of the engine.
type Docker struct {
	Running         bool   `json:"running"`
	Version         string `json:"version"`
	FirewallBackend string `json:"firewallBackend"` // "iptables", "nftables" or "" while unknown
	LiveRestore     bool   `json:"liveRestore"`
	Restarts        int    `json:"restarts"` // since the agent started
	Network         string `json:"network"`  // the Docker network's name
	Bridge          string `json:"bridge"`   // its interface
	Subnet          string `json:"subnet"`   // its CIDR
	// Access says by which means the host's traffic gets past Docker's own
	// rules: "nat-unprotected", "user-chain", "first-rules" or "daemon-mark".
	Access string `json:"access"`
}

// Network is the state of the rules.
type Network struct {
	InSync           bool      `json:"inSync"`
	LastApplied      time.Time `json:"lastApplied"`
	LastReason       string    `json:"lastReason"`
	Repairs          int       `json:"repairs"` // how often rules were damaged and put back since the agent started
	LastRepairMillis float64   `json:"lastRepairMillis"`
	Allow            []string  `json:"allow"`  // who counts as the host, CIDRs
	Ranges           []string  `json:"ranges"` // what is reachable from there, CIDRs
	Rules            []Rule    `json:"rules"`
}

// Cluster is one kind cluster, or the demo workload.
type Cluster struct {
	Name   string   `json:"name"`
	Number int      `json:"number"`
	Nodes  []string `json:"nodes"`
	VIP    string   `json:"vip,omitempty"`
	Routed string   `json:"routed,omitempty"` // pods and services, CIDR
	Demo   bool     `json:"demo,omitempty"`
}

// Mirror is one registry mirror.
type Mirror struct {
	Name    string `json:"name"`
	Address string `json:"address"`
}

// Caller is a computer that registered itself with the guest.
type Caller struct {
	ID      string `json:"id"`
	Name    string `json:"name"`
	Address string `json:"address"`
}

// ConditionStatus is True, False or Unknown.
type ConditionStatus string

// The three states of a condition.
const (
	True    ConditionStatus = "True"
	False   ConditionStatus = "False"
	Unknown ConditionStatus = "Unknown"
)

// Condition types. Each is True when all is well.
const (
	CondDocker          = "DockerReady"
	CondDockerNetwork   = "DockerNetworkReady"
	CondUplink          = "UplinkReady"
	CondRules           = "RulesInSync"
	CondForwarding      = "ForwardingEnabled"
	CondDockerRules     = "DockerRulesPresent"
	CondForeignFirewall = "NoForeignFirewall"
	CondBackend         = "FirewallBackendSupported"
	CondState           = "StateWritable"
	CondAddressPlan     = "AddressPlanFree"
	CondConfig          = "ConfigValid"
)

// Condition is one statement on the guest's health.
type Condition struct {
	Type    string          `json:"type"`
	Status  ConditionStatus `json:"status"`
	Reason  string          `json:"reason"`  // one CamelCase word
	Message string          `json:"message"` // for a person, with what to do about it
}

// Generation counts configurations: Desired is the one that was put last,
// Reconciled the last one the guest has fully applied.
type Generation struct {
	Desired    int64 `json:"desired"`
	Reconciled int64 `json:"reconciled"`
}

// Status is the answer of GET /v1/status.
type Status struct {
	Version    string      `json:"version"`
	PID        int         `json:"pid"`
	Started    time.Time   `json:"started"`
	Generation Generation  `json:"generation"`
	Uplink     Uplink      `json:"uplink"`
	Docker     Docker      `json:"docker"`
	Network    Network     `json:"network"`
	Clusters   []Cluster   `json:"clusters"`
	Mirrors    []Mirror    `json:"mirrors"`
	Callers    []Caller    `json:"callers"`
	Conditions []Condition `json:"conditions"`
}

// Healthy reports whether rules are in sync and every condition is True.
func (s Status) Healthy() bool {
	if !s.Network.InSync {
		return false
	}
	for _, c := range s.Conditions {
		if c.Status != True {
			return false
		}
	}
	return true
}

// ConfigPut is the answer of PUT /v1/config.
type ConfigPut struct {
	Generation int64  `json:"generation"`
	ETag       string `json:"etag"`
	Changed    bool   `json:"changed"`
}

// Error is the body of every answer that is not 2xx.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

func (e *Error) Error() string {
	if e.Hint == "" {
		return e.Message
	}
	return e.Message + "\n  " + e.Hint
}

// Error codes.
const (
	CodeBadRequest         = "bad-request"
	CodeNotFound           = "not-found"
	CodeInternal           = "internal"
	CodePreconditionFailed = "precondition-failed"
	CodeInvalidConfig      = "invalid-config"
	CodeVersionMismatch    = "version-mismatch"
	CodeUnavailable        = "unavailable"
)

// Event is one line of GET /v1/events (NDJSON). Status is the whole state
// after the event.
type Event struct {
	Time   time.Time `json:"time"`
	Type   string    `json:"type"` // "status" for now
	Reason string    `json:"reason,omitempty"`
	Status *Status   `json:"status,omitempty"`
}

// Exit codes of both programs.
const (
	ExitOK          = 0 // done, or in sync
	ExitDegraded    = 1 // failed, or degraded
	ExitUnreachable = 2 // the agent did not answer
	ExitUsage       = 3 // wrong flags, arguments or configuration; nothing was changed
	ExitInterrupted = 130
)
