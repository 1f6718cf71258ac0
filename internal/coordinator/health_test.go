package coordinator

import (
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// healthy is a summary of Services, all with two targets that are well.
func healthy(services ...drain.Service) *wire.Summary {
	s := &wire.Summary{Services: len(services)}
	for _, name := range services {
		s.All.Usable += 2
		s.Told = append(s.Told, wire.ServiceHealth{Service: name, TargetCounts: wire.TargetCounts{Usable: 2},
			Checked: true})
	}
	return s
}

// unhealthy is healthy, and one target of the first Service is not.
func unhealthy(services ...drain.Service) *wire.Summary {
	s := healthy(services...)
	s.All.Usable, s.All.Unhealthy = s.All.Usable-1, 1
	of := &s.Told[0]
	of.Usable, of.Unhealthy = 1, 1
	of.Targets = []wire.TargetHealth{{Address: netip.MustParseAddrPort("10.1.0.7:80"), Pod: "shop/web-1",
		Why: "unhealthy", Last: "http failure: 503", Since: time.Now().UTC()}}
	return s
}

// believed is what a view shows of health, one line a Service.
func believed(r *replica) string {
	synctest.Wait()
	b := r.View(0, 0).TargetHealth
	lines := []string{fmt.Sprintf("%d agents, %d usable, %d unhealthy, %d untold", b.Agents, b.All.Usable,
		b.All.Unhealthy, b.Untold)}
	for _, s := range b.Services {
		line := fmt.Sprintf("%s: %d gateways, %d open, %d unwell:", s.Namespace+"/"+s.Name, s.Gateways, s.FailingOpen,
			s.Unwell)
		for _, w := range s.Says {
			line += fmt.Sprintf(" %s %d/%d", w.Agent, w.Usable, w.Usable+w.Unhealthy)
			for _, one := range w.Targets {
				line += fmt.Sprintf(" %s %s(%s, %s)", one.Pod, one.Address, one.Why, one.Last)
			}
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

// What gateways believe is shown within two seconds, changes as they do, and ends with their
// streams.
func TestHealthViewsAreShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		var one, two atomic.Pointer[wire.Summary]
		tells := func(from *atomic.Pointer[wire.Summary]) func(*client.Client) {
			return func(c *client.Client) {
				c.Routes, c.Health = routesOf(web, store), from.Load
			}
		}
		n.agentWith("one", tells(&one), "replica-0")
		second := n.agentWith("two", tells(&two), "replica-0")
		check := func(when, want string) {
			t.Helper()
			time.Sleep(2 * time.Second)
			if got := believed(r); got != want {
				t.Errorf("%s:\ngot  %s\nwant %s", when, got, want)
			}
		}
		check("nothing is known", "0 agents, 0 usable, 0 unhealthy, 0 untold")
		one.Store(healthy(web, store))
		check("one has told", "1 agents, 4 usable, 0 unhealthy, 0 untold\nshop/api: 1 gateways, 0 open, 0 "+
			"unwell: one 2/2\nshop/web: 1 gateways, 0 open, 0 unwell: one 2/2")
		two.Store(unhealthy(web))
		check("two sees another thing",
			"2 agents, 5 usable, 1 unhealthy, 0 untold\nshop/web: 2 gateways, 0 open, 1 unwell: two 1/2 "+
				"shop/web-1 10.1.0.7:80(unhealthy, http failure: 503) one 2/2\nshop/api: 1 gateways, 0 open, 0 "+
				"unwell: one 2/2")
		open := unhealthy(store)
		open.Told[0].FailingOpen = true
		one.Store(open)
		two.Store(healthy(web))
		check("one fails open", "2 agents, 3 usable, 1 unhealthy, 0 untold\nshop/api: 1 gateways, 1 open, 1 "+
			"unwell: one 1/2 shop/web-1 10.1.0.7:80(unhealthy, http failure: 503)\nshop/web: 1 gateways, 0 open, 0 "+
			"unwell: two 2/2")
		second.end()
		check("two has gone", "1 agents, 1 usable, 1 unhealthy, 0 untold\nshop/api: 1 gateways, 1 open, 1 "+
			"unwell: one 1/2 shop/web-1 10.1.0.7:80(unhealthy, http failure: 503)")
		n.Cut("replica-0")
		synctest.Wait()
		if got := believed(r); got != "0 agents, 0 usable, 0 unhealthy, 0 untold" {
			t.Errorf("after the stream was cut: %s", got)
		}
		time.Sleep(5 * time.Second)
		check("it has come back", "1 agents, 1 usable, 1 unhealthy, 0 untold\nshop/api: 1 gateways, 1 open, "+
			"1 unwell: one 1/2 shop/web-1 10.1.0.7:80(unhealthy, http failure: 503)")
	})
}

// What cannot be read of health, and what an agent has no right to speak of, is left out; the
// stream, by which reports come, goes on.
func TestHealthIsNeverInTheWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		s, session := n.upgraded("one", "replica-0")
		go io.Copy(io.Discard, s.conn)
		r.mu.Lock()
		r.core.Ledger.Declare("one", session, "", routesOf(web))
		r.mu.Unlock()
		say := func(line string) {
			t.Helper()
			if _, err := io.WriteString(s.conn,
				strings.ReplaceAll(line, "SESSION", fmt.Sprint(session))+"\n"); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		say(`{"health":{"session":SESSION,"changed":[{"service":{"namespace":"shop","name":"web"}}]}}`)
		if got := believed(r); !strings.HasPrefix(got, "0 agents") {
			t.Errorf("a difference to nothing: %s", got)
		}
		say(`{"health":{"session":SESSION,"first":true,"services":2,"changed":[{"service":{"namespace":"shop","name":"web"},"usable":1},{"service":{"namespace":"other","name":"web"},"unhealthy":9}]}}`)
		want := "1 agents, 0 usable, 0 unhealthy, 1 untold\nshop/web: 1 gateways, 0 open, 0 unwell: one 1/1"
		for _, line := range []string{
			`{"health":{"session":SESSION,"services":-1}}`, `{"health":nonsense`,
			`{"health":{"session":999,"first":true}}`,
			`{"health":{"session":SESSION,"first":true,"x":"` + strings.Repeat("x", wire.MaxHealth) + `"}}`,
		} {
			say(line)
			if got := believed(r); got != want {
				t.Errorf("after %.60s: %s, want %s", line, got, want)
			}
		}
		if got := r.metric("lameduck_agent_requests_total", "400", wire.HealthPath); got != 3 {
			t.Errorf("%v are counted as refused", got)
		}
		held := r.hold(pod("a"), web)
		say(`{"session":SESSION,"boot":"b","reports":[{"uid":"` + string(
			pod("a").UID) + `","state":"idle","number":1}]}`)
		answered(t, held, "Released Acknowledged held=true after 0s")
	})
}

// Agents of the last release tell nothing, and are told nothing of it.
func TestAgentsWithoutHealthAreKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		n.agent("one", []drain.Service{web}, "replica-0")
		time.Sleep(5 * time.Second)
		v := r.View(1, 1)
		if v.Agents.Known != 1 || v.TargetHealth.Agents != 0 || v.TargetHealth.Services == nil ||
			v.Propagation == nil ||
			strings.Contains(strings.Join(v.Agents.Items[0].Features, " "), wire.FeatureHealth) {
			t.Errorf("%+v", v)
		}
	})
}

// An agent that says all that it can say, and more, takes no more than the bound, which leaves room
// in the 64 KiB that an agent may take.
func TestWhatOneAgentTakesIsBounded(t *testing.T) {
	const agents = 200
	var b healthReports
	before := heap()
	for id := range agents {
		for n := range 4 {
			h := wire.Health{Session: 1, First: n == 0, Services: 1000}
			for s := range 60 {
				one := wire.ServiceHealth{Service: drain.Service{Namespace: "shop",
					Name: fmt.Sprintf("%d-%d-%d", id, n, s)}}
				for target := range wire.MaxHealthTargets {
					one.Targets = append(one.Targets,
						wire.TargetHealth{Pod: fmt.Sprintf("shop/%d-%s", target, strings.Repeat("x", 200)),
							Why: strings.Clone("unhealthy"), Last: strings.Repeat("y", 90)})
				}
				h.Changed = append(h.Changed, one)
			}
			b.take(drain.AgentID(fmt.Sprint(id)), h, func(drain.Service) bool { return true })
		}
	}
	if each := (heap() - before) / agents; each > 44<<10 || each < 8<<10 {
		t.Errorf("each agent takes %d bytes", each)
	}
	is := b.of["7"]
	if is.size > wire.MaxHealthKept || len(is.told) == 0 {
		t.Errorf("%d bytes in %d Services", is.size, len(is.told))
	}
	// What went makes room.
	var gone wire.Health
	gone.Session = 1
	for s := range is.told {
		gone.Gone = append(gone.Gone, s)
	}
	b.take("7", gone, func(drain.Service) bool { return true })
	if is.size != 0 || len(is.told) != 0 {
		t.Errorf("%d bytes in %d Services are left", is.size, len(is.told))
	}
	runtime.KeepAlive(&b)
}

// Without this, what comes late from a session that was current a moment ago takes the place of
// what the next one tells, and goes with that session: the next one tells differences only, and
// those are to nothing then.
func TestAFormerSessionTakesNothing(t *testing.T) {
	var b healthReports
	all := func(drain.Service) bool { return true }
	b.take("one", wire.Health{Session: 8, First: true, Services: 2}, all)
	b.take("one", wire.Health{Session: 7, First: true, Services: 1}, all)
	b.end("one", 7)
	if is := b.of["one"]; is == nil || is.session != 8 || is.services != 2 {
		t.Errorf("%+v", is)
	}
	b.take("one", wire.Health{Session: 9, First: true, Services: 3}, all)
	if is := b.of["one"]; is.session != 9 || is.services != 3 {
		t.Errorf("%+v", is)
	}
}

// What a liar writes so that it takes more room than it says takes no more either: a list that
// comes after a longer one of the same name is kept in the room of that.
func TestWhatALiarTakesIsBounded(t *testing.T) {
	const agents = 2
	var b healthReports
	long := strings.Repeat("{},", 4000) + "{}"
	before := heap()
	for id := range agents {
		for n := range 50 {
			h, err := wire.ParseHealth(fmt.Appendf(nil,
				`{"health":{"session":1,"first":%t,"changed":[{"service":{"namespace":"shop","name":"%d"},"targets":[%s],"targets":[{"since":"2026-01-02T03:04:05+01:23"}]}]}}`, n == 0, n, long))
			if err != nil {
				t.Fatal(err)
			}
			b.take(drain.AgentID(fmt.Sprint(id)), h, func(drain.Service) bool { return true })
		}
	}
	if each := (heap() - before) / agents; each > 64<<10 {
		t.Errorf("each agent takes %d bytes", each)
	}
	runtime.KeepAlive(&b)
}

func heap() int {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// BenchmarkHealthView is a view of a thousand gateways with a hundred Services each, which is made
// four times a second while a page is open.
func BenchmarkHealthView(b *testing.B) {
	var all healthReports
	var agents []api.Agent
	for a := range 1000 {
		h := wire.Health{Session: 1, First: true, Services: 100}
		for s := range 100 {
			h.Changed = append(h.Changed, wire.ServiceHealth{Service: drain.Service{Namespace: "shop",
				Name: fmt.Sprint(s)}, TargetCounts: wire.TargetCounts{Usable: 3}})
		}
		id := drain.AgentID(fmt.Sprint(a))
		agents = append(agents, api.Agent{ID: string(id), Name: string(id)})
		all.take(id, h, func(drain.Service) bool { return true })
	}
	for b.Loop() {
		all.view(agents)
	}
}
