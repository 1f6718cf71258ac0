package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// link is the stream to one replica: the product's session, and what its client does around it.
type link struct {
	a       *agent
	c       *coord
	conn    *conn
	session *client.Session // nil before the hello
	pauses  client.Pauses
	began   time.Duration
	heardAt time.Duration
	// declaring: a declaration is under way. declared: the present stream has had its answer.
	// reporting: its report loop runs.
	declaring, declared, reporting bool
	// everything and poked are what the report loop wakes up for.
	everything, poked bool
	// told are the numbers of the drains that the stream has opened, as its lines say: a plain
	// record beside the session's, for the checks.
	told map[drain.UID]uint64
	// asks are told when the stream is lost.
	asks []func()
}

// open reports whether the replica can be asked.
func (l *link) open() bool { return l.conn != nil && l.session != nil }

// holder is who exclusions of the last stream belong to.
func (l *link) holder() string {
	if l.session == nil {
		return ""
	}
	return l.session.Hello.Holder.String()
}

func (l *link) connect() {
	w, a, c := l.a.w, l.a, l.c
	k := &conn{}
	l.conn, l.began, l.heardAt, l.session = k, w.at, w.at, nil
	l.declaring, l.declared, l.reporting, l.everything, l.poked = false, false, false, false, false
	l.told = map[drain.UID]uint64{}
	if !c.up {
		w.after(&a.proc, time.Millisecond, func() { l.lost(k) })
		return
	}
	boot := fmt.Sprint(a.life) // that in which the agent connects, whatever its life when the replica accepts
	w.send(&a.proc, &c.proc, k, 0, func() { c.connect(l, k, boot) })
	l.watchdog(k)
}

// watchdog ends a stream on which nothing comes.
func (l *link) watchdog(k *conn) {
	w := l.a.w
	w.after(&l.a.proc, l.heardAt+w.times.Away-w.at, func() {
		switch {
		case l.conn != k:
		case w.at-l.heardAt >= w.times.Away:
			l.a.log("%s is silent", l.c.name)
			l.lost(k)
		default:
			l.watchdog(k)
		}
	})
}

// closed is told when the other side died.
func (l *link) closed() {
	if l.conn != nil {
		l.lost(l.conn)
	}
}

func (l *link) lost(k *conn) {
	w, a, c := l.a.w, l.a, l.c
	if l.conn != k {
		return
	}
	l.conn, l.declared = nil, false
	if l.session != nil {
		l.session.End(a.now())
	}
	asks := l.asks
	l.asks = nil
	for _, fail := range asks {
		fail()
	}
	w.cut(&a.proc, &c.proc, k, 0, false, func() { c.endOf(k) })
	pause := l.pauses.Next(w.at-l.began, func(most time.Duration) time.Duration { return w.between(0, most-1) })
	w.after(&a.proc, pause, func() {
		if l.conn == nil && !a.left {
			l.connect()
		}
	})
}

// read carries out the lines of one write.
func (l *link) read(k *conn, lines []byte) {
	a := l.a
	if l.conn != k {
		return
	}
	l.heardAt = a.w.at
	news := false
	for line := range bytes.Lines(lines) {
		var m wire.Message
		if err := json.Unmarshal(line, &m); err != nil {
			panic(err)
		}
		l.note(m)
		if l.session == nil {
			l.session = l.hello(m)
			continue
		}
		synced, more, err := l.session.Message(a.now(), m)
		if err != nil {
			a.log("%s: %v", l.c.name, err)
			l.lost(k)
			return
		}
		if news = news || more; synced {
			l.declare(k)
		}
		if m.Declared > 0 {
			l.learned()
		}
	}
	if news {
		l.poke(false)
	}
}

// note keeps what a line opens and ends.
func (l *link) note(m wire.Message) {
	if m.Drains != nil {
		for i := range m.Drains.Pods {
			d, err := m.Drains.Open(i)
			if err != nil {
				panic(err)
			}
			l.told[d.Pod.UID] = d.Number
		}
	}
	if m.Releases != nil && m.Releases.Gate == drain.AtHold {
		for _, uid := range m.Releases.UIDs {
			delete(l.told, uid)
		}
	}
}

// learned takes in that the stream has brought what is open of what was declared.
func (l *link) learned() {
	if !l.declared && l.session.Learned() {
		l.declared = true
		l.a.learn()
	}
}

func (l *link) hello(m wire.Message) *client.Session {
	a := l.a
	var exclusions client.Exclusions = recorded{a.exclusions, a}
	var watches client.Watches = a.watches
	if a.kernel != nil {
		exclusions, watches = nil, a.observed
	}
	s, err := client.NewSession(m, fmt.Sprint(a.life), exclusions, watches)
	if err != nil {
		panic(err)
	}
	return s
}

// post brings one request to the replica and its answer back. It ends the stream if none comes in
// time.
func (l *link) post(k *conn, serve func() bool, answered func()) {
	w, a, c := l.a.w, l.a, l.c
	done := false
	twice := w.faulty() && w.chance(w.twice)
	if !c.up {
		w.after(&a.proc, time.Millisecond, func() { l.lost(k) })
		return
	}
	w.send(&a.proc, &c.proc, nil, 0, func() {
		ok := serve()
		if twice {
			serve()
		}
		w.send(&c.proc, &a.proc, nil, 0, func() {
			if done || l.conn != k {
				return
			}
			done = true
			if !ok {
				l.lost(k)
				return
			}
			answered()
		})
	})
	w.after(&a.proc, client.PostTimeout, func() {
		if !done {
			done = true
			l.lost(k)
		}
	})
}

// leave tells every replica to which a stream is open, once.
func (a *agent) leave() {
	a.log("leaves")
	a.left = true
	for _, l := range a.links {
		if !l.declaring {
			l.leave()
		}
	}
}

// leave comes after the declaration that is under way: which of the two a coordinator hears last
// decides.
func (l *link) leave() {
	if !l.open() {
		return
	}
	a, c, session, boot := l.a, l.c, l.session.Hello.Session, fmt.Sprint(l.a.life)
	a.w.measure("leaves that were sent to a replica")
	l.post(l.conn, func() bool { return c.leave(a, session, boot) }, func() {})
}

// declare is replica.declare. An agent that has left declares nothing: coordinators would wait for
// it again.
func (l *link) declare(k *conn) {
	if l.a.left {
		l.report(k)
		return
	}
	a, c, session := l.a, l.c, l.session.Hello.Session
	routes := make([]drain.Route, 0, len(a.services))
	for _, s := range a.services {
		routes = append(routes, drain.Route{Service: service(s), Via: drain.Endpoints, Kind: drain.Directed})
	}
	if a.kernel != nil {
		routes = []drain.Route{{Service: drain.EveryService, Via: drain.Endpoints, Kind: drain.Observed}}
	}
	declaration := a.declarations
	l.declaring = true
	var answer wire.Declared
	l.post(k, func() (ok bool) { answer, ok = c.declare(a, session, routes); return ok }, func() {
		l.declaring = false
		l.session.Declared(answer)
		l.learned()
		switch {
		case a.left:
			l.leave()
		case a.declarations != declaration:
			l.declare(k)
			return
		}
		l.report(k)
	})
}

// report is replica.report, once what is to be declared is.
func (l *link) report(k *conn) {
	if !l.reporting {
		l.reporting = true
		l.renewal(k)
	}
	l.everything = true
	l.reports(k)
}

func (a *agent) learn() {
	for _, l := range a.links {
		if !l.declared {
			return
		}
	}
	if !a.learned {
		a.learned = true
		a.log("has learned which drains are open")
		a.programmed(10 * time.Second)
	}
	a.program()
}

// programmed ends, after some time, that a has not learned. Its gateway must have answered for
// 10 s.
func (a *agent) programmed(after time.Duration) {
	a.w.after(&a.proc, after, func() {
		if left := a.deaf + 10*time.Second - a.w.at; left > 0 {
			a.programmed(left)
			return
		}
		a.unlearned = false
	})
}

func (l *link) renewal(k *conn) {
	w := l.a.w
	w.after(&l.a.proc, w.times.Renewal/2, func() {
		if l.conn == k {
			l.poke(true)
			l.renewal(k)
		}
	})
}

// poke says that there may be something to report.
func (l *link) poke(everything bool) {
	l.everything = l.everything || everything
	if l.poked || l.conn == nil || !l.reporting {
		return
	}
	k := l.conn
	l.poked = true
	l.a.w.after(&l.a.proc, 0, func() {
		if l.conn == k {
			l.poked = false
			l.reports(k)
		}
	})
}

// reports writes what has changed, or everything, into the stream.
func (l *link) reports(k *conn) {
	w, a, c := l.a.w, l.a, l.c
	if a.deaf > w.at || l.declaring {
		return
	}
	batch := l.session.Reports(a.now(), l.everything)
	l.everything = false
	if batch.UpTo == nil && len(batch.Reports) == 0 {
		return
	}
	line, readAt := wire.Append(nil, batch), a.readAt
	if a.kernel != nil {
		readAt = w.at
	}
	meant := l.meant()
	w.send(&a.proc, &c.proc, k, 0, func() { c.listen(a, k, line, meant, readAt) })
	a.dies("after a report")
}

// meant is what the agent may report of each drain, whatever it says of all: the state of the
// exclusions that this replica has asked for, by the number that the stream has named.
func (l *link) meant() []drain.Report {
	if l.a.kernel != nil {
		return nil
	}
	var all []drain.Report
	for _, r := range l.a.exclusions.Reports(l.a.now()) {
		number, told := l.told[r.UID]
		if told && slices.Contains(l.a.set.Held(l.holder()), r.UID) {
			r.Number = number
			all = append(all, r)
		}
	}
	return all
}
