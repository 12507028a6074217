package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"klimax/host/route"
	"klimax/host/up"
	"klimax/shared/api"
	"klimax/shared/config"
	"klimax/shared/progress"
)

func TestUpTwiceStatusDown(t *testing.T) {
	w := newWorld(t)
	w.file(".klimax/klimax.yaml", "apiVersion: klimax/v1\nnetwork:\n  uplink: lima0\n")
	w.want(api.ExitDegraded, []string{"172.30.0.0/16", "missing", "set them: klimax up"}, "status")
	w.want(api.ExitDegraded, []string{"missing"}, "route", "show")

	out, errs := w.want(api.ExitOK, []string{"done    Configure the guest", `network.uplink: "" → "lima0"`,
		"done    Route to the guest", "172.30.0.0/16 via 192.168.64.3", "the bridge answers at 172.30.0.1", "Next: "}, "up")
	if strings.Contains(out, "Nothing had to be changed") || strings.Contains(out, "\x1b") || errs != "" {
		t.Errorf("first up:\n%s\n%s", out, errs)
	}
	if w.agent.cfg.Network.Uplink != "lima0" || w.agent.puts != 1 {
		t.Errorf("the guest has %+v after %d puts", w.agent.cfg.Network, w.agent.puts)
	}
	out, _ = w.want(api.ExitOK, []string{"Nothing had to be changed ("}, "up")
	if strings.Contains(out, "done ") || w.agent.puts != 1 {
		t.Errorf("second up:\n%s", out)
	}
	w.want(api.ExitOK, []string{"All is well.", "present"}, "status")
	w.want(api.ExitOK, []string{"present"}, "route", "show")

	w.want(api.ExitOK, []string{"they stay", "klimax down --remove-route", "klimax-guest stop"}, "down")
	w.want(api.ExitOK, []string{"done    Remove the routes", "no longer reachable"}, "down", "--remove-route")
	if len(w.routes.state.Routes) != 2 {
		t.Errorf("routes %v", w.routes.state.Routes)
	}
	w.want(api.ExitOK, []string{"nothing to undo"}, "down", "--remove-route")
}

func TestUpJSON(t *testing.T) {
	w := newWorld(t)
	w.agent.status.Clusters = []api.Cluster{{Name: "dev", Number: 1, Nodes: []string{"172.30.1.2"}, Routed: "10.101.0.0/16"}}
	out, errs := w.want(api.ExitOK, nil, "up", "-o", "json")
	var last map[string]any
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for i, l := range lines {
		var e progress.Event
		if err := json.Unmarshal([]byte(l), &e); err != nil || i < len(lines)-1 && e.Step == "" {
			t.Errorf("line %q: %v", l, err)
		}
	}
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil {
		t.Fatal(err)
	}
	res, ok := last["result"].(map[string]any)
	if !ok || res["changed"] != true || res["local"] != false || fmt.Sprint(res["conditions"]) != "[]" || len(res["reachable"].([]any)) != 2 {
		t.Errorf("result %v", last)
	}
	if errs != "" {
		t.Errorf("standard error: %s", errs)
	}
	w.want(api.ExitOK, []string{`"result":{"guestRunning":true,"kept":[],"removed":[{"op":"remove","destination":"10.101.0.0/16"`}, "down", "--remove-route", "-o=json")
}

func TestUpAsksForRoot(t *testing.T) {
	w := newWorld(t)
	w.routes.root = false
	_, errs := w.want(api.ExitOK, nil, "up")
	if want := "Changing this computer's routes needs root:\n  sudo klimax route apply (1 changes)\n"; errs != want {
		t.Errorf("standard error %q, want %q", errs, want)
	}
	if _, errs = w.want(api.ExitOK, nil, "up"); errs != "" {
		t.Errorf("asked again: %q", errs)
	}
	w.routes.state.Routes = w.routes.state.Routes[:2]
	w.routes.err = errSudo
	w.want(api.ExitDegraded, []string{"FAILED  Route to the guest", "klimax: Route to the guest: sudo: a password is required"}, "up")
}

func TestUpOnATerminal(t *testing.T) {
	w := newWorld(t)
	w.tty = true
	out, _ := w.want(api.ExitOK, []string{"✓ Configure the guest", "= Connect to the guest", "\x1b[32m"}, "--config", w.file("a.yaml", "network: {uplink: lima0}"), "up")
	_ = out
	w.env["NO_COLOR"] = "1"
	if out, _ = w.want(api.ExitOK, []string{"= Connect to the guest"}, "up"); strings.Contains(out, "\x1b[32m") || strings.Contains(out, "\x1b[2m") {
		t.Errorf("coloured in spite of NO_COLOR: %q", out)
	}
	w.env["TERM"] = "dumb"
	if out, _ = w.want(api.ExitOK, []string{"same    Connect to the guest"}, "up"); strings.Contains(out, "\x1b") {
		t.Errorf("a dumb terminal gets %q", out)
	}
	// A failed step stands on the same screen already.
	w.routes.state.Routes = append(w.routes.state.Routes, route.Route{Dest: netip.MustParsePrefix("172.16.0.0/12"), Dev: "tun0"})
	_, errs := w.want(api.ExitDegraded, []string{"FAILED  Check the address plan", "172.16.0.0/12 dev tun0", "network.kindBridgeCIDR"}, "up")
	if errs != "" {
		t.Errorf("told twice: %s", errs)
	}
}

func TestDegraded(t *testing.T) {
	w := newWorld(t)
	w.agent.status.Conditions = append(w.agent.status.Conditions, api.Condition{Type: api.CondForeignFirewall, Status: api.False, Reason: "Drops",
		Message: "firewalld drops on the forward hook\nadd lima0 to a zone that forwards"})
	w.want(api.ExitDegraded, []string{"Not as it should be: NoForeignFirewall: firewalld drops on the forward hook\n  add lima0", "From this computer"}, "up")
	w.want(api.ExitDegraded, []string{"guest: NoForeignFirewall: firewalld drops on the forward hook\n  add lima0"}, "status")
	out, _ := w.want(api.ExitDegraded, nil, "status", "-o", "json")
	var st statusJSON
	if err := json.Unmarshal([]byte(out), &st); err != nil || st.Version != "0.1.0" || st.Host.Version != "0.1.0" ||
		!st.Host.InSync || st.Host.Guest != "unix://"+w.socket || len(st.Conditions) != 4 {
		t.Errorf("%v: %+v", err, st)
	}
}

func TestUnreachableAndWrongVersions(t *testing.T) {
	w := newWorld(t)
	none := "unix://" + filepath.Join(t.TempDir(), "none.sock")
	for _, cmd := range []string{"up", "status", "route show"} {
		code, out, errs := w.bare(append([]string{"--guest", none}, strings.Fields(cmd)...)...)
		if code != api.ExitUnreachable || !strings.Contains(errs, "there is no agent: the socket ") {
			t.Errorf("%s: %d\n%s\n%s", cmd, code, out, errs)
		}
	}
	if code, out, errs := w.bare("--guest", none, "down", "--remove-route"); code != 0 || !strings.Contains(out, "it does not answer, and need not") {
		t.Errorf("down: %d\n%s\n%s", code, out, errs)
	}
	w.agent.version = "0.2.0"
	w.want(api.ExitDegraded, []string{"upgrade the host\n  install a klimax of version 0.2.0 here"}, "status")
	w.agent.version = "0.0.9"
	w.want(api.ExitDegraded, []string{"upgrade the guest\n  install klimax-guest 0.1.0 in the guest"}, "status")
	w.goos = "darwin"
	if code, _, errs := w.bare("up"); code != api.ExitUsage || !strings.Contains(errs, "guest.type: lima (the default on darwin) is not in this version of klimax yet") ||
		!strings.Contains(errs, "--guest unix:///") {
		t.Errorf("macOS without a guest: %d, %s", code, errs)
	}
}

func TestInterrupt(t *testing.T) {
	w := newWorld(t)
	w.agent.hang = true
	ctx, cancel := context.WithCancel(t.Context())
	w.ctx = ctx
	time.AfterFunc(50*time.Millisecond, cancel)
	start := time.Now()
	for _, cmd := range []string{"up", "status", "down"} {
		if code, _, errs := w.run(cmd); code != api.ExitInterrupted || !strings.Contains(errs, "klimax: interrupted\n") {
			t.Errorf("%s: %d, %q", cmd, code, errs)
		}
	}
	if d := time.Since(start); d > time.Second {
		t.Errorf("took %v to end", d)
	}
}

func TestWrongUse(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"upp", `klimax: unknown command "upp", did you mean up?`},
		{"pu", "did you mean up?"},
		{"stauts", `unknown command "stauts", did you mean status?`},
		{"conf", "did you mean config?"},
		{"xyzzy", "unknown command \"xyzzy\"\n  see: klimax --help"},
		{"config inti", `unknown command "config inti", did you mean init?`},
		{"route aply", "unknown command \"route aply\"\n"}, // hidden commands are not proposed
		{"up --confg x", "unknown flag --confg, did you mean --config?\n  see: klimax up --help"},
		{"--gest x up", "unknown flag --gest, did you mean --guest?\n  see: klimax --help"},
		{"down --remove-routes", "did you mean --remove-route?"},
		{"up -x", "unknown flag -x\n"},
		{"up --config", "flag needs an argument"},
		{"up here", `klimax up takes no arguments, got "here"`},
		{"status -o yaml", `--output "yaml": it must be text or json`},
		{"status -o json -output text", "Cannot use two forms"},
		{"down --remove-route=maybe", "invalid"},
		{"--config= up", "--config is empty"},
		{"--config /no/such/file up", "there is no configuration file /no/such/file\n  make one: klimax config init --config /no/such/file"},
		{"--config / up", "the configuration cannot be read"},
		{"help confg", "did you mean config?"},
		{"help config pth", "did you mean path?"},
	} {
		w := newWorld(t)
		code, out, errs := w.run(strings.Fields(c.args)...)
		if code != api.ExitUsage || !strings.Contains(errs, c.want) || out != "" {
			t.Errorf("klimax %s: %d\n%s%s\nwant %s", c.args, code, out, errs, c.want)
		}
	}
}

func TestGlobalFlagsAnywhere(t *testing.T) {
	w := newWorld(t)
	a, b := w.file("a.yaml", "network: {uplink: aaa}"), w.file("b.yaml", "network: {uplink: bbb}")
	for args, want := range map[string]string{
		"--config " + a + " config path":                    a,
		"config path --config " + a:                         a,
		"config --config " + a + " path":                    a,
		"--config " + a + " config path --config " + b:      b,
		"--config " + a + " config --config " + b + " path": b,
		"-v config path --config=" + a:                      a,
		"config path":                                       filepath.Join(w.home, ".klimax/klimax.yaml"),
	} {
		if code, out, errs := w.bare(strings.Fields(args)...); code != 0 || strings.TrimSpace(out) != want {
			t.Errorf("%s: %d %q %s, want %s", args, code, out, errs, want)
		}
	}
	w.env["KLIMAX_HOME"] = "/somewhere"
	if _, out, _ := w.bare("config", "path"); out != "/somewhere/klimax.yaml\n" {
		t.Errorf("KLIMAX_HOME: %q", out)
	}
	if code, out, errs := w.bare("status", "--guest", "unix://"+w.socket); code != 1 || !strings.Contains(out, "klimax-guest 0.1.0") {
		t.Errorf("--guest after the command: %d %s %s", code, out, errs)
	}
}

func TestConfigCommands(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(w.home, ".klimax/klimax.yaml")
	w.want(0, []string{"There is no " + path}, "config", "validate")
	w.want(0, []string{"Wrote " + path}, "config", "init")
	got, err := os.ReadFile(path)
	if err != nil || string(got) != config.Template() {
		t.Errorf("wrote %q, %v", got, err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	w.want(0, []string{path + " is valid."}, "config", "validate")
	w.file(".klimax/klimax.yaml", "network: {uplink: lima0}\nregistries: {mirrors: [{name: m, host: h.io, port: 5001, remoteURL: 'https://h.io', username: u, password: hush}]}\n")
	w.want(api.ExitUsage, []string{"exists already and is kept", "config init --force"}, "config", "init")

	out, _ := w.want(0, []string{"# from " + path, "uplink: lima0", "password: '***'"}, "config", "show")
	if strings.Contains(out, "hush") || strings.Contains(out, "dockerNetwork") || !strings.Contains(out, "apiVersion: klimax/v1") {
		t.Errorf("show:\n%s", out)
	}
	if _, err := config.Parse("show", []byte(out)); err != nil {
		t.Errorf("what show prints is no configuration: %v", err)
	}
	if out, _ = w.want(0, []string{"dockerNetwork: kind", "uplink: lima0"}, "config", "show", "--effective"); strings.Contains(out, "hush") {
		t.Errorf("the password is shown:\n%s", out)
	}
	w.want(0, []string{`"uplink": "lima0"`}, "config", "show", "-o", "json")
	w.want(0, []string{"Wrote"}, "config", "init", "--force")
	if out, _ = w.want(0, nil, "config", "show"); out != "# from "+path+"\napiVersion: klimax/v1\n" {
		t.Errorf("show of the template:\n%s", out)
	}
	if out, _ = w.want(0, nil, "config", "init", "--print"); out != config.Template() {
		t.Errorf("print:\n%s", out)
	}
	left, err := filepath.Glob(filepath.Join(w.home, ".klimax", ".klimax-*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v %v", left, err)
	}

	bad := w.file("bad.yaml", "netwrk: {}\nnetwork:\n  kindBridgeCIDR: 172.30.0.0/24\n")
	w.want(api.ExitUsage, []string{bad + ":1: ", "did you mean network?", bad + ":3: network.kindBridgeCIDR"}, "--config", bad, "config", "validate")
	w.want(api.ExitUsage, []string{bad + ":1: "}, "--config", bad, "up")
	if w.agent.puts != 0 {
		t.Error("a bad configuration was put")
	}
	w.want(api.ExitUsage, []string{`"valid": false`, `"line": 3`}, "--config", bad, "config", "validate", "-o", "json")
	w.stdin = "network: {uplink: fromstdin}"
	w.want(0, []string{"# from standard input", "uplink: fromstdin"}, "--config", "-", "config", "show")
	w.want(api.ExitUsage, []string{"standard input"}, "--config", "-", "config", "init")
}

func TestUpReadsPasswords(t *testing.T) {
	w := newWorld(t)
	w.file("pw", "hush\n")
	file := func(pw string) string {
		return w.file("k.yaml", "registries: {mirrors: [{name: m, host: h.io, port: 5001, remoteURL: 'https://h.io', username: u, passwordFile: '"+pw+"'}]}")
	}
	out, errs := w.want(0, nil, "--config", file("~/pw"), "up")
	if w.agent.cfg.Registries.Mirrors[0].Password != "hush" || strings.Contains(out+errs, "hush") {
		t.Errorf("the guest has %+v; printed\n%s", w.agent.cfg.Registries, out)
	}
	if _, _ = w.want(0, []string{"Nothing had to be changed"}, "--config", file("~/pw"), "up"); w.agent.puts != 1 {
		t.Errorf("%d puts", w.agent.puts)
	}
	w.want(api.ExitUsage, []string{"registries.mirrors[0].passwordFile", "correct "}, "--config", file("~/none"), "up")
}

func TestRouteApply(t *testing.T) {
	w := newWorld(t)
	w.stdin = `{"version":1,"bridge":"172.30.0.0/16","clusterBase":"10.100.0.0","guest":"192.168.64.3",
		"changes":[{"op":"add","destination":"172.30.0.0/16","gateway":"192.168.64.3"}]}`
	w.want(0, []string{"172.30.0.0/16 via 192.168.64.3"}, "route", "apply")
	if len(w.routes.state.Routes) != 3 {
		t.Errorf("routes %v", w.routes.state.Routes)
	}
	w.stdin = strings.Replace(w.stdin, `"destination":"172.30.0.0/16"`, `"destination":"0.0.0.0/0"`, 1)
	w.want(api.ExitUsage, []string{"not in the plan", "run by klimax up"}, "route", "apply")
	w.stdin = ""
	w.want(api.ExitUsage, []string{"not valid"}, "route", "apply")
	if len(w.routes.state.Routes) != 3 {
		t.Errorf("routes %v", w.routes.state.Routes)
	}
}

func TestHelpAndVersion(t *testing.T) {
	w := newWorld(t)
	root, _ := w.want(0, []string{"Usage: klimax", "up ", "--config FILE", "Exit codes:"}, "--help")
	for _, args := range []string{"", "-h", "help"} {
		if out, _ := w.want(0, nil, strings.Fields(args)...); out != root {
			t.Errorf("klimax %s differs from --help:\n%s", args, out)
		}
	}
	if strings.Contains(root, "apply") {
		t.Error("a hidden command is listed")
	}
	one, _ := w.want(0, []string{"klimax config init: ", "--force"}, "config", "init", "--help")
	if two, _ := w.want(0, nil, "help", "config", "init"); two != one {
		t.Errorf("help config init:\n%s", two)
	}
	w.want(0, []string{"klimax config: ", "validate"}, "config")
	w.want(0, []string{"klimax 0.1.0 "}, "version")
	w.want(0, []string{"klimax 0.1.0 "}, "--version")
	w.want(0, []string{`"version": "0.1.0"`}, "version", "-o", "json")
	w.want(api.ExitUsage, []string{"must be text or json"}, "version", "-o", "xml")
}

// The table in the documents is the one that the program prints.
func TestExitCodeTable(t *testing.T) {
	w := newWorld(t)
	out, _ := w.want(0, nil, "help", "exit-codes")
	doc, err := os.ReadFile("../../docs/exit-codes.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range exitCodes() {
		if row := fmt.Sprintf("| %d | %s |\n", e.Code, e.Meaning); !strings.Contains(string(doc), row) {
			t.Errorf("docs/exit-codes.md has no %q", row)
		}
		if !strings.Contains(out, e.Meaning) {
			t.Errorf("help exit-codes does not say %q", e.Meaning)
		}
	}
}

func TestComplete(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		words []string
		want  string // the candidates
	}{
		{[]string{""}, "up down status config route version completion help"},
		{[]string{"st"}, "status"},
		{[]string{"config", ""}, "init show validate path"},
		{[]string{"route", ""}, "show"},
		{[]string{"help", "co"}, "config completion"},
		{[]string{"help", "config", "p"}, "path"},
		{[]string{"--config", ""}, ":files"},
		{[]string{"--config", "x", "sta"}, "status"},
		{[]string{"up", "-o", ""}, "text json"},
		{[]string{"up", "--output=j"}, "--output=json"},
		{[]string{"up", "--"}, "--output --config --guest --verbose --help"},
		{[]string{"down", "--r"}, "--remove-route"},
		{[]string{"up", "--guest", "u"}, "unix:///"},
		{[]string{"up", "nothing", ""}, ""},
		{[]string{"--", ""}, ""},
		{nil, "up down status config route version completion help"},
	} {
		code, out, errs := w.bare(append([]string{completeCommand}, c.words...)...)
		var got []string
		for line := range strings.Lines(out) {
			word, _, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
			got = append(got, word)
		}
		if code != 0 || errs != "" || strings.Join(got, " ") != c.want {
			t.Errorf("%q: %d %q %s, want %q", c.words, code, got, errs, c.want)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		w.want(0, []string{"klimax " + completeCommand}, "completion", shell)
	}
}

func TestStatusText(t *testing.T) {
	a := newAgent()
	now := a.status.Started.Add(90 * time.Minute)
	v := up.View{Guest: a.status, Host: up.HostView{Guest: "unix:///run/s", InSync: true, Routes: []route.Line{
		{Dest: netip.MustParsePrefix("172.30.0.0/16"), Gateway: netip.MustParseAddr("192.168.64.3"), State: "present", For: "containers"}}}}
	v.Guest.Network.LastApplied, v.Guest.Network.LastReason = now.Add(-30*time.Second), "docker restarted"
	v.Guest.Network.Repairs, v.Guest.Network.LastRepairMillis, v.Guest.Docker.Restarts = 2, 12.34, 1
	v.Guest.Clusters = []api.Cluster{{Name: "demo", Number: 99, Demo: true, Nodes: []string{"172.30.99.2"}, VIP: "172.30.99.200"}}
	want := `guest     klimax-guest 0.1.0, running for 1 h 30 min, at unix:///run/s
docker    Docker 20.10.24, iptables, 1 restart
          network kind: 172.30.0.0/16 on br-kind, opened by nat-unprotected
uplink    lima0 192.168.64.3 in 192.168.64.0/24
rules     in place, last written 30 s ago (docker restarted)
          2 repairs, the last took 12.3 ms
callers   192.168.64.0/24
routes    172.30.0.0/16      via 192.168.64.3     present    containers
clusters  demo workload: 1 node 172.30.99.2, answers at 172.30.99.200

All is well.
`
	if got := statusText(v, now); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}

	v.Guest.Docker, v.Guest.Clusters, v.Guest.Uplink.Address = api.Docker{}, nil, ""
	v.Guest.Network = api.Network{Rules: []api.Rule{{ID: api.RuleGuard, Wanted: 1}}}
	v.Guest.Conditions = []api.Condition{{Type: api.CondDocker, Status: api.False, Message: "dockerd is not running\nstart it"}}
	v.Host.Routes[0].State, v.Host.Routes[0].Present, v.Host.Local = "wrong-gateway", netip.MustParseAddr("192.168.64.9"), false
	want = `guest     klimax-guest 0.1.0, running for 1 h 30 min, at unix:///run/s
docker    not running
uplink    lima0, without an IPv4 address
rules     NOT in place
          guard: 0 of 1 present
callers   nobody but the guest itself (network.allowFrom)
routes    172.30.0.0/16      via 192.168.64.3     leads to 192.168.64.9 containers

guest: DockerReady: dockerd is not running
  start it
here: the routes are not as they should be
  set them: klimax up
`
	if got := statusText(v, now); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	for d, want := range map[time.Duration]string{-time.Hour: "0 s", 59 * time.Second: "59 s", time.Minute: "1 min", 3*time.Hour + 4*time.Minute: "3 h 4 min", 50 * time.Hour: "2 d 2 h"} {
		if got := forHowLong(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}

func TestNearest(t *testing.T) {
	words := []string{"up", "down", "status", "config", "o"}
	for got, want := range map[string]string{"staus": "status", "STATUS": "status", "dwon": "down", "u": "up", "zzz": "", "cfg": "", "stat": "status", "": ""} {
		if n := nearest(got, words); n != want {
			t.Errorf("%q: %q, want %q", got, n, want)
		}
	}
}
