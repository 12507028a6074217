package network

import (
	"encoding/binary"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// rawRule is a rule as the kernel tells it. Expressions that decode has no use
// for, or that google/nftables cannot read (such as ct with a direction, which
// makes its GetRules fail), are nil: a rule of others must not keep us from
// reading ours.
type rawRule struct {
	handle   uint64
	userData []byte
	exprs    []expr.Any
}

// dumpRules reads the rules of a chain; of one that does not exist, none.
func dumpRules(conn *netlink.Conn, c *nftables.Chain) ([]rawRule, error) {
	attrs, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_RULE_TABLE, Data: append([]byte(c.Table.Name), 0)},
		{Type: unix.NFTA_RULE_CHAIN, Data: append([]byte(c.Name), 0)},
	})
	if err != nil {
		return nil, err
	}
	msgs, err := conn.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETRULE, Flags: netlink.Request | netlink.Dump},
		Data:   append([]byte{byte(c.Table.Family), 0, 0, 0}, attrs...), // nfgenmsg
	})
	if err != nil {
		return nil, err
	}
	out := make([]rawRule, 0, len(msgs))
	for _, m := range msgs {
		if m.Header.Flags&netlink.DumpInterrupted != 0 {
			return nil, unix.EINTR
		}
		r, err := parseRule(byte(c.Table.Family), m.Data)
		if err != nil {
			return nil, err
		}
		out = append(out, r)
	}
	return out, nil
}

func parseRule(family byte, data []byte) (rawRule, error) {
	var r rawRule
	ad, err := netlink.NewAttributeDecoder(data[min(4, len(data)):])
	if err != nil {
		return r, err
	}
	ad.ByteOrder = binary.BigEndian
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_RULE_HANDLE:
			r.handle = ad.Uint64()
		case unix.NFTA_RULE_USERDATA:
			r.userData = ad.Bytes()
		case unix.NFTA_RULE_EXPRESSIONS:
			ad.Nested(func(list *netlink.AttributeDecoder) error {
				for list.Next() {
					r.exprs = append(r.exprs, parseExpr(family, list.Bytes()))
				}
				return nil
			})
		}
	}
	return r, ad.Err()
}

func parseExpr(family byte, data []byte) expr.Any {
	ad, err := netlink.NewAttributeDecoder(data)
	if err != nil {
		return nil
	}
	name, content := "", []byte(nil)
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_EXPR_NAME:
			name = ad.String()
		case unix.NFTA_EXPR_DATA:
			content = ad.Bytes()
		}
	}
	e := newExpr(name, content)
	if e == nil || ad.Err() != nil || expr.Unmarshal(family, content, e) != nil {
		return nil
	}
	return e
}

// newExpr makes an empty expression of those that decode knows.
func newExpr(name string, content []byte) expr.Any {
	switch name {
	case "meta":
		return &expr.Meta{}
	case "payload":
		return &expr.Payload{}
	case "fib":
		return &expr.Fib{}
	case "bitwise":
		return &expr.Bitwise{}
	case "cmp":
		return &expr.Cmp{}
	case "lookup":
		return &expr.Lookup{}
	case "counter":
		return &expr.Counter{}
	case "match":
		return &expr.Match{}
	case "target":
		return &expr.Target{}
	case "nat":
		return &expr.NAT{}
	case "reject":
		return &expr.Reject{}
	case "immediate":
		// An immediate value for the verdict register is a verdict.
		var i expr.Immediate
		if expr.Unmarshal(unix.NFPROTO_IPV4, content, &i) == nil && i.Register == unix.NFT_REG_VERDICT {
			return &expr.Verdict{}
		}
	}
	return nil
}
