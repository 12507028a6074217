package watch

import (
	"context"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

func TestCommitter(t *testing.T) {
	attrs, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_GEN_ID, Data: []byte{0, 0, 0, 9}},
		{Type: unix.NFTA_GEN_PROC_PID, Data: []byte{0, 0, 0x30, 0x39}},
		{Type: unix.NFTA_GEN_PROC_NAME, Data: []byte("nft\x00")},
	})
	if err != nil {
		t.Fatal(err)
	}
	if pid, name := committer(append([]byte{0, 0, 0, 0}, attrs...)); pid != 12345 || name != "nft" {
		t.Errorf("%d %q", pid, name)
	}
	for _, bad := range [][]byte{nil, {1, 2}, {0, 0, 0, 0, 3, 0}} {
		if pid, _ := committer(bad); pid != 0 {
			t.Errorf("%v: %d", bad, pid)
		}
	}
}

// TestNoSubscription: one that cannot be had is asked for with growing pauses.
func TestNoSubscription(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	var log strings.Builder
	subscribe(ctx, slog.New(slog.NewTextHandler(&log, nil)), "nothing", unix.NETLINK_ROUTE, []uint32{1 << 30}, func(reason string) { t.Error(reason) }, nil)
	if n := strings.Count(log.String(), "subscribing again"); n < 2 || n > 6 {
		t.Errorf("%d attempts in 300 ms:\n%s", n, log.String())
	}
}

func TestOwn(t *testing.T) {
	comm, err := os.ReadFile("/proc/thread-self/comm")
	if err != nil {
		t.Fatal(err)
	}
	name := strings.TrimSpace(string(comm))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	tid := uint32(unix.Gettid())
	if !own(tid, name) {
		t.Errorf("thread %d (%s) is not ours", tid, name)
	}
	if own(tid, "nft") || own(1, name) || own(0, "") {
		t.Error("somebody else is taken for us")
	}
}
