package serve

import (
	"container/list"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// crowd bounds how many connections there are. The one that has been without a request for longest makes room, so that somebody who opens
// many and says nothing keeps nobody out who has something to ask.
type crowd struct {
	most int

	mu sync.Mutex
	// waiting holds the connections without a request, the longest at the front. all says where in it each is; nil: it has a request.
	waiting *list.List
	all     map[net.Conn]*list.Element
}

func newCrowd(most int) *crowd {
	return &crowd{most: most, waiting: list.New(), all: map[net.Conn]*list.Element{}}
}

// enter takes in a new connection, and returns the one that has to be closed for it: nil, another, or this one.
func (c *crowd) enter(conn net.Conn) (out net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.all) >= c.most {
		oldest := c.waiting.Front()
		if oldest == nil {
			return conn
		}
		out = oldest.Value.(net.Conn)
		c.forget(out)
	}
	c.all[conn] = c.waiting.PushBack(conn)
	return out
}

// leave forgets a connection. A repeat changes nothing.
func (c *crowd) leave(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forget(conn)
}

func (c *crowd) forget(conn net.Conn) {
	if e := c.all[conn]; e != nil {
		c.waiting.Remove(e)
	}
	delete(c.all, conn)
}

// turn is a server's ConnState.
func (c *crowd) turn(conn net.Conn, state http.ConnState) {
	if secure, ok := conn.(*tls.Conn); ok {
		conn = secure.NetConn()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	e, known := c.all[conn]
	switch {
	case !known:
	case state == http.StateActive && e != nil:
		c.waiting.Remove(e)
		c.all[conn] = nil
	case state == http.StateIdle && e == nil:
		c.all[conn] = c.waiting.PushBack(conn)
	}
}

// crowdListener lets its connections into a crowd.
type crowdListener struct {
	net.Listener
	crowd *crowd
	log   *slog.Logger
	said  rate.Sometimes
}

// crowdedEvery is how often a line is logged that connections are too many.
const crowdedEvery = 10 * time.Second

// Accept implements net.Listener.
func (l *crowdListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		member := &crowdConn{conn, l.crowd}
		out := l.crowd.enter(member)
		if out == nil {
			return member, nil
		}
		l.said.Do(func() {
			l.log.Warn("too many connections: closed the one without a request for longest", "most", l.crowd.most, "closed", out.RemoteAddr().String())
		})
		out.Close()
		if out != member {
			return member, nil
		}
	}
}

// crowdConn leaves the crowd when it is closed.
type crowdConn struct {
	net.Conn
	crowd *crowd
}

// Close implements net.Conn.
func (c *crowdConn) Close() error {
	c.crowd.leave(c)
	return c.Conn.Close()
}
