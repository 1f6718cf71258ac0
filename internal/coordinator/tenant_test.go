package coordinator

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// localRoutesOf are routes of Services that need not exist.
func localRoutesOf(n int, name string) []drain.Route {
	var services []drain.Service
	for i := range n {
		services = append(services, drain.Service{Namespace: "shop", Name: fmt.Sprint(name, "-", i)})
	}
	return routesOf(services...)
}

// flood is an agent that posts bodies on many connections until it is stopped.
type flood struct {
	codes map[int]int
	stop  chan struct{}
	all   sync.WaitGroup
}

func newFlood(url, token string, connections int, bodies [2][]byte) *flood {
	f := &flood{codes: map[int]int{}, stop: make(chan struct{})}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: connections}}
	var mu sync.Mutex
	for c := range connections {
		f.all.Go(func() {
			for i := c; ; i++ {
				select {
				case <-f.stop:
					return
				default:
				}
				q, _ := http.NewRequest(http.MethodPost, url+wire.DeclarationsPath, bytes.NewReader(bodies[i%2]))
				q.Header.Set("Authorization", "Bearer "+token)
				a, err := client.Do(q)
				if err != nil {
					continue // the server does not read the body of what it refuses
				}
				_, _ = io.Copy(io.Discard, a.Body)
				a.Body.Close()
				mu.Lock()
				f.codes[a.StatusCode]++
				mu.Unlock()
			}
		})
	}
	return f
}

// end stops the flood and returns how many answers there were of each code.
func (f *flood) end() map[int]int {
	close(f.stop)
	f.all.Wait()
	return f.codes
}

// An agent that may acknowledge in one namespace declares as many routes as it may and then others,
// on 128 connections. Without limits for each agent, the answers about deletions in other
// namespaces took 4 s, the time after which the API server lets them through unasked. The control
// is the same bytes of a stranger.
func TestOneAgentDelaysNoOtherNamespace(t *testing.T) {
	n := newNetwork(t)
	r := n.replica("a", "1")
	s := n.open("local t", "a")
	hello, ok := s.next(t)
	if !ok || hello.Hello == nil {
		t.Fatal("no hello")
	}
	go func() {
		for ok := true; ok; {
			_, ok = s.next(t)
		}
	}()
	server := httptest.NewServer(r.Handler())
	defer server.Close()
	var bodies [2][]byte
	for i := range bodies {
		bodies[i], _ = json.Marshal(wire.Declaration{Session: hello.Hello.Session, Gateway: "x",
			Routes: localRoutesOf(maxOwnRoutes, fmt.Sprint(strings.Repeat("x", 40), i))})
	}
	bank := drain.Service{Namespace: "bank", Name: "core"}
	slowest := func(token string) (took time.Duration, codes map[int]int) {
		f := newFlood(server.URL, token, 128, bodies)
		for i, end := 0, time.Now().Add(4*time.Second); time.Now().Before(end); i++ {
			p := drain.Pod{Namespace: "bank", Name: "core", UID: drain.UID(fmt.Sprint(token, i))}
			began := time.Now()
			// What a review asks, in its order.
			r.Expecting()
			r.CouldRoute([]drain.Service{bank})
			r.Pod(p.UID)
			if _, _, err := r.Drain(t.Context(), requestOf(p, bank), began.Add(2*time.Second)); err != nil {
				t.Fatal(err)
			}
			took = max(took, time.Since(began))
			time.Sleep(20 * time.Millisecond) // a pause, nothing is awaited
		}
		return took, f.end()
	}
	control, _ := slowest("nonsense")
	began, good, codes := time.Now(), false, map[int]int{}
	for try := 0; try < 3 && !good; try++ { // other programs may take the processor meanwhile
		took, more := slowest("agent local t")
		t.Logf("the slowest answer took %s, and %s beside a stranger; answers %v", took, control, more)
		good = took <= 500*time.Millisecond+4*control
		for code, n := range more {
			codes[code] += n
		}
	}
	if !good {
		t.Error("an answer took too long beside an agent, three times, and not beside a stranger who sends the same")
	}
	if codes[http.StatusOK] > seldom+int(time.Since(began)/time.Second)+1 || codes[http.StatusTooManyRequests] == 0 {
		t.Errorf("answers %v", codes)
	}
}

// What one agent may do often is limited, and costs no other agent anything.
func TestEachAgentIsLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench()
		handler := b.Handler()
		ask := func(row route, agent string) int {
			request := httptest.NewRequest(row.method, row.path, strings.NewReader("{}"))
			request.Header.Set("Authorization", "Bearer agent "+agent)
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, request)
			return w.Code
		}
		for _, row := range routes {
			if row.access != agents {
				continue
			}
			accepted := 0
			for range 2 * row.burst {
				if ask(row, "two") != http.StatusTooManyRequests {
					accepted++
				}
			}
			if row.burst == 0 || accepted != row.burst {
				t.Errorf("%s: %d are accepted at once, want %d", row.path, accepted, row.burst)
			}
			if code := ask(row, "three"); code == http.StatusTooManyRequests {
				t.Errorf("%s: another agent is refused", row.path)
			}
			time.Sleep(time.Second)
			if code := ask(row, "two"); code == http.StatusTooManyRequests {
				t.Errorf("%s: it is refused a second later", row.path)
			}
		}
	})
}

// A thousand steps of agents that come together are taken in turns, between which deletions have
// the lock.
func TestStepsOfAgentsAreTakenInTurns(t *testing.T) {
	b := newBench()
	b.mu.Lock()
	var all sync.WaitGroup
	taken, settled := 0, 0
	for range 10 {
		all.Go(func() {
			b.inTurn(func() {
				if taken == 0 {
					b.later = append(b.later, func() { settled = taken })
				}
				taken++
				for began := time.Now(); time.Since(began) < maxTurn; { // a step that takes long
				}
			})
		})
	}
	for waiting := 0; waiting < 10; { // until all have come
		b.turns.Lock()
		if waiting = 0; b.next != nil {
			waiting = len(b.next.steps)
		}
		b.turns.Unlock()
	}
	b.mu.Unlock()
	all.Wait()
	if taken != 10 || settled != 1 {
		t.Errorf("%d steps are taken, %d of them in the first turn", taken, settled)
	}
}

// The routes of all agents of a namespace that have no right everywhere are bounded together: the
// Services need not exist.
func TestRoutesOfANamespaceAreBounded(t *testing.T) {
	now := time.Now()
	c := NewCore(now, drain.Holder{Replica: "a", Epoch: "1"}, drain.DefaultTimes(), &Options{})
	declare := func(name string, everywhere bool, n int) error {
		s, err := c.Connect(now, Identity{Agent: drain.AgentID(name), Name: name, Everywhere: everywhere}, wire.Offer{},
			func() {})
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.Declare(s.Who.Agent, wire.Declaration{Session: s.Number, Routes: localRoutesOf(n, name)})
		return err
	}
	for i := range 59 {
		if err := declare(fmt.Sprint("shop/", i), false, 1000); err != nil {
			t.Fatal(err)
		}
	}
	for _, of := range []struct {
		name       string
		everywhere bool
		routes     int
		refused    bool
	}{
		{"shop/b", false, 1001, true},
		{"shop/b", false, 999, false},
		{"shop/c", false, 2, true},
		{"shop/c", false, 1, false},
		{"shop/d", false, 1, true},
		{"shop/e", true, 10_000, false},
		{"shopping/a", false, 1000, false},
		{"shop/0", false, 1000, false}, // it has a new session, and its routes count once
		{"shop/0", false, 900, false},
		{"shop/d", false, 100, false},
	} {
		err := declare(of.name, of.everywhere, of.routes)
		if (err != nil) != of.refused || of.refused && !strings.Contains(err.Error(), "more than 1000 or 60000 need") {
			t.Errorf("%s declares %d: %v", of.name, of.routes, err)
		}
	}
}
