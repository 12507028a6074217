package network

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"strings"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"

	"klimax/shared/api"
)

// Offsets in the IPv4 and TCP headers.
const (
	offsetSrc     = 12
	offsetDst     = 16
	offsetTCPDest = 2
)

// fibLocal is RTN_LOCAL, what the fib expression yields for an address of the guest.
const fibLocal = unix.RTN_LOCAL

// conntrackEstablished is the state mask of xt_conntrack for ESTABLISHED and
// RELATED: bit 1<<(state%3+1), linux/netfilter/xt_conntrack.h.
const conntrackEstablished = 1<<1 | 1<<2

// reg is the register that every load of ours uses.
const reg = 1

// encode turns a rule into expressions. In shared chains only what iptables
// itself would write is used, so that iptables-save shows the full match.
func encode(r Rule) []expr.Any {
	var out []expr.Any
	m := r.Match
	ifname := func(key expr.MetaKey, name string) {
		out = append(out, &expr.Meta{Key: key, Register: reg},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: ifnameData(name)})
	}
	load := func(offset uint32) {
		out = append(out, &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4})
	}
	network := func(offset uint32, p netip.Prefix) {
		load(offset)
		mask := make([]byte, 4)
		binary.BigEndian.PutUint32(mask, ^uint32(uint64(1)<<(32-p.Bits())-1))
		if p.Bits() < 32 {
			out = append(out, &expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: mask, Xor: make([]byte, 4)})
		}
		out = append(out, &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: p.Masked().Addr().AsSlice()})
	}
	lookup := func(offset uint32, set string) {
		load(offset)
		out = append(out, &expr.Lookup{SourceRegister: reg, SetName: set})
	}
	if m.In != "" {
		ifname(expr.MetaKeyIIFNAME, m.In)
	}
	if m.Out != "" {
		ifname(expr.MetaKeyOIFNAME, m.Out)
	}
	if m.Src.IsValid() {
		network(offsetSrc, m.Src)
	}
	if m.SrcSet != "" {
		lookup(offsetSrc, m.SrcSet)
	}
	if m.Dst.IsValid() {
		network(offsetDst, m.Dst)
	}
	if m.DstSet != "" {
		lookup(offsetDst, m.DstSet)
	}
	if m.TCPPortSet != "" {
		out = append(out,
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{unix.IPPROTO_TCP}},
			&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: offsetTCPDest, Len: 2},
			&expr.Lookup{SourceRegister: reg, SetName: m.TCPPortSet})
	}
	if m.Local {
		out = append(out, &expr.Fib{Register: reg, FlagDADDR: true, ResultADDRTYPE: true},
			&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: binaryutil.NativeEndian.PutUint32(fibLocal)})
	}
	if m.Established {
		info := &xt.ConntrackMtinfo3{}
		info.MatchFlags = uint16(xt.ConntrackState)
		info.StateMask = conntrackEstablished
		out = append(out, &expr.Match{Name: "conntrack", Rev: 3, Info: info})
	}
	out = append(out, &expr.Counter{})
	switch r.Verdict {
	case Accept:
		out = append(out, &expr.Verdict{Kind: expr.VerdictAccept})
	case Drop:
		out = append(out, &expr.Verdict{Kind: expr.VerdictDrop})
	case SNATSelf:
		load(offsetSrc)
		out = append(out, &expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: reg, RegAddrMax: reg})
	case Mark:
		mask := binaryutil.NativeEndian.PutUint32(^DirectMark)
		bit := binaryutil.NativeEndian.PutUint32(DirectMark)
		out = append(out,
			&expr.Meta{Key: expr.MetaKeyMARK, Register: reg},
			&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: mask, Xor: bit},
			&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg})
	}
	return out
}

func ifnameData(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func encodeComment(id api.RuleID) []byte {
	return userdata.AppendString(nil, userdata.TypeComment, CommentPrefix+string(id))
}

// decodeComment returns the ID of a rule of ours. iptables keeps comments
// either in the rule's user data or as a match of its own.
func decodeComment(data []byte, exprs []expr.Any) (api.RuleID, bool) {
	s, ok := userdata.GetString(data, userdata.TypeComment)
	if !ok {
		for _, e := range exprs {
			if m, isMatch := e.(*expr.Match); isMatch && m.Name == "comment" {
				if c, isComment := m.Info.(*xt.Comment); isComment {
					s, ok = string(*c), true
				} else if u, isUnknown := m.Info.(*xt.Unknown); isUnknown {
					s, ok = string(*u), true
				}
			}
		}
	}
	if i := strings.IndexByte(s, 0); i >= 0 {
		s = s[:i]
	}
	id, ours := strings.CutPrefix(s, CommentPrefix)
	return api.RuleID(id), ok && ours
}

// decoded is what decode understood of a rule.
type decoded struct {
	match   Match
	verdict Verdict
	packets uint64
	// jump is the target of a jump or goto
	jump string
	// final: accept, drop, reject or return
	final bool
	// drops: drop or reject
	drops bool
	// matches says whether there is any condition
	matches bool
	// exact: every expression was understood, so match and verdict are all of it
	exact bool
	// loadsMark: the rule looks at the packet's mark
	loadsMark bool
}

// decode is the inverse of encode for what encode writes and what iptables
// makes of it after a restore; of other rules it tells the parts it knows.
func decode(exprs []expr.Any) decoded {
	d := decoded{exact: true}
	var last expr.Any // the last load into the register
	var mask []byte
	for i := 0; i < len(exprs); i++ {
		switch e := exprs[i].(type) {
		case *expr.Meta:
			if e.SourceRegister {
				if d.verdict = Mark; !isMarkLoad(last) || !isMarkMask(exprs, i) {
					d.exact = false
				}
				continue
			}
			d.loadsMark = d.loadsMark || e.Key == expr.MetaKeyMARK
			last, mask = e, nil
		case *expr.Payload:
			last, mask = e, nil
		case *expr.Fib:
			last, mask = e, nil
		case *expr.Bitwise:
			mask = e.Mask
		case *expr.Cmp:
			d.matches = true
			d.compare(last, mask, e)
		case *expr.Lookup:
			d.matches = true
			d.lookup(last, e)
		case *expr.Counter:
			d.packets = e.Packets
		case *expr.Match:
			switch {
			case e.Name == "comment":
			case e.Name == "conntrack" && isEstablished(e.Info):
				d.matches, d.match.Established = true, true
			default:
				d.matches, d.exact = true, false
			}
		case *expr.Verdict:
			d.decide(e)
		case *expr.NAT:
			p, ok := last.(*expr.Payload)
			if ok && p.Offset == offsetSrc && p.Len == 4 && e.Type == expr.NATTypeSourceNAT && e.RegAddrMin == p.DestRegister {
				d.verdict = SNATSelf
			} else {
				d.exact = false
			}
		case *expr.Reject:
			d.final, d.drops, d.exact = true, true, false
		case *expr.Target:
			d.exact = false
			d.final = e.Name == "REJECT"
			d.drops = e.Name == "REJECT"
		default: // an expression of others, or one that could not be read
			last, mask = nil, nil
			d.matches, d.exact = true, false
		}
	}
	return d
}

func (d *decoded) decide(v *expr.Verdict) {
	switch v.Kind {
	case expr.VerdictAccept:
		d.verdict, d.final = Accept, true
	case expr.VerdictDrop:
		d.verdict, d.final, d.drops = Drop, true, true
	case expr.VerdictJump, expr.VerdictGoto:
		d.jump, d.exact = v.Chain, false
	case expr.VerdictReturn:
		d.final, d.exact = true, false
	default:
		d.exact = false
	}
}

func (d *decoded) compare(last expr.Any, mask []byte, c *expr.Cmp) {
	if c.Op != expr.CmpOpEq {
		d.exact = false
		return
	}
	switch l := last.(type) {
	case *expr.Meta:
		name, whole := strings.CutSuffix(strings.TrimRight(string(c.Data), "\x00")+"\x00", "\x00")
		whole = whole && len(c.Data) > 0 && c.Data[len(c.Data)-1] == 0
		switch {
		case l.Key == expr.MetaKeyIIFNAME && whole:
			d.match.In = name
		case l.Key == expr.MetaKeyOIFNAME && whole:
			d.match.Out = name
		case l.Key == expr.MetaKeyL4PROTO && len(c.Data) == 1 && c.Data[0] == unix.IPPROTO_TCP:
		default:
			d.exact = false
		}
	case *expr.Payload:
		p, ok := prefixOf(c.Data, mask, l.Len)
		switch {
		case l.Base != expr.PayloadBaseNetworkHeader || !ok:
			d.exact = false
		case l.Offset == offsetSrc:
			d.match.Src = p
		case l.Offset == offsetDst:
			d.match.Dst = p
		default:
			d.exact = false
		}
	case *expr.Fib:
		if l.ResultADDRTYPE && l.FlagDADDR && len(c.Data) == 4 && binaryutil.NativeEndian.Uint32(c.Data) == fibLocal {
			d.match.Local = true
		} else {
			d.exact = false
		}
	default:
		d.exact = false
	}
}

func (d *decoded) lookup(last expr.Any, l *expr.Lookup) {
	p, ok := last.(*expr.Payload)
	switch {
	case !ok || l.Invert || l.IsDestRegSet:
		d.exact = false
	case p.Base == expr.PayloadBaseNetworkHeader && p.Offset == offsetSrc && p.Len == 4:
		d.match.SrcSet = l.SetName
	case p.Base == expr.PayloadBaseNetworkHeader && p.Offset == offsetDst && p.Len == 4:
		d.match.DstSet = l.SetName
	case p.Base == expr.PayloadBaseTransportHeader && p.Offset == offsetTCPDest && p.Len == 2:
		d.match.TCPPortSet = l.SetName
	default:
		d.exact = false
	}
}

// prefixOf reads the network out of a comparison of the first n bytes of an
// address; iptables loads only the bytes that a /8, /16 or /24 needs.
func prefixOf(data, mask []byte, n uint32) (netip.Prefix, bool) {
	if n == 0 || n > 4 || len(data) != int(n) {
		return netip.Prefix{}, false
	}
	ones := int(n) * 8
	if mask != nil {
		var m [4]byte
		if copy(m[:], mask) != int(n) {
			return netip.Prefix{}, false
		}
		v := binary.BigEndian.Uint32(m[:])
		ones = bits.LeadingZeros32(^v)
		if v<<ones != 0 && ones < 32 {
			return netip.Prefix{}, false
		}
	}
	var a [4]byte
	copy(a[:], data)
	return netip.PrefixFrom(netip.AddrFrom4(a), ones), true
}

func isMarkLoad(e expr.Any) bool {
	m, ok := e.(*expr.Meta)
	return ok && m.Key == expr.MetaKeyMARK
}

func isMarkMask(exprs []expr.Any, i int) bool {
	if i == 0 {
		return false
	}
	b, ok := exprs[i-1].(*expr.Bitwise)
	return ok && len(b.Mask) == 4 && len(b.Xor) == 4 &&
		binaryutil.NativeEndian.Uint32(b.Mask) == ^DirectMark && binaryutil.NativeEndian.Uint32(b.Xor) == DirectMark
}

func isEstablished(info xt.InfoAny) bool {
	switch m := info.(type) {
	case *xt.ConntrackMtinfo3:
		return m.StateMask == conntrackEstablished && m.MatchFlags == uint16(xt.ConntrackState) && m.InvertFlags == 0
	case *xt.ConntrackMtinfo2:
		return m.StateMask == conntrackEstablished && m.MatchFlags == uint16(xt.ConntrackState) && m.InvertFlags == 0
	}
	return false
}
