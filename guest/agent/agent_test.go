package agent

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"klimax/guest/reconcile"
	"klimax/guest/state"
	"klimax/shared/api"
)

// TestStateCondition: a state directory that cannot be written is said, and
// that it can be again is noticed without anything being stored.
func TestStateCondition(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	a := &agent{o: Options{StateDir: dir}, board: reconcile.NewBoard(api.Status{})}
	condition := func() api.Condition {
		for _, c := range a.board.Status().Conditions {
			if c.Type == api.CondState {
				return c
			}
		}
		return api.Condition{}
	}
	a.stateFailed(nil)
	a.stateFailed(&state.HeldError{})
	a.checkState()
	if c := condition(); c.Type != "" {
		t.Errorf("nothing happened: %+v", c)
	}
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // a file in the directory's place
		t.Fatal(err)
	}
	a.stateFailed(errors.New("no space left"))
	if c := condition(); c.Status != api.False || !strings.Contains(c.Message, "no space left") {
		t.Errorf("%+v", c)
	}
	if a.checkState(); condition().Status != api.False {
		t.Errorf("still not writable: %+v", condition())
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if a.checkState(); condition().Status != api.True {
		t.Errorf("writable again: %+v", condition())
	}
}
