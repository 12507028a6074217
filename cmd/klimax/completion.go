package main

import (
	_ "embed"
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"
)

// completeCommand is what the shells' scripts call with the words so far, the
// last of which is the one to complete.
const completeCommand = "__complete"

// filesWanted is the answer of completeCommand that stands for file names.
const filesWanted = ":files"

//go:embed completion/klimax.bash
var bashScript string

//go:embed completion/klimax.zsh
var zshScript string

//go:embed completion/klimax.fish
var fishScript string

func (p *program) completionCommand() *cli.Command {
	shell := func(name, script, how string) *cli.Command {
		return &cli.Command{Name: name, Usage: "print the script for " + name, Description: how,
			Action: func(*cli.Context) error { p.printf("%s", script); return nil }}
	}
	return &cli.Command{
		Name: "completion", Usage: "print a script that completes klimax's words in a shell",
		Subcommands: []*cli.Command{
			shell("bash", bashScript, "In this shell:   source <(klimax completion bash)\nIn every one:    klimax completion bash > ~/.local/share/bash-completion/completions/klimax"),
			shell("zsh", zshScript, "In this shell:   source <(klimax completion zsh)\nIn every one:    klimax completion zsh > \"${fpath[1]}/_klimax\""),
			shell("fish", fishScript, "In this shell:   klimax completion fish | source\nIn every one:    klimax completion fish > ~/.config/fish/completions/klimax.fish"),
		},
	}
}

// complete prints what the last word can become, one candidate a line, with
// its meaning after a tab.
func (p *program) complete(app *cli.App, words []string) {
	if len(words) == 0 {
		words = []string{""}
	}
	done, last := words[:len(words)-1], words[len(words)-1]
	commands, flags := app.Commands, app.Flags
	var waiting cli.Flag // the flag whose value comes next
	arguments := 0
	for _, w := range done {
		switch {
		case waiting != nil:
			waiting = nil
		case w == "--":
			return
		case strings.HasPrefix(w, "-") && len(w) > 1:
			if f := findFlag(flags, strings.TrimLeft(w, "-")); f != nil {
				if _, value := f.(*cli.StringFlag); value {
					waiting = f
				}
			}
		default:
			next := findCommand(commands, w)
			if next == nil {
				arguments++
				continue
			}
			commands, flags = next.Subcommands, next.Flags
			if next.Name == "help" {
				commands = app.Commands
			}
		}
	}
	var prefix string
	if name, value, ok := strings.Cut(last, "="); ok && strings.HasPrefix(last, "-") {
		waiting, last, prefix = findFlag(flags, strings.TrimLeft(name, "-")), value, name+"="
	}
	offer := func(word, meaning string) {
		if strings.HasPrefix(word, last) {
			p.printf("%s%s\t%s\n", prefix, word, meaning)
		}
	}
	switch {
	case waiting != nil:
		switch waiting.Names()[0] {
		case "output":
			offer("text", "for people")
			offer("json", "for programs")
		case "config":
			p.printf("%s\n", filesWanted)
		case "guest":
			offer("local", "the guest is this machine")
			offer("unix:///", "path of the agent's socket")
		}
	case strings.HasPrefix(last, "-"):
		for _, f := range flags {
			for _, n := range f.Names() {
				if len(n) > 1 {
					usage, _ := unquote(fmt.Sprint(f.(cli.DocGenerationFlag).GetUsage()))
					offer("--"+n, usage)
				}
			}
		}
		offer("--help", "what this is and how to use it")
	case arguments == 0:
		for _, c := range commands {
			if !c.Hidden {
				offer(c.Name, c.Usage)
			}
		}
	}
}

func findFlag(flags []cli.Flag, name string) cli.Flag {
	for _, f := range flags {
		for _, n := range f.Names() {
			if n == name {
				return f
			}
		}
	}
	return nil
}

func findCommand(cs []*cli.Command, name string) *cli.Command {
	for _, c := range cs {
		if c.HasName(name) {
			return c
		}
	}
	return nil
}
