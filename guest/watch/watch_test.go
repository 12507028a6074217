package watch

import (
	"testing"

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
