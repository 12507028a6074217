//go:build linux

package probe

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"net"
	"sync"
	"time"
)

// idle is how long the server keeps a connection on which nothing comes.
const idle = 5 * time.Minute

// Seen is one connection that a server accepted.
type Seen struct {
	At   time.Time
	Peer string
}

// Server answers each connection with the address it sees it come from.
type Server struct {
	ln net.Listener
	wg sync.WaitGroup

	mu     sync.Mutex
	peers  map[string]int
	log    []Seen
	conns  map[net.Conn]bool
	closed bool
	record bool
}

// Serve answers on the listener in one line (address, newline), then sends back whatever comes. With record
// it remembers each connection.
func Serve(ln net.Listener, record bool) *Server {
	return serve(ln, record, func(c net.Conn, peer string) {
		if _, err := fmt.Fprintf(c, "%s\n", peer); err != nil {
			return
		}
		b := make([]byte, 64)
		for {
			c.SetReadDeadline(time.Now().Add(idle))
			n, err := c.Read(b)
			if err != nil {
				return
			}
			if _, err := c.Write(b[:n]); err != nil {
				return
			}
		}
	})
}

// ServeHTTP answers any HTTP/1 request on the listener with the peer's address and a newline. Written out by
// hand: net/http would make the binary, and so each test's image, three times as large.
func ServeHTTP(ln net.Listener) *Server {
	return serve(ln, false, func(c net.Conn, peer string) {
		c.SetDeadline(time.Now().Add(10 * time.Second))
		var head []byte
		b := make([]byte, 4096)
		for !bytes.Contains(head, []byte("\r\n\r\n")) {
			n, err := c.Read(b)
			if err != nil || len(head) > 1<<16 {
				return
			}
			head = append(head, b[:n]...)
		}
		body := peer + "\n"
		if bytes.HasPrefix(head, []byte("HEAD ")) {
			body = ""
		}
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(peer)+1, body)
	})
}

// ServeSink reads and throws away what comes, for throughput, and says at the end how much it was: a caller
// that closes its writing side gets the number of bytes as a line.
func ServeSink(ln net.Listener) *Server {
	return serve(ln, false, func(c net.Conn, _ string) {
		c.SetDeadline(time.Now().Add(idle))
		n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, make([]byte, 1<<18))
		if err == nil {
			fmt.Fprintf(c, "%d\n", n)
		}
	})
}

func serve(ln net.Listener, record bool, handle func(net.Conn, string)) *Server {
	s := &Server{ln: ln, peers: map[string]int{}, conns: map[net.Conn]bool{}, record: record}
	s.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				if s.isClosed() {
					return
				}
				time.Sleep(5 * time.Millisecond) // out of file descriptors, or the peer has gone already
				continue
			}
			peer, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			if !s.add(c, peer) {
				c.Close()
				return
			}
			s.wg.Go(func() {
				defer s.drop(c)
				handle(c, peer)
			})
		}
	})
	return s
}

func (s *Server) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closed
}

func (s *Server) add(c net.Conn, peer string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.conns[c] = true
	if s.record {
		s.peers[peer]++
		s.log = append(s.log, Seen{time.Now(), peer})
	}
	return true
}

func (s *Server) drop(c net.Conn) {
	c.Close()
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
}

// Addr is the address listened on.
func (s *Server) Addr() string { return s.ln.Addr().String() }

// Peers counts the connections accepted so far by the address they came from.
func (s *Server) Peers() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.peers)
}

// Seen lists the connections accepted so far, first to last.
func (s *Server) Seen() []Seen {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Seen(nil), s.log...)
}

// Close stops listening and closes what is open.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	err := s.ln.Close()
	s.wg.Wait()
	return err
}
