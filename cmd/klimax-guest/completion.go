package main

import (
	"fmt"

	"github.com/urfave/cli/v2"
)

// The program completes itself: called with --generate-bash-completion behind
// the words so far, it prints what may come next, one word a line.
const (
	bashCompletion = `_klimax_guest() {
  local IFS=$'\n'
  COMPREPLY=($(compgen -W "$("${COMP_WORDS[@]:0:COMP_CWORD}" --generate-bash-completion 2>/dev/null)" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _klimax_guest klimax-guest
`
	zshCompletion = `#compdef klimax-guest
_klimax_guest() {
  local -a opts
  opts=("${(@f)$(${words[1,CURRENT-1]} --generate-bash-completion 2>/dev/null)}")
  compadd -a opts || _files
}
compdef _klimax_guest klimax-guest
`
	fishCompletion = `complete -c klimax-guest -f -a '(set -l w (commandline -opc); $w --generate-bash-completion 2>/dev/null)'
`
)

func (p program) completionCommand() *cli.Command {
	return &cli.Command{
		Name: "completion", Usage: "print a completion script for bash, zsh or fish", ArgsUsage: "SHELL",
		Action: func(x *cli.Context) error {
			script, ok := map[string]string{"bash": bashCompletion, "zsh": zshCompletion, "fish": fishCompletion}[x.Args().First()]
			if !ok || x.NArg() > 1 {
				return usageError{fmt.Errorf("completion: name one shell: bash, zsh or fish")}
			}
			_, err := fmt.Fprint(p.out, script)
			return err
		},
	}
}
