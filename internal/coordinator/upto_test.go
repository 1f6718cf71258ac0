package coordinator

import (
	"bytes"
	"encoding/json"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// steps is one agent and one replica without anything between them: what is written is read when
// the test says so.
type steps struct {
	*testing.T
	core       *Core
	stream     *Session
	session    *client.Session
	exclusions *exclusions
}

func newSteps(t *testing.T) *steps {
	s := &steps{T: t, core: NewCore(time.Now(), drain.Holder{Replica: "r", Epoch: "e"}, drain.DefaultTimes(),
		&Options{MaxHolds: 9})}
	s.exclusions = &exclusions{t: t, of: map[drain.UID]*exclusion{}}
	return s
}

// connect opens a stream; the agent reads all of it.
func (s *steps) connect() {
	var err error
	if s.stream, err = s.core.Connect(time.Now(), Identity{Agent: "edge", Everywhere: true}, wire.Offer{}, func() {
	}); err != nil {
		s.Fatal(err)
	}
	s.session = nil
	s.read(s.written())
}

func (s *steps) written() []byte {
	news, _ := s.core.Feed(s.stream)
	return s.core.Append(nil, time.Now(), s.stream, news)
}

func (s *steps) read(lines []byte) {
	for line := range bytes.Lines(lines) {
		var m wire.Message
		if err := json.Unmarshal(line, &m); err != nil {
			s.Fatal(err)
		}
		if s.session == nil {
			s.session, _ = client.NewSession(m, "boot", s.exclusions, nil)
			continue
		}
		if _, _, err := s.session.Message(time.Now(), m); err != nil {
			s.Fatal(err)
		}
	}
}

func (s *steps) declare(services ...drain.Service) {
	answer, err := s.core.Declare("edge", wire.Declaration{Session: s.stream.Number, Routes: routesOf(services...)})
	if err != nil {
		s.Fatal(err)
	}
	s.session.Declared(answer)
}

func (s *steps) report(everything bool) wire.Reports {
	batch := s.session.Reports(time.Now(), everything)
	s.Logf("edge says %s", bytes.TrimSpace(wire.Append(nil, batch)))
	if _, err := s.core.Report(time.Now(), "edge", batch); err != nil {
		s.Fatal(err)
	}
	return batch
}

func (s *steps) ask(p drain.Pod, service drain.Service) {
	s.core.Unroute(time.Now(), Request{Pod: p, Targets: []drain.Targets{{Service: service}}})
}

// The agent's container restarts with a Service more. The answer to its declaration overtakes the
// stream, and it reports before it has read of the drains that this adds.
func TestADrainThatTheAgentHasNotReadOfIsNotAcknowledged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSteps(t)
		s.connect()
		s.declare(web)
		s.read(s.written())
		s.ask(pod("p"), store)
		s.ask(pod("q"), web)
		s.connect() // the new life, which is told of q
		s.exclusions.say("uid-q", drain.Idle)
		s.declare(web, store)
		late := s.written() // and on its way
		s.report(true)
		if of := s.exclusions.of["uid-p"]; of != nil {
			t.Fatal("the test is wrong: p is excluded")
		}
		if got := s.core.Ledger.Status(time.Now(), drain.AtHold, "uid-p"); got.Phase != drain.Unrouting {
			t.Errorf("p is %s, %s, and the agent has not heard of it", got.Phase, got.Reason)
		}
		s.read(late)
	})
}

// Another replica has had the agent exclude the pod already. What is told for this one is
// acknowledged at once, not at the next renewal.
func TestWhatADeclarationAddsIsReportedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSteps(t)
		s.connect()
		s.declare(web)
		s.read(s.written())
		s.ask(pod("p"), store)
		s.ask(pod("q"), web)
		s.connect()
		s.exclusions.Exclude(time.Now(), pod("p"), "other/e", time.Now(), time.Now().Add(time.Minute))
		s.exclusions.say("uid-p", drain.Idle)
		s.exclusions.say("uid-q", drain.Idle)
		s.declare(web, store)
		s.report(true) // arrives before the stream is written
		s.read(s.written())
		s.report(false) // woken by what was read
		if got := s.core.Ledger.Status(time.Now(), drain.AtHold, "uid-p"); got.Phase != drain.Released {
			t.Errorf("p is %s, though the agent was told of it and it is idle", got.Phase)
		}
	})
}

// What serves a stream hangs in a write while the agent comes back. Then it looks for news, and
// what it finds counts as told to the agent on its new stream.
func TestWhatAFormerStreamWasToldIsNotToldOnTheNewOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSteps(t)
		s.connect()
		s.declare(web)
		s.read(s.written())
		former := s.stream
		s.ask(pod("p"), web)
		for i := range 1000 {
			s.ask(pod(fmt.Sprint("x", i)), web)
		}
		var err error
		if s.stream, err = s.core.Connect(time.Now(), Identity{Agent: "edge", Everywhere: true}, wire.Offer{},
			func() {}); err != nil {
			t.Fatal(err)
		}
		if _, ok := s.core.Feed(former); ok {
			t.Fatal("it is over")
		}
		s.ask(pod("p"), store) // p is told again, as the newest, because it has a Service more
		s.session = nil
		lines := s.written()
		var first []byte // the agent reads up to the first line of drains
		for line := range bytes.Lines(lines) {
			first = append(first, line...)
			if bytes.Contains(line, []byte(`"drains"`)) {
				break
			}
		}
		s.read(first)
		for uid := range s.exclusions.of {
			s.exclusions.say(uid, drain.Idle)
		}
		if s.exclusions.of["uid-p"] != nil {
			t.Fatal("the test is wrong: p is excluded")
		}
		s.report(true)
		if got := s.core.Ledger.Status(time.Now(), drain.AtHold, "uid-p"); got.Phase != drain.Unrouting {
			t.Errorf("p is %s, %s, and the agent has not heard of it", got.Phase, got.Reason)
		}
	})
}
