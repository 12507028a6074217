// Package watch turns news of the kernel and of systemd into calls of one
// function: something that the rules depend on may have changed.
package watch

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Notify is called with a short reason for people. It must not block.
type Notify func(reason string)

// receiveBuffer is asked for on each socket: a commit of thousands of rules
// arrives as one burst. When it overflows all the same, the subscription is
// made anew and everything is read again.
const receiveBuffer = 4 << 20

// The pause before a broken subscription is made anew: short after one that
// held, doubled while none does.
const (
	firstPause = 10 * time.Millisecond
	lastPause  = 5 * time.Second
)

// rtnetlink groups, linux/rtnetlink.h.
const (
	groupLink    = 1
	groupIPv4    = 5  // RTNLGRP_IPV4_IFADDR
	groupRoute   = 7  // RTNLGRP_IPV4_ROUTE
	groupNetconf = 24 // RTNLGRP_IPV4_NETCONF: ip_forward among others
)

// groupNFTables is NFNLGRP_NFTABLES, linux/netfilter/nfnetlink.h.
const groupNFTables = 7

// newGen is the message that ends the notifications of one nftables commit.
const newGen = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWGEN

// NFTables reports every commit to nftables in this network namespace that was
// not made by this process.
func NFTables(ctx context.Context, log *slog.Logger, notify Notify) {
	subscribe(ctx, log, "nftables", unix.NETLINK_NETFILTER, []uint32{groupNFTables}, notify, func(msgs []netlink.Message) string {
		for _, m := range msgs {
			if m.Header.Type != newGen {
				continue
			}
			if pid, name := committer(m.Data); !own(pid, name) {
				return fmt.Sprintf("nftables changed by %s (PID %d)", name, pid)
			}
		}
		return ""
	})
}

// own reports whether a commit was made by this process. The kernel tells the
// number and name of the committing thread, and Go commits from any. The number
// is one of the first PID namespace: in a container own commits look like
// somebody else's, which costs a look and nothing else, and the name keeps
// somebody else's number from being taken for one of ours.
func own(thread uint32, name string) bool {
	comm, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/comm", thread))
	return err == nil && name != "" && strings.TrimSuffix(string(comm), "\n") == name
}

// committer reads NFTA_GEN_PROC_PID and NFTA_GEN_PROC_NAME behind the four
// bytes of nfgenmsg.
func committer(data []byte) (pid uint32, name string) {
	if len(data) < 4 {
		return 0, "unknown"
	}
	ad, err := netlink.NewAttributeDecoder(data[4:])
	if err != nil {
		return 0, "unknown"
	}
	ad.ByteOrder = binary.BigEndian
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_GEN_PROC_PID:
			pid = ad.Uint32()
		case unix.NFTA_GEN_PROC_NAME:
			name = ad.String()
		}
	}
	return pid, name
}

// Links reports changes of interfaces, IPv4 addresses, routes and forwarding.
func Links(ctx context.Context, log *slog.Logger, notify Notify) {
	subscribe(ctx, log, "rtnetlink", unix.NETLINK_ROUTE, []uint32{groupLink, groupIPv4, groupRoute, groupNetconf}, notify, func(msgs []netlink.Message) string {
		for _, m := range msgs {
			switch m.Header.Type {
			case unix.RTM_NEWADDR, unix.RTM_DELADDR:
				return "an address changed"
			case unix.RTM_NEWNETCONF:
				return "a forwarding switch changed"
			}
		}
		return "an interface or route changed"
	})
}

// subscribe reads one multicast subscription until the context ends. Whenever
// it begins it notifies: what happened before was not told.
func subscribe(ctx context.Context, log *slog.Logger, what string, family int, groups []uint32, notify Notify, reason func([]netlink.Message) string) {
	pause := firstPause
	begin := "start"
	for ctx.Err() == nil {
		held, err := receive(ctx, family, groups, begin, notify, reason)
		if ctx.Err() != nil {
			return
		}
		if held {
			pause, begin = firstPause, what+" notifications were lost"
		}
		log.Info("notifications broke off, subscribing again", "source", what, "in", pause, "error", err)
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, lastPause)
	}
}

// receive is one subscription, begin what it notifies of when it has come
// about; held tells whether it did.
func receive(ctx context.Context, family int, groups []uint32, begin string, notify Notify, reason func([]netlink.Message) string) (held bool, err error) {
	conn, err := netlink.Dial(family, nil)
	if err != nil {
		return false, err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	// Needs CAP_NET_ADMIN to go beyond net.core.rmem_max; less is no error.
	_ = conn.SetReadBuffer(receiveBuffer)
	for _, g := range groups {
		if err := conn.JoinGroup(g); err != nil {
			return false, fmt.Errorf("join group %d: %w", g, err)
		}
	}
	notify(begin)
	for {
		msgs, err := conn.Receive()
		if err != nil {
			return true, err
		}
		if r := reason(msgs); r != "" {
			notify(r)
		}
	}
}
