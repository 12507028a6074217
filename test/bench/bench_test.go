//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"klimax/test/lab"
	"klimax/test/lab/probe"
)

const ms = time.Millisecond

func TestQuantile(t *testing.T) {
	var hundred, twoHundred []float64
	for i := range 200 {
		if twoHundred = append(twoHundred, float64(200-i)); i < 100 {
			hundred = append(hundred, float64(i+1))
		}
	}
	for _, tt := range []struct {
		values  []float64
		q, want float64
	}{
		{nil, 0.5, 0},
		{[]float64{7}, 0.99, 7},
		{[]float64{3, 1, 2}, 0.5, 2},
		{[]float64{4, 3, 1, 2}, 0.5, 2},
		{hundred, 0.99, 99},
		{twoHundred, 0.99, 198},
		{twoHundred, 0, 1},
		{twoHundred, 1, 200},
	} {
		if got := quantile(tt.values, tt.q); got != tt.want {
			t.Errorf("quantile(%d values, %v) = %v, want %v", len(tt.values), tt.q, got, tt.want)
		}
	}
	if s := spread(twoHundred); s != "p50 100.0, p90 180.0, p99 198.0, max 200.0 ms" {
		t.Error(s)
	}
}

func TestVersus(t *testing.T) {
	if r := ratios([]float64{1, 9, 4}, []float64{2, 3}); !slices.Equal(r, []float64{0.5, 3}) {
		t.Errorf("%v", r)
	}
	if s := versus([]float64{9, 20, 27}, []float64{10, 20, 30}); s != "90.0 % (half of 3 rounds: 90 to 100 %); 20.00 to 20.00 Gbit/s" {
		t.Error(s)
	}
}

// samples makes a loop's result: one connection every 20 ms, "." answered by
// peer, "x" lost.
func samples(start time.Time, peer, pattern string) lab.Result {
	r := lab.Result{Target: "t", Start: start, Total: len(pattern), Peers: map[string]int{}}
	for i, c := range pattern {
		s := probe.Sample{At: time.Duration(i) * interval, Took: ms}
		if c == 'x' {
			s.Err = "timeout"
			r.Lost++
		} else {
			s.Peer = peer
			r.Peers[peer]++
		}
		r.Samples = append(r.Samples, s)
	}
	return r
}

func TestCount(t *testing.T) {
	now := time.Now()
	w := way{name: "in", want: "a"}
	got := count(w, samples(now, "a", "....x."))
	if got.Total != 6 || got.Lost != 1 || got.Foreign != 0 || got.clean() || len(got.Losses) != 1 || !got.Losses[0].At.Equal(now.Add(4*interval)) {
		t.Errorf("one lost: %+v", got)
	}
	got = count(w, samples(now, "b", "..."))
	if got.Foreign != 3 || got.Lost != 0 || got.clean() || got.Losses[0].What != "seen from b" {
		t.Errorf("foreign: %+v", got)
	}
	all := count(w, samples(now, "a", "..."))
	if !all.clean() {
		t.Errorf("nothing lost: %+v", all)
	}
	all.add(got)
	if all.Total != 6 || all.Foreign != 3 || len(all.Ways) != 2 || all.clean() {
		t.Errorf("sum: %+v", all)
	}
	if (Traffic{}).clean() {
		t.Error("no connections at all are no success")
	}
	if (Traffic{Total: 1, BrokenFlows: 1}).clean() {
		t.Error("a broken flow is no success")
	}
	if s := usualRatio(Traffic{Total: 200, Lost: 3, Foreign: 1}, &Traffic{Total: 1000}); !strings.Contains(s, "2.00 % against klimax's 0.000 %") {
		t.Error(s)
	}
	if s := usualRatio(Traffic{Total: 200}, nil); s != "" {
		t.Error(s)
	}
}

func TestOutside(t *testing.T) {
	now := time.Now()
	control := samples(now, "gw", "....xxxxx.....xx")
	for _, tt := range []struct {
		name, pattern string
		shift         time.Duration
		want          int
	}{
		{"the same down time", "....xxxxx.....xx", 0, 0},
		{"a turn longer at both ends", "...xxxxxxx......", 3 * ms, 0},
		{"before", "x...xxxxx.......", 0, 1},
		{"between", "....xxxxx..x....", 0, 0},
		{"much longer", "....xxxxxxxxxxxxxxxxxxxxxxxxx", 0, 10},
		{"nothing lost", "................", 0, 0},
	} {
		losses := count(way{want: "a"}, samples(now.Add(tt.shift), "a", tt.pattern)).Losses
		if got := outside(losses, control, coldSlack); len(got) != tt.want {
			t.Errorf("%s: %d outside of the down time, want %d: %v", tt.name, len(got), tt.want, got)
		}
	}
	losses := count(way{want: "a"}, samples(now, "a", "xx")).Losses
	if got := outside(losses, samples(now, "gw", ".."), coldSlack); len(got) != 2 {
		t.Errorf("the control lost nothing: %v", got)
	}
}

func TestFirstCallers(t *testing.T) {
	now := time.Now()
	var seen []probe.Seen
	at := func(peer string, offsets ...int) {
		for _, o := range offsets {
			seen = append(seen, probe.Seen{At: now.Add(time.Duration(o) * ms), Peer: peer})
		}
	}
	at("c", 0, 20, 40, 60)
	at("vm", 900) // masqueraded, first after the restart
	at("c", 920, 940, 2000, 2020)
	window := func(from, to int) [2]time.Time {
		return [2]time.Time{now.Add(time.Duration(from) * ms), now.Add(time.Duration(to) * ms)}
	}
	first, masked := firstCallers(seen, [][2]time.Time{window(50, 1000), window(1000, 3000)}, "c")
	if !slices.Equal(first, []string{"c", "vm", "c"}) || masked != 1 {
		t.Errorf("first %v, %d masked", first, masked)
	}
	if first, _ := firstCallers(nil, [][2]time.Time{window(0, 1)}, "c"); len(first) != 0 {
		t.Errorf("nobody called, first %v", first)
	}
	if first, _ := firstCallers(seen, [][2]time.Time{window(5000, 6000)}, "c"); len(first) != 1 {
		t.Errorf("nobody came back, first %v", first)
	}
}

func TestTimeline(t *testing.T) {
	now := time.Now()
	var line timeline
	line.add(now, "long before")
	line.commit(commit{at: now.Add(2 * time.Second), pid: 7, name: "iptables", what: "-rule filter/FORWARD"})
	line.add(now.Add(9*time.Second), "long after")
	got := line.around([]Loss{{At: now.Add(2100 * ms), Way: "in", What: "timeout", Took: 900}})
	if len(got) != 2 || !strings.Contains(got[0].What, "iptables (PID 7): -rule filter/FORWARD") || !strings.HasPrefix(got[1].What, "LOST in: timeout") {
		t.Errorf("%+v", got)
	}
	log := filepath.Join(t.TempDir(), "log")
	stamp := now.Add(2200 * ms).Round(ms).UTC().Format(time.RFC3339Nano)
	if err := os.WriteFile(log, []byte("junk\ntime="+stamp+" level=INFO msg=one\ntime=\""+stamp+"\" level=info msg=two\ntime=never msg=three\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	line.logs("agent", log)
	if more := line.around([]Loss{{At: now.Add(2100 * ms), Took: 900}}); len(more) != 4 || more[2].What != "agent: level=INFO msg=one" || more[3].What != "agent: level=info msg=two" {
		t.Errorf("with a log: %+v", more)
	}
	if got := line.around(nil); len(got) != 0 {
		t.Errorf("nothing lost: %+v", got)
	}
	s := Series{Timeline: got, Unclean: []int{4}}
	if text := s.story(); !strings.Contains(text, "100.0 ms  LOST in") || !strings.Contains(text, "[4]") {
		t.Error(text)
	}
}

func TestCommitWords(t *testing.T) {
	message := func(attrs ...any) []byte {
		e := netlink.NewAttributeEncoder()
		for i := 0; i < len(attrs); i += 2 {
			switch v := attrs[i+1].(type) {
			case string:
				e.String(uint16(attrs[i].(int)), v)
			case uint32:
				e.Bytes(uint16(attrs[i].(int)), []byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
			}
		}
		b, err := e.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return append(make([]byte, 4), b...)
	}
	for want, got := range map[string]string{
		"-rule filter/FORWARD": change(unix.NFT_MSG_DELRULE, message(unix.NFTA_RULE_TABLE, "filter", unix.NFTA_RULE_CHAIN, "FORWARD")),
		"+chain nat/DOCKER":    change(unix.NFT_MSG_NEWCHAIN, message(unix.NFTA_CHAIN_TABLE, "nat", unix.NFTA_CHAIN_NAME, "DOCKER")),
		"+table klimax":        change(unix.NFT_MSG_NEWTABLE, message(unix.NFTA_TABLE_NAME, "klimax")),
		"+element klimax/allow": change(unix.NFT_MSG_NEWSETELEM, message(unix.NFTA_SET_ELEM_LIST_TABLE, "klimax",
			unix.NFTA_SET_ELEM_LIST_SET, "allow")),
		"message 200": change(200, nil),
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if pid, name := committer(message(unix.NFTA_GEN_PROC_PID, uint32(70000), unix.NFTA_GEN_PROC_NAME, "nft")); pid != 70000 || name != "nft" {
		t.Errorf("%d %s", pid, name)
	}
	if s := words(map[string]int{"b": 1, "a": 3}); s != "a ×3, b" {
		t.Error(s)
	}
}

func TestBed(t *testing.T) {
	var order []string
	err := inBed(t.Context(), func(b *bed) {
		b.Cleanup(func() { order = append(order, fmt.Sprint("first ", b.Context().Err() != nil, b.Failed())) })
		b.Cleanup(func() { b.Fatal("in a clean-up") })
		b.Logf("a note")
		b.Errorf("one %d", 1)
		b.Fatalf("two")
		t.Error("Fatalf returned")
	})
	if err == nil || !slices.Equal(strings.Split(err.Error(), "\n"), []string{"one 1", "two", "in a clean-up", "a note"}) {
		t.Errorf("%v", err)
	}
	if !slices.Equal(order, []string{"first true true"}) {
		t.Errorf("clean-ups: %v", order)
	}
	err = inBed(t.Context(), func(b *bed) {
		b.Logf("a note")
		if b.Failed() || b.Context().Err() != nil {
			b.Errorf("failed at the start")
		}
	})
	if err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := inBed(ctx, func(b *bed) { rest(b, time.Hour) }); err == nil || err.Error() != "interrupted" {
		t.Errorf("%v", err)
	}
}

func TestReport(t *testing.T) {
	r := newReport(io.Discard)
	r.add(Line{Section: "one", Name: "a", Measured: "3 ≤", Limit: "5", OK: true, Kind: Hard})
	r.add(Line{Section: "one", Name: "b", Measured: "9", Limit: "5", Kind: Aim})
	r.add(Line{Section: "two", Name: "c", Measured: "1", Kind: Base})
	r.failed("two", "d", Hard, errors.New("broke"))
	r.failed("two", "e", Base, errors.New("broke"))
	r.end()
	if met, all := r.met(Hard); met != 1 || all != 2 {
		t.Errorf("hard: %d of %d", met, all)
	}
	if met, all := r.met(Aim); met != 0 || all != 2 {
		t.Errorf("aims: %d of %d", met, all)
	}
	if len(r.Details) != 1 {
		t.Errorf("the same cause is told %d times", len(r.Details))
	}
	var out bytes.Buffer
	r.table(&out)
	for _, want := range []string{"ONE", "\n  a  3 ≤", "ok    hard", "MISS  aim", "-     base", "two: d: broke", "hard lines met: 1 of 2", "aims met: 0 of 2"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	out.Reset()
	if err := r.json(&out); err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(out.Bytes(), &back); err != nil || len(back.Lines) != 5 || back.Lines[3].Raw != "broke" {
		t.Errorf("%+v %v", back, err)
	}
}

func TestFlags(t *testing.T) {
	t.Setenv("KLIMAX_LAB_SETUPS", "") // put back at the end: the program sets it
	for _, args := range []string{"-only nothing", "-o xml", "-restarts 0", "more", "-setups none", "-no-such-flag"} {
		var said strings.Builder
		if code := run(t.Context(), strings.Fields(args), io.Discard, &said); code != exitUsage || said.Len() == 0 {
			t.Errorf("%s: exit %d, %q", args, code, said.String())
		}
	}
	chosen, err := choose("repair, restart")
	if err != nil || len(chosen) != 2 || chosen[0].name != "repair" {
		t.Errorf("%v %v", chosen, err)
	}
	if chosen, err := choose(""); err != nil || len(chosen) != len(sections()) {
		t.Errorf("%v %v", chosen, err)
	}
}

func TestPlans(t *testing.T) {
	b := &bench{options: options{restarts: 50, usual: 10}, setups: []lab.Setup{lab.Debian, lab.Nftables}}
	var names []string
	for _, p := range b.plans() {
		names = append(names, p.name()+" "+string(p.kind()))
	}
	want := []string{
		"debian, SIGTERM ×50 hard", "debian, kill -9 ×50 hard", "debian, policy DROP, SIGTERM/kill -9 ×10 hard",
		"debian usual design, SIGTERM/kill -9 ×10 base", "debian usual design, policy DROP, SIGTERM/kill -9 ×10 base",
		"29-nftables, SIGTERM ×50 hard", "29-nftables, kill -9 ×50 hard", "29-nftables usual design, SIGTERM/kill -9 ×10 base",
	}
	if !slices.Equal(names, want) {
		t.Errorf("%q", names)
	}
	if d := b.restartCost(); d < 3*time.Minute || d > time.Hour {
		t.Errorf("expected time %v", d)
	}
}

func TestProcessFigures(t *testing.T) {
	pid := os.Getpid()
	before, err := cpuTime(pid)
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	after := before
	for after < before+5*tick && time.Since(begin) < 10*time.Second { // reading it takes time, too
		if after, err = cpuTime(pid); err != nil {
			t.Fatal(err)
		}
	}
	if used, over := after-before, time.Since(begin); used < 5*tick || used > 64*over {
		t.Errorf("busy for %v: %v", over, used)
	}
	if n, err := memory(pid); err != nil || n < 1e6 || n > 10e9 {
		t.Errorf("%d bytes, %v", n, err)
	}
	if !hasThread(pid, uint32(unix.Gettid())) || hasThread(pid, 1) {
		t.Error("threads of this process")
	}
}

func TestInspect(t *testing.T) {
	dir := t.TempDir()
	source := filepath.Join(dir, "main.go")
	if err := os.WriteFile(source, []byte("package main\n\nfunc main() {}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for flags, want := range map[string]string{"": "has section .symtab", "-s -w": ""} {
		program := filepath.Join(dir, "program")
		c := exec.Command("go", "build", "-ldflags="+flags, "-o", program, source)
		c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		size, faults, err := inspect(program)
		if err != nil || size < 1e5 || strings.Contains(strings.Join(faults, ","), ".symtab") != (want != "") {
			t.Errorf("%q: %d bytes, %v, %v", flags, size, faults, err)
		}
		if want == "" && len(faults) > 0 {
			t.Errorf("static and stripped: %v", faults)
		}
	}
	if _, _, err := inspect(source); err == nil {
		t.Error("a text is no program")
	}
}
