// Package pipenet is a network of pipes for tests inside a bubble of testing/synctest, where fake
// time does not pass while a goroutine waits for a real connection.
package pipenet

import (
	"context"
	"fmt"
	"net"
	"sync"
)

// Listener is a listener whose connections are pipes.
type Listener struct {
	accept chan net.Conn
	closed chan struct{}
	once   sync.Once
}

// NewListener returns a listener.
func NewListener() *Listener {
	return &Listener{accept: make(chan net.Conn), closed: make(chan struct{})}
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accept:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *Listener) Close() error { l.once.Do(func() { close(l.closed) }); return nil }

// Closed returns a channel that is closed with the listener.
func (l *Listener) Closed() <-chan struct{} { return l.closed }

// Addr implements net.Listener.
func (l *Listener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }

// Dial connects to the listener, whatever the address.
func (l *Listener) Dial(ctx context.Context, _, address string) (net.Conn, error) {
	near, far := net.Pipe()
	select {
	case l.accept <- far:
		return near, nil
	case <-l.closed:
		return nil, refused(address)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func refused(address string) error { return fmt.Errorf("dial %s: connection refused", address) }

// Network joins clients and the listeners of hosts, and can fail. Its zero value has no hosts.
type Network struct {
	mu        sync.Mutex
	listeners map[string]*Listener
	conns     map[string][]*conn
}

// Add makes l the listener of a host, in the place of an earlier one.
func (n *Network) Add(host string, l *Listener) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listeners == nil {
		n.listeners, n.conns = map[string]*Listener{}, map[string][]*conn{}
	}
	n.listeners[host] = l
}

// Dial connects to the host of an address. Its connections can be cut and swallowed.
func (n *Network) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	l := n.listeners[host]
	n.mu.Unlock()
	if l == nil {
		return nil, refused(address)
	}
	near, err := l.Dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: near}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.conns[host] = append(n.conns[host], c)
	return c, nil
}

// Conns returns how many connections to a host were made since it was last cut.
func (n *Network) Conns(host string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.conns[host])
}

// Cut breaks every connection to a host.
func (n *Network) Cut(host string) {
	n.mu.Lock()
	conns := n.conns[host]
	n.conns[host] = nil
	n.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
}

// Swallow makes a black hole of every present connection to a host: nothing arrives at the client,
// and nothing fails.
func (n *Network) Swallow(host string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.conns[host] {
		c.mu.Lock()
		c.hole = true
		c.mu.Unlock()
	}
}

// conn is the client's end of a connection.
type conn struct {
	net.Conn
	mu   sync.Mutex
	hole bool
}

// Read implements net.Conn.
func (c *conn) Read(into []byte) (int, error) {
	for {
		n, err := c.Conn.Read(into)
		c.mu.Lock()
		hole := c.hole
		c.mu.Unlock()
		if err != nil || !hole {
			return n, err
		}
	}
}
