//go:build linux

package probe

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Throughput sends to a sink (ServeSink) for a time and returns the bytes per second that arrived there, counted until
// the sink has read everything.
func Throughput(in Enter, target string, d time.Duration) (float64, error) {
	to, err := netip.ParseAddrPort(target)
	if err != nil {
		return 0, fmt.Errorf("throughput: %w", err)
	}
	var f *os.File
	if err := in(func() (err error) { f, err = dial(to); return err }); err != nil {
		return 0, fmt.Errorf("throughput to %s: %w", target, err)
	}
	defer f.Close()
	begin := time.Now()
	f.SetDeadline(begin.Add(d + 10*time.Second))
	b := make([]byte, 1<<18)
	// A socket that is still connecting takes no data yet: the first write waits.
	for time.Since(begin) < d {
		if _, err := f.Write(b); err != nil {
			return 0, fmt.Errorf("throughput to %s: %s: %w", target, Kind(err), err)
		}
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	if cerr := raw.Control(func(fd uintptr) { err = unix.Shutdown(int(fd), unix.SHUT_WR) }); cerr != nil || err != nil {
		return 0, fmt.Errorf("throughput to %s: end: %v, %v", target, cerr, err)
	}
	got, err := line(f, time.Now().Add(10*time.Second))
	if err != nil {
		return 0, fmt.Errorf("throughput to %s: count: %s: %w", target, Kind(err), err)
	}
	n, err := strconv.ParseInt(got, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("throughput to %s: count: %w", target, err)
	}
	return float64(n) / time.Since(begin).Seconds(), nil
}
