package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests and layouts of iptables-legacy, linux/netfilter_ipv4/ip_tables.h.
const (
	iptSoGetInfo    = 64
	iptSoGetEntries = 65
	tableNameLen    = 32
	// struct ipt_getinfo: name, valid_hooks, hook_entry[5], underflow[5], num_entries, size
	infoLen       = tableNameLen + 4 + 5*4 + 5*4 + 4 + 4
	infoUnderflow = tableNameLen + 4 + 5*4
	infoSize      = infoLen - 4
	// struct ipt_get_entries: name, size, padded to 8, then the entries
	entriesHead = tableNameLen + 8
	// struct ipt_entry: 84 bytes ipt_ip, nfcache, target_offset, next_offset, comefrom, counters
	entryTargetOffset = 88
	entryNextOffset   = 90
	entryLen          = 112
	// struct xt_entry_target: size, name[29], revision, then the data
	targetName    = 2
	targetNameLen = 29
	targetData    = 32
	// a standard target holds its verdict, -NF_DROP-1 for DROP
	verdictDrop = -1
)

// readLegacy tells what iptables-legacy has in this network namespace: its
// tables, whether Docker's chains are among them and whether FORWARD drops.
func readLegacy() (tables []string, docker, forwardDrop bool, err error) {
	b, err := os.ReadFile("/proc/thread-self/net/ip_tables_names")
	if errors.Is(err, os.ErrNotExist) {
		return nil, false, false, nil // kernel without iptables-legacy
	}
	if err != nil {
		return nil, false, false, fmt.Errorf("iptables-legacy: %w", err)
	}
	tables = strings.Fields(string(b))
	slices.Sort(tables)
	if !slices.Contains(tables, "filter") {
		return tables, false, false, nil
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return tables, false, false, fmt.Errorf("iptables-legacy: raw socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	info := make([]byte, infoLen)
	copy(info, "filter")
	if err := getsockopt(fd, iptSoGetInfo, info); err != nil {
		return tables, false, false, fmt.Errorf("iptables-legacy: read table filter: %w", err)
	}
	size := binary.NativeEndian.Uint32(info[infoSize:])
	if size > 64<<20 {
		return tables, false, false, fmt.Errorf("iptables-legacy: table filter of %d bytes", size)
	}
	entries := make([]byte, entriesHead+int(size))
	copy(entries, "filter")
	binary.NativeEndian.PutUint32(entries[tableNameLen:], size)
	if err := getsockopt(fd, iptSoGetEntries, entries); err != nil {
		return tables, false, false, fmt.Errorf("iptables-legacy: read the rules of table filter: %w", err)
	}
	docker, forwardDrop = scanLegacy(info, entries[entriesHead:])
	return tables, docker, forwardDrop, nil
}

// scanLegacy walks the entries of table filter. User-defined chains begin with
// an entry whose target ERROR carries the chain's name; a built-in chain's
// policy is the standard target at its underflow offset.
func scanLegacy(info, entries []byte) (docker, forwardDrop bool) {
	const hookForward = 2 // NF_INET_FORWARD
	underflow := int(binary.NativeEndian.Uint32(info[infoUnderflow+4*hookForward:]))
	for off := 0; off+entryLen <= len(entries); {
		target := off + int(binary.NativeEndian.Uint16(entries[off+entryTargetOffset:]))
		next := int(binary.NativeEndian.Uint16(entries[off+entryNextOffset:]))
		if next < entryLen || target+targetData+4 > len(entries) {
			break
		}
		name := cString(entries[target+targetName : target+targetName+targetNameLen])
		if name == "ERROR" {
			chain := cString(entries[target+targetData : min(target+targetData+30, len(entries))])
			docker = docker || chain == "DOCKER" || chain == "DOCKER-USER"
		}
		if off == underflow && name == "" {
			forwardDrop = int32(binary.NativeEndian.Uint32(entries[target+targetData:])) == verdictDrop
		}
		off += next
	}
	return docker, forwardDrop
}

func cString(b []byte) string {
	s, _, _ := strings.Cut(string(b), "\x00")
	return s
}

func getsockopt(fd, opt int, buf []byte) error {
	l := uint32(len(buf))
	_, _, e := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_IP, uintptr(opt),
		uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&l)), 0)
	if e != 0 {
		return e
	}
	return nil
}
