// Package up brings a guest and this computer's way to it into the state that
// the configuration asks for, as a visible list of steps, and takes it down.
package up

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"klimax/host/route"
	"klimax/shared/api"
	"klimax/shared/config"
	"klimax/shared/netplan"
	"klimax/shared/progress"
)

// Guest is what is asked of the agent; *client.Client is one.
type Guest interface {
	Status(ctx context.Context) (api.Status, error)
	Config(ctx context.Context) (config.Config, string, error)
	PutConfig(ctx context.Context, cfg config.Config, ifMatch string) (api.ConfigPut, error)
}

// Routes is this computer's routing table; *route.System is one.
type Routes interface {
	Current(ctx context.Context, p netplan.Plan, uplink netip.Prefix) (route.State, error)
	Direct() bool
	Explain(q route.Request) []string
	Apply(ctx context.Context, q route.Request) error
}

// Options is what Up, Down and Look work with.
type Options struct {
	Config config.Config // whole, passwords included
	Source string        // where Config is from, for a person
	Guest  Guest
	Routes Routes
	Sink   progress.Sink
	// AskRoot is called before a password may be asked for, with the commands
	// that will run as root. No step runs meanwhile, and none is shown as
	// running until the password was given.
	AskRoot func(commands []string)
	// Dial makes the connections that prove the way to the guest.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	Timing Timing
}

// Timing holds the waits of Up. The zero value stands for the defaults.
type Timing struct {
	Reconcile time.Duration // until the guest has applied a configuration; 60 s
	Settle    time.Duration // until its conditions are good, after a change; 10 s
	Probe     time.Duration // until a probe succeeds, after a change; 10 s
	Poll      time.Duration // between two looks; 100 ms
	Connect   time.Duration // for one probe's connection; 2 s
}

func (t Timing) orDefault() Timing {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&t.Reconcile, 60*time.Second)
	def(&t.Settle, 10*time.Second)
	def(&t.Probe, 10*time.Second)
	def(&t.Poll, 100*time.Millisecond)
	def(&t.Connect, 2*time.Second)
	return t
}

// Result is what Up found and did.
type Result struct {
	Changed bool       // anything, in the guest or here
	Local   bool       // the guest is this computer
	Guest   api.Status // its last state
	// Reachable lists what answers from here by its own address.
	Reachable []Reachable
	// Demo is the URL of the demo workload while that runs.
	Demo string
	// Conditions are those that are not as they should be, the guest's and
	// this computer's. Up ends without an error all the same.
	Conditions []api.Condition
}

// Reachable is one range or address that can be used from here.
type Reachable struct {
	What string `json:"what"` // a CIDR or an address
	For  string `json:"for"`
}

// run is one Up on its way.
type run struct {
	Options
	plan    netplan.Plan
	result  Result
	applied int64 // generation of the configuration that must be reconciled
	wanted  route.Wanted
	state   route.State
}

// Up does all steps. An error names the step that failed and leaves what the
// steps before it did; calling Up again goes on from there. When everything is
// as wanted already, Up changes nothing.
func Up(ctx context.Context, o Options) (Result, error) {
	o.Timing = o.Timing.orDefault()
	r := &run{Options: o}
	err := steps(ctx, o.Sink, []progress.Step{
		{ID: "config", Title: "Read the configuration", Run: r.config},
		{ID: "connect", Title: "Connect to the guest", Run: r.connect},
		{ID: "address-plan", Title: "Check the address plan", Run: r.addressPlan},
		{ID: "guest-config", Title: "Configure the guest", Run: r.guestConfig},
		{ID: "reconcile", Title: "Wait for the guest", Run: r.reconcile},
	})
	if err == nil {
		err = r.routes(ctx)
	}
	if err == nil {
		err = steps(ctx, o.Sink, []progress.Step{
			{ID: "probe", Title: "Try the way there", Run: r.probe},
		})
	}
	return r.result, err
}

// steps runs steps, one after the other; one that was interrupted says so.
func steps(ctx context.Context, sink progress.Sink, list []progress.Step) error {
	for i, s := range list {
		list[i].Run = func(ctx context.Context, log func(string)) (progress.Result, error) {
			res, err := s.Run(ctx, log)
			if errors.Is(err, context.Canceled) {
				err = interrupted{}
			}
			return res, err
		}
	}
	return progress.Run(ctx, sink, list)
}

// interrupted is context.Canceled in words for a person.
type interrupted struct{}

func (interrupted) Error() string { return "interrupted" }
func (interrupted) Unwrap() error { return context.Canceled }

// quiet hides that a step runs, so that nothing is redrawn over the question
// for a password; its end is shown.
type quiet struct{ progress.Sink }

func (q quiet) Event(e progress.Event) {
	if e.State != progress.Started && e.State != progress.Log {
		q.Sink.Event(e)
	}
}
