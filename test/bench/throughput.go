//go:build linux

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"klimax/test/lab"
)

// burst is how long one measurement of throughput takes. Many short ones in
// turn are better than few long ones: other work on the machine and the
// scheduler's choices change from second to second.
const burst = 500 * time.Millisecond

// Ports on which docker-proxy publishes the container's.
const (
	proxiedPort = 18080
	proxiedSink = 18081
)

// Throughput is what one engine's paths carried, in Gbit/s, one of each per
// round.
type Throughput struct {
	Routed []float64 `json:"routedGbits"` // mac to VIP, through all rules
	Docker []float64 `json:"dockerGbits"` // the same path with Docker's rules and none of klimax
	Plain  []float64 `json:"plainGbits"`  // the same path without any rule
	Proxy  []float64 `json:"proxyGbits"`  // mac to docker-proxy's published port
}

func (b *bench) throughputCost() time.Duration {
	return time.Duration(len(b.setups)) * (3*labCost + time.Duration(b.pairs)*4*(burst+50*time.Millisecond))
}

func (b *bench) throughput(ctx context.Context) {
	const section = "throughput"
	for _, setup := range b.setups {
		if ctx.Err() != nil {
			return
		}
		x, err := b.fourPaths(ctx, setup)
		if err != nil {
			b.failed(section, string(setup), Aim, err)
			continue
		}
		share := 100 * quantile(ratios(x.Routed, x.Plain), 0.5)
		b.add(Line{Section: section, Name: string(setup) + ", mac to VIP / no firewall", Measured: versus(x.Routed, x.Plain),
			Limit: "≥ 95 %", OK: share >= 95, Kind: Aim, Raw: x})
		b.add(Line{Section: section, Name: string(setup) + ", Docker's rules alone / no firewall", Measured: versus(x.Docker, x.Plain), Kind: Base})
		b.add(Line{Section: section, Name: string(setup) + ", mac to VIP / Docker's rules alone", Measured: versus(x.Routed, x.Docker), Kind: Base})
		b.add(Line{Section: section, Name: string(setup) + ", mac to VIP / docker-proxy", Measured: versus(x.Routed, x.Proxy), Kind: Base})
	}
}

// ratios divides round by round: what else the machine does in a round hits
// both alike.
func ratios(of, to []float64) []float64 {
	var out []float64
	for i := range min(len(of), len(to)) {
		out = append(out, of[i]/to[i])
	}
	return out
}

// versus is the median ratio in words, with its middle half and both medians.
func versus(of, to []float64) string {
	r := ratios(of, to)
	return fmt.Sprintf("%.1f %% (half of %d rounds: %.0f to %.0f %%); %.2f to %.2f Gbit/s",
		100*quantile(r, 0.5), len(r), 100*quantile(r, 0.25), 100*quantile(r, 0.75), quantile(of, 0.5), quantile(to, 0.5))
}

// fourPaths measures all paths in turn.
func (b *bench) fourPaths(ctx context.Context, setup lab.Setup) (x Throughput, err error) {
	err = inLab(ctx, lab.Options{Setup: setup}, func(t *bed, l *lab.Lab) {
		w := b.withAgent(t, l, lab.Spec{Publish: map[string]string{
			fmt.Sprint(proxiedPort): fmt.Sprint(lab.Port), fmt.Sprint(proxiedSink): fmt.Sprint(lab.SinkPort)}})
		w.works()
		throughProxy(t, l)
		docker := dockerPath(t, setup)
		plain := dockerPath(t, setup)
		plain.VM.MustRun("nft", "flush", "ruleset")

		vip := port(vipAddr, lab.SinkPort)
		paths := []struct {
			l      *lab.Lab
			target string
			into   *[]float64
		}{
			{l, vip, &x.Routed},
			{plain, vip, &x.Plain},
			{docker, vip, &x.Docker},
			{l, port(l.VMAddr(), proxiedSink), &x.Proxy},
		}
		for i := range b.pairs + 1 { // the first is a warm-up and not counted
			for j := range paths {
				path := paths[(i+j)%len(paths)]
				rate, err := path.l.Throughput(path.l.Mac, path.target, burst)
				if err != nil {
					t.Fatal(err)
				}
				if i > 0 {
					*path.into = append(*path.into, rate*8/1e9)
				}
				rest(t, 50*time.Millisecond)
			}
		}
		if out := plain.VM.MustRun("nft", "list", "ruleset"); out != "" {
			t.Fatalf("the path without a firewall has one:\n%s", out)
		}
		if out := docker.VM.MustRun("nft", "list", "ruleset"); out == "" || strings.Contains(out, "klimax") {
			t.Fatalf("the path with Docker's rules alone has others:\n%s", out)
		}
	})
	return x, err
}

// throughProxy makes calls from the Mac to published ports go through
// docker-proxy. They would never get there: Docker translates their
// destination in the kernel. A translation of the guest's address to itself,
// before Docker's, claims the connection.
func throughProxy(t *bed, l *lab.Lab) {
	target := port(l.VMAddr(), proxiedPort)
	if peer, err := l.Get(l.Mac, target, time.Second); err != nil || peer != l.MacAddr() {
		t.Fatalf("published port without docker-proxy: the container sees %q, want the mac: %v", peer, err)
	}
	l.VM.MustRun("nft", fmt.Sprintf(`table ip bench {
 chain prerouting {
  type nat hook prerouting priority dstnat - 10;
  ip daddr %s tcp dport { %d, %d } dnat to ip daddr
 }
}`, l.VMAddr(), proxiedPort, proxiedSink))
	if peer, err := l.Get(l.Mac, target, time.Second); err != nil || peer != bridgeAddr {
		t.Fatalf("published port by docker-proxy: the container sees %q, want the proxy at %s: %v", peer, bridgeAddr, err)
	}
}

// dockerPath is the same path, container included, in a lab of the same engine
// without an agent, on a network that needs no rule to be reached.
func dockerPath(t *bed, setup lab.Setup) *lab.Lab {
	l := lab.New(t, lab.Options{Setup: setup})
	o := map[string]string{}
	if setup.Moby29() {
		o["com.docker.network.bridge.gateway_mode_ipv4"] = "nat-unprotected"
	}
	l.CreateNetwork(dockerNetwork, bridgeCIDR, o)
	w := &world{t: t, l: l}
	w.workload(lab.Spec{})
	if peer, err := l.WaitGet(l.Mac, port(vipAddr, lab.Port), 5*time.Second); err != nil || peer != l.MacAddr() {
		t.Fatalf("the path without klimax: seen from %q, want the mac: %v", peer, err)
	}
	return l
}
