package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"

	"klimax/host/connect"
	"klimax/shared/api"
	"klimax/shared/client"
	"klimax/shared/config"
	"klimax/shared/version"
)

// exitCodes is the one table of exit codes; docs/exit-codes.md has it too.
func exitCodes() []struct {
	Code    int
	Meaning string
} {
	return []struct {
		Code    int
		Meaning string
	}{
		{api.ExitOK, "done; or everything is as the configuration asks for"},
		{api.ExitDegraded, "failed; or something that the configuration asks for is not in place"},
		{api.ExitUnreachable, "the guest's agent did not answer"},
		{api.ExitUsage, "wrong command, flags, arguments or configuration; nothing was changed"},
		{api.ExitInterrupted, "interrupted (Ctrl-C or SIGTERM); run the command again to go on"},
	}
}

// usageError says that the program was called in a wrong way.
type usageError struct{ message, hint string }

func (e *usageError) Error() string { return e.message + "\n  " + e.hint }

// silent is an error that was told already; its value is the exit code.
type silent int

func (silent) Error() string { return "" }

// shown is an error whose text a terminal shows already as that of a step.
type shown struct{ error }

func (e shown) Unwrap() error { return e.error }

// exitCode maps an error to its exit code.
func exitCode(err error) int {
	var (
		code     silent
		usage    *usageError
		problems *config.Problems
		target   *connect.Error
		away     *client.UnreachableError
		answer   *api.Error
	)
	switch {
	case err == nil:
		return api.ExitOK
	case errors.As(err, &code):
		return int(code)
	case errors.Is(err, context.Canceled):
		return api.ExitInterrupted
	case errors.As(err, &usage), errors.As(err, &problems), errors.As(err, &target):
		return api.ExitUsage
	case errors.As(err, &away):
		return api.ExitUnreachable
	case errors.As(err, &answer) && answer.Code == api.CodeInvalidConfig:
		return api.ExitUsage
	}
	return api.ExitDegraded
}

// report tells a person about an error and returns its exit code.
func (p *program) report(err error) int {
	code := exitCode(err)
	var told silent
	var step shown
	if err == nil || errors.As(err, &told) {
		return code
	}
	var mismatch *version.MismatchError
	text := err.Error()
	switch {
	case code == api.ExitInterrupted:
		text = "interrupted"
	case errors.As(err, &step) && p.OutTerminal && p.ErrTerminal:
		return code // the failed step is on the same screen
	case errors.As(err, &mismatch) && mismatch.Upgrade == version.Host:
		text += "\n  install a klimax of version " + mismatch.GuestVersion + " here"
	case errors.As(err, &mismatch):
		text += "\n  install klimax-guest " + mismatch.HostVersion + " in the guest and restart the agent"
	}
	_, _ = fmt.Fprintf(p.Err, "klimax: %s\n", text)
	return code
}

// onUsageError takes the flag package's complaints.
func onUsageError(c *cli.Context, err error, _ bool) error {
	hint := "see: klimax --help"
	var flags []cli.Flag
	if c.Command != nil && c.Command.HelpName != "" && c.Command.Name != c.App.Name {
		hint, flags = "see: "+c.Command.HelpName+" --help", c.Command.Flags
	} else {
		flags = c.App.Flags
	}
	message := err.Error()
	if name, ok := strings.CutPrefix(message, "flag provided but not defined: "); ok {
		message = "unknown flag " + dashes(strings.TrimLeft(name, "-"))
		var names []string
		for _, f := range flags {
			names = append(names, f.Names()...)
		}
		if n := nearest(strings.TrimLeft(name, "-"), names); n != "" {
			message += ", did you mean " + dashes(n) + "?"
		}
	}
	return &usageError{message: message, hint: hint}
}

func dashes(name string) string {
	if len(name) == 1 {
		return "-" + name
	}
	return "--" + name
}

func unknownCommand(c *cli.Context) error {
	path, commands := c.App.Name, c.App.Commands
	if len(c.Command.Subcommands) > 0 && c.Command.Name != c.App.Name {
		path, commands = c.Command.HelpName, c.Command.Subcommands
	}
	var names []string
	for _, s := range commands {
		if !s.Hidden {
			names = append(names, s.Names()...)
		}
	}
	message := fmt.Sprintf("unknown command %q", strings.TrimPrefix(path+" "+c.Args().First(), c.App.Name+" "))
	if n := nearest(c.Args().First(), names); n != "" {
		message += ", did you mean " + n + "?"
	}
	return &usageError{message: message, hint: "see: " + path + " --help"}
}

// nearest returns the word that got most likely stands for: the one with the
// fewest letters to change, when that is at most a third of them and one, or
// one that got begins or that begins with it.
func nearest(got string, words []string) string {
	best, least := "", 1+len(got)/3
	for _, w := range words {
		d := distance(strings.ToLower(got), w)
		if len(got) > 1 && strings.HasPrefix(w, strings.ToLower(got)) {
			d = 1
		}
		if d <= least && len(w) > 1 && (best == "" || d < least) {
			best, least = w, d
		}
	}
	return best
}

// distance is the number of letters to insert, delete, replace or swap with
// their neighbour that makes b of a.
func distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			replace := rows[i-1][j-1]
			if a[i-1] != b[j-1] {
				replace++
			}
			rows[i][j] = min(replace, rows[i-1][j]+1, rows[i][j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				rows[i][j] = min(rows[i][j], rows[i-2][j-2]+1)
			}
		}
	}
	return rows[len(a)][len(b)]
}
