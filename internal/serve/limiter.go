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

// connLimiter bounds the connections. For one more, the source address with the most that are not
// kept ([KeepConn]) loses the one without a new request for longest. So strangers who open many
// keep others out neither by silence, nor by slow requests, nor by answers that they do not read.
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

// admit takes in a new connection, and returns the one that has to be closed for it: nil, another,
// or this one.
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

// push, called with the lock, puts a connection at the end of its source's, unless it has left.
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

// pull, called with the lock, takes a connection from those of its source. A repeat changes
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

// forget, called with the lock, forgets a connection. A repeat changes nothing.
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

// limitedEvery is how often a line is logged that connections are too many.
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

// limitedConn leaves the limiter when it is closed.
type limitedConn struct {
	net.Conn
	crowd  *connLimiter
	source netip.Addr
	// in: the limiter counts it. at is where it waits; nil: its handler keeps it.
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

// turn is called when a request begins, and with kept when its handler vouches for it; the end of
// that is a turn again.
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

// KeepConn protects connections: while next handles a request, its connection is not closed to make
// room for another. Use it behind the handler that authenticates the caller.
func KeepConn(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if conn, ok := r.Context().Value(connKey{}).(*limitedConn); ok {
			conn.turn(true)
			defer conn.turn(false)
		}
		next.ServeHTTP(w, r)
	})
}
