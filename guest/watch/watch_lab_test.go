//go:build lab

package watch

import (
	"context"
	"log/slog"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestNotifications: in a network namespace of its own, each change is told.
func TestNotifications(t *testing.T) {
	run := func(what func(context.Context, *slog.Logger, Notify), commands map[string]string) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread()
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				t.Errorf("unshare: %v", err)
				return
			}
			news := make(chan string, 100)
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			// the subscriber must be in the namespace too: this thread is it,
			// the commands come from children of another one
			pid := unix.Gettid()
			go func() {
				time.Sleep(200 * time.Millisecond)
				for command, want := range commands {
					for len(news) > 0 {
						<-news
					}
					cmd := exec.Command("nsenter", append([]string{"--net=/proc/" + strconv.Itoa(pid) + "/ns/net"}, strings.Fields(command)...)...)
					if out, err := cmd.CombinedOutput(); err != nil {
						t.Errorf("%s: %v %s", command, err, out)
					}
					select {
					case got := <-news:
						if !strings.Contains(got, want) {
							t.Errorf("%s: told %q", command, got)
						}
					case <-time.After(2 * time.Second):
						t.Errorf("%s: not told", command)
					}
					time.Sleep(100 * time.Millisecond)
				}
				cancel()
			}()
			what(ctx, slog.New(slog.DiscardHandler), func(reason string) { news <- reason })
		}()
		<-done
	}
	run(NFTables, map[string]string{"nft add table ip t": "nftables changed by nft (PID"})
	run(Links, map[string]string{
		"ip link add d0 type bridge":              "changed",
		"sysctl -w net.ipv4.conf.lo.forwarding=1": "forwarding",
		"ip address add 10.1.2.3/24 dev lo":       "changed",
	})
}
