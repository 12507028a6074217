package demo

import (
	"errors"
	"fmt"

	"klimax/guest/facts"
	"klimax/shared/netplan"
)

// check refuses to start where the demo could not work or would be in the way.
func check(e facts.Engine) error {
	if !e.Known {
		return errors.New(e.Problem)
	}
	if !e.Network.Found && e.Network.Reason != "Missing" {
		return errors.New(e.Network.Problem)
	}
	for _, c := range e.Clusters {
		if c.Number == netplan.DemoCluster && !c.Demo {
			return fmt.Errorf("cluster number %d is taken by %s: the demo needs it; delete that cluster first", c.Number, c.Name)
		}
	}
	return nil
}
