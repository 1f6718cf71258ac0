package drain

import (
	"fmt"
	"testing"
	"time"
)

// A zone is lost, with many agents, and many pods at the barrier. To forget the agents one after
// the other takes 600 times as long for a hundred as for one, under the coordinator's lock.
func TestManyAgentsAreForgottenAtOnce(t *testing.T) {
	forget := func(lost int) time.Duration {
		now := time.Now()
		l := NewLedger(DefaultTimes(), ScopeAll, DefaultSampling())
		var expected []Expected
		sessions := map[AgentID]uint64{}
		for i := range 400 {
			id := AgentID(fmt.Sprintf("node-%03d", i))
			expected = append(expected, Expected{ID: id, Name: string(id), Ready: true, Label: LabelObserved})
			sessions[id] = l.Connect(now, id, Hello{Observes: true})
			l.Declare(id, sessions[id], Nodes, []Route{{EveryService, Endpoints, Observed}})
		}
		l.Expect(now, expected)
		for i := range 50 {
			name := fmt.Sprint("pod-", i)
			l.OpenBarrier(now, Barrier{Pod: Pod{"shop", name, UID(name)}, By: "node-399",
				Services: []Service{{"shop", "web"}}, Since: now, Bound: 30 * time.Second})
		}
		for _, e := range expected[:lost] {
			l.Disconnect(now, e.ID, sessions[e.ID])
		}
		began := time.Now()
		l.Expect(now.Add(time.Second), expected[lost:])
		return time.Since(began)
	}
	var ratio float64
	for range 5 { // other programs may take the processor meanwhile
		one := forget(1)
		if ratio = float64(forget(100)) / float64(one); ratio < 150 {
			return
		}
	}
	t.Errorf("100 agents take %.0f times as long as one", ratio)
}
