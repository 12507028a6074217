//go:build linux

package main

import (
	"context"
	"fmt"
	"time"

	"klimax/test/lab"
)

// burst is how long one measurement of throughput takes.
const burst = time.Second

// Ports on which docker-proxy publishes the container's.
const (
	proxiedPort = 18080
	proxiedSink = 18081
)

// Throughput is what one engine's paths carried, in Gbit/s.
type Throughput struct {
	Routed []float64 `json:"routedGbits"` // mac to VIP, through all rules
	Plain  []float64 `json:"plainGbits"`  // the same path without any rule
	Proxy  []float64 `json:"proxyGbits"`  // mac to docker-proxy's published port
}

func (b *bench) throughputCost() time.Duration {
	return time.Duration(len(b.setups)) * (2*labCost + time.Duration(b.pairs)*3*(burst+100*time.Millisecond))
}

func (b *bench) throughput(ctx context.Context) {
	const section = "throughput"
	for _, setup := range b.setups {
		if ctx.Err() != nil {
			return
		}
		x, err := b.threeWays(ctx, setup)
		if err != nil {
			b.failed(section, string(setup), Aim, err)
			continue
		}
		routed, plain, proxy := quantile(x.Routed, 0.5), quantile(x.Plain, 0.5), quantile(x.Proxy, 0.5)
		share := 100 * routed / plain
		b.add(Line{Section: section, Name: string(setup) + ", mac to VIP against no firewall", Limit: "≥ 95 %", OK: share >= 95, Kind: Aim, Raw: x,
			Measured: fmt.Sprintf("%.1f %%: %.2f of %.2f Gbit/s, medians of %d", share, routed, plain, len(x.Routed))})
		b.add(Line{Section: section, Name: string(setup) + ", mac to VIP against docker-proxy", Kind: Base,
			Measured: fmt.Sprintf("%.2f times: %.2f to %.2f Gbit/s", routed/proxy, routed, proxy)})
	}
}

// threeWays measures the three paths in turn, so that whatever else the
// machine does hits all of them alike.
func (b *bench) threeWays(ctx context.Context, setup lab.Setup) (x Throughput, err error) {
	err = inLab(ctx, lab.Options{Setup: setup}, func(t *bed, l *lab.Lab) {
		w := b.withAgent(t, l, lab.Spec{Publish: map[string]string{
			fmt.Sprint(proxiedPort): fmt.Sprint(lab.Port), fmt.Sprint(proxiedSink): fmt.Sprint(lab.SinkPort)}})
		w.works()
		throughProxy(t, l)
		p := lab.New(t, lab.Options{Setup: setup})
		plainPath(t, p)

		paths := []struct {
			l      *lab.Lab
			target string
			into   *[]float64
		}{
			{l, port(vipAddr, lab.SinkPort), &x.Routed},
			{p, port(vipAddr, lab.SinkPort), &x.Plain},
			{l, port(l.VMAddr(), proxiedSink), &x.Proxy},
		}
		for i := range b.pairs + 1 {
			for j := range paths {
				path := paths[(i+j)%len(paths)]
				d := burst
				if i == 0 {
					d /= 4 // a warm-up, not counted
				}
				rate, err := path.l.Throughput(path.l.Mac, path.target, d)
				if err != nil {
					t.Fatal(err)
				}
				if i > 0 {
					*path.into = append(*path.into, rate*8/1e9)
				}
				rest(t, 50*time.Millisecond)
			}
		}
		if out := p.VM.MustRun("nft", "list", "ruleset"); out != "" {
			t.Fatalf("the path without a firewall has one:\n%s", out)
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

// plainPath is the same path, container included, in a lab of the same engine
// with no packet rule left: those of Docker are flushed, and there is no agent.
func plainPath(t *bed, l *lab.Lab) {
	w := &world{t: t, l: l}
	l.CreateNetwork(dockerNetwork, bridgeCIDR, nil)
	w.workload(lab.Spec{})
	l.VM.MustRun("nft", "flush", "ruleset")
	if peer, err := l.WaitGet(l.Mac, port(vipAddr, lab.Port), 5*time.Second); err != nil || peer != l.MacAddr() {
		t.Fatalf("the path without a firewall: seen from %q, want the mac: %v", peer, err)
	}
}
