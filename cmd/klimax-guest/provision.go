package main

import "github.com/urfave/cli/v2"

func (p program) provisionCommands() []*cli.Command { return nil }
