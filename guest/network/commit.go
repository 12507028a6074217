package network

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// transaction collects changes with google/nftables and sends them itself.
// Conn.Flush would ask for an answer to each message, of which a socket holds
// some two hundred, and it cannot say for which generation of the ruleset the
// batch was made.
type transaction struct {
	*nftables.Conn
	// generation other than 0 makes the kernel refuse the batch (ERESTART) when
	// anybody has committed since that one was read.
	generation uint32
	err        error
}

func newTransaction() (*transaction, error) {
	t := &transaction{}
	var err error
	t.Conn, err = nftables.New(nftables.WithTestDial(func(batch []netlink.Message) ([]netlink.Message, error) {
		if len(batch) > 0 { // else Flush looks for answers
			t.err = send(batch, t.generation)
		}
		return nil, nil
	}))
	return t, err
}

// commit sends what was collected: either all of it is in the kernel
// afterwards or nothing.
func (t *transaction) commit() error { return errors.Join(t.Flush(), t.err) }

// attributeGeneration is NFNL_BATCH_GENID, linux/netfilter/nfnetlink.h.
const attributeGeneration = 1

// send sends a batch, of which the first and the last message are its frame.
// Only the last change asks for an answer; of others the kernel tells errors.
func send(batch []netlink.Message, generation uint32) error {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if generation != 0 {
		b, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: attributeGeneration, Data: binary.BigEndian.AppendUint32(nil, generation)}})
		if err != nil {
			return err
		}
		batch[0].Data = append(batch[0].Data, b...)
	}
	size := 0
	for i := range batch {
		h := &batch[i].Header
		h.Length, h.Sequence, h.PID = 0, 0, 0 // of this connection now
		h.Flags &^= netlink.Acknowledge | netlink.Echo
		if i == len(batch)-2 {
			h.Flags |= netlink.Acknowledge
		}
		size += unix.NLMSG_HDRLEN + len(batch[i].Data) + unix.NLMSG_ALIGNTO
	}
	// The batch is one datagram: it has to fit into the buffer. Should errors
	// not fit, the first ones do.
	if err := errors.Join(conn.SetWriteBuffer(max(size, minWriteBuffer)), conn.SetOption(netlink.NoENOBUFS, true)); err != nil {
		return fmt.Errorf("prepare the socket: %w", err)
	}
	if _, err := conn.SendMessages(batch); err != nil {
		return err
	}
	_, err = conn.Receive()
	return err
}

// minWriteBuffer is about what the kernel gives each socket.
const minWriteBuffer = 200 << 10

// generation reads the number of the ruleset's last commit.
func generation(conn *netlink.Conn) (uint32, error) {
	msgs, err := conn.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: netlink.Request},
		Data:   make([]byte, 4), // nfgenmsg
	})
	if err != nil {
		return 0, err
	}
	for _, m := range msgs {
		if len(m.Data) < 4 {
			continue
		}
		ad, err := netlink.NewAttributeDecoder(m.Data[4:])
		if err != nil {
			return 0, err
		}
		ad.ByteOrder = binary.BigEndian
		for ad.Next() {
			if ad.Type() == unix.NFTA_GEN_ID {
				return ad.Uint32(), nil
			}
		}
	}
	return 0, errors.New("the kernel tells no generation")
}
