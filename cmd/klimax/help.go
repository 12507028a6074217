package main

import (
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"
)

func (p *program) helpCommand() *cli.Command {
	return &cli.Command{
		Name: "help", Usage: "help on a command, or on exit-codes", ArgsUsage: "[COMMAND...|exit-codes]",
		Action: func(c *cli.Context) error {
			if !c.Args().Present() {
				p.printf("%s", appHelp(c.App))
				return nil
			}
			if c.Args().First() == "exit-codes" {
				p.printf("%s", exitCodeHelp())
				return nil
			}
			commands, path := c.App.Commands, c.App.Name
			var found *cli.Command
			for _, name := range c.Args().Slice() {
				found = nil
				var names []string
				for _, s := range commands {
					if !s.Hidden {
						names = append(names, s.Name)
					}
					if s.HasName(name) {
						found = s
					}
				}
				if found == nil {
					message := fmt.Sprintf("there is no command %q to help with", strings.TrimPrefix(path+" "+name, c.App.Name+" "))
					if n := nearest(name, names); n != "" {
						message += ", did you mean " + n + "?"
					}
					return &usageError{message: message, hint: "see: " + path + " --help"}
				}
				commands, path = found.Subcommands, path+" "+found.Name
			}
			p.printf("%s", found.CustomHelpTemplate)
			return nil
		},
	}
}

func exitCodeHelp() string {
	var b strings.Builder
	b.WriteString("Exit codes of klimax and klimax-guest:\n\n")
	for _, e := range exitCodes() {
		fmt.Fprintf(&b, "  %3d  %s\n", e.Code, e.Meaning)
	}
	return b.String()
}

// appHelp is the text of `klimax --help`.
func appHelp(app *cli.App) string {
	var b strings.Builder
	fmt.Fprintf(&b, "klimax: %s\n\nUsage: klimax [flags] COMMAND\n\nCommands:\n", app.Usage)
	b.WriteString(commandList(app.Commands))
	b.WriteString("\nFlags, before or after the command:\n" + flagList(app.Flags))
	b.WriteString("\nExit codes: 0 done, 1 failed or degraded, 2 no agent, 3 wrong use (klimax help exit-codes)\n")
	return b.String()
}

// commandHelp is the text of `klimax COMMAND --help`. The cli package takes it
// for a template, so it must not have two braces in a row.
func commandHelp(c *cli.Command, path string) string {
	var b strings.Builder
	usage := path
	if len(c.Subcommands) > 0 {
		usage += " COMMAND"
	}
	fmt.Fprintf(&b, "%s: %s\n\nUsage: %s [flags]", path, c.Usage, usage)
	if c.ArgsUsage != "" {
		b.WriteString(" " + c.ArgsUsage)
	}
	b.WriteString("\n")
	if c.Description != "" {
		b.WriteString("\n" + strings.TrimSpace(c.Description) + "\n")
	}
	if len(c.Subcommands) > 0 {
		b.WriteString("\nCommands:\n" + commandList(c.Subcommands))
	}
	own := c.Flags[:len(c.Flags)-len(globalFlags())]
	if len(own) > 0 {
		b.WriteString("\nFlags:\n" + flagList(own))
	}
	b.WriteString("\nFlags of every command:\n" + flagList(globalFlags()))
	return b.String()
}

func commandList(cs []*cli.Command) string {
	var rows [][2]string
	for _, c := range cs {
		if !c.Hidden {
			rows = append(rows, [2]string{c.Name, c.Usage})
		}
	}
	return columns(rows)
}

func flagList(fs []cli.Flag) string {
	var rows [][2]string
	for _, f := range fs {
		usage, value := "", ""
		switch f := f.(type) {
		case *cli.StringFlag:
			usage, value = unquote(f.Usage)
			if f.Value != "" {
				usage += " (default: " + f.Value + ")"
			}
		case *cli.BoolFlag:
			usage = f.Usage
		}
		var names []string
		for _, n := range f.Names() {
			names = append(names, dashes(n))
		}
		if value != "" {
			names[len(names)-1] += " " + value
		}
		rows = append(rows, [2]string{strings.Join(names, ", "), usage})
	}
	return columns(rows)
}

// unquote takes the back quotes from a flag's usage; what they enclose is the
// name of its value.
func unquote(usage string) (text, value string) {
	before, rest, ok := strings.Cut(usage, "`")
	if !ok {
		return usage, "VALUE"
	}
	value, after, _ := strings.Cut(rest, "`")
	return before + value + after, value
}

func columns(rows [][2]string) string {
	width := 0
	for _, r := range rows {
		width = max(width, len(r[0]))
	}
	var b strings.Builder
	for _, r := range rows {
		fmt.Fprintf(&b, "  %-*s  %s\n", width, r[0], r[1])
	}
	return b.String()
}
