package reconcile

import (
	"testing"

	"klimax/guest/facts"
)

// TestPartialAnswer: what the engine could not tell stays as it was known.
func TestPartialAnswer(t *testing.T) {
	var s engineState
	full := facts.Engine{Known: true, Running: true, Version: "29", Network: facts.DockerNetwork{Found: true},
		Clusters: []facts.Cluster{{Name: "dev", Number: 1, HasAPI: true}}, Mirrors: []facts.Mirror{{Name: "hub"}}}
	s.learn(full, 1)
	s.learn(facts.Engine{Running: true, Version: "29", Reason: "ContainersUnreadable", Problem: "list containers: timeout"}, 2)
	e, _, settled := s.get(2)
	if !e.Known || !e.Running || len(e.Clusters) != 1 || len(e.Mirrors) != 1 || !e.Network.Found || e.Reason != "ContainersUnreadable" || !settled {
		t.Errorf("%+v", e)
	}
	s.learn(facts.Engine{Reason: "NotRunning"}, 2)
	if e, _, _ = s.get(2); e.Running || len(e.Clusters) != 1 {
		t.Errorf("%+v", e)
	}
	s.learn(full, 2)
	if e, _, _ = s.get(2); e.Reason != "" || !e.Running {
		t.Errorf("%+v", e)
	}
}
