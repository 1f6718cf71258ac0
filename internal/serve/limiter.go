package serve

import (
	"container/list"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// connLimiter bounds the connections of a server. When there are too many, it closes one of the
// source address that has the most, not counting connections that are kept ([KeepConn]): the one
// without a new request for longest. So a client cannot keep others out with many connections that
// are silent, send slowly or do not read their answers.
type connLimiter struct {
	max int

	mu  sync.Mutex
	all int
	// waiting holds the connections of each source that may be closed, the longest without a new
	// request at the front.
	waiting map[netip.Addr]*list.List
}

func newConnLimiter(most int) *connLimiter {
	return &connLimiter{max: most, waiting: map[netip.Addr]*list.List{}}
}

// admit adds a new connection, and returns the connection that the caller must close for it: none
// (nil), another one, or conn itself.
func (c *connLimiter) admit(conn *limitedConn) (out *limitedConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all >= c.max {
		source, most := conn.source, 0
		if own := c.waiting[source]; own != nil {
			most = own.Len() + 1
		}
		for of, conns := range c.waiting {
			if conns.Len() > most {
				source, most = of, conns.Len()
			}
		}
		if most == 0 {
			return conn
		}
		out = c.waiting[source].Front().Value.(*limitedConn)
		c.forget(out)
	}
	conn.in = true
	c.all++
	c.push(conn)
	return out
}

// push, called with the lock, puts a connection at the end of its source's list, unless it was
// closed.
func (c *connLimiter) push(conn *limitedConn) {
	if !conn.in {
		return
	}
	conns := c.waiting[conn.source]
	if conns == nil {
		conns = list.New()
		c.waiting[conn.source] = conns
	}
	conn.at = conns.PushBack(conn)
}

// pull, called with the lock, takes a connection out of its source's list. A second call changes
// nothing.
func (c *connLimiter) pull(conn *limitedConn) {
	if conn.at == nil {
		return
	}
	conns := c.waiting[conn.source]
	conns.Remove(conn.at)
	conn.at = nil
	if conns.Len() == 0 {
		delete(c.waiting, conn.source)
	}
}

// forget, called with the lock, removes a connection from the limiter. A second call changes
// nothing.
func (c *connLimiter) forget(conn *limitedConn) {
	if conn.in {
		conn.in = false
		c.all--
		c.pull(conn)
	}
}

type limitedListener struct {
	net.Listener
	crowd *connLimiter
	log   *slog.Logger
	said  rate.Sometimes
}

// limitedEvery is the shortest interval between two log lines about too many connections.
const limitedEvery = 10 * time.Second

// Accept implements net.Listener.
func (l *limitedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		member := &limitedConn{Conn: conn, crowd: l.crowd}
		if from, err := netip.ParseAddrPort(conn.RemoteAddr().String()); err == nil {
			member.source = from.Addr().Unmap()
		}
		out := l.crowd.admit(member)
		if out == nil {
			return member, nil
		}
		l.said.Do(func() {
			l.log.Warn("too many connections: closed one of the source with the most", "most", l.crowd.max,
				"closed", out.RemoteAddr().String())
		})
		_ = out.Close()
		if out != member {
			return member, nil
		}
	}
}

// limitedConn is a connection that the limiter counts until it is closed.
type limitedConn struct {
	net.Conn
	crowd  *connLimiter
	source netip.Addr
	// in: the limiter counts it. at is its place in its source's list. While in is true, a nil at
	// means that its handler keeps it.
	in bool
	at *list.Element
}

// Close implements net.Conn.
func (c *limitedConn) Close() error {
	c.crowd.mu.Lock()
	c.crowd.forget(c)
	c.crowd.mu.Unlock()
	return c.Conn.Close()
}

// turn records a new request, which moves the connection to the end of its source's list. With
// kept, it takes the connection out of the list until the next turn.
func (c *limitedConn) turn(kept bool) {
	c.crowd.mu.Lock()
	defer c.crowd.mu.Unlock()
	if c.crowd.pull(c); !kept {
		c.crowd.push(c)
	}
}

// connKey is the key of the connection in a request's context.
type connKey struct{}

func connContext(ctx context.Context, conn net.Conn) context.Context {
	if secure, ok := conn.(*tls.Conn); ok {
		conn = secure.NetConn()
	}
	return context.WithValue(ctx, connKey{}, conn)
}

// KeepConn returns a handler that protects connections: while next handles a request, the limiter
// does not close its connection. Use it behind the handler that authenticates the caller.
func KeepConn(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if conn, ok := r.Context().Value(connKey{}).(*limitedConn); ok {
			conn.turn(true)
			defer conn.turn(false)
		}
		next.ServeHTTP(w, r)
	})
}
