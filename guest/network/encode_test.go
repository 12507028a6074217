package network

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/google/nftables/expr"

	"klimax/shared/api"
	"klimax/shared/config"
)

func TestEncodeDecode(t *testing.T) {
	plan, err := config.Default().Plan()
	if err != nil {
		t.Fatal(err)
	}
	f := world()
	f.Engine.Network.GatewayMode, f.Firewall.RawDrop, f.Firewall.ForwardDrop = "", true, true
	rules := Desired(config.Default(), plan, f).All()
	rules = append(rules,
		Rule{ID: api.RuleDirectMark, Chain: OwnGuard, Match: Match{In: "lima0", SrcSet: "allow"}, Verdict: Mark},
		Rule{ID: api.RuleGuard, Chain: OwnGuard, Match: Match{Src: netip.MustParsePrefix("10.1.2.3/32"), Dst: netip.MustParsePrefix("0.0.0.0/1")}, Verdict: Drop})
	for _, r := range rules {
		d := decode(encode(r))
		if !d.exact || d.match != r.Match || d.verdict != r.Verdict {
			t.Errorf("%v\ncomes back as %+v", r, d)
		}
		id, ours := decodeComment(encodeComment(r.ID), nil)
		if !ours || id != r.ID {
			t.Errorf("comment of %v: %q %v", r, id, ours)
		}
	}
}

// TestDecodeForeign: what is not understood is never taken for ours.
func TestDecodeForeign(t *testing.T) {
	accept := &expr.Verdict{Kind: expr.VerdictAccept}
	in := []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: ifnameData("lima0")}}
	for name, exprs := range map[string][]expr.Any{
		"not equal":       {in[0], &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: ifnameData("lima0")}, accept},
		"name prefix":     {in[0], &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte("lima")}, accept},
		"udp":             {&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{17}}, accept},
		"other match":     {&expr.Match{Name: "mark"}, accept},
		"jump":            {&expr.Verdict{Kind: expr.VerdictJump, Chain: "DOCKER"}},
		"return":          {&expr.Verdict{Kind: expr.VerdictReturn}},
		"odd mask":        {&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offsetSrc, Len: 4}, &expr.Bitwise{Mask: []byte{255, 0, 255, 0}, Xor: make([]byte, 4)}, &expr.Cmp{Op: expr.CmpOpEq, Data: []byte{10, 0, 1, 0}}, accept},
		"inverted lookup": {&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offsetSrc, Len: 4}, &expr.Lookup{SetName: "allow", Invert: true}, accept},
		"masquerade":      {&expr.Masq{}},
		"limit":           {&expr.Limit{}, accept},
	} {
		if d := decode(exprs); d.exact {
			t.Errorf("%s is taken for %+v", name, d)
		}
	}
	if d := decode([]expr.Any{&expr.Counter{}, accept}); d.matches || !d.final || !d.exact {
		t.Errorf("a bare accept: %+v", d)
	}
	if _, ours := decodeComment(nil, nil); ours {
		t.Error("a rule without a comment is ours")
	}
}

// TestIPTablesForm: iptables loads only as many bytes as a prefix needs.
func TestIPTablesForm(t *testing.T) {
	for _, c := range []struct {
		data []byte
		mask []byte
		want string
	}{
		{[]byte{10}, nil, "10.0.0.0/8"},
		{[]byte{172, 30}, nil, "172.30.0.0/16"},
		{[]byte{192, 168, 64}, nil, "192.168.64.0/24"},
		{[]byte{192, 168, 64, 7}, nil, "192.168.64.7/32"},
		{[]byte{10, 66, 16, 0}, []byte{255, 255, 240, 0}, "10.66.16.0/20"},
	} {
		p, ok := prefixOf(c.data, c.mask, uint32(len(c.data)))
		if !ok || p.String() != c.want {
			t.Errorf("%v: %v %v", c, p, ok)
		}
	}
}

func TestScanLegacy(t *testing.T) {
	entry := func(target string, data []byte) []byte {
		e := make([]byte, entryLen+targetData+32)
		e[entryTargetOffset] = entryLen
		e[entryNextOffset] = byte(len(e))
		copy(e[entryLen+targetName:], target)
		copy(e[entryLen+targetData:], data)
		return e
	}
	policy := func(v byte) []byte { return entry("", []byte{v, 0xff, 0xff, 0xff}) }
	info := make([]byte, infoLen)
	table := bytes.Join([][]byte{policy(0xff), entry("ERROR", []byte("DOCKER\x00"))}, nil) // at 0: -1, DROP
	if docker, drop := scanLegacy(info, table); !docker || !drop {
		t.Errorf("%v %v", docker, drop)
	}
	table = bytes.Join([][]byte{policy(0xfe), entry("ERROR", []byte("DOCKERS\x00"))}, nil) // -2, ACCEPT
	if docker, drop := scanLegacy(info, table); docker || drop {
		t.Errorf("%v %v", docker, drop)
	}
	for n := range table { // cut anywhere, it must not go out of bounds
		scanLegacy(info, table[:n])
	}
}
