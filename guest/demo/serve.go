package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// device is the first interface that Docker gives a container.
const device = "eth0"

// Serve answers HTTP with the address that the peer has from here, until the
// context ends. It gives itself vip as a second address first, the way a
// load balancer in layer-2 mode announces one: the kernel answers ARP for it.
func Serve(ctx context.Context, vip netip.Addr) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find %s: %w", device, err)
	}
	a := &netlink.Addr{IPNet: &net.IPNet{IP: vip.AsSlice(), Mask: net.CIDRMask(32, 32)}}
	if err := netlink.AddrReplace(link, a); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add %v to %s: %w", vip, device, err)
	}
	srv := &http.Server{
		Addr: fmt.Sprintf(":%d", Port), Handler: http.HandlerFunc(answer), ReadHeaderTimeout: 5 * time.Second,
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	if err := srv.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func answer(w http.ResponseWriter, r *http.Request) {
	peer, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		peer = r.RemoteAddr
	}
	here := ""
	if l, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		here, _, _ = net.SplitHostPort(l.String())
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = fmt.Fprintf(w, "klimax demo: you are %s, this is %s\n", peer, here)
}
