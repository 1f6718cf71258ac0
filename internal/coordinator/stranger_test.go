package coordinator

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// ask asks the replica something as an agent, and returns the status and the body.
func (r *replica) ask(method, agent, path, body string) (int, string) {
	request := httptest.NewRequest(method, path, strings.NewReader(body))
	request.Header.Set("Authorization", "Bearer agent "+agent)
	request.Header.Set("Upgrade", wire.Upgrade)
	w := httptest.NewRecorder()
	r.Handler().ServeHTTP(w, request)
	return w.Code, w.Body.String()
}

// Without this, an agent whose pod is deleted, whose token has ended or whose right was taken
// acknowledges drains for as long as it keeps its stream open.
func TestAStreamEndsWithWhatItRestsOn(t *testing.T) {
	for name, c := range map[string]struct {
		agent string
		lose  func(r *replica, revoked *sync.Map)
		// least and most are when the stream ends after that.
		least, most time.Duration
	}{
		"the pod is deleted":     {"one", func(r *replica, _ *sync.Map) { r.Deleted("one") }, 0, 2 * time.Second},
		"another pod is deleted": {"one", func(r *replica, _ *sync.Map) { r.Deleted("two") }, time.Hour, 2 * time.Hour},
		"the token ends":         {"one", func(*replica, *sync.Map) {}, time.Hour, time.Hour + 2*time.Second},
		"the right is taken":     {"one", func(_ *replica, revoked *sync.Map) { revoked.Store("", 1) }, 0, time.Minute},
		"that of a namespace": {"local one", func(_ *replica, revoked *sync.Map) { revoked.Store("shop", 1) }, 0,
			time.Minute},
		"that of a namespace that it declared before": {"local one", func(r *replica, revoked *sync.Map) {
			r.change(func() { r.core.Ledger.Declare("local one", r.core.sessions["local one"].Number, "", nil) })
			revoked.Store("shop", 1)
		}, 0, time.Minute},
		"that of another namespace": {"local one", func(_ *replica, revoked *sync.Map) { revoked.Store("bank", 1) },
			time.Hour, 2 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNetwork(t)
				var revoked sync.Map
				r := n.replica("replica-0", "a", func(o *Options) {
					o.Authenticate = tokens{until: time.Now().Add(time.Hour), revoked: &revoked}
				})
				s, session := n.upgraded(c.agent, "replica-0")
				if code, text := r.ask(http.MethodPost, c.agent, wire.DeclarationsPath,
					fmt.Sprintf(`{"session":%d,"routes":[{"service":{"namespace":"shop","name":"web"},"via":"endpoints","kind":"directed"}]}`, session)); code != 200 {
					t.Fatal(code, text)
				}
				began := time.Now()
				c.lose(r, &revoked)
				for {
					if _, ok := s.next(t); !ok {
						break
					}
				}
				if took := time.Since(began); took < c.least || took > c.most {
					t.Errorf("the stream ends after %s, want %s to %s", took, c.least, c.most)
				}
				if code, text := r.ask(http.MethodPost, c.agent, wire.LeavePath,
					fmt.Sprintf(`{"session":%d,"boot":"b"}`, session)); code != http.StatusConflict {
					t.Errorf("a leave is answered %d %s", code, text)
				}
			})
		})
	}
}

// An answer about a token is remembered for up to a minute: the agent of a pod that is deleted must
// not come back meanwhile. A list that was older than the pod may have lacked it: once the pod is
// seen again its agent is let in.
func TestADeletedAgentDoesNotComeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		r.Deleted("one")
		if code, text := r.ask(http.MethodGet, "one", wire.StreamPath+"?protocol=1",
			""); code != http.StatusUnauthorized || !strings.Contains(text, "pod is deleted") {
			t.Errorf("answered %d %s", code, text)
		}
		r.Ready("one", time.Now())
		n.upgraded("one", "replica-0")
		r.Deleted("one")
		time.Sleep(2 * deletedFor)
		synctest.Wait()
		if len(r.core.deleted) > 0 {
			t.Errorf("still remembered: %v", r.core.deleted)
		}
	})
}

// A stream whose agent does not read hangs in a write for seconds. What it has reported is void at
// once.
func TestAReportIsVoidWhenItsAgentIsDeleted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		_, session := n.upgraded("one", "replica-0")
		time.Sleep(2500 * time.Millisecond) // a heartbeat is being written, and not read
		r.Deleted("one")
		if r.core.Ledger.Current("one", session) {
			t.Error("the session of a deleted agent goes on")
		}
	})
}

// More drains than are read in a tick, of pods that live on: each is read in turn, whatever its
// UID.
func TestEachPodIsReadInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a")
		for i := range 300 {
			p := pod(fmt.Sprintf("%03d", i))
			if i < 290 {
				r.lives.set(p.UID, LifeUnknown) // it cannot be read, and is named again and again
			} else {
				r.lives.set(p.UID, Living)
			}
			r.Unroute(requestOf(p, drain.Service{Namespace: "shop", Name: fmt.Sprint("web-", i)}))
		}
		time.Sleep(drain.DefaultTimes().Abandon + 20*time.Second)
		synctest.Wait()
		for i := 290; i < 300; i++ {
			if r.core.Ledger.Pod(pod(fmt.Sprintf("%03d", i)).UID).Draining {
				t.Errorf("pod %d was not read in 20 s", i)
			}
		}
	})
}

// stuckPods is an API server that does not answer.
type stuckPods struct{}

func (stuckPods) Life(ctx context.Context, _ drain.Pod) (Life, error) {
	<-ctx.Done()
	return LifeUnknown, ctx.Err()
}

// The kubelet starts a replica again whose ledger is stuck, and none because the API server does
// not answer.
func TestLive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNetwork(t)
		r := n.replica("replica-0", "a", func(o *Options) { o.Pods = stuckPods{} })
		for i := range 20 {
			r.Unroute(requestOf(pod(fmt.Sprint(i)), drain.Service{Namespace: "shop", Name: fmt.Sprint("web-", i)}))
		}
		time.Sleep(3 * time.Minute)
		if err := r.Live(); err != nil {
			t.Errorf("the API server does not answer: %v", err)
		}
		c := newBench().Coordinator
		time.Sleep(maxTickGap + time.Second)
		if err := c.Live(); err == nil || !strings.Contains(err.Error(), "no tick") {
			t.Errorf("nothing ticks: %v", err)
		}
	})
}

// The lock is kept for ever: not in a bubble of synctest, which would wait for who waits for it.
func TestLiveWhenTheLockIsKept(t *testing.T) {
	c := newBench().Coordinator
	c.mu.Lock()
	defer c.mu.Unlock()
	began := time.Now()
	err := c.Live()
	if took := time.Since(began); err == nil || !strings.Contains(err.Error(), "lock") || took < maxLockHeld ||
		took > 5*maxLockHeld {
		t.Errorf("%v after %s", err, took)
	}
}

// A thousand agents do not delay deletions: one of them waits for the lock, and takes the steps of
// all.
func TestAgentsTakeTheirStepsTogether(t *testing.T) {
	c := newBench().Coordinator
	const agents = 1000
	taken := 0
	var all sync.WaitGroup
	c.mu.Lock()
	for range agents {
		all.Go(func() { c.inTurn(func() { taken++ }) })
	}
	for asked := 0; asked < agents; {
		runtime.Gosched()
		c.turns.Lock()
		if c.next != nil {
			asked = len(c.next.steps)
		}
		c.turns.Unlock()
	}
	stacks := make([]byte, 4<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	if n := strings.Count(string(stacks), "(*Coordinator).change("); n > 1 {
		t.Errorf("%d agents wait for the lock", n)
	}
	c.unlock()
	all.Wait()
	if taken != agents || c.next != nil {
		t.Errorf("the steps of %d agents of %d were taken, left %v", taken, agents, c.next)
	}
}

// An agent that has given up while it waited for the lock is not connected: it has begun another
// stream, and would end it.
func TestAnAgentThatIsGoneIsNotConnected(t *testing.T) {
	c := newBench().Coordinator
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r := httptest.NewRequestWithContext(ctx, http.MethodGet, wire.StreamPath, nil)
	s, err := c.connect(r, Identity{Agent: "agent-a", Name: "edge/agent-a", Everywhere: true}, wire.NewOffer("boot"))
	if s != nil || err == nil || c.Agent("agent-a").Connected {
		t.Errorf("connected=%t: %v", c.Agent("agent-a").Connected, err)
	}
}
