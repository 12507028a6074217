package reconcile

import (
	"sync"

	"klimax/shared/api"
	"klimax/shared/config"
)

// want is the configuration that the loop works towards.
type want struct {
	mu  sync.Mutex
	cfg config.Config
	gen int64
	err error
}

func (w *want) get() (config.Config, int64, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cfg, w.gen, w.err
}

// SetConfig gives the loop another configuration and returns its generation.
// With an error it has none: rules then stay as they are until a valid one
// comes.
func (l *Loop) SetConfig(c config.Config, err error) int64 {
	l.want.mu.Lock()
	l.want.gen++
	l.want.err = err
	if err == nil {
		l.want.cfg = c
	}
	gen := l.want.gen
	l.want.mu.Unlock()
	l.board.Update("configuration", func(s *api.Status) { s.Generation.Desired = gen })
	l.dockerNews.Set("configuration")
	l.Kick("configuration")
	return gen
}
