//go:build linux

package lab

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// Setup is an engine with a firewall backend.
type Setup string

const (
	Debian   Setup = "debian"      // the dockerd of the distribution (docker.io, 20.10 on Debian 12), iptables
	Iptables Setup = "29-iptables" // Docker 29
	Nftables Setup = "29-nftables" // Docker 29 with --firewall-backend=nftables
)

var all = []Setup{Debian, Iptables, Nftables}

// Setups are the setups to run a test on: those in $KLIMAX_LAB_SETUPS (separated by commas), else all.
func Setups(t testing.TB) []Setup {
	t.Helper()
	env := os.Getenv("KLIMAX_LAB_SETUPS")
	if env == "" {
		return slices.Clone(all)
	}
	var list []Setup
	for s := range strings.SplitSeq(env, ",") {
		set := Setup(strings.TrimSpace(s))
		if !set.known() {
			t.Fatalf("KLIMAX_LAB_SETUPS: no setup %q; there are %v", set, all)
		}
		list = append(list, set)
	}
	return list
}

// Each runs the test once per setup, as a subtest of its name.
func Each(t *testing.T, f func(t *testing.T, s Setup)) {
	t.Helper()
	for _, s := range Setups(t) {
		t.Run(string(s), func(t *testing.T) { f(t, s) })
	}
}

func (s Setup) known() bool { return slices.Contains(all, s) }

// Iptables says whether Docker writes its rules with iptables.
func (s Setup) Iptables() bool { return s != Nftables }

// Moby29 says whether the engine is Docker 29.
func (s Setup) Moby29() bool { return s != Debian }
