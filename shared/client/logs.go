package client

import (
	"context"
	"fmt"
	"io"
	"net/http"
)

// Logs copies the agent's last n log lines to w, all it keeps for n < 0, and
// with follow every new one until ctx is done.
func (c *Client) Logs(ctx context.Context, w io.Writer, n int, follow bool) error {
	resp, err := c.do(ctx, http.MethodGet, fmt.Sprintf("/v1/logs?lines=%d&follow=%v", n, follow), nil, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(w, resp.Body); err != nil && ctx.Err() == nil {
		return fmt.Errorf("reading the agent's log: %w", err)
	}
	return nil
}
