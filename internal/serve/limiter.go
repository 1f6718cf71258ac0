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

// connLimiter bounds the connections of a server, not counting those that are kept ([KeepConn]).
// When there are too many, it closes one of the source address that has the most: the one without a
// new request for longest. So a client cannot keep others out with many connections that are
// silent, send slowly or do not read their answers.
type connLimiter struct {
	max int

	mu sync.Mutex
	// all is how many connections are in waiting: those of each source that may be closed, the next
	// to be closed at the front.
	all     int
	waiting map[netip.Addr]*list.List
}

func newConnLimiter(most int) *connLimiter {
	return &connLimiter{max: most, waiting: map[netip.Addr]*list.List{}}
}

// add puts a connection at the end of its source's list, unless it was closed. If there are too
// many then, it removes another one and returns it: the caller must close it.
func (c *connLimiter) add(conn *limitedConn) (out *limitedConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.remove(conn); conn.closed {
		return nil
	}
	conns := c.waiting[conn.source]
	if conns == nil {
		conns = list.New()
		c.waiting[conn.source] = conns
	}
	conn.at = conns.PushBack(conn)
	if c.all++; c.all <= c.max {
		return nil
	}
	source, most := conn.source, conns.Len()
	if most == 1 {
		most = 0 // the only one of its source makes no room for itself
	}
	for of, conns := range c.waiting {
		if of != conn.source && conns.Len() > most {
			source, most = of, conns.Len()
		}
	}
	out = c.waiting[source].Front().Value.(*limitedConn)
	c.remove(out)
	return out
}

// remove, called with the lock, takes a connection out of its source's list. A second call changes
// nothing.
func (c *connLimiter) remove(conn *limitedConn) {
	if conn.at == nil {
		return
	}
	c.all--
	conns := c.waiting[conn.source]
	conns.Remove(conn.at)
	conn.at = nil
	if conns.Len() == 0 {
		delete(c.waiting, conn.source)
	}
}

type limitedListener struct {
	net.Listener
	limiter *connLimiter
	log     *slog.Logger
	said    rate.Sometimes
}

// limitedEvery is the shortest interval between two log lines about too many connections.
const limitedEvery = 10 * time.Second

// Accept implements net.Listener.
func (l *limitedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	limited := &limitedConn{Conn: conn, listener: l}
	if from, err := netip.ParseAddrPort(conn.RemoteAddr().String()); err == nil {
		limited.source = from.Addr().Unmap()
	}
	l.wait(limited)
	return limited, nil
}

// wait makes conn, which is new or has a new request, or whose kept request is answered, the last
// of its source that may be closed. It closes another one if there are too many.
func (l *limitedListener) wait(conn *limitedConn) {
	out := l.limiter.add(conn)
	if out == nil {
		return
	}
	l.said.Do(func() {
		l.log.Warn("too many connections: closed one of the source with the most", "most", l.limiter.max,
			"closed", out.RemoteAddr().String())
	})
	_ = out.Close()
}

// limitedConn is a connection of a limitedListener.
type limitedConn struct {
	net.Conn
	listener *limitedListener
	source   netip.Addr
	// at is the place in its source's list, nil while it is kept and once it is closed.
	at           *list.Element
	kept, closed bool
}

// Close implements net.Conn.
func (c *limitedConn) Close() error {
	limiter := c.listener.limiter
	limiter.mu.Lock()
	c.closed = true
	limiter.remove(c)
	limiter.mu.Unlock()
	return c.Conn.Close()
}

// connKey is the key of the connection in a request's context.
type connKey struct{}

func connContext(ctx context.Context, conn net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, limited(conn))
}

// limited returns the connection below TLS.
func limited(conn net.Conn) net.Conn {
	if secure, ok := conn.(*tls.Conn); ok {
		return secure.NetConn()
	}
	return conn
}

// connState ends the protection of [KeepConn]: an idle connection has sent its answer. When the
// handler returns, net/http has not sent all of it yet.
func connState(conn net.Conn, state http.ConnState) {
	c, ok := limited(conn).(*limitedConn)
	if !ok || state != http.StateIdle {
		return
	}
	limiter := c.listener.limiter
	limiter.mu.Lock()
	kept := c.kept
	c.kept = false
	limiter.mu.Unlock()
	if kept {
		c.listener.wait(c)
	}
}

// Source returns the address from which the request with a context came, invalid if a [Server] with
// a limiter does not serve it.
func Source(ctx context.Context) netip.Addr {
	if conn, ok := ctx.Value(connKey{}).(*limitedConn); ok {
		return conn.source
	}
	return netip.Addr{}
}

// KeepConn returns a handler that protects connections: from when next handles a request until that
// is answered, the limiter neither counts nor closes its connection. Use it behind the handler that
// authenticates the caller.
func KeepConn(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if conn, ok := r.Context().Value(connKey{}).(*limitedConn); ok {
			limiter := conn.listener.limiter
			limiter.mu.Lock()
			conn.kept = true
			limiter.remove(conn)
			limiter.mu.Unlock()
		}
		next.ServeHTTP(w, r)
	})
}
