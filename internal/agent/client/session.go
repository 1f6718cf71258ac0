package client

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// Session is the state of one open stream: what the coordinator has asked on it, and what was
// reported. It does no I/O, reads no clock and never blocks. The goroutines of a [Client] drive it,
// as does the simulation. Its methods may be called from any goroutine.
type Session struct {
	// Hello is the first message of the stream.
	Hello wire.Hello

	boot       string
	exclusions Exclusions
	watches    Watches // nil: the agent observes nothing

	mu sync.Mutex
	// listed are the pods that each gate's part of the list has named so far. Nil once it is
	// complete. syncedAt is the time of the first message of type synced.
	listed   *[2]map[drain.UID]bool
	syncedAt time.Time
	// asked are the drains and barriers that the stream has opened.
	asked [2]map[drain.UID]asked
	// revision is the revision of the last drains, at the time of the last message.
	revision uint64
	at       int64
	// answered is how many declarations the stream has answered, awaited how many it must answer.
	answered, awaited int
	// upTo is the last report about all drains, nil if there was none, and said the later reports
	// about single pods, at each gate.
	upTo *drain.UpTo
	said [2]map[drain.UID]drain.Report
}

// declaredWithin is how long after its first list a stream has answered the agent's declaration.
const declaredWithin = 10 * time.Second

// asked is a drain that the agent is to report on: its number, see [drain.Open], and the last
// revision with which the stream named it.
type asked struct{ number, revision uint64 }

// NewSession begins a session with the first message of a stream. It fails if that is not a hello
// that this agent supports. e is nil for an agent that directs nothing, w for one that observes
// nothing.
func NewSession(first wire.Message, boot string, e Exclusions, w Watches) (*Session, error) {
	if e == nil {
		e = nothing{}
	}
	if first.Type != wire.TypeHello || first.Hello == nil || first.Hello.Protocol != wire.Protocol {
		return nil, fmt.Errorf("first message is not a hello of protocol %d: %+v", wire.Protocol, first)
	}
	hello := *first.Hello
	if hello.AwayMillis <= 0 || hello.ExpiryMillis <= 0 || hello.RenewalMillis <= 0 {
		return nil, fmt.Errorf("hello names no times: %+v", hello)
	}
	return &Session{Hello: hello, boot: boot, exclusions: e, watches: w,
		listed: &[2]map[drain.UID]bool{{}, {}}, asked: [2]map[drain.UID]asked{{}, {}},
		said: [2]map[drain.UID]drain.Report{{}, {}}}, nil
}

func (s *Session) holder() string { return s.Hello.Holder.String() }

func (s *Session) expires(now time.Time) time.Time {
	return now.Add(time.Duration(s.Hello.ExpiryMillis) * time.Millisecond)
}

// Message carries out the next message of the stream. synced reports whether it completed the first
// list of open drains: the agent then declares its routes. news reports whether reports may have
// changed. An error ends the stream.
func (s *Session) Message(now time.Time, m wire.Message) (synced, news bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.exclusions.Renew(now, s.holder(), s.expires(now))
	// Not before the expiries are renewed: later reports hold as long as these do.
	s.at = m.At
	if s.listed != nil && !s.syncedAt.IsZero() && now.Sub(s.syncedAt) >= declaredWithin {
		s.complete(now)
	}
	switch {
	case m.Type == wire.TypeDrains && m.Drains != nil:
		for i := range m.Drains.Pods {
			d, err := m.Drains.Open(i)
			if err != nil {
				return false, false, err
			}
			s.exclusions.Exclude(now, d.Pod, s.holder(), d.Since, s.expires(now))
			s.ask(drain.AtHold, d.Pod.UID, asked{d.Number, m.Drains.Revision})
		}
		s.revision = m.Drains.Revision
		return false, true, nil // a pod may be excluded already, for another replica
	case m.Type == wire.TypeWatch && m.Watch != nil && s.watches != nil:
		s.watches.Watch(now, *m.Watch, s.holder())
		s.ask(drain.AtBarrier, m.Watch.Pod.UID, asked{number: m.Watch.Number})
		return false, true, nil
	case m.Type == wire.TypeReleases && m.Releases != nil:
		for _, uid := range m.Releases.UIDs {
			s.release(now, uid, *m.Releases)
		}
	case m.Type == wire.TypeSynced:
		s.answered = max(s.answered, m.Declared)
		// What an agent has not declared may not be listed, and is still open.
		if s.listed != nil && m.Declared > 0 {
			s.complete(now)
		}
		synced = s.syncedAt.IsZero()
		if synced {
			s.syncedAt = now
		}
		return synced, false, nil
	case m.Type == wire.TypeRefused && m.Refused != nil:
		return false, false, fmt.Errorf("coordinator refuses: %s", m.Refused.Error)
	}
	return false, false, nil
}

// ask records a drain or barrier on which the agent is to report.
func (s *Session) ask(gate drain.Gate, uid drain.UID, a asked) {
	s.asked[gate][uid] = a
	if s.listed != nil {
		s.listed[gate][uid] = true
	}
}

func (s *Session) release(now time.Time, uid drain.UID, r wire.Releases) {
	if r.Gate >= drain.Gate(len(s.asked)) {
		return
	}
	delete(s.asked[r.Gate], uid)
	delete(s.said[r.Gate], uid)
	switch {
	case r.Gate != drain.AtBarrier:
		s.exclusions.Readmit(now, uid, s.holder(), r.Terminating)
	case s.watches != nil:
		s.watches.Unwatch(now, uid, s.holder(), r.Terminating)
	}
}

// complete ends what this holder asked for earlier and does not ask for any more.
func (s *Session) complete(now time.Time) {
	for _, uid := range s.exclusions.Held(s.holder()) {
		if !s.listed[drain.AtHold][uid] {
			s.exclusions.Readmit(now, uid, s.holder(), false)
		}
	}
	if s.watches != nil {
		for _, uid := range s.watches.Watched(s.holder()) {
			if !s.listed[drain.AtBarrier][uid] {
				s.watches.Unwatch(now, uid, s.holder(), false)
			}
		}
	}
	s.listed = nil
}

// End ends the observations for this replica. It cannot receive reports any more, and its next
// stream brings what is still open. An observation that does not end would outlive its pod, and the
// next pod at that address would be taken for one that is being deleted. Exclusions stay until
// their expiry.
func (s *Session) End(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.watches == nil {
		return
	}
	for _, uid := range s.watches.Watched(s.holder()) {
		s.watches.Unwatch(now, uid, s.holder(), false)
	}
}

// Declared records the answer to a declaration.
func (s *Session) Declared(answer wire.Declared) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.awaited = answer.Declared
}

// Learned reports whether the stream has brought all open drains of what was declared, so that all
// are excluded.
func (s *Session) Learned() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.awaited > 0 && s.answered >= s.awaited
}

// Reports returns the reports to send now: the changes since the last call, or everything.
func (s *Session) Reports(now time.Time, everything bool) wire.Reports {
	s.mu.Lock()
	defer s.mu.Unlock()
	batch := wire.Reports{Session: s.Hello.Session, At: s.at, Boot: s.boot}
	s.reportDrains(now, everything, &batch)
	if s.watches == nil {
		return batch
	}
	said := map[drain.UID]drain.Report{}
	for _, r := range s.watches.Reports(now) {
		asked, is := s.asked[drain.AtBarrier][r.UID]
		if !is {
			continue
		}
		r.Number, r.Gate, r.Generation = asked.number, drain.AtBarrier, shortened(r.Generation)
		said[r.UID] = r
		if everything || s.said[drain.AtBarrier][r.UID] != r {
			batch.Reports = append(batch.Reports, r)
		}
	}
	s.said[drain.AtBarrier] = said
	return batch
}

// reportDrains adds the reports on drains to batch. It reports the most frequent state for all
// drains and the others one by one, or only the changes if these are fewer.
func (s *Session) reportDrains(now time.Time, everything bool, batch *wire.Reports) {
	n := len(s.asked[drain.AtHold])
	held := make(map[drain.UID]bool, n)
	for _, uid := range s.exclusions.Held(s.holder()) {
		held[uid] = true
	}
	is := make(map[drain.UID]drain.Report, n)
	for _, r := range s.exclusions.Reports(now) {
		if asked, ok := s.asked[drain.AtHold][r.UID]; ok && held[r.UID] {
			r.Number, r.Generation = asked.number, shortened(r.Generation)
			is[r.UID] = r
		}
	}
	if n == 0 {
		return
	}
	count := map[drain.UpTo]int{}
	var most drain.UpTo
	var changes, but []drain.Report
	all := make([]drain.Report, 0, n)
	uids := slices.AppendSeq(make([]drain.UID, 0, n), maps.Keys(s.asked[drain.AtHold]))
	slices.Sort(uids)
	for _, uid := range uids {
		asked := s.asked[drain.AtHold][uid]
		r, held := is[uid]
		if !held {
			r = drain.Report{UID: uid, Number: asked.number}
		}
		all = append(all, r)
		up := drain.UpTo{Revision: s.revision, State: r.State, Generation: r.Generation}
		if count[up]++; count[up] > count[most] && says(up, r) {
			most = up
		}
		said, alone := s.said[drain.AtHold][uid]
		if alone && said == r || !alone && s.upTo != nil && asked.revision <= s.upTo.Revision && says(*s.upTo, r) {
			continue
		}
		changes = append(changes, r)
	}
	for _, r := range all {
		if !says(most, r) {
			but = append(but, r)
		}
	}
	switch {
	case !everything && len(changes) == 0:
		return
	case most.Revision > 0 && (everything || len(but) < len(changes)):
		batch.UpTo, s.upTo, s.said[drain.AtHold] = &most, &most, map[drain.UID]drain.Report{}
		batch.Reports = but
	case everything:
		batch.Reports = all
	default:
		batch.Reports = changes
	}
	for _, r := range batch.Reports {
		s.said[drain.AtHold][r.UID] = r
	}
}

// shortened returns the name of a generation as coordinators take it. It may have a word for each
// process of a gateway with many.
func shortened(generation string) string {
	if len(generation) <= wire.MaxName {
		return generation
	}
	sum := fmt.Sprintf("... %x", sha256.Sum256([]byte(generation)))
	return generation[:wire.MaxName-len(sum)] + sum
}

// says reports whether up covers r. A pod that is Kept always has a report of its own.
func says(up drain.UpTo, r drain.Report) bool {
	return r.State != drain.Kept && r == drain.Report{UID: r.UID, Number: r.Number, State: up.State,
		Generation: up.Generation}
}
