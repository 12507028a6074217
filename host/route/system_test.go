package route

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"klimax/shared/netplan"
)

func request(t testing.TB, guest string, changes ...Change) Request {
	return NewRequest(plan(t), addr(guest), netip.Prefix{}, changes)
}

func change(op Op, dest, gw, old string) Change {
	return Change{Op: op, Dest: netip.MustParsePrefix(dest), Gateway: addr(gw), Old: addr(old)}
}

const guest = "192.168.64.3"

func TestReadRequest(t *testing.T) {
	good := request(t, guest, change(Add, "172.30.0.0/16", guest, ""),
		change(Replace, "10.101.0.0/16", guest, "192.168.64.9"), change(Remove, "10.102.0.0/16", "192.168.64.9", ""))
	data, err := json.Marshal(good)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ReadRequest(bytes.NewReader(data))
	if err != nil || fmt.Sprint(got) != fmt.Sprint(good) {
		t.Fatalf("got %v, %v\nwant %v", got, err, good)
	}

	for name, c := range map[string]struct {
		edit func(*Request)
		want string
	}{
		"public destination": {func(q *Request) {
			q.Bridge = netip.MustParsePrefix("8.8.0.0/16")
			q.Changes = []Change{change(Add, "8.8.0.0/16", guest, "")}
		}, "no private network"},
		"default route":         {func(q *Request) { q.Changes[0].Dest = netip.MustParsePrefix("0.0.0.0/0") }, "not in the plan"},
		"half the net":          {func(q *Request) { q.Changes[0].Dest = netip.MustParsePrefix("128.0.0.0/1") }, "not in the plan"},
		"outside the plan":      {func(q *Request) { q.Changes[0].Dest = netip.MustParsePrefix("172.31.0.0/16") }, "not in the plan"},
		"part of the plan":      {func(q *Request) { q.Changes[0].Dest = netip.MustParsePrefix("172.30.1.0/24") }, "not in the plan"},
		"cluster 100":           {func(q *Request) { q.Changes[0].Dest = netip.MustParsePrefix("10.200.0.0/16") }, "not in the plan"},
		"host bits":             {func(q *Request) { q.Changes[0].Dest = netip.MustParsePrefix("172.30.0.1/16") }, "is no network"},
		"ipv6":                  {func(q *Request) { q.Changes[0].Dest = netip.MustParsePrefix("fd00::/8") }, "not in the plan"},
		"bridge no /16":         {func(q *Request) { q.Bridge = netip.MustParsePrefix("172.0.0.0/8") }, "must be a /16"},
		"gateway not the guest": {func(q *Request) { q.Changes[0].Gateway = addr("192.168.64.8") }, "is not the guest's address"},
		"loopback gateway":      {func(q *Request) { q.Guest = addr("127.0.0.1"); q.Changes[0].Gateway = q.Guest }, "no host's address"},
		"multicast gateway":     {func(q *Request) { q.Guest = addr("224.0.0.1"); q.Changes[0].Gateway = q.Guest }, "no host's address"},
		"gateway in the bridge": {func(q *Request) { q.Guest = addr("172.30.0.1"); q.Changes[0].Gateway = q.Guest }, "within the plan's own ranges"},
		"no gateway":            {func(q *Request) { q.Changes[0].Gateway = netip.Addr{}; q.Guest = netip.Addr{} }, "no host's address"},
		"unknown operation":     {func(q *Request) { q.Changes[0].Op = "flush" }, "unknown operation"},
		"replace without old":   {func(q *Request) { q.Changes[1].Old = netip.Addr{} }, "needs the old gateway"},
		"add with old":          {func(q *Request) { q.Changes[0].Old = addr("192.168.64.9") }, "has no old gateway"},
		"twice":                 {func(q *Request) { q.Changes = append(q.Changes, q.Changes[0]) }, "is there twice"},
		"nothing":               {func(q *Request) { q.Changes = nil }, "0 changes"},
		"too many":              {func(q *Request) { q.Changes = make([]Change, 201) }, "201 changes"},
		"another version":       {func(q *Request) { q.Version = 2 }, "version 2"},
	} {
		t.Run(name, func(t *testing.T) {
			q := good
			q.Changes = slices.Clone(good.Changes)
			c.edit(&q)
			data, err := json.Marshal(q)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := ReadRequest(bytes.NewReader(data)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
	for name, raw := range map[string]string{
		"empty":         "",
		"shell":         "ip route flush table main",
		"unknown field": strings.Replace(string(data), `"version"`, `"command":"rm","version"`, 1),
		"more after it": string(data) + string(data),
		"large":         strings.Repeat(" ", requestLimit) + string(data),
		"null":          "null",
		"list":          "[]",
	} {
		if _, err := ReadRequest(strings.NewReader(raw)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// table that a fake kernel keeps; dead makes changes fail silently, as
// /sbin/route does.
type fakeKernel struct {
	rs   []Route
	dead bool
	err  error
	n    int // calls of apply
}

func (k *fakeKernel) routes(context.Context, netplan.Plan, netip.Prefix) ([]Route, error) {
	return slices.Clone(k.rs), nil
}

func (k *fakeKernel) apply(_ context.Context, changes []Change) error {
	k.n++
	if !k.dead && k.err == nil {
		k.rs = play(k.rs, changes)
	}
	return k.err
}

func (k *fakeKernel) commands(changes []Change) []string {
	var out []string
	for _, c := range changes {
		out = append(out, fmt.Sprintf("fake %s %v", c.Op, c))
	}
	return out
}

type fakeRunner struct {
	calls []string
	stdin []byte
	fn    func(stdin []byte, args []string) ([]byte, error)
}

func (r *fakeRunner) Run(_ context.Context, stdin []byte, name string, args ...string) ([]byte, error) {
	r.calls = append(r.calls, strings.Join(append([]string{name}, args...), " "))
	r.stdin = stdin
	if r.fn == nil {
		return nil, nil
	}
	return r.fn(stdin, args)
}

func system(k kernel, r Runner, root bool) *System {
	return &System{Runner: r, Self: "/usr/local/bin/klimax", Log: slog.New(slog.DiscardHandler), kernel: k,
		root: func() bool { return root }, addrs: func() ([]net.Addr, error) { return nil, nil }}
}

func TestApplyAsRoot(t *testing.T) {
	for name, c := range map[string]struct {
		table   string
		changes []Change
		kernel  fakeKernel
		want    string // part of the error, empty for success
		applied int
	}{
		"add": {table: "plain", changes: []Change{change(Add, "172.30.0.0/16", guest, "")}, applied: 1},
		"replace and remove": {table: "moved", changes: []Change{change(Replace, "172.30.0.0/16", guest, "192.168.64.9"),
			change(Remove, "10.102.0.0/16", "192.168.64.9", "")}, applied: 1},
		"not ours to remove": {table: "routed", changes: []Change{change(Remove, "10.103.0.0/16", "10.8.0.1", "")},
			want: "10.103.0.0/16 via 10.8.0.1 is not a route of klimax's"},
		"the default route": {table: "routed", changes: []Change{change(Remove, "0.0.0.0/0", "192.168.1.1", "")},
			want: "is not a route of klimax's"},
		"not ours to replace": {table: "routed", changes: []Change{change(Replace, "10.103.0.0/16", guest, "10.8.0.1")},
			want: "is not a route of klimax's"},
		"over somebody's": {table: "vpn-bridge", changes: []Change{change(Add, "172.30.0.0/16", guest, "")},
			want: "network.kindBridgeCIDR: 172.30.0.0/16 overlaps the route 172.16.0.0/12"},
		"no effect": {table: "plain", changes: []Change{change(Add, "172.30.0.0/16", guest, "")},
			kernel: fakeKernel{dead: true}, applied: 1, want: "is not there after setting it"},
		"removal without effect": {table: "routed", changes: []Change{change(Remove, "172.30.0.0/16", guest, "")},
			kernel: fakeKernel{dead: true}, applied: 1, want: "is still there after its removal"},
		"kernel says no": {table: "plain", changes: []Change{change(Add, "172.30.0.0/16", guest, "")},
			kernel: fakeKernel{err: fmt.Errorf("fake: %w", errors.ErrUnsupported)}, applied: 1, want: "unsupported"},
	} {
		t.Run(name, func(t *testing.T) {
			k := c.kernel
			k.rs = table(t, c.table)
			run := &fakeRunner{}
			err := system(&k, run, true).Apply(t.Context(), request(t, guest, c.changes...))
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if k.n != c.applied || len(run.calls) != 0 {
				t.Errorf("%d calls of the kernel, want %d; programs run: %q", k.n, c.applied, run.calls)
			}
		})
	}
}

func TestApplyWithoutRootIsOneSudo(t *testing.T) {
	k := &fakeKernel{rs: table(t, "moved")}
	run := &fakeRunner{}
	user := system(k, run, false)
	// What sudo starts is the same program as root, fed from standard input.
	run.fn = func(stdin []byte, args []string) ([]byte, error) {
		q, err := ReadRequest(bytes.NewReader(stdin))
		if err != nil {
			return []byte(err.Error()), err
		}
		return nil, system(k, nil, true).ApplyRequest(t.Context(), q)
	}
	st, err := user.Current(t.Context(), plan(t), netip.Prefix{})
	if err != nil {
		t.Fatal(err)
	}
	w, err := Desired(Input{Plan: plan(t), Guest: addr(guest), Clusters: one, RoutePods: true, State: State{Routes: st.Routes}})
	if err != nil {
		t.Fatal(err)
	}
	changes := Diff(w, st)
	if len(changes) != 3 {
		t.Fatalf("changes: %v", changes)
	}
	q := request(t, guest, changes...)
	if err := user.Apply(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	if want := []string{"sudo /usr/local/bin/klimax route apply"}; !slices.Equal(run.calls, want) {
		t.Errorf("ran %q, want %q", run.calls, want)
	}
	if again := Diff(w, State{Routes: k.rs}); len(again) != 0 {
		t.Errorf("second diff: %v", again)
	}
	explained := strings.Join(user.Explain(q), "\n")
	if !strings.HasPrefix(explained, "sudo /usr/local/bin/klimax route apply") || strings.Count(explained, "\n") != 3 {
		t.Errorf("explained as %s", explained)
	}
	if got := system(k, run, true).Explain(q); len(got) != 3 || strings.Contains(got[0], "sudo") {
		t.Errorf("explained to root as %q", got)
	}

	run.calls = nil
	if err := user.Apply(t.Context(), request(t, guest)); err != nil || len(run.calls) != 0 {
		t.Errorf("nothing to do: %v, ran %q", err, run.calls)
	}
	if err := user.Apply(t.Context(), request(t, guest, change(Add, "0.0.0.0/0", guest, ""))); err == nil || len(run.calls) != 0 {
		t.Errorf("a bad request: %v, ran %q", err, run.calls)
	}
}

func TestSudoErrors(t *testing.T) {
	q := request(t, guest, change(Add, "172.30.0.0/16", guest, ""))
	for name, c := range map[string]struct {
		out  string
		err  error
		want []string
	}{
		"no sudo": {"", fmt.Errorf("sudo: %w", exec.ErrNotFound), []string{"there is no sudo here", "as root, run:\n    fake add"}},
		"no password": {"sudo: a terminal is required to read the password\n", errors.New("exit status 1"),
			[]string{"sudo: a terminal is required", "by hand, as root:\n    fake add"}},
		"silent": {"", errors.New("exit status 1"), []string{"exit status 1", "fake add"}},
	} {
		t.Run(name, func(t *testing.T) {
			run := &fakeRunner{fn: func([]byte, []string) ([]byte, error) { return []byte(c.out), c.err }}
			err := system(&fakeKernel{rs: table(t, "plain")}, run, false).Apply(t.Context(), q)
			for _, w := range c.want {
				if err == nil || !strings.Contains(err.Error(), w) {
					t.Errorf("got %v, want %q in it", err, w)
				}
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	run := &fakeRunner{fn: func([]byte, []string) ([]byte, error) { return nil, errors.New("signal: interrupt") }}
	if err := system(&fakeKernel{}, run, false).Apply(ctx, q); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
}

// mac answers like the programs of macOS, from a table of its own. Its route
// command ends with status 0 whatever happens.
func mac(t *testing.T, name string, broken bool) *fakeRunner {
	rs := table(t, name)
	run := &fakeRunner{}
	run.fn = func(_ []byte, args []string) ([]byte, error) {
		if args[0] == "-rn" {
			var b strings.Builder
			b.WriteString("Routing tables\n\nInternet:\nDestination        Gateway            Flags               Netif Expire\n")
			for _, r := range rs {
				gw, flags := "link#1", "UCS"
				if r.Gateway.IsValid() {
					gw, flags = r.Gateway.String(), "UGSc"
				}
				fmt.Fprintf(&b, "%-18v %-18s %-10s %14s\n", r.Dest, gw, flags, r.Dev)
			}
			return []byte(b.String()), nil
		}
		if broken {
			return []byte("route: writing to routing socket: not in table\n"), nil
		}
		op := map[string]Op{"add": Add, "delete": Remove}[args[1]]
		rs = play(rs, []Change{change(op, args[3], args[4], "")})
		return nil, nil
	}
	return run
}

func TestMacOS(t *testing.T) {
	run := mac(t, "moved", false)
	s := system(bsdKernel{run: run}, run, true)
	st, err := s.Current(t.Context(), plan(t), netip.Prefix{})
	if err != nil {
		t.Fatal(err)
	}
	w, err := Desired(Input{Plan: plan(t), Guest: addr(guest), Clusters: append(slices.Clone(one), two[1]), RoutePods: false, State: st})
	if err != nil {
		t.Fatal(err)
	}
	q := request(t, guest, Diff(w, st)...)
	run.calls = nil
	if err := s.Apply(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"/usr/sbin/netstat -rn -f inet",
		"/sbin/route -n delete -net 172.30.0.0/16 192.168.64.9",
		"/sbin/route -n add -net 172.30.0.0/16 192.168.64.3",
		"/sbin/route -n delete -net 10.101.0.0/16 192.168.64.9",
		"/sbin/route -n delete -net 10.102.0.0/16 192.168.64.9",
		"/usr/sbin/netstat -rn -f inet",
	}
	if !slices.Equal(run.calls, want) {
		t.Errorf("ran\n%s\nwant\n%s", strings.Join(run.calls, "\n"), strings.Join(want, "\n"))
	}
	if got := s.Explain(q); !slices.Equal(got, want[1:5]) {
		t.Errorf("explained as %q", got)
	}
	if st, err = s.Current(t.Context(), plan(t), netip.Prefix{}); err != nil || len(Diff(w, st)) != 0 {
		t.Errorf("second diff %v, %v", Diff(w, st), err)
	}

	run = mac(t, "plain", true)
	err = system(bsdKernel{run: run}, run, true).Apply(t.Context(), request(t, guest, change(Add, "172.30.0.0/16", guest, "")))
	if err == nil || !strings.Contains(err.Error(), "is not there after setting it") {
		t.Errorf("a route command that lies: %v", err)
	}
}

func TestExecRunner(t *testing.T) {
	out, err := execRunner{}.Run(t.Context(), []byte("in"), "cat")
	if err != nil || string(out) != "in" {
		t.Errorf("%q, %v", out, err)
	}
	if _, err = (execRunner{}).Run(t.Context(), nil, "klimax-no-such-program"); !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("%v", err)
	}
}
