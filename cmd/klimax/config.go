package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/urfave/cli/v2"
	"go.yaml.in/yaml/v3"

	"klimax/shared/api"
	"klimax/shared/config"
)

func (p *program) configCommand() *cli.Command {
	return &cli.Command{
		Name: "config", Usage: "write, show and check klimax.yaml",
		Subcommands: []*cli.Command{
			{Name: "init", Usage: "write a klimax.yaml with every key commented", Action: p.configInit,
				Description: "An existing file is kept unless --force is given.",
				Flags: []cli.Flag{
					&cli.BoolFlag{Name: "force", Usage: "replace an existing file", DisableDefaultText: true},
					&cli.BoolFlag{Name: "print", Usage: "print it instead of writing a file", DisableDefaultText: true},
				}},
			{Name: "show", Usage: "print the settings that differ from the defaults", Action: p.configShow,
				Description: "Passwords are shown as " + config.Hidden + ".",
				Flags: []cli.Flag{outputFlag(),
					&cli.BoolFlag{Name: "effective", Usage: "print all settings, with the defaults filled in", DisableDefaultText: true}}},
			{Name: "validate", Usage: "check a file and tell everything that is wrong", Action: p.configValidate,
				Description: "Exit code 0: the file is valid, 3: it is not.", Flags: []cli.Flag{outputFlag()}},
			{Name: "path", Usage: "print where the file is looked for", Action: p.configPathCommand},
		},
	}
}

func (p *program) configInit(c *cli.Context) error {
	if c.Bool("print") {
		p.printf("%s", config.Template())
		return nil
	}
	path, _, err := p.configPath(c)
	if err != nil {
		return err
	}
	if path == "-" {
		return &usageError{message: "--config - is standard input, nothing can be written there", hint: "to print the file: klimax config init --print"}
	}
	if err := writeNew(path, []byte(config.Template()), c.Bool("force")); err != nil {
		if errors.Is(err, os.ErrExist) {
			return &usageError{message: path + " exists already and is kept", hint: "to replace it: klimax config init --force"}
		}
		return fmt.Errorf("the configuration was not written: %w", err)
	}
	p.printf("Wrote %s: every key is there with its default, commented out.\nNext: edit it, klimax config validate, klimax up\n", path)
	return nil
}

// writeNew writes a file whole or not at all, for its owner alone because a
// password may come to stand in it.
func writeNew(path string, data []byte, replace bool) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".klimax-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	if _, err = f.Write(data); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := f.Close(); err != nil {
		return err
	}
	if replace {
		return os.Rename(f.Name(), path)
	}
	// A link fails where a rename would replace.
	return os.Link(f.Name(), path)
}

func (p *program) configShow(c *cli.Context) error {
	asJSON, err := asJSON(c)
	if err != nil {
		return err
	}
	cfg, source, err := p.loadConfig(c)
	if err != nil {
		return err
	}
	cfg = cfg.Redacted()
	text, err := cfg.YAML()
	if err != nil {
		return err
	}
	if !c.Bool("effective") {
		if text, err = changedOnly(text); err != nil {
			return err
		}
	}
	if asJSON {
		var v any
		if err := yaml.Unmarshal(text, &v); err != nil {
			return fmt.Errorf("encoding the configuration: %w", err)
		}
		return p.json(v)
	}
	p.printf("# from %s\n%s", source, text)
	return nil
}

// changedOnly takes from a whole configuration what is the default anyway,
// except the apiVersion, which makes the rest a file of its own.
func changedOnly(text []byte) ([]byte, error) {
	def, err := config.Default().YAML()
	if err != nil {
		return nil, err
	}
	var a, b yaml.Node
	if err := errors.Join(yaml.Unmarshal(text, &a), yaml.Unmarshal(def, &b)); err != nil {
		return nil, fmt.Errorf("comparing with the defaults: %w", err)
	}
	prune(a.Content[0], b.Content[0])
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := errors.Join(enc.Encode(&a), enc.Close()); err != nil {
		return nil, fmt.Errorf("encoding the configuration: %w", err)
	}
	return out.Bytes(), nil
}

// prune removes from the mapping a the keys that have the same value in b.
func prune(a, b *yaml.Node) {
	var kept []*yaml.Node
	for i := 0; i+1 < len(a.Content); i += 2 {
		key, value := a.Content[i], a.Content[i+1]
		other := lookup(b, key.Value)
		if other != nil && value.Kind == yaml.MappingNode {
			if prune(value, other); len(value.Content) == 0 {
				continue
			}
		} else if other != nil && same(value, other) && key.Value != "apiVersion" {
			continue
		}
		kept = append(kept, key, value)
	}
	a.Content = kept
}

func lookup(mapping *yaml.Node, key string) *yaml.Node {
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == key {
			return mapping.Content[i+1]
		}
	}
	return nil
}

func same(a, b *yaml.Node) bool {
	if a.Kind != b.Kind || a.Value != b.Value || len(a.Content) != len(b.Content) {
		return false
	}
	for i := range a.Content {
		if !same(a.Content[i], b.Content[i]) {
			return false
		}
	}
	return true
}

func (p *program) configValidate(c *cli.Context) error {
	asJSON, err := asJSON(c)
	if err != nil {
		return err
	}
	path, data, found, err := p.readConfig(c)
	if err != nil {
		return err
	}
	var problems *config.Problems
	_, err = config.Parse(path, data)
	if err != nil && !errors.As(err, &problems) {
		return err
	}
	switch {
	case asJSON:
		answer := map[string]any{"file": path, "exists": found, "valid": problems == nil, "problems": []config.Problem{}}
		if problems != nil {
			answer["problems"] = problems.List
		}
		if err := p.json(answer); err != nil || problems == nil {
			return err
		}
		return silent(api.ExitUsage)
	case problems != nil:
		return problems
	case !found:
		p.printf("There is no %s: all defaults.\n", path)
	default:
		p.printf("%s is valid.\n", path)
	}
	return nil
}

func (p *program) configPathCommand(c *cli.Context) error {
	path, _, err := p.configPath(c)
	if err == nil {
		p.printf("%s\n", path)
	}
	return err
}
