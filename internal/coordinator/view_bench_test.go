package coordinator

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// What is remembered for operators is paid with every report. The floor is what the ledger itself
// does with it.
func BenchmarkReported(b *testing.B) {
	for _, noted := range []bool{false, true} {
		b.Run(map[bool]string{false: "ledger", true: "ledger and history"}[noted], func(b *testing.B) {
			c, ids, sessions, p := withAgents(1000)
			now := time.Now()
			i := 0
			for b.Loop() {
				said := []drain.Report{{UID: p.UID, State: drain.Removed + drain.State(i/len(ids)%2), Number: 1}}
				id := ids[i%len(ids)]
				taken, _ := c.core.Report(now, id, wire.Reports{Session: sessions[i%len(ids)], Reports: said})
				if noted {
					c.seen.reported(now, id, taken)
				}
				i++
			}
		})
	}
}

// A view is made under the lock that deletions wait for.
func BenchmarkView(b *testing.B) {
	for _, agents := range []int{10, 1000} {
		b.Run(fmt.Sprint(agents, " agents owe a drain"), func(b *testing.B) {
			c, _, _, _ := withAgents(agents)
			for b.Loop() {
				c.View(200, 20)
			}
		})
	}
}

// withAgents is a coordinator with so many agents that must acknowledge one drain.
func withAgents(n int) (c *Coordinator, ids []drain.AgentID, sessions []uint64, p drain.Pod) {
	c = New(drain.Holder{Replica: "r"}, drain.DefaultTimes(),
		Options{MaxHolds: 32, Log: slog.New(slog.DiscardHandler), Metrics: NewMetrics(prometheus.NewRegistry())})
	now := time.Now()
	for i := range n {
		id := drain.AgentID(fmt.Sprint("agent-", i))
		session := c.core.Ledger.Connect(now, id, drain.Hello{})
		c.core.Ledger.Declare(id, session, "", routesOf(web))
		c.seen.connected(now, id, wire.Offer{}, "")
		ids, sessions = append(ids, id), append(sessions, session)
	}
	p = pod("a")
	c.Unroute(requestOf(p, web))
	return c, ids, sessions, p
}
