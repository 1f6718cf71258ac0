package admission

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/test/pipenet"

	agentclient "github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/internal/agent/metrics"
)

// haproxy is an agent whose gateway stops routing to a pod within 100 ms, and keeps the last one.
type haproxy struct {
	*agentclient.Client
	// unrouted is called for each pod that is excluded, and reports whether it can be removed.
	unrouted func(drain.UID) bool

	mu   sync.Mutex
	of   map[drain.UID]time.Time
	kept map[drain.UID]bool
}

const letsGo = 100 * time.Millisecond

func (h *haproxy) Exclude(_ time.Time, pod drain.Pod, _ string, _, _ time.Time) {
	h.mu.Lock()
	_, known := h.of[pod.UID]
	if !known {
		h.of[pod.UID], h.kept[pod.UID] = time.Now(), !h.unrouted(pod.UID)
	}
	h.mu.Unlock()
	if !known {
		time.AfterFunc(letsGo, h.Wake)
	}
}

func (h *haproxy) Readmit(_ time.Time, uid drain.UID, _ string, _ bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.of, uid)
}

func (h *haproxy) Renew(time.Time, string, time.Time) {}

func (h *haproxy) Held(string) []drain.UID {
	h.mu.Lock()
	defer h.mu.Unlock()
	var uids []drain.UID
	for uid := range h.of {
		uids = append(uids, uid)
	}
	return uids
}

func (h *haproxy) Reports(time.Time) []drain.Report {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []drain.Report
	for uid, at := range h.of {
		r := drain.Report{UID: uid, Generation: "1", State: drain.Routing}
		switch {
		case h.kept[uid]:
			r.State, r.Kept, r.NoConnections = drain.Kept, "shop/web", true
		case time.Since(at) >= letsGo:
			r.State = drain.Idle
		}
		all = append(all, r)
	}
	return all
}

// anybody is an authenticator that knows one agent.
type anybody struct{}

func (anybody) Authenticate(context.Context, string) (coordinator.Identity, error) {
	return coordinator.Identity{Agent: "agent-1", Name: "edge/haproxy-1", Username: "edge", Everywhere: true}, nil
}

func (anybody) MayAcknowledge(context.Context, coordinator.Identity, string) (bool, error) {
	return true, nil
}

func (anybody) MayAskBarriers(context.Context, coordinator.Identity) (bool, error) { return true, nil }

// replicaSet is one of n ready pods behind shop/web, with the real coordinator, ledger, index and
// wire. Pods that may go are terminating 20 ms later, and EndpointSlices say so after 200 ms more.
type replicaSet struct {
	*Handler
	t     *testing.T
	coord *coordinator.Coordinator
	index *endpoints.Index

	mu       sync.Mutex
	pods     []*corev1.Pod
	going    map[drain.UID]bool
	excluded map[drain.UID]bool
	rounds   []string
	version  int
}

func (r *replicaSet) apply() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.version++
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-1", ResourceVersion: fmt.Sprint(r.version),
			Labels: map[string]string{discovery.LabelServiceName: "web"}},
		AddressType: discovery.AddressTypeIPv4,
	}
	for i, p := range r.pods {
		going := r.going[drain.UID(p.UID)]
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.0.0.%d", i+1)},
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", UID: p.UID},
			Conditions: discovery.EndpointConditions{Ready: ptr.To(!going), Terminating: ptr.To(going)},
		})
	}
	r.index.Apply(time.Now(), s)
}

// unrouted checks, at each pod that the agent is told of, that no more than half of those that are
// left are unrouted.
func (r *replicaSet) unrouted(uid drain.UID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.ContainsFunc(r.pods, func(p *corev1.Pod) bool {
		other := drain.UID(p.UID)
		return other != uid && !r.excluded[other] && !r.going[other]
	}) {
		return false
	}
	r.excluded[uid] = true
	unrouted := 0
	for of := range r.excluded {
		if !r.going[of] {
			unrouted++
		}
	}
	left := len(r.pods) - len(r.going)
	if unrouted > max(1, left/2) {
		r.t.Errorf("%d of %d are unrouted", unrouted, left)
	}
	r.rounds = append(r.rounds, fmt.Sprintf("%d/%d", unrouted, left))
	return true
}

func newReplicaSet(t *testing.T, n int) *replicaSet {
	w := newWorld(t)
	log := slog.New(slog.DiscardHandler)
	r := &replicaSet{Handler: w.Handler, t: t, index: endpoints.NewIndex(), going: map[drain.UID]bool{},
		excluded: map[drain.UID]bool{}}
	w.reader.objects = []client.Object{w.ns, w.node}
	for i := range n {
		p := runningPod(fmt.Sprint("p", i))
		p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "web", UID: "rs",
			Controller: ptr.To(true)}}
		r.pods = append(r.pods, p)
		w.reader.objects = append(w.reader.objects, p)
	}
	r.coord = coordinator.New(drain.Holder{Replica: "r", Epoch: "1"}, drain.DefaultTimes(), coordinator.Options{
		MaxHolds: 32, MaxHoldsPerOwner: 8, Authenticate: anybody{}, Log: log,
		Metrics: coordinator.NewMetrics(prometheus.NewRegistry()),
	})
	r.Cluster.Ledger, r.Cluster.Slices, r.Handler.Events = r.coord, r.index, quiet{}
	r.apply()

	listener := pipenet.NewListener()
	transport := &http.Transport{DialContext: listener.Dial}
	agent := &haproxy{Client: agentclient.New(), of: map[drain.UID]time.Time{}, kept: map[drain.UID]bool{},
		unrouted: r.unrouted}
	agent.HTTP, agent.Log, agent.Exclusions = &http.Client{Transport: transport}, log, agent
	agent.Token = func() (string, error) { return "t", nil }
	agent.Boot, agent.Gateway, agent.Observer = "1", "haproxy", metrics.NewClient(prometheus.NewRegistry())
	agent.Routes = []drain.Route{{Service: drain.Service{Namespace: "shop", Name: "web"}, Via: drain.Endpoints,
		Kind: drain.Directed}}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		_ = serve.All(ctx, serve.Task{Name: "coordinator", Run: r.coord.Run},
			serve.Server{Name: "agents", Listener: listener, Handler: r.coord.Handler(), Grace: time.Second,
				Stop: r.coord.Stop}.Task())
	})
	running.Go(func() { _ = agent.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		transport.CloseIdleConnections()
	})
	r.coord.Expect([]drain.Expected{{ID: "agent-1", Name: "edge/haproxy-1", Ready: true, Label: drain.LabelDirected}})
	agent.Replicas([]string{"http://coordinator"})
	<-agent.Learned()
	return r
}

type quiet struct{}

func (quiet) Event(*corev1.Pod, bool, string, string) {}

// delete asks for a deletion as client-go in a ReplicaSet's controller does until it is carried
// out, and returns why it was, after how long.
func (r *replicaSet) delete(pod *corev1.Pod) (reason string, took time.Duration, err error) {
	began := time.Now()
	for range 11 {
		q := &request{operation: Delete, namespace: "shop", name: pod.Name, pod: pod, username: replicaSets,
			timeout: 5 * time.Second}
		o, _ := r.decide(context.Background(), time.Now(), q)
		if !o.Allowed {
			if o.RetryAfter == 0 {
				o.RetryAfter = 10 * time.Second // its own back-off
			}
			time.Sleep(o.RetryAfter) // in a bubble
			continue
		}
		took = time.Since(began)
		time.Sleep(20 * time.Millisecond) // in a bubble
		r.mu.Lock()
		r.going[drain.UID(pod.UID)] = true
		r.mu.Unlock()
		r.coord.GatePassed(drain.UID(pod.UID))
		time.AfterFunc(200*time.Millisecond, r.apply)
		return o.Reason, took, nil
	}
	return "", 0, errors.New("the controller gave up")
}

// All pods of a Service are deleted at one moment: at most half of those that are left are unrouted
// at one time, each round begins when the one before is terminating, the last pod is routed to its
// end, and nothing waits for the deadline. Without room for those that follow, or with a list of
// targets that is not looked at again, they wait until the deadline.
func TestScaleToZeroGoesInRounds(t *testing.T) {
	for _, n := range []int{1, 2, 3, 10, 40} {
		synctest.Test(t, func(t *testing.T) {
			r := newReplicaSet(t, n)
			var deletions sync.WaitGroup
			var mu sync.Mutex
			reasons := map[string]int{}
			var last time.Duration
			for _, p := range r.pods {
				deletions.Go(func() {
					reason, took, err := r.delete(p)
					mu.Lock()
					defer mu.Unlock()
					if err != nil {
						t.Errorf("%s: %v", p.Name, err)
					}
					reasons[reason]++
					last = max(last, took)
				})
			}
			deletions.Wait()
			t.Logf("%d pods: %s, %v, unrouted/left %s", n, last, reasons, strings.Join(r.rounds, " "))
			if reasons[string(LastTarget)] != 1 || reasons[drain.Acknowledged.String()] != n-1 {
				t.Errorf("%d pods went for %v", n, reasons)
			}
			if last > 10*time.Second {
				t.Errorf("the last of %d pods went after %s", n, last)
			}
		})
	}
}

// What waits for room is a disruption to come: evictions must not find a budget's room for it a
// second time.
func TestQueuedDrainsCountForBudgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newReplicaSet(t, 2)
		uids := []drain.UID{"uid-p0", "uid-p1"}
		for _, p := range r.pods {
			s := subject{pod: p}
			r.Cluster.live(time.Now(), &s)
			r.coord.Unroute(s.request())
		}
		first, second := r.coord.Pod(uids[0]), r.coord.Pod(uids[1])
		if !first.Draining || first.Queued || !second.Queued {
			t.Errorf("draining: %+v, %+v", first, second)
		}
		s := subject{pod: r.pods[1]}
		r.Cluster.live(time.Now(), &s)
		if got, want := r.Cluster.fullService(s).String(),
			"1 of 2 targets of Service shop/web are being drained here"; !strings.HasPrefix(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	})
}

func TestTheRequestNamesItsOwner(t *testing.T) {
	w := newWorld(t)
	w.ask(deletion(w.a))
	w.a.OwnerReferences = []metav1.OwnerReference{
		{Kind: "Vineyard", UID: "v"}, {Kind: "ReplicaSet", UID: "rs-1", Controller: ptr.To(true)},
	}
	w.ask(deletion(w.a))
	w.ask(deletion(w.a, options(`{"gracePeriodSeconds":0}`)))
	var owners []string
	for _, r := range w.ledger.requests {
		owners = append(owners, r.Owner)
		if want := []drain.UID{"uid-a", "uid-b"}; len(r.Targets) != 1 || !slices.Equal(r.Targets[0].Usable, want) {
			t.Errorf("targets %v", r.Targets)
		}
	}
	if want := []string{"", "ReplicaSet/rs-1", "ReplicaSet/rs-1"}; !slices.Equal(owners, want) {
		t.Errorf("owners %q, want %q", owners, want)
	}
}

// What a held call asks with must be what EndpointSlices say now, and what it asked with before
// must stay as it was: the ledger keeps it.
func TestTheTargetsOfAHeldCallAreLookedAtAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.ledger.answer = func(until time.Time) (drain.Status, bool, error) {
			time.Sleep(time.Until(until))
			w.slices.usable[webService] = []health.UID{"uid-a", "uid-c"}
			return drain.Status{Phase: drain.Queued, Deadline: time.Now().Add(time.Minute)}, true, nil
		}
		w.ask(deletion(w.a))
		var asked []string
		for _, r := range w.ledger.requests {
			asked = append(asked, fmt.Sprint(r.Targets[0].Usable))
		}
		if len(asked) != 8 || asked[0] != "[uid-a uid-b]" || asked[1] != "[uid-a uid-c]" || asked[7] != asked[1] {
			t.Errorf("asked with %q", asked)
		}
	})
}

func TestQueuedAndSuspendedAreSaid(t *testing.T) {
	w := newWorld(t)
	w.slices.usable[webService] = []health.UID{"uid-a", "uid-b", "uid-c", "uid-d"}
	w.ledger.draining = map[drain.UID]time.Time{"uid-a": time.Now(), "uid-b": time.Now(), "uid-c": time.Now(),
		"uid-x": time.Now()}
	w.ledger.queued = map[drain.UID]bool{"uid-a": true}
	const crowded = "2 of 4 targets of Service shop/web are being drained here; at most half at a time, counting " +
		"those of other replicas"
	for name, c := range map[string]struct {
		set     func()
		counted string
		said    string
	}{
		"queued": {func() { w.status(drain.Queued, drain.ReasonNone, 3*time.Second, true, nil, silent) }, "deny Queued",
			"Lameduck: pod shop/a has been queued for 3.0s: " + crowded + ". It is deleted when its turn has " +
				"come and its gateways have stopped routing to it, in 27.0s at the latest."},
		"queued, too many": {func() {
			w.status(drain.Queued, drain.ReasonNone, 3*time.Second, false, coordinator.ErrTooManyHolds, silent)
		}, "deny TooManyHolds", "has been queued for 3.0s: " + crowded},
		"too many of its owner": {func() {
			w.status(drain.Unrouting, drain.ReasonNone, 3*time.Second, false, coordinator.ErrTooManyOfOwner, silent)
		}, "deny TooManyOfOwner", "is still routed by 1 of 2 gateways"},
		"queued to the deadline": {func() {
			w.status(drain.Released, drain.Deadline, 30*time.Second, true, nil,
				silent)
		}, "allow Deadline",
			"deleted after 30.0s while gateways still route to it (Deadline): its drain was queued: " + crowded},
		"suspended": {func() { w.suspended(drain.Suspended) }, "allow Suspended",
			"deleted without waiting for gateways that did not acknowledge several drains in a row (Suspended): " +
				"edge/haproxy-1 (routing)"},
		"others have acknowledged": {func() { w.suspended(drain.Acknowledged) }, "allow Suspended",
			"(Suspended): edge/haproxy-1 (routing)"},
	} {
		w.registry = prometheus.NewRegistry()
		w.Handler.Metrics, w.events, w.Handler.Times = NewMetrics(w.registry), nil, drain.DefaultTimes()
		c.set()
		got := w.ask(deletion(w.a))
		said := strings.Join(got.Warnings, "\n")
		if !got.Allowed {
			said = got.Result.Message
		}
		if !strings.Contains(said, c.said) || len(w.events) != 1 {
			t.Errorf("%s: %q, want %q; events %v", name, said, c.said, w.events)
		}
		if want := []string{"delete " + c.counted + " 1"}; !slices.Equal(w.counted(), want) {
			t.Errorf("%s: counted %q, want %q", name, w.counted(), want)
		}
	}
}

// A gateway that is away and not waited for is named in the log, as a possible reason of a lost
// request. It is no warning: a cluster with a node that is not ready would have one at each
// deletion.
func TestWhoIsAwayIsNamed(t *testing.T) {
	for _, reason := range []drain.Reason{drain.Acknowledged, drain.NoAgents} {
		w := newWorld(t)
		var log bytes.Buffer
		w.Log = slog.New(slog.NewTextHandler(&log, nil))
		w.status(drain.Released, reason, 0, false, nil)
		answer := w.ledger.answer
		w.ledger.answer = func(until time.Time) (drain.Status, bool, error) {
			status, held, err := answer(until)
			status.Away = []drain.Waiting{{Agent: "agent-2", Name: "edge/haproxy-2"}}
			return status, held, err
		}
		if got := w.ask(deletion(w.a)); !got.Allowed || len(got.Warnings) != 0 || len(w.events) != 0 {
			t.Errorf("%s: %+v, events %v", reason, got, w.events)
		}
		if !strings.Contains(log.String(), "edge/haproxy-2 (not connected)") ||
			!strings.Contains(log.String(), "reason="+reason.String()) {
			t.Errorf("%s: the log says %s", reason, log.String())
		}
	}
}

// suspended makes the next drain one that a suspended agent has not acknowledged.
func (w *world) suspended(reason drain.Reason) {
	w.status(drain.Released, reason, 0, false, nil)
	answer := w.ledger.answer
	w.ledger.answer = func(until time.Time) (drain.Status, bool, error) {
		status, held, err := answer(until)
		status.Suspended = []drain.Waiting{silent}
		return status, held, err
	}
}
