package hooks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"

	"github.com/lameduck-io/lameduck/internal/agent/nodepods"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/agenttest"
	"github.com/lameduck-io/lameduck/test/planes"
)

var podTarget = netip.MustParseAddrPort("10.1.0.7:0")

// node is a node agent's inner parts in a bubble.
type testNode struct {
	*testing.T
	*Server
	k        *planes.FakeObserved
	registry *prometheus.Registry
	// asked holds what coordinators were asked.
	asked []wire.BarrierRequest
	liven func() (nodepods.Pod, bool, error)
}

func newTestNode(t *testing.T) *testNode {
	k := planes.NewFakeObserved()
	n := &testNode{T: t, k: k, registry: prometheus.NewRegistry()}
	live := func(context.Context, drain.Pod) (nodepods.Pod, bool, error) {
		if n.liven == nil {
			return nodepods.Pod{}, false, errors.New("no API server")
		}
		return n.liven()
	}
	n.Server = New(nodepods.New(func(nodepods.Pod) {}, slog.New(slog.DiscardHandler)), k, live, nil, n.registry,
		slog.New(slog.DiscardHandler))
	n.pods.SetSynced()
	n.unreachable()
	return n
}

// unreachable: no coordinator can be asked.
func (n *testNode) unreachable() {
	n.ask = func(_ context.Context, b wire.BarrierRequest) (wire.BarrierStatus, error) {
		n.asked = append(n.asked, b)
		return wire.BarrierStatus{}, client.ErrNoCoordinator
	}
}

type got struct {
	code int
	text string
	took time.Duration
}

// hook is one hook's request, from the node itself.
func (n *testNode) hook(id string) chan got { return n.hookFrom(id, "127.0.0.1") }

// atMost has a coordinator answer at once that the agent is to wait for so long at most, or until
// nothing has come for 10 s. The last client comes after last.
func (n *testNode) atMost(reason string, most, last time.Duration) {
	n.k.Is(podTarget, health.Idle, 0)
	came := time.Now().Add(last)
	n.k.OnCount(func() { n.k.Quiet(podTarget, max(0, time.Since(came))) })
	n.ask = func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error) {
		return wire.BarrierStatus{Reason: reason, AtMostMillis: most.Milliseconds(), QuietMillis: 10_000}, nil
	}
	n.pods.Set(agenttest.Hooked("a"), false)
	n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
}

// every calls f again and again until the test ends.
func (n *testNode) every(pause time.Duration, f func()) {
	go func() {
		for n.Context().Err() == nil {
			f()
			select {
			case <-n.Context().Done():
			case <-time.After(pause):
			}
		}
	}()
}

// hookFrom is one hook's request from an address.
func (n *testNode) hookFrom(id, from string) chan got {
	out := make(chan got, 1)
	go func() {
		began := time.Now()
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, "/v1/wait/"+id+"?container=app", nil)
		r.RemoteAddr = net.JoinHostPort(from, "4711")
		n.Handler().ServeHTTP(w, r)
		body, _ := io.ReadAll(w.Result().Body)
		out <- got{w.Code, strings.TrimSpace(string(body)), time.Since(began)}
	}()
	synctest.Wait()
	return out
}

func (n *testNode) answered(h chan got, code int, prefix string, least, most time.Duration) {
	n.Helper()
	select {
	case g := <-h:
		if g.code != code || !strings.HasPrefix(g.text, prefix) || g.took < least || g.took > most {
			n.Errorf("%d %q after %s, want %d %q after %s to %s", g.code, g.text, g.took, code, prefix, least, most)
		}
	case <-time.After(time.Minute):
		n.Errorf("the hook hangs")
	}
	if open := n.k.Open(); open != 0 {
		n.Errorf("%d watches of the kernel are left", open)
	}
}

// count is how many waits ended so.
func (n *testNode) ended(o outcome) float64 {
	n.Helper()
	families, err := n.registry.Gather()
	if err != nil {
		n.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "lameduck_barrier_waits_total" && m.GetLabel()[0].GetValue() == string(o) {
				return m.GetCounter().GetValue()
			}
		}
	}
	n.Fatalf("no waits are counted as %s", o)
	return 0
}

func (n *testNode) counted(o outcome, want float64) {
	n.Helper()
	if got := n.ended(o); got != want {
		n.Errorf("%v waits ended by %s, want %v", got, o, want)
	}
}

// Every way in which a hook ends, and by when: none hangs.
func TestHooksEnd(t *testing.T) {
	for name, c := range map[string]struct {
		// before prepares the node; hooks then ask; after happens while they wait.
		before func(n *testNode)
		after  func(n *testNode)
		id     string
		code   int
		prefix string
		counts outcome
		least  time.Duration
		most   time.Duration
	}{
		"the coordinator says when": {
			before: func(n *testNode) {
				n.ask = func(ctx context.Context, b wire.BarrierRequest) (wire.BarrierStatus, error) {
					time.Sleep(700 * time.Millisecond)
					return wire.BarrierStatus{Reason: "Acknowledged"}, nil
				}
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "Acknowledged", counts: "Acknowledged", least: 700 * time.Millisecond,
			most: 700 * time.Millisecond,
		},
		"the coordinator says nothing": {
			before: func(n *testNode) {
				n.ask = func(ctx context.Context, _ wire.BarrierRequest) (wire.BarrierStatus, error) {
					<-ctx.Done()
					return wire.BarrierStatus{}, ctx.Err()
				}
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "Bound", counts: outBound, least: 30 * time.Second, most: 30 * time.Second,
		},
		"a client deletes with less grace": {
			before: func(n *testNode) {
				n.ask = func(ctx context.Context, _ wire.BarrierRequest) (wire.BarrierStatus, error) {
					<-ctx.Done()
					return wire.BarrierStatus{}, ctx.Err()
				}
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 8*time.Second), false)
			},
			code: 200, prefix: "Bound", counts: outBound, least: 3 * time.Second, most: 3 * time.Second,
		},
		"the grace is all the application's": {
			before: func(n *testNode) {
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 5*time.Second), false)
			},
			code: 200, prefix: "NoTime", counts: outNoTime,
		},
		"no coordinator: the kernel lets go": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Routing, 1)
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			after: func(n *testNode) {
				time.Sleep(2 * time.Second)
				n.k.Is(podTarget, health.Removed, 1)
				time.Sleep(2 * time.Second)
				n.k.Is(podTarget, health.Idle, 0)
			},
			code: 200, prefix: "Local", counts: outLocal, least: 4 * time.Second, most: 4 * time.Second,
		},
		"no coordinator: the kernel has let go before": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Idle, 0)
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "Local", counts: outLocal, least: localAfter, most: localAfter + askAgain,
		},
		"no coordinator: connections stay": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Removed, 1)
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "Local", counts: outLocal, least: 10 * time.Second, most: 10*time.Second + askAgain,
		},
		"no coordinator: the kernel has nowhere else to send to": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Kept, 0)
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "Local", counts: outLocal, least: localAfter, most: localAfter + askAgain,
		},
		"no coordinator: the kernel cannot be read for a moment": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Routing, 0)
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			after: func(n *testNode) {
				time.Sleep(localAfter + time.Second)
				n.k.Is(podTarget, health.Unknown, 0)
				time.Sleep(localAfter - time.Millisecond)
				n.k.Is(podTarget, health.Routing, 0)
			},
			code: 200, prefix: "Bound", counts: outBound, least: 30 * time.Second, most: 30 * time.Second,
		},
		"deleted again, with a shorter grace period": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Routing, 0)
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			after: func(n *testNode) {
				time.Sleep(5 * time.Second)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 6*time.Second), false)
			},
			code: 200, prefix: "Bound", counts: outBound, least: 5 * time.Second, most: 5*time.Second + askAgain,
		},
		"no coordinator: the kernel cannot be read": {
			before: func(n *testNode) {
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "Local", counts: outLocal, least: localAfter, most: localAfter + askAgain,
		},
		"no coordinator, and the kernel does not let go": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Routing, 0)
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "Bound", counts: outBound, least: 30 * time.Second, most: 30 * time.Second,
		},
		"a coordinator comes": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Routing, 0)
				n.ask = func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error) {
					if n.asked = append(n.asked, wire.BarrierRequest{}); len(n.asked) < 4 {
						return wire.BarrierStatus{}, client.ErrNoCoordinator
					}
					return wire.BarrierStatus{Reason: "LastTarget"}, nil
				}
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "LastTarget", counts: "LastTarget", least: 3 * askAgain, most: 3 * askAgain,
		},
		// The release before the stated wait counts, although the kernel alone would not be enough.
		"coordinators are away when a stated wait is over": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Routing, 0)
				n.ask = func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error) {
					n.unreachable()
					return wire.BarrierStatus{Reason: "LastTarget", AtMostMillis: 5_000}, nil
				}
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "LastTarget", counts: "LastTarget", least: 5*time.Second + localAfter,
			most: 5*time.Second + localAfter + 2*askAgain,
		},
		"a connection has come during a stated wait": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Idle, 0)
				n.k.OnCount(func() { n.k.Is(podTarget, health.Removed, 1) })
				n.ask = func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error) {
					time.Sleep(5 * time.Second)
					return wire.BarrierStatus{Reason: "Acknowledged"}, nil
				}
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			after: func(n *testNode) {
				time.Sleep(8 * time.Second)
				n.k.Is(podTarget, health.Idle, 0)
			},
			code: 200, prefix: "Acknowledged", counts: "Acknowledged", least: 8 * time.Second, most: 8 * time.Second,
		},
		"a connection has come during a stated wait, and stays": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Idle, 0)
				n.k.OnCount(func() { n.k.Is(podTarget, health.Removed, 1); n.k.OnCount(nil) })
				n.ask = func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error) {
					time.Sleep(5 * time.Second)
					return wire.BarrierStatus{Reason: "Acknowledged"}, nil
				}
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "IdleBound", counts: "IdleBound", least: countEarly + localIdle,
			most: countEarly + localIdle + countedLate,
		},
		"none has come during a stated wait": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Idle, 1)
				n.k.OnCount(func() { n.k.Is(podTarget, health.Idle, 1) })
				n.ask = func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error) {
					time.Sleep(5 * time.Second)
					return wire.BarrierStatus{Reason: "Acknowledged"}, nil
				}
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "Acknowledged", counts: "Acknowledged", least: 5 * time.Second,
			most: 5*time.Second + countedLate/10,
		},
		"connections cannot be counted": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Idle, 0)
				n.ask = func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error) {
					time.Sleep(5 * time.Second)
					return wire.BarrierStatus{Reason: "Acknowledged"}, nil
				}
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "Acknowledged", counts: "Acknowledged", least: 5 * time.Second,
			most: 5*time.Second + countedLate,
		},
		"a wait of at most 25s, and nothing has come for 10s after 8s": {
			before: func(n *testNode) { n.atMost("Acknowledged", 25*time.Second, 8*time.Second) },
			code:   200, prefix: "Acknowledged", counts: "Acknowledged", least: 18 * time.Second,
			most: 19 * time.Second,
		},
		"a wait of at most 25s, without an agent that observes": {
			before: func(n *testNode) { n.atMost("NoAgents", 25*time.Second, 8*time.Second) },
			code:   200, prefix: "NoAgents", counts: "NoAgents", least: 18 * time.Second,
			most: 19 * time.Second,
		},
		"a wait of at most 25s, and gateways acknowledge after 14s": {
			before: func(n *testNode) {
				n.atMost("Acknowledged", 25*time.Second, 0)
				// As the kernel's gateway does: it counts by itself, and measures how long it is
				// quiet from when it was first told to count.
				var told atomic.Pointer[time.Time]
				count := func() {
					quiet := time.Duration(0)
					if since := told.Load(); since != nil {
						quiet = time.Since(*since)
					}
					n.k.Quiet(podTarget, quiet)
				}
				n.k.OnCount(func() { now := time.Now(); told.CompareAndSwap(nil, &now); count() })
				n.every(100*time.Millisecond, count)
				ask := n.ask
				n.ask = func(ctx context.Context, asked wire.BarrierRequest) (wire.BarrierStatus, error) {
					time.Sleep(14 * time.Second)
					return ask(ctx, asked)
				}
			},
			code: 200, prefix: "Acknowledged", counts: "Acknowledged", least: 14 * time.Second,
			most: 15 * time.Second,
		},
		"a wait of at most 25s, and clients come until its end": {
			before: func(n *testNode) { n.atMost("Acknowledged", 25*time.Second, time.Hour) },
			code:   200, prefix: "Acknowledged", counts: "Acknowledged", least: 25 * time.Second,
			most: 25*time.Second + askAgain,
		},
		"a wait of at most 25s, and connections are not counted any more": {
			before: func(n *testNode) {
				n.atMost("Acknowledged", 25*time.Second, 0)
				n.k.OnCount(nil)
				n.k.Quiet(podTarget, time.Minute)
				ask := n.ask
				n.ask = func(ctx context.Context, asked wire.BarrierRequest) (wire.BarrierStatus, error) {
					time.Sleep(2 * countedFresh) // for which it was quiet, but not seen
					return ask(ctx, asked)
				}
			},
			code: 200, prefix: "Acknowledged", counts: "Acknowledged", least: 25 * time.Second,
			most: 25*time.Second + 2*countedFresh + countedLate + askAgain, // it asks again
		},
		"a wait of 5s, and a gateway sends to the pod again at its end, for 3s": {
			before: func(n *testNode) {
				n.atMost("Acknowledged", 5*time.Second, 0)
				asked := 0
				n.ask = func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error) {
					if asked++; asked == 2 {
						time.Sleep(3 * time.Second)
					}
					return wire.BarrierStatus{Reason: "Acknowledged", AtMostMillis: 5000}, nil
				}
			},
			code: 200, prefix: "Acknowledged", counts: "Acknowledged", least: 8 * time.Second,
			most: 8*time.Second + countedLate + askAgain,
		},
		"a wait of at most 60s, longer than the bound": {
			before: func(n *testNode) { n.atMost("Acknowledged", time.Minute, time.Hour) },
			code:   200, prefix: "Deadline after 30.000s:  (a stated wait is longer than the bound)",
			counts: "Deadline", least: 30 * time.Second, most: 30 * time.Second,
		},
		"kept connections are to be waited for": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Idle, 1)
				n.ask = func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error) {
					time.Sleep(time.Second)
					return wire.BarrierStatus{Reason: "Acknowledged", IdleBoundMillis: 20_000}, nil
				}
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			after: func(n *testNode) {
				time.Sleep(14 * time.Second)
				n.k.Is(podTarget, health.Idle, 0)
			},
			code: 200, prefix: "Acknowledged", counts: "Acknowledged", least: 14 * time.Second, most: 14 * time.Second,
		},
		"kept connections are to be waited for, and stay": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Removed, 1)
				n.ask = func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error) {
					time.Sleep(10 * time.Second)
					return wire.BarrierStatus{Reason: "IdleBound", IdleBoundMillis: 20_000}, nil
				}
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "IdleBound", counts: "IdleBound", least: 20 * time.Second,
			most: 20*time.Second + countedLate,
		},
		"kept connections are to be waited for beyond the bound": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Idle, 1)
				n.ask = func(context.Context, wire.BarrierRequest) (wire.BarrierStatus, error) {
					return wire.BarrierStatus{Reason: "Acknowledged", IdleBoundMillis: 60_000}, nil
				}
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			code: 200, prefix: "IdleBound", counts: "IdleBound", least: 30 * time.Second, most: 30 * time.Second,
		},
		"the watch is late for the pod": {
			after: func(n *testNode) {
				time.Sleep(time.Second)
				n.k.Is(podTarget, health.Routing, 0)
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
				time.Sleep(100 * time.Millisecond)
				n.k.Is(podTarget, health.Idle, 0)
			},
			code: 200, prefix: "Local", counts: outLocal, least: time.Second + localAfter,
			most: time.Second + localAfter + askAgain,
		},
		"no such pod": {id: "id-b", code: 404, prefix: "Unknown", counts: outUnknown, least: 2 * time.Second,
			most: 2 * time.Second},
		"an id that is too long": {
			id: strings.Repeat("x", maxID+1), code: 404, prefix: "Unknown", counts: outUnknown,
		},
		"the watch is late for the deletion": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Idle, 0)
				n.pods.Set(agenttest.Hooked("a"), false)
				n.liven = func() (nodepods.Pod, bool, error) {
					p, _ := nodepods.Read(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second))
					p.Seen = time.Now()
					return p, false, nil
				}
			},
			code: 200, prefix: "Local", counts: outLocal, least: localAfter, most: localAfter + askAgain,
		},
		"the pod is gone": {
			before: func(n *testNode) {
				n.pods.Set(agenttest.Hooked("a"), false)
				n.liven = func() (nodepods.Pod, bool, error) { return nodepods.Pod{}, true, nil }
			},
			code: 200, prefix: "Gone", counts: outGone,
		},
		"a container is restarted: told": {
			before: func(n *testNode) {
				n.pods.Set(agenttest.Hooked("a"), false)
				n.liven = func() (nodepods.Pod, bool, error) {
					p, _ := nodepods.Read(agenttest.Hooked("a"))
					return p, false, nil
				}
				n.ask = func(_ context.Context, b wire.BarrierRequest) (wire.BarrierStatus, error) {
					if b.Terminating {
						n.Errorf("the pod is called terminating: %+v", b)
					}
					return wire.BarrierStatus{Reason: "Acknowledged"}, nil
				}
			},
			code: 200, prefix: "Restart", counts: outRestart,
		},
		"a container is restarted, and coordinators leave the hook to others": {
			before: func(n *testNode) {
				n.pods.Set(agenttest.Hooked("a"), false)
				n.liven = func() (nodepods.Pod, bool, error) {
					p, _ := nodepods.Read(agenttest.Hooked("a"))
					return p, false, nil
				}
				var taken atomic.Int64
				n.ask = func(_ context.Context, b wire.BarrierRequest) (wire.BarrierStatus, error) {
					// As a coordinator does.
					if b.ElapsedMillis*2 < b.BoundMillis {
						return wire.BarrierStatus{}, errors.New("another replica has more agents")
					}
					taken.Add(1)
					return wire.BarrierStatus{Reason: "Acknowledged"}, nil
				}
				n.Cleanup(func() {
					if taken.Load() == 0 {
						n.Error("no coordinator takes it")
					}
				})
			},
			code: 200, prefix: "Restart", counts: outRestart,
		},
		"a container is restarted, and no coordinator answers": {
			before: func(n *testNode) {
				n.pods.Set(agenttest.Hooked("a"), false)
				n.live = func(ctx context.Context, _ drain.Pod) (nodepods.Pod, bool, error) {
					<-ctx.Done()
					return nodepods.Pod{}, false, ctx.Err()
				}
				n.ask = func(ctx context.Context, _ wire.BarrierRequest) (wire.BarrierStatus, error) {
					<-ctx.Done()
					return wire.BarrierStatus{}, ctx.Err()
				}
			},
			code: 200, prefix: "Restart", counts: outRestart, least: 2 * time.Second, most: 2 * time.Second,
		},
		"the API server does not answer, and a coordinator knows of the deletion": {
			before: func(n *testNode) {
				n.pods.Set(agenttest.Hooked("a"), false)
				n.live = func(ctx context.Context, _ drain.Pod) (nodepods.Pod, bool, error) {
					<-ctx.Done()
					return nodepods.Pod{}, false, ctx.Err()
				}
				n.ask = func(_ context.Context, b wire.BarrierRequest) (wire.BarrierStatus, error) {
					if !b.Terminating {
						return wire.BarrierStatus{Terminating: true, GraceMillis: 25_000}, nil
					}
					// of the grace period, 5 s are the application's
					if b.Since.IsZero() || b.BoundMillis != 19_750 || b.ElapsedMillis != 1000 {
						n.Errorf("asked for %+v", b)
					}
					time.Sleep(5 * time.Second)
					return wire.BarrierStatus{Reason: "Acknowledged"}, nil
				}
			},
			code: 200, prefix: "Acknowledged", counts: "Acknowledged", least: 6 * time.Second,
			most: 6*time.Second + countedLate,
		},
		"the agent stops": {
			before: func(n *testNode) {
				n.k.Is(podTarget, health.Routing, 0)
				n.pods.Set(agenttest.Hooked("a"), false)
				n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
			},
			after: func(n *testNode) {
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				_ = n.Server.Run(ctx, 4*time.Second)
			},
			code: 200, prefix: "Stopping", counts: outStopping, least: 4 * time.Second, most: 4 * time.Second,
		},
		"the pod has no address": {
			before: func(n *testNode) {
				p := agenttest.Hooked("a")
				p.Status.PodIPs = nil
				n.pods.Set(p, false)
				n.pods.Set(agenttest.Deleted(p, 35*time.Second), false)
			},
			code: 200, prefix: "NoTargets", counts: outNoTargets,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newTestNode(t)
				if c.before != nil {
					c.before(n)
				}
				id := c.id
				if id == "" {
					id = "id-a"
				}
				first, second := n.hook(id), n.hook(id)
				if c.after != nil {
					c.after(n)
				}
				n.answered(first, c.code, c.prefix, c.least, c.most)
				n.answered(second, c.code, c.prefix, c.least, c.most)
				want := 1.0
				if c.code != 200 {
					want = 2
				}
				if c.most == 0 && c.code == 200 && n.ended(c.counts) == 2 {
					want = 2 // the first was over before the second came
				}
				n.counted(c.counts, want)
			})
		})
	}
}

// Without this, any client that can reach the node's address can keep its agent busy.
func TestWaitsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(t)
		var all []chan got
		for range maxUnknown + 5 {
			all = append(all, n.hook("unknown"))
		}
		codes := map[int]int{}
		for _, h := range all {
			codes[(<-h).code]++
		}
		if codes[429] != 5 || codes[404] != maxUnknown {
			t.Errorf("answers to strangers: %v", codes)
		}
		for i := range maxWaits {
			n.open[drain.UID(rune('a'+i))] = &wait{}
		}
		n.pods.Set(agenttest.Hooked("a"), false)
		n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
		if g := <-n.hook("id-a"); g.code != http.StatusTooManyRequests {
			t.Errorf("one more than the bound is answered %d %s", g.code, g.text)
		}
	})
}

// Without this, a client that can read a pod's annotation and reach the node's port could have a
// pod that is not deleted taken out of every directed gateway. Kubelets call from the node's own
// addresses, hooks of kind exec from their pod's.
func TestHooksComeFromTheNodeOrTheirPod(t *testing.T) {
	for from, code := range map[string]int{
		"127.0.0.1": 200, "127.9.9.9": 200, "::1": 200, "192.0.2.7": 200, "::ffff:192.0.2.7": 200, "2001:db8::7": 200,
		podTarget.Addr().String(): 200,
		"203.0.113.9":             403, "2001:db8::8": 403,
	} {
		t.Run(from, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newTestNode(t)
				n.addresses = func() ([]net.Addr, error) {
					return []net.Addr{
						&net.IPNet{IP: net.ParseIP("192.0.2.7"), Mask: net.CIDRMask(24, 32)},
						&net.IPNet{IP: net.ParseIP("2001:db8::7"), Mask: net.CIDRMask(64, 128)},
					}, nil
				}
				p := agenttest.Hooked("web")
				n.pods.Set(p, false)
				n.liven = func() (nodepods.Pod, bool, error) { is, _ := nodepods.Read(p); return is, false, nil }
				n.ask = func(_ context.Context, b wire.BarrierRequest) (wire.BarrierStatus, error) {
					n.asked = append(n.asked, b)
					return wire.BarrierStatus{Reason: "Acknowledged"}, nil
				}
				if g := <-n.hookFrom("id-web", from); g.code != code || len(n.asked) != 0 && code != 200 {
					t.Errorf("answered %d %s, and coordinators were asked %d times, want %d", g.code, g.text,
						len(n.asked), code)
				}
			})
		})
	}
}

// Strangers ask for ids that do not exist, from one address and from many. The hook of a pod that
// the watch does not know yet still finds room.
func TestStrangersDoNotFillThePlacesForUnknownIDs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(t)
		n.addresses = func() ([]net.Addr, error) { return nil, nil }
		for range 100 {
			n.hookFrom("unknown", "203.0.113.9")
		}
		other := n.hookFrom("id-b", "203.0.113.10")
		for i := range 100 {
			n.hookFrom("unknown", fmt.Sprintf("198.51.100.%d", i))
		}
		local := n.hook("id-a")
		n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
		if g := <-local; g.code != http.StatusOK {
			t.Errorf("a hook from the node is answered %d %s", g.code, g.text)
		}
		if g := <-other; g.code != http.StatusNotFound {
			t.Errorf("a hook from a second address is answered %d %s", g.code, g.text)
		}
		time.Sleep(2 * findTimeout)
		synctest.Wait()
		if len(n.strangers) > 0 {
			t.Errorf("places stay taken: %v", n.strangers)
		}
	})
}

// A probe has failed, and while the hook of that container waits the pod is deleted. Without this
// the hooks of the deletion share the answer of that one, and the pod is stopped without a barrier.
func TestADeletionWhileAContainerIsBeingStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(t)
		n.k.Is(podTarget, health.Routing, 0)
		p := agenttest.Hooked("a")
		n.pods.Set(p, false)
		n.liven = func() (nodepods.Pod, bool, error) { is, _ := nodepods.Read(p); return is, false, nil }
		n.ask = func(ctx context.Context, b wire.BarrierRequest) (wire.BarrierStatus, error) {
			n.asked = append(n.asked, b)
			if b.Terminating {
				time.Sleep(5 * time.Second)
				return wire.BarrierStatus{Reason: "Acknowledged"}, nil
			}
			<-ctx.Done()
			return wire.BarrierStatus{}, ctx.Err()
		}
		first := n.hook("id-a")
		time.Sleep(time.Second)
		n.pods.Set(agenttest.Deleted(p, 35*time.Second), false)
		second := n.hook("id-a")
		n.answered(second, 200, "Acknowledged", 5*time.Second, 5*time.Second)
		n.answered(first, 200, "Acknowledged", 6*time.Second, 6*time.Second)
		if len(n.asked) != 2 || n.asked[0].Terminating || !n.asked[1].Terminating {
			t.Errorf("asked %+v", n.asked)
		}
	})
}

// The streams of an agent break at one moment, and begin again: the kernel of this node alone is
// not enough meanwhile, nor while the coordinator that has been asked since waits for other nodes.
func TestNoCoordinatorForAMoment(t *testing.T) {
	start := time.Now()
	at := func(after time.Duration) time.Time { return start.Add(after) }
	idle := gateway.Reading{State: health.Idle, NoConnections: true}
	p, _ := nodepods.Read(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second))
	p.Seen = start
	w := NewWait(start, p)
	w.Look(start, idle)
	w.Answered(at(time.Millisecond), wire.BarrierStatus{}, client.ErrNoCoordinator)
	w.Look(at(100*time.Millisecond), idle)
	if w.Over || w.Ask != nil {
		t.Fatalf("over %t, asks %v", w.Over, w.Ask)
	}
	if w.Look(at(askAgain+time.Millisecond), idle); w.Ask == nil {
		t.Fatal("no coordinator is asked again")
	}
	if w.Look(at(10*time.Second), idle); w.Over {
		t.Fatalf("over although a coordinator is asked: %s", w.Outcome)
	}
	// That one dies. There may be another one.
	w.Answered(at(10*time.Second), wire.BarrierStatus{}, client.ErrNoCoordinator)
	if w.Look(at(12*time.Second), idle); w.Over || w.Ask == nil {
		t.Fatalf("over %t, asks %v", w.Over, w.Ask)
	}
	w.Answered(at(12*time.Second), wire.BarrierStatus{}, client.ErrNoCoordinator)
	if w.Look(at(10*time.Second+localAfter), idle); !w.Over || w.Outcome != outLocal {
		t.Fatalf("over %t, %s", w.Over, w.Outcome)
	}
}

// An agent that has just started has not listed the pods of its node yet.
func TestHooksWaitForTheFirstList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(t)
		n.Server.pods = nodepods.New(func(nodepods.Pod) {}, slog.New(slog.DiscardHandler))
		hook := n.hook("id-a")
		time.Sleep(startTimeout - time.Second)
		n.k.Is(podTarget, health.Idle, 0)
		n.pods.Set(agenttest.Deleted(agenttest.Hooked("a"), 35*time.Second), false)
		took := startTimeout - time.Second + localAfter
		n.answered(hook, 200, "Local", took, took+askAgain)
	})
}

// Clocks of nodes are wrong, and no coordinator is there: what the kernel says counts by this
// node's clock, too, also if the agent has started since the deletion.
func TestTheKernelAloneByThisNodesClock(t *testing.T) {
	for name, known := range map[string]bool{"it has heard of the deletion": true, "it has started since": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newTestNode(t)
				n.k.Is(podTarget, health.Kept, 0)
				p := agenttest.Hooked("a")
				if known {
					n.pods.Set(p, false)
				}
				gone := agenttest.Deleted(p, 35*time.Second)
				ahead := metav1.NewTime(gone.DeletionTimestamp.Add(time.Hour))
				gone.DeletionTimestamp = &ahead
				n.pods.Set(gone, false)
				n.answered(n.hook("id-a"), 200, "Local", localAfter, localAfter+askAgain)
				n.k.Is(podTarget, health.Routing, 0)
				n.answered(n.hook("id-a"), 200, "Bound", 30*time.Second-localAfter-askAgain, 30*time.Second-localAfter)
			})
		})
	}
}

// Hooks that come while the agent ends are answered at once, and no wait begins that the agent
// would not wait for: the race detector finds those.
func TestHooksThatComeAtTheEnd(t *testing.T) {
	n := newTestNode(t)
	n.k.Is(podTarget, health.Routing, 1)
	for _, name := range []string{"a", "b"} {
		n.pods.Set(agenttest.Deleted(agenttest.Hooked(name), 35*time.Second), false)
	}
	ask := func(name string) string {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/v1/wait/id-"+name, nil)
		r.RemoteAddr = "127.0.0.1:4711"
		n.Handler().ServeHTTP(w, r)
		return w.Body.String()
	}
	first := make(chan string, 1)
	go func() { first <- ask("a") }()
	for n.count() == 0 {
		time.Sleep(time.Millisecond)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	ended := make(chan error, 1)
	go func() { ended <- n.Server.Run(ctx, 0) }()
	if text := <-first; !strings.HasPrefix(text, "Stopping") {
		t.Errorf("the hook that waited is told %q", text)
	}
	if text := ask("b"); !strings.HasPrefix(text, "Stopping") {
		t.Errorf("the hook that came late is told %q", text)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if got := n.ended(outStopping); got != 2 {
		t.Errorf("%v hooks are counted, want 2", got)
	}
}

// Clocks of nodes are wrong: what counts is when this node heard of the deletion.
func TestTheBoundRunsByThisNodesClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(t)
		n.k.Is(podTarget, health.Routing, 0)
		p := agenttest.Hooked("a")
		n.pods.Set(p, false)
		gone := agenttest.Deleted(p, 35*time.Second)
		ahead := metav1.NewTime(gone.DeletionTimestamp.Add(-time.Hour))
		gone.DeletionTimestamp = &ahead
		n.pods.Set(gone, false)
		h := n.hook("id-a")
		time.Sleep(10 * time.Second)
		// Repeated by the watch, it does not begin again.
		n.pods.Set(gone.DeepCopy(), false)
		n.answered(h, 200, "Bound", 30*time.Second, 30*time.Second)
		h = n.hook("id-a")
		n.answered(h, 200, "NoTime", 0, 0)
		if b := n.asked[0]; b.BoundMillis != 29_750 || b.ElapsedMillis != 0 || !b.Terminating {
			t.Errorf("asked %+v", b)
		}
		// So it does if the agent has not known the pod before. Its hook is not over at once
		// because the clocks differ.
		for uid, apart := range map[types.UID]time.Duration{"behind": time.Hour, "ahead": -time.Hour} {
			p := agenttest.Deleted(agenttest.Hooked("b"), 35*time.Second)
			p.UID, p.Annotations["lameduck.io/barrier-id"] = uid, string(uid)
			at := metav1.NewTime(p.DeletionTimestamp.Add(apart))
			p.DeletionTimestamp = &at
			n.pods.Set(p, false)
			n.answered(n.hook(string(uid)), 200, "Bound", 30*time.Second, 30*time.Second)
		}
	})
}
