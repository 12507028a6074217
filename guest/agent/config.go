package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"

	"klimax/guest/state"
	"klimax/shared/config"
)

// configStore is the configuration file and, apart from it, the mirrors'
// passwords.
type configStore struct {
	path string
	dir  state.Dir

	mu  sync.Mutex
	cfg config.Config
	err error
}

// ReadConfig reads a configuration file; a missing one means the defaults.
func ReadConfig(path string) (config.Config, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return config.Default(), nil
	}
	if err != nil {
		return config.Config{}, fmt.Errorf("read the configuration: %w", err)
	}
	return config.Parse(path, b)
}

func (s *configStore) load() (config.Config, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, err := ReadConfig(s.path)
	if err == nil {
		c, err = s.addSecrets(c)
	}
	s.cfg, s.err = c, err
	return c, err
}

func (s *configStore) get() (config.Config, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cfg, s.err
}

// put stores another configuration. A password of "***" keeps the one that is
// stored. The secrets are written first: a configuration without its password
// would be worse than a password without its configuration.
func (s *configStore) put(c config.Config) (config.Config, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, err := s.readSecrets()
	if err != nil {
		return c, err
	}
	secrets, plain := map[string]string{}, c
	plain.Registries.Mirrors = append([]config.Mirror{}, c.Registries.Mirrors...)
	c.Registries.Mirrors = append([]config.Mirror{}, c.Registries.Mirrors...)
	for i := range c.Registries.Mirrors {
		m := &c.Registries.Mirrors[i]
		if m.Password == config.Hidden {
			m.Password = old[m.Name]
		}
		if m.Password != "" {
			secrets[m.Name] = m.Password
		}
		plain.Registries.Mirrors[i].Password = ""
	}
	b, err := json.Marshal(secrets)
	if err != nil {
		return c, err
	}
	if len(secrets) > 0 || len(old) > 0 {
		if err := state.WriteFile(s.dir.Secrets(), b, 0o600); err != nil {
			return c, err
		}
	}
	y, err := plain.YAML()
	if err != nil {
		return c, err
	}
	if err := state.WriteFile(s.path, y, 0o644); err != nil {
		return c, err
	}
	s.cfg, s.err = c, nil
	return c, nil
}

func (s *configStore) readSecrets() (map[string]string, error) {
	out := map[string]string{}
	b, err := os.ReadFile(s.dir.Secrets())
	if errors.Is(err, os.ErrNotExist) {
		return out, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		return nil, fmt.Errorf("read the mirrors' passwords from %s: %w", s.dir.Secrets(), err)
	}
	return out, nil
}

func (s *configStore) addSecrets(c config.Config) (config.Config, error) {
	secrets, err := s.readSecrets()
	if err != nil {
		return c, err
	}
	for i, m := range c.Registries.Mirrors {
		if m.Password == "" {
			c.Registries.Mirrors[i].Password = secrets[m.Name]
		}
	}
	return c, nil
}
