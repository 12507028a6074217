//go:build lab

package network

import (
	"context"
	"net/netip"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"klimax/guest/facts"
	"klimax/shared/config"
	"klimax/shared/netplan"
)

// inNamespace runs f on a thread of its own in a new network namespace, which
// ends with the thread.
func inNamespace(t *testing.T, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread dies with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Errorf("unshare: %v", err)
			return
		}
		f()
	}()
	<-done
}

func sh(t *testing.T, script string) string {
	t.Helper()
	out, err := exec.Command("sh", "-euc", script).CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", script, err, out)
	}
	return string(out)
}

func testFacts() facts.Facts {
	return facts.Facts{
		Uplink: facts.Uplink{Name: "lima0", Found: true, Up: true, Address: netip.MustParseAddr("192.168.64.3"),
			Network: netip.MustParsePrefix("192.168.64.0/24")},
		Bridge:    facts.Bridge{Name: "br-kind", Present: true},
		IPForward: true,
		Engine: facts.Engine{Known: true, Running: true, Version: "29.0.0", Backend: "iptables",
			Network:  facts.DockerNetwork{Found: true},
			Clusters: []facts.Cluster{{Name: "dev", Number: 1, HasAPI: true}, {Name: "qa", Number: 7, HasAPI: true}},
			Mirrors:  []facts.Mirror{{Name: "hub", Address: netip.MustParseAddr("172.30.0.9")}}},
	}
}

// reconcile is one round of the loop.
func reconcile(t *testing.T, f facts.Facts) (Ruleset, State) {
	t.Helper()
	c := config.Default()
	p, err := c.Plan()
	if err != nil {
		t.Fatal(err)
	}
	have, fw, err := Current(context.Background(), p.Bridge)
	if err != nil {
		t.Fatal(err)
	}
	f.Firewall = fw
	want := Desired(c, p, f)
	if err := Apply(context.Background(), Diff(want, have, f)); err != nil {
		t.Fatal(err)
	}
	have, f.Firewall, err = Current(context.Background(), p.Bridge)
	if err != nil {
		t.Fatal(err)
	}
	want = Desired(c, p, f)
	if d := Diff(want, have, f); !d.Empty() {
		t.Errorf("after applying, still: %v\n%s\n%s", d, want, sh(t, "nft list ruleset"))
	}
	return want, have
}

const iptablesChains = `
iptables -N DOCKER-USER; iptables -A FORWARD -j DOCKER-USER; iptables -A DOCKER-USER -j RETURN
iptables -t raw -A PREROUTING -d 172.30.1.2/32 ! -i br-kind -j DROP
`

func TestApplyReadsBackEqual(t *testing.T) {
	inNamespace(t, func() {
		sh(t, iptablesChains)
		f := testFacts()
		reconcile(t, f)
		t.Log(sh(t, "nft list ruleset; iptables-save -c"))
		// damage of every kind is found and mended
		for _, damage := range []string{
			"nft delete table ip klimax",
			"nft flush table ip klimax",
			"nft flush chain ip klimax guard",
			"nft delete element ip klimax allow '{ 192.168.64.0/24 }'",
			"nft add element ip klimax allow '{ 10.0.0.0/8 }'",
			"nft add rule ip klimax guard accept",
			`nft 'insert rule ip klimax guard counter accept comment "klimax:guard-allow"'`,
			"nft add chain ip klimax other",
			"nft add set ip klimax more '{ type ipv4_addr; }'",
			"nft chain ip klimax guard '{ policy drop; }'",
			"nft delete table ip klimax; nft add table ip klimax; nft add chain ip klimax guard '{ type filter hook prerouting priority 0; }'",
			"iptables -F DOCKER-USER",
			"iptables -D DOCKER-USER 1",
			"iptables -I DOCKER-USER -j DROP",
			"iptables -t raw -I PREROUTING -d 172.30.1.0/24 -j DROP",
			"iptables -F; iptables -t raw -F",
		} {
			sh(t, damage)
			p, _ := config.Default().Plan()
			have, fw, err := Current(context.Background(), p.Bridge)
			if err != nil {
				t.Fatal(damage, err)
			}
			g := f
			g.Firewall = fw
			d := Diff(Desired(config.Default(), p, g), have, g)
			if d.Empty() {
				t.Errorf("not noticed: %s", damage)
			}
			t.Logf("%s: %v", damage, d)
			reconcile(t, f)
		}
		if changed, err := Remove(context.Background()); err != nil || !changed {
			t.Errorf("remove: %v %v", changed, err)
		}
		if left := sh(t, "nft list ruleset"); strings.Contains(left, "klimax") {
			t.Errorf("left behind:\n%s", left)
		}
		if changed, err := Remove(context.Background()); err != nil || changed {
			t.Errorf("second remove: %v %v", changed, err)
		}
	})
}

func TestIPTablesSaveRestoreChangesNothing(t *testing.T) {
	inNamespace(t, func() {
		sh(t, iptablesChains+"iptables -P FORWARD DROP")
		f := testFacts()
		reconcile(t, f)
		before := sh(t, "iptables-save | grep -v ^#")
		for _, want := range []string{"-s 192.168.64.0/24", "-i lima0", "-o br-kind", "RELATED,ESTABLISHED", "klimax:forward-accept", "klimax:raw-accept"} {
			if !strings.Contains(before, want) {
				t.Errorf("iptables-save does not show %q:\n%s", want, before)
			}
		}
		sh(t, "iptables-save > /tmp/klimax-save.$$; iptables-restore < /tmp/klimax-save.$$; rm /tmp/klimax-save.$$")
		if after := sh(t, "iptables-save | grep -v ^#"); after != before {
			t.Errorf("restoring changed\n%s\nto\n%s", before, after)
		}
		p, _ := netplanOf(t)
		have, fw, err := Current(context.Background(), p.Bridge)
		if err != nil {
			t.Fatal(err)
		}
		f.Firewall = fw
		if d := Diff(Desired(config.Default(), p, f), have, f); !d.Empty() {
			t.Errorf("a restore makes work: %v\n%s", d, sh(t, "nft --debug=netlink list chain ip filter DOCKER-USER"))
		}
		sh(t, "iptables -L -n -v; iptables -S; iptables -t raw -S; iptables -D DOCKER-USER 1")
	})
}

func netplanOf(t *testing.T) (netplan.Plan, config.Config) {
	t.Helper()
	c := config.Default()
	p, err := c.Plan()
	if err != nil {
		t.Fatal(err)
	}
	return p, c
}

func TestLegacyIsRecognised(t *testing.T) {
	inNamespace(t, func() {
		tables, docker, drop, err := readLegacy()
		if err != nil || len(tables) != 0 || docker || drop {
			t.Errorf("empty namespace: %v %v %v %v", tables, docker, drop, err)
		}
		sh(t, "iptables-legacy -N OTHER")
		if tables, docker, drop, err = readLegacy(); err != nil || len(tables) != 1 || docker || drop {
			t.Errorf("a chain of others: %v %v %v %v", tables, docker, drop, err)
		}
		sh(t, "iptables-legacy -N DOCKER; iptables-legacy -A FORWARD -o docker0 -j DOCKER; iptables-legacy -P FORWARD DROP")
		if _, docker, drop, err = readLegacy(); err != nil || !docker || !drop {
			t.Errorf("Docker's chain, policy DROP: %v %v %v", docker, drop, err)
		}
	})
}

// state reads what is there.
func state(t *testing.T) State {
	t.Helper()
	p, _ := netplanOf(t)
	s, _, err := Current(context.Background(), p.Bridge)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestManyNetworks: one transaction however many rules and elements it has.
func TestManyNetworks(t *testing.T) {
	inNamespace(t, func() {
		sh(t, iptablesChains)
		p, c := netplanOf(t)
		for i := range 1200 {
			c.Network.AllowFrom = append(c.Network.AllowFrom, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i / 200), byte(i % 200), 1}), 32))
		}
		f := testFacts()
		for range 2 { // the second time rules are replaced
			have, fw, err := Current(context.Background(), p.Bridge)
			if err != nil {
				t.Fatal(err)
			}
			f.Firewall = fw
			if err := Apply(context.Background(), Diff(Desired(c, p, f), have, f)); err != nil {
				t.Fatal(err)
			}
			if d := Diff(Desired(c, p, f), state(t), f); !d.Empty() {
				t.Errorf("after applying, still: %v", d)
			}
			c.Network.AllowFrom = c.Network.AllowFrom[1:]
		}
	})
}

// TestNeighbours: ranges that touch are elements of their own, also when
// somebody else adds one.
func TestNeighbours(t *testing.T) {
	inNamespace(t, func() {
		f := testFacts()
		for _, numbers := range [][]int{{1, 2, 3}, {1, 3}, {1, 2, 3, 4}, {2, 3}, {3}} {
			f.Engine.Clusters = nil
			for _, n := range numbers {
				f.Engine.Clusters = append(f.Engine.Clusters, facts.Cluster{Number: n, HasAPI: true})
			}
			reconcile(t, f)
		}
		sh(t, "nft add element ip klimax ranges '{ 10.102.0.0/16, 10.104.0.0/16 }'")
		if got := state(t).Sets[setRanges].Format(setRanges); got != "10.102.0.0/16, 10.103.0.0/16, 10.104.0.0/16, 172.30.0.0/16" {
			t.Error(got)
		}
		reconcile(t, f)
	})
}

// TestRulesOfOthersThatCannotBeRead must not keep ours from being read.
func TestRulesOfOthersThatCannotBeRead(t *testing.T) {
	inNamespace(t, func() {
		sh(t, iptablesChains+`
			nft add rule ip filter DOCKER-USER ct original ip saddr 1.2.3.4 drop
			nft add rule ip filter FORWARD ct original bytes gt 100000 drop
			nft 'add table inet f; add chain inet f c { type filter hook forward priority 0; }; add rule inet f c ct reply ip saddr 1.2.3.4 drop'`)
		reconcile(t, testFacts())
		if out := sh(t, "nft list chain ip filter DOCKER-USER"); !strings.Contains(out, "ct original ip saddr 1.2.3.4") {
			t.Errorf("a rule of others is gone:\n%s", out)
		}
	})
}

// TestHandlesOfAnotherTable: a table that was made anew counts its handles
// from 1 again. A change that was computed before must not hit other rules.
func TestHandlesOfAnotherTable(t *testing.T) {
	inNamespace(t, func() {
		sh(t, iptablesChains)
		f := testFacts()
		reconcile(t, f)
		sh(t, "iptables -D DOCKER-USER 1") // so that the other one of ours is replaced
		p, c := netplanOf(t)
		have, fw, err := Current(context.Background(), p.Bridge)
		if err != nil {
			t.Fatal(err)
		}
		f.Firewall = fw
		d := Diff(Desired(c, p, f), have, f)
		var script strings.Builder
		script.WriteString("nft delete table ip filter; iptables -N DOCKER-USER; iptables -A FORWARD -j DOCKER-USER\n")
		for range 40 {
			script.WriteString("iptables -A DOCKER-USER -s 10.9.9.9 -j DROP\n")
		}
		sh(t, script.String())
		if err := Apply(context.Background(), d); err == nil || !Stale(err) {
			t.Errorf("a change for another ruleset: %v", err)
		}
		if n := strings.Count(sh(t, "iptables -S DOCKER-USER"), "10.9.9.9"); n != 40 {
			t.Errorf("%d of 40 rules of others are left", n)
		}
		reconcile(t, f)
	})
}

// TestRulesOfTheUser: rules of others in DOCKER-USER that let something pass
// stay before ours, those that end the chain come behind.
func TestRulesOfTheUser(t *testing.T) {
	inNamespace(t, func() {
		sh(t, "iptables -N DOCKER-USER; iptables -A FORWARD -j DOCKER-USER; iptables -A DOCKER-USER -s 192.168.64.9 -j DROP; iptables -A DOCKER-USER -j RETURN")
		f := testFacts()
		f.Engine.Network.GatewayMode = "nat-unprotected"
		order := func() (out []string) {
			for _, line := range strings.Split(sh(t, "iptables -S DOCKER-USER"), "\n") {
				for _, word := range []string{"192.168.64.9", "forward-accept", "forward-return", "RETURN"} {
					if strings.Contains(line, word) {
						out = append(out, word)
					}
				}
			}
			return out
		}
		want := []string{"192.168.64.9", "forward-accept", "forward-return", "RETURN"}
		for _, damage := range []string{"true", "iptables -D DOCKER-USER 2", "iptables -D DOCKER-USER 3"} {
			sh(t, damage)
			reconcile(t, f)
			if got := order(); !slices.Equal(got, want) {
				t.Errorf("%s: %v", damage, got)
			}
		}
		sh(t, "iptables -D DOCKER-USER -j RETURN; iptables -D DOCKER-USER 2")
		reconcile(t, f)
		if got := order(); !slices.Equal(got, want[:3]) {
			t.Errorf("without an end: %v", got)
		}
	})
}

// TestDockersRulesAreRecognised: a flush leaves Docker's chains and takes what
// leads to them.
func TestDockersRulesAreRecognised(t *testing.T) {
	inNamespace(t, func() {
		p, _ := netplanOf(t)
		look := func() facts.Firewall {
			_, fw, err := Current(context.Background(), p.Bridge)
			if err != nil {
				t.Fatal(err)
			}
			return fw
		}
		sh(t, "iptables -t nat -N DOCKER; iptables -t nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER; iptables -N DOCKER; iptables -A FORWARD -o docker0 -j DOCKER")
		if fw := look(); !fw.DockerNAT || !fw.DockerForward {
			t.Errorf("Docker's rules: %+v", fw)
		}
		sh(t, "iptables -t nat -F")
		if fw := look(); fw.DockerNAT || !fw.DockerForward {
			t.Errorf("nat flushed: %+v", fw)
		}
		sh(t, "iptables -F")
		if fw := look(); fw.DockerNAT || fw.DockerForward {
			t.Errorf("filter flushed: %+v", fw)
		}
	})
}
