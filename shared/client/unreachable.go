package client

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// UnreachableError says that no agent answered.
type UnreachableError struct {
	Socket string // path of the unix socket, empty for another kind of connection
	Err    error
}

func (e *UnreachableError) Unwrap() error { return e.Err }

func (e *UnreachableError) Error() string {
	const start = "\n  in the guest: systemctl status klimax-guest (without systemd: klimax-guest status)"
	if e.Socket == "" {
		return fmt.Sprintf("the guest's agent does not answer: %v%s", e.Err, start)
	}
	switch {
	case errors.Is(e.Err, fs.ErrPermission):
		return fmt.Sprintf("no permission for the agent's socket %s\n"+
			"  join its group and log in again: sudo usermod -aG klimax $USER\n"+
			"  or run this command with sudo", e.Socket)
	case errors.Is(e.Err, fs.ErrNotExist):
		return fmt.Sprintf("there is no agent: the socket %s does not exist\n"+
			"  start the agent: sudo systemctl start klimax-guest (without systemd: sudo klimax-guest install)\n"+
			"  or name another socket: klimax --guest unix:///PATH, klimax-guest --socket PATH", e.Socket)
	case errors.Is(e.Err, syscall.ECONNREFUSED):
		return fmt.Sprintf("nobody listens on the agent's socket %s: the agent ended without removing it\n"+
			"  start it again: sudo systemctl restart klimax-guest (without systemd: sudo klimax-guest install)", e.Socket)
	case errors.Is(e.Err, syscall.ENOTSOCK):
		return fmt.Sprintf("%s is not the socket of an agent\n  name its socket: klimax --guest unix:///PATH, klimax-guest --socket PATH", e.Socket)
	case errors.Is(e.Err, os.ErrDeadlineExceeded):
		return fmt.Sprintf("the agent's socket %s did not take the connection in time%s", e.Socket, start)
	}
	return fmt.Sprintf("the agent's socket %s does not answer: %v%s", e.Socket, e.Err, start)
}
