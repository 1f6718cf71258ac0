package drain

import (
	"fmt"
	"testing"
	"time"
)

// What a report of an agent costs the ledger when a hundred drains are open that a thousand agents
// must acknowledge: each receives all of them, and acknowledges them in one line. Its time is that
// of the lock which every agent and every deletion waits for.
func BenchmarkAHundredDrains(b *testing.B) {
	const agents, drains = 1000, 100
	now := time.Now()
	l := NewLedger(DefaultTimes(), ScopeAuto, DefaultSampling())
	sessions := map[AgentID]uint64{}
	sent := map[AgentID]uint64{}
	for i := range agents {
		id := AgentID(fmt.Sprint("agent-", i))
		sessions[id] = l.Connect(now, id, Hello{})
		l.Declare(id, sessions[id], "", []Route{{Service{"shop", "web"}, Endpoints, Directed}})
	}
	round := 0
	for b.Loop() {
		now = now.Add(time.Second)
		round++
		for i := range drains {
			name := fmt.Sprint(round, "-", i)
			l.Ask(now, Pod{"shop", name, UID(name)}, targetsOf(Service{"shop", "web"}), Place{})
		}
		l.Changed(AtHold)
		released := 0
		for _, id := range l.Affected() {
			_, _, told, next := l.ChangesFor(id, sent[id])
			sent[id] = next
			l.Report(now, now, id, sessions[id], &UpTo{Revision: told, State: Idle}, nil)
			for _, uid := range l.Changed(AtHold) {
				if s := l.Status(now, AtHold, uid); s.Phase == Released && s.Reason == Acknowledged {
					released++
				}
			}
		}
		if released != drains {
			b.Fatalf("%d drains are released, want %d", released, drains)
		}
		for i := range drains {
			l.GatePassed(now, AtHold, UID(fmt.Sprint(round, "-", i)))
		}
		l.Changed(AtHold)
		l.Affected()
		l.Tick(now)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/agents/drains, "ns/report")
}

// What a barrier costs the ledger that asks a sample of 5,000 nodes, from its start to its end: the
// time of the same lock.
func BenchmarkASampledBarrier(b *testing.B) {
	now := time.Now()
	l := NewLedger(DefaultTimes(), ScopeAuto, DefaultSampling())
	for i := range 5000 {
		id := AgentID(fmt.Sprint("node-", i))
		l.Declare(id, l.Connect(now, id, Hello{Observes: true}), Nodes, []Route{{EveryService, Endpoints, Observed}})
	}
	for range DefaultSampling().Learn {
		l.learnt.add(time.Second)
	}
	l.Affected()
	round := 0
	for b.Loop() {
		round++
		now = now.Add(time.Second)
		name := fmt.Sprint("pod-", round)
		s := l.OpenBarrier(now, Barrier{Pod: Pod{"shop", name, UID(name)}, By: "node-7",
			Services: []Service{{"shop", "web"}}, Since: now, Bound: 30 * time.Second})
		if s.Owed < 50 || s.Owed > 51 {
			b.Fatalf("%d nodes are asked", s.Owed)
		}
		l.GatePassed(now, AtBarrier, UID(name))
		l.Affected()
		l.Tick(now)
	}
}
