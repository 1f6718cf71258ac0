package admission

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// gathered are the facts of q in the world.
func (w *world) gathered(q *request) Facts {
	w.t.Helper()
	f, s, err := w.Cluster.gather(w.t.Context(), time.Now(), q)
	if err == nil {
		_, err = w.Cluster.judge(w.t.Context(), &f, &s, true)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return f
}

func (w *world) deleteA() *request {
	return &request{operation: Delete, namespace: "shop", name: "a", pod: w.a.DeepCopy(), username: "jane"}
}

func (w *world) evictA() *request {
	return &request{operation: Evict, namespace: "shop", name: "a", username: "jane"}
}

// Each row changes one thing in the cluster or in the review, and must change its fact and no
// other.
func TestGather(t *testing.T) {
	zero, two := int64(0), int64(2)
	condition := func(kind corev1.PodConditionType, status corev1.ConditionStatus,
		since time.Duration) corev1.PodCondition {
		return corev1.PodCondition{Type: kind, Status: status,
			LastTransitionTime: metav1.NewTime(time.Now().Add(-since))}
	}
	ready := Facts{Operation: Delete, Listed: true, Ready: true, Agents: 1, CouldRoute: true}
	for name, c := range map[string]struct {
		set    func(w *world, q *request)
		change func(f *Facts)
	}{
		"nothing": {func(*world, *request) {}, func(*Facts) {}},
		"dry run": {func(_ *world, q *request) { q.dryRun = true }, func(f *Facts) {
			f.DryRun = true
		}},
		"excluded by flag": {func(w *world, _ *request) { w.Cluster.Excluded = []string{"shop"} },
			func(f *Facts) { f.Excluded = true }},
		"off by the namespace's label": {func(w *world, q *request) {
			w.ns.Labels[keys.Mode], q.pod.Labels[keys.Mode] = keys.Off, keys.Enforce
		}, func(f *Facts) { f.Mode = keys.Off }},
		"off by the pod's": {func(w *world, q *request) {
			w.ns.Labels[keys.Mode], q.pod.Labels[keys.Mode] = keys.Enforce, keys.Off
		}, func(f *Facts) { f.Mode = keys.Off }},
		"another value of the label": {func(w *world, _ *request) {
			w.ns.Labels[keys.Mode], w.Cluster.Mode = "disabled", keys.Observe
		}, func(f *Facts) { f.Mode = keys.Observe }},
		"enforced where the default is to observe": {func(w *world, _ *request) {
			w.ns.Labels[keys.Mode], w.Cluster.Mode = keys.Enforce, keys.Observe
		}, func(*Facts) {}},
		"namespace unknown": {func(w *world, _ *request) { w.ns.Name = "other" }, func(*Facts) {}},
		"break glass": {func(_ *world, q *request) { q.pod.Annotations[BreakGlassAnnotation] = "true" },
			func(f *Facts) { f.BreakGlass = true }},
		"no break glass": {func(_ *world, q *request) { q.pod.Annotations[BreakGlassAnnotation] = "no" },
			func(*Facts) {}},
		"not in the cache": {func(w *world, _ *request) { w.a.Name = "other" }, func(f *Facts) {
			*f = Facts{Operation: Delete, Unknown: true}
		}},
		"another UID": {func(_ *world, q *request) { q.pod.UID = "uid-older" }, func(f *Facts) {
			*f = Facts{Operation: Delete, Unknown: true}
		}},
		"terminating": {func(_ *world, q *request) {
			q.pod.DeletionTimestamp = &metav1.Time{Time: time.Now()}
		}, func(f *Facts) { f.Terminating = true }},
		"succeeded": {func(_ *world, q *request) { q.pod.Status.Phase = corev1.PodSucceeded },
			func(f *Facts) { f.Finished = true }},
		"failed": {func(_ *world, q *request) { q.pod.Status.Phase = corev1.PodFailed },
			func(f *Facts) { f.Finished = true }},
		"pending": {func(_ *world, q *request) { q.pod.Status.Phase = corev1.PodPending },
			func(f *Facts) { f.NotRunning = true }},
		"unscheduled": {func(_ *world, q *request) { q.pod.Spec.NodeName = "" }, func(f *Facts) {
			f.NotRunning = true
		}},
		"mirror pod": {func(_ *world, q *request) {
			q.pod.Annotations[corev1.MirrorPodAnnotationKey] = "x"
		}, func(f *Facts) { f.Mirror = true }},
		"forced": {func(_ *world, q *request) { q.grace = &zero }, func(f *Facts) {
			f.Forced = true
		}},
		"the pod's own grace is none": {func(_ *world, q *request) {
			q.grace, q.pod.Spec.TerminationGracePeriodSeconds = &zero, &zero
		}, func(*Facts) {}},
		"a short grace period": {func(_ *world, q *request) { q.grace = &two }, func(*Facts) {}},
		"namespace terminating": {func(w *world, _ *request) {
			w.ns.DeletionTimestamp = &metav1.Time{Time: time.Now()}
		}, func(f *Facts) { f.NamespaceTerminating = true }},
		"collection by the namespace controller": {
			func(_ *world, q *request) {
				q.collection, q.username = true, "system:serviceaccount:kube-system:namespace-controller"
			},
			func(f *Facts) { f.NamespaceTerminating = true }},
		"collection by the namespace controller, namespace unknown": {
			func(w *world, q *request) {
				w.ns.Name = "other"
				q.collection, q.username = true, "system:serviceaccount:kube-system:namespace-controller"
			},
			func(f *Facts) { f.NamespaceTerminating = true }},
		"collection by a person": {func(_ *world, q *request) { q.collection = true }, func(*Facts) {}},
		"disruption target": {func(_ *world, q *request) {
			q.pod.Status.Conditions = append(q.pod.Status.Conditions,
				condition(corev1.DisruptionTarget, corev1.ConditionTrue, 0))
		}, func(f *Facts) { f.DisruptionTarget = true }},
		"no disruption target": {func(_ *world, q *request) {
			q.pod.Status.Conditions = append(q.pod.Status.Conditions,
				condition(corev1.DisruptionTarget, corev1.ConditionFalse, 0))
		}, func(*Facts) {}},
		"node not ready": {func(w *world, _ *request) {
			w.node.Status.Conditions[0].Status = corev1.ConditionFalse
		}, func(f *Facts) { f.NodeLost = true }},
		"node silent": {func(w *world, _ *request) {
			w.node.Status.Conditions[0].Status = corev1.ConditionUnknown
		}, func(f *Facts) { f.NodeLost = true }},
		"node gone": {func(w *world, _ *request) { w.node.Name = "node-2" }, func(f *Facts) {
			f.NodeLost = true
		}},
		"node out of service": {func(w *world, _ *request) {
			w.node.Spec.Taints = []corev1.Taint{{Key: outOfService}}
		}, func(f *Facts) { f.NodeLost = true }},
		"node with other taints": {func(w *world, _ *request) {
			w.node.Spec.Taints = []corev1.Taint{{Key: "dedicated"}}
		}, func(*Facts) {}},
		"not listed": {func(w *world, _ *request) { delete(w.slices.of, "uid-a") },
			func(f *Facts) { f.Listed, f.Ready, f.CouldRoute = false, false, false }},
		"listed a moment ago": {func(w *world, _ *request) {
			w.slices.of["uid-a"] = []endpoints.Listing{{Service: webService, LeftAt: time.Now()}}
		},
			func(f *Facts) { f.Ready = false }},
		"ready in one of two Services": {func(w *world, _ *request) {
			other := webService
			other.Name = "admin"
			w.slices.of["uid-a"] = []endpoints.Listing{{Service: other}, {Service: webService, Ready: true}}
		}, func(*Facts) {}},
		"not ready": {func(w *world, q *request) {
			w.slices.of["uid-a"][0].Ready = false
			q.pod.Status.Conditions[0] = condition(corev1.PodReady, corev1.ConditionFalse, 20*time.Second)
		}, func(f *Facts) { f.Ready, f.NotReadyFor = false, 20*time.Second }},
		"never ready": {func(w *world, q *request) {
			w.slices.of["uid-a"][0].Ready = false
			q.pod.Status.Conditions = nil
		}, func(f *Facts) { f.Ready, f.NotReadyFor = false, longNotReady }},
		"no agents": {func(w *world, _ *request) { w.ledger.expected = 0 }, func(f *Facts) { f.Agents = 0 }},
		"no gateway routes it": {func(w *world, _ *request) { w.ledger.routed = nil }, func(f *Facts) {
			f.CouldRoute = false
		}},
		"allowed in vain": {func(w *world, _ *request) { w.ledger.refused = 3 }, func(f *Facts) { f.Refused = 3 }},
		"the only target": {func(w *world, _ *request) { w.slices.usable[webService] = []health.UID{"uid-a"} },
			func(f *Facts) { f.LastOf = "shop/web" }},
		"the other drains": {func(w *world, _ *request) {
			w.ledger.draining["uid-b"] = time.Now()
		}, func(*Facts) {}},
		"an endpoint that is no pod is a target too": {func(w *world, _ *request) {
			w.slices.usable[webService] = []health.UID{"", "uid-a"}
		}, func(*Facts) {}},
		"it drains itself": {func(w *world, _ *request) { w.ledger.draining["uid-a"] = time.Now() }, func(f *Facts) {
			f.Draining = true
		}},
		"it has left its Services and drains": {func(w *world, _ *request) {
			delete(w.slices.of, "uid-a")
			w.ledger.draining["uid-a"] = time.Now()
		}, func(f *Facts) { f.Listed, f.Ready, f.Draining = false, false, true }},
		"the only one, and not ready": {func(w *world, _ *request) {
			w.slices.of["uid-a"][0].Ready = false
			w.slices.usable[webService] = nil
		}, func(f *Facts) { f.Ready = false }},
		"cold": {func(w *world, _ *request) { w.cold = true }, func(f *Facts) {
			*f = Facts{Operation: Delete, Cold: true}
		}},
		"cold, and the pod says enough": {func(w *world, q *request) {
			w.cold = true
			w.reader.broken = "*v1.Pod" // an unsynced cache must not be asked
			q.pod.Status.Phase = corev1.PodSucceeded
		}, func(f *Facts) { *f = Facts{Operation: Delete, Cold: true, Finished: true} }},
		"cold, and the namespace goes": {func(w *world, q *request) {
			w.cold = true
			q.collection, q.username = true, "system:serviceaccount:kube-system:namespace-controller"
		}, func(f *Facts) { *f = Facts{Operation: Delete, Cold: true, NamespaceTerminating: true} }},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			q := w.deleteA()
			c.set(w, q)
			want := ready
			c.change(&want)
			if want.Mode == "" {
				want.Mode = keys.Enforce
			}
			got := w.gathered(q)
			if got.Up.Round(time.Minute) != time.Hour {
				t.Errorf("up %s", got.Up)
			}
			within := cmp.Comparer(func(a, b time.Duration) bool { return (a - b).Abs() < time.Second })
			if diff := cmp.Diff(want, got, within, cmpopts.IgnoreFields(Facts{}, "Up")); diff != "" {
				t.Errorf("facts (-want +got):\n%s", diff)
			}
			if len(w.ledger.calls) != 0 {
				t.Errorf("gathering changes something: %q", w.ledger.calls)
			}
		})
	}
}

// An eviction brings no pod: the cache has it.
func TestGatherLooksUpThePodOfAnEviction(t *testing.T) {
	w := newWorld(t)
	w.a.Annotations[BreakGlassAnnotation] = "true"
	f, s, err := w.Cluster.gather(t.Context(), time.Now(), w.evictA())
	if err != nil || !f.BreakGlass || !f.Ready || f.Unknown {
		t.Errorf("%+v, %v", f, err)
	}
	if diff := cmp.Diff(drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"}, s.drainPod()); diff != "" {
		t.Errorf("pod (-want +got):\n%s", diff)
	}
	want := coordinator.Request{
		Pod: drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"},
		Targets: []drain.Targets{{Service: drain.Service{Namespace: "shop", Name: "web"},
			Usable: []drain.UID{"uid-a", "uid-b"}}},
		Place: drain.Place{Evicted: true},
	}
	if diff := cmp.Diff(want, s.request()); diff != "" {
		t.Errorf("request (-want +got):\n%s", diff)
	}
	q := w.evictA()
	q.name = "unknown"
	if f, s, err := w.Cluster.gather(t.Context(), time.Now(), q); err != nil || !f.Unknown || s.pod != nil {
		t.Errorf("unknown: %+v, pod %v, %v", f, s.pod, err)
	}
	w.cold = true
	if f, s, err := w.Cluster.gather(t.Context(), time.Now(), w.evictA()); err != nil || !f.Cold || s.pod != nil {
		t.Errorf("cold: %+v, pod %v, %v", f, s.pod, err)
	}
}

// The watch of pods is behind: a pod of a StatefulSet has come back under its name and is routed,
// and the cache shows the former one, or none. Without a live look at which pod has the name, the
// new one goes while gateways route to it. EndpointSlices may be as far behind, and the Services
// that select the pod count.
func TestTheFormerPodOfANameAnswersNothing(t *testing.T) {
	const drained = "drain shop/a uid-new [shop/web]"
	web := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec: corev1.ServiceSpec{Selector: map[string]string{"app": "web"}}}
	for name, c := range map[string]struct {
		cache func(w *world)
		live  func(w *world, live *reader)
		want  string // what is counted
		calls []string
	}{
		"terminating": {func(w *world) { w.a.DeletionTimestamp = &metav1.Time{Time: time.Now()} }, nil,
			"Acknowledged", []string{drained}},
		"finished": {func(w *world) { w.a.Status.Phase = corev1.PodFailed }, nil,
			"Acknowledged", []string{drained}},
		"not started": {func(w *world) { w.a.Status.Phase = corev1.PodPending }, nil,
			"Acknowledged", []string{drained}},
		"not there": {func(w *world) { w.a.Name = "z" }, nil, "Acknowledged", []string{drained}},
		"really over": {func(w *world) { w.a.Status.Phase = corev1.PodFailed }, func(w *world, live *reader) {
			live.objects[0] = w.a
		}, "Finished", nil},
		"really gone": {func(w *world) { w.a.DeletionTimestamp = &metav1.Time{Time: time.Now()} },
			func(_ *world, live *reader) { live.objects = nil }, "UnknownPod", nil},
		"not readable": {func(w *world) { w.a.DeletionTimestamp = &metav1.Time{Time: time.Now()} },
			func(_ *world, live *reader) { live.broken = "*v1.Pod" }, "NoFacts", nil},
		"running": {func(*world) {}, nil, "Acknowledged", []string{drained}},
		"running, and its slices are not known": {func(w *world) { delete(w.slices.of, "uid-new") }, nil,
			"Acknowledged", []string{drained}},
		"running, and no Service selects it": {func(w *world) {
			delete(w.slices.of, "uid-new")
		}, func(_ *world, live *reader) { live.objects[0].SetLabels(nil) }, "NotListed", nil},
		"running, and Services are not known": {func(w *world) {
			delete(w.slices.of, "uid-new")
			w.Cluster.Services = func() bool { return false }
		}, nil, "NotListed", nil},
		"running, and the API server does not answer": {func(*world) {}, func(_ *world, live *reader) {
			live.hangs = true
		}, "Acknowledged", []string{"drain shop/a uid-a [shop/web]"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			now := runningPod("a")
			now.UID = "uid-new"
			w.slices.of["uid-new"], w.slices.usable[webService] = w.slices.of["uid-a"], []health.UID{"uid-b", "uid-new"}
			live := &reader{objects: []client.Object{now}}
			w.reader.objects = append(w.reader.objects, web)
			w.Cluster.Live, w.Cluster.Services = live, func() bool { return true }
			c.cache(w)
			if c.live != nil {
				c.live(w, live)
			}
			w.ask(eviction(now, "policy/v1", ""))
			want := []string{"evict allow " + c.want + " 1"}
			if !slices.Equal(w.counted(), want) || !slices.Equal(w.ledger.calls, c.calls) {
				t.Errorf("counted %q, want %q; calls %q, want %q", w.counted(), want, w.ledger.calls, c.calls)
			}
		})
	}
	// A deletion brings its pod, and the cache may not have that UID yet.
	w := newWorld(t)
	now := runningPod("a")
	now.UID = "uid-new"
	w.reader.objects = append(w.reader.objects, web)
	w.Cluster.Live, w.Cluster.Services = &reader{objects: []client.Object{now}}, func() bool { return true }
	w.ask(deletion(now))
	if want := []string{drained}; !slices.Equal(w.ledger.calls, want) {
		t.Errorf("a deletion: calls %q, want %q", w.ledger.calls, want)
	}
}

// The API server answers such an eviction with 409, after the webhook. A drain would take a pod
// that lives on out of traffic until it is abandoned, and two of them count as refused.
func TestAnEvictionWhosePreconditionsDoNotHoldStartsNoDrain(t *testing.T) {
	for options, want := range map[string]string{
		`{"preconditions":{"uid":"uid-former"}}`:                   "UnknownPod",
		`{"preconditions":{"resourceVersion":"6"}}`:                "UnknownPod",
		`{"preconditions":{"uid":"uid-a","resourceVersion":"6"}}`:  "UnknownPod",
		`{"preconditions":{"uid":"uid-a","resourceVersion":"7"}}`:  "Acknowledged",
		`{"preconditions":{"uid":"uid-a","resourceVersion":"8"}}`:  "Acknowledged", // newer than the cache
		`{"preconditions":{"uid":"","resourceVersion":""}}`:        "Acknowledged",
		`{"preconditions":null}`:                                   "Acknowledged",
		`{"preconditions":{"uid":"uid-x"},"gracePeriodSeconds":0}`: "Forced",
	} {
		w := newWorld(t)
		w.a.ResourceVersion = "7"
		live := w.a.DeepCopy()
		if strings.Contains(options, `"8"`) {
			live.ResourceVersion = "8"
		}
		w.Cluster.Live = &reader{objects: []client.Object{live}}
		if got := w.ask(eviction(w.a, "policy/v1", options)); !got.Allowed {
			t.Errorf("%s: %+v", options, got)
		}
		if counted := []string{"evict allow " + want + " 1"}; !slices.Equal(w.counted(), counted) {
			t.Errorf("%s: counted %q, want %q", options, w.counted(), counted)
		}
		if drains := want == "Acknowledged"; drains != (len(w.ledger.calls) == 1) {
			t.Errorf("%s: calls %q", options, w.ledger.calls)
		}
	}
}

// budget is one of the namespace shop.
func budget(name string, allowed int32, selector map[string]string) *policyv1.PodDisruptionBudget {
	return &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Generation: 1},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: selector}},
		Status: policyv1.PodDisruptionBudgetStatus{ObservedGeneration: 1, DisruptionsAllowed: allowed,
			DesiredHealthy: 2, CurrentHealthy: 2 + allowed},
	}
}

// because gives a budget's controller something to say.
func because(b *policyv1.PodDisruptionBudget, reason string) *policyv1.PodDisruptionBudget {
	b.Status.Conditions = []metav1.Condition{{Type: policyv1.DisruptionAllowedCondition, Status: metav1.ConditionFalse,
		Reason: reason, Message: "told so"}}
	return b
}

// Where the API server refuses with another code than 429, the refusal is left to it: no pod is
// excluded for it, and no caller is asked to retry.
func TestBudgetsThatTheAPIServerRefuses(t *testing.T) {
	app := map[string]string{"app": "web"}
	for name, set := range map[string]func(w *world){
		"two of one pod": func(w *world) { w.add(budget("one", 1, app)); w.add(budget("two", 1, nil)) },
		"negative":       func(w *world) { w.add(budget("pdb", -1, app)) },
		"too many disrupted": func(w *world) {
			b := budget("pdb", 1, app)
			b.Status.DisruptedPods = map[string]metav1.Time{}
			for i := range mostDisrupted + 1 {
				b.Status.DisruptedPods[fmt.Sprint(i)] = metav1.Time{}
			}
			w.add(b)
		},
	} {
		w := newWorld(t)
		set(w)
		if got := w.ask(eviction(w.a, "policy/v1", "")); !got.Allowed {
			t.Errorf("%s: %+v", name, got.Result)
		}
		if want := []string{"evict allow BudgetBroken 1"}; !slices.Equal(w.counted(), want) || len(w.ledger.calls) > 0 {
			t.Errorf("%s: counted %q, want %q; calls %q", name, w.counted(), want, w.ledger.calls)
		}
	}
}

// kubectl drain evicts all pods of a node at one moment. If room were looked at before the drain
// that takes it is open, each of them would find the room of one, and traffic would be taken from
// pods that the budget then keeps.
func TestEvictionsAtOneMomentShareTheRoom(t *testing.T) {
	const evictions, allowed = 20, 3
	w := newWorld(t)
	w.reader.objects = []client.Object{w.ns, w.node, budget("pdb", allowed, map[string]string{"app": "web"})}
	var uids []health.UID
	for i := range evictions {
		p := runningPod(fmt.Sprint("p", i))
		w.reader.objects = append(w.reader.objects, p)
		w.slices.of[health.UID(p.UID)] = []endpoints.Listing{{Service: webService, Ready: true}}
		uids = append(uids, health.UID(p.UID))
	}
	w.slices.usable[webService] = uids
	var calls sync.WaitGroup
	var denied atomic.Int32
	for i := range evictions {
		calls.Go(func() {
			q := &request{operation: Evict, namespace: "shop", name: fmt.Sprint("p", i), username: "jane"}
			o, _ := w.decide(t.Context(), time.Now(), q)
			if o.Allowed {
				return
			}
			if o.Reason != string(Budget) {
				t.Errorf("denied for %s", o.Reason)
			}
			denied.Add(1)
		})
	}
	calls.Wait()
	drained := slices.Sorted(maps.Keys(w.ledger.draining))
	if len(drained) != allowed || denied.Load() != evictions-allowed {
		t.Fatalf("%d drains, %d denied, want %d and %d", len(drained), denied.Load(), allowed, evictions-allowed)
	}
	// A retry of one that drains joins it.
	name, _ := strings.CutPrefix(string(drained[0]), "uid-")
	q := &request{operation: Evict, namespace: "shop", name: name}
	f, s, err := w.Cluster.gather(t.Context(), time.Now(), q)
	if err == nil {
		_, err = w.Cluster.judge(t.Context(), &f, &s, true)
	}
	if err != nil || f.Budget != "" {
		t.Errorf("a retry: %+v, %v", f, err)
	}
}

func TestBudget(t *testing.T) {
	app := map[string]string{"app": "web"}
	now := time.Now()
	for name, c := range map[string]struct {
		set  func(w *world)
		want string
	}{
		"none": {func(*world) {}, ""},
		"room": {func(w *world) { w.add(budget("pdb", 1, app)) }, ""},
		"no room": {func(w *world) { w.add(budget("pdb", 0, app)) },
			"The disruption budget pdb needs 2 healthy pods and has 2 currently"},
		"of other pods": {func(w *world) {
			w.add(budget("pdb", 0, map[string]string{"app": "api"}))
		}, ""},
		"of all pods": {func(w *world) { w.add(budget("pdb", 0, nil)) },
			"The disruption budget pdb needs"},
		"of another namespace": {func(w *world) {
			b := budget("pdb", 0, app)
			b.Namespace = "other"
			w.add(b)
		}, ""},
		"of none": {func(w *world) {
			b := budget("pdb", 0, app)
			b.Spec.Selector = nil
			w.add(b)
		}, ""},
		"not processed": {func(w *world) { b := budget("pdb", 5, app); b.Generation = 2; w.add(b) },
			"The disruption budget pdb is still being processed by the server."},
		"the only one of two that matches": {func(w *world) {
			w.add(budget("one", 1, map[string]string{"app": "api"}))
			w.add(budget("two", 0, app))
		}, "The disruption budget two needs"},
		"failed sync": {func(w *world) { w.add(because(budget("pdb", 0, app), policyv1.SyncFailedReason)) },
			"The disruption budget pdb does not allow evicting pods currently because it failed sync: told so"},
		"another reason": {func(w *world) {
			b := because(budget("pdb", 0, app), "Mood")
			b.Status.CurrentHealthy++
			w.add(b)
		}, "The disruption budget pdb does not allow evicting pods currently (Mood): told so"},
		"no reason": {func(w *world) { b := budget("pdb", 0, app); b.Status.CurrentHealthy++; w.add(b) },
			"The disruption budget pdb does not allow evicting pods currently"},
		"a drained pod that the budget knows as evicted": {func(w *world) {
			b := budget("pdb", 1, app)
			b.Status.DisruptedPods = map[string]metav1.Time{"b": {}}
			w.add(b)
			w.ledger.draining["uid-b"] = now
		}, ""},
		"used up by an open drain": {func(w *world) { w.add(budget("pdb", 1, app)); w.ledger.draining["uid-b"] = now },
			"has 3 currently of which 1 are being drained"},
		"room besides an open drain": {func(w *world) {
			w.add(budget("pdb", 2, app))
			w.ledger.draining["uid-b"] = now
		}, ""},
		"its own drain is no other": {func(w *world) { w.add(budget("pdb", 1, app)); w.ledger.draining["uid-a"] = now },
			""},
		"the drained pod is terminating and seen by the budget": {func(w *world) {
			w.add(budget("pdb", 1, app))
			w.ledger.draining["uid-b"] = now
			w.b.DeletionTimestamp = &metav1.Time{Time: now}
		}, ""},
		"a drain of a pod outside of the budget": {func(w *world) {
			w.add(budget("pdb", 1, app))
			w.ledger.draining["uid-b"] = now
			w.b.Labels["app"] = "api"
		}, ""},
		"an unready pod, and too few are healthy": {func(w *world) {
			b := budget("pdb", 0, app)
			b.Status.CurrentHealthy = 1
			w.add(b)
			w.a.Status.Conditions[0].Status = corev1.ConditionFalse
		}, "The disruption budget pdb needs 2 healthy pods and has 1 currently"},
		"an unready pod that may always go": {func(w *world) {
			b, always := budget("pdb", 0, app), policyv1.AlwaysAllow
			b.Status.CurrentHealthy, b.Spec.UnhealthyPodEvictionPolicy = 1, &always
			w.add(b)
			w.a.Status.Conditions[0].Status = corev1.ConditionFalse
		}, ""},
		"a ready pod, and unready ones may always go": {func(w *world) {
			b, always := budget("pdb", 0, app), policyv1.AlwaysAllow
			b.Spec.UnhealthyPodEvictionPolicy = &always
			w.add(b)
		}, "The disruption budget pdb needs"},
		"a ready pod where nothing is desired": {func(w *world) {
			b := budget("pdb", 0, app)
			b.Status.DesiredHealthy, b.Status.CurrentHealthy = 0, 0
			w.add(b)
			w.a.Status.Conditions[0].Status = corev1.ConditionFalse
		}, "The disruption budget pdb needs 0"},
		"an unready pod asks no budget": {func(w *world) {
			w.add(budget("pdb", 0, app))
			w.a.Status.Conditions[0].Status = corev1.ConditionFalse
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			c.set(w)
			if got := w.gathered(w.evictA()).Budget; !strings.Contains(got, c.want) || c.want == "" && got != "" {
				t.Errorf("%q, want %q", got, c.want)
			}
			if got := w.gathered(w.deleteA()).Budget; got != "" {
				t.Errorf("a deletion asks for a budget: %q", got)
			}
		})
	}

	// A pod whose drain is open has its place: a retry must not be told that the budget is used up
	// by another one.
	t.Run("of two that drain, both go on", func(t *testing.T) {
		w := newWorld(t)
		w.add(budget("pdb", 1, app))
		w.ledger.draining["uid-a"], w.ledger.draining["uid-b"] = now, now
		evictB := w.evictA()
		evictB.name = "b"
		if a, b := w.gathered(w.evictA()).Budget, w.gathered(evictB).Budget; a != "" || b != "" {
			t.Errorf("a: %q, b: %q", a, b)
		}
	})
}

func (w *world) add(budget *policyv1.PodDisruptionBudget) {
	w.reader.objects = append(w.reader.objects, budget)
}

// What cannot be read is an error, never a fact.
// A pod is in the Service web, which a gateway routes, and in a Service of its own, as each broker
// of a StatefulSet or a canary is. Its deletion must wait for the gateway if web has another
// target, whether or not a gateway routes its own Service as well: of that one, the agent reports
// that it keeps the pod.
func TestAPodIsTheLastTargetOfAllItsRoutedServicesOrOfNone(t *testing.T) {
	own := types.NamespacedName{Namespace: "shop", Name: "web-a"}
	for name, c := range map[string]struct {
		set  func(w *world)
		want string
	}{
		"its own Service is not routed": {func(*world) {}, ""},
		"its own Service is routed": {func(w *world) {
			w.ledger.routed = append(w.ledger.routed, drain.Service{Namespace: "shop", Name: "web-a"})
		}, ""},
		"it is the last of both": {func(w *world) { w.slices.usable[webService] = []health.UID{"uid-a"} }, "shop/web"},
		"its own Service stopped listing it": {func(w *world) {
			w.ledger.routed = append(w.ledger.routed, drain.Service{Namespace: "shop", Name: "web-a"})
			w.slices.usable[webService], w.slices.usable[own] = []health.UID{"uid-a"}, nil
			w.slices.of["uid-a"] = []endpoints.Listing{{Service: webService, Ready: true},
				{Service: own, LeftAt: time.Now()}}
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.slices.of["uid-a"] = []endpoints.Listing{{Service: webService, Ready: true}, {Service: own, Ready: true}}
			w.slices.usable[own] = []health.UID{"uid-a"}
			c.set(w)
			if got := w.gathered(w.deleteA()).LastOf; got != c.want {
				t.Errorf("the last target of %q, want %q", got, c.want)
			}
			w.ask(deletion(w.a))
			if asked := len(w.ledger.calls) > 0; asked != (c.want == "") {
				t.Errorf("gateways were asked: %t", asked)
			}
		})
	}
}

// A blue/green switch: the Service selects other pods, and the old ones are deleted a delay later.
// A request that began before may still run through a gateway, and only its agent knows. Without
// this it is cut: the pod was deleted unasked, and an open drain of it given up, 10 s after the
// switch.
func TestARequestAcrossASwitch(t *testing.T) {
	began := time.Now()
	for _, draining := range []bool{false, true} {
		for after, want := range map[time.Duration]Reason{
			5 * time.Second: Draining, 11 * time.Second: Draining, 30 * time.Second: Draining,
			endpoints.Memory - 1: Draining, endpoints.Memory: NotListed,
		} {
			w, index := newWorld(t), endpoints.NewIndex()
			slice := &discovery.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-1",
				Labels: map[string]string{discovery.LabelServiceName: "web"}}, AddressType: discovery.AddressTypeIPv4,
				Endpoints: []discovery.Endpoint{{Addresses: []string{"10.0.0.1"},
					TargetRef: &corev1.ObjectReference{Kind: "Pod", UID: "uid-a"}}}}
			index.Apply(began, slice)
			index.Delete(began, slice)
			if w.Cluster.Slices = index; draining {
				w.ledger.draining["uid-a"], want = began, Draining
			}
			f, _, err := w.Cluster.gather(t.Context(), began.Add(after), w.deleteA())
			if got := Decide(f); err != nil || got.Reason != want {
				t.Errorf("%s after the switch, draining %t: %s, %v, want %s", after, draining, got.Reason, err, want)
			}
		}
	}
}

// The EndpointSlices of some controllers do not name their pods. Agents exclude by UID, and answer
// Idle about a UID that they do not have: without this the pod counts as not listed, or as
// acknowledged, and its caller hears nothing of the requests that are lost.
func TestAPodThatIsListedByItsAddressIsUncovered(t *testing.T) {
	const message = "deleted without waiting for everything that routes it (Uncovered): Service shop/web lists its " +
		"address without a targetRef, by which agents would know the pod"
	address := endpoints.At(netip.MustParseAddr("10.0.0.1"))
	api := types.NamespacedName{Namespace: "shop", Name: "api"}
	for name, c := range map[string]struct {
		set  func(w *world)
		want string // what is counted
		says string
	}{
		"only so":              {func(*world) {}, "Uncovered", message},
		"and no agent asks":    {func(w *world) { w.ledger.routed = nil }, "NotRouted", ""},
		"on the node's own IP": {func(w *world) { w.a.Spec.HostNetwork = true }, "NotListed", ""},
		"a former pod was":     {func(w *world) { w.slices.of[address][0].LeftAt = time.Now() }, "NotListed", ""},
		"and by its UID": {func(w *world) {
			w.slices.of["uid-a"] = []endpoints.Listing{{Service: webService, Ready: true}}
		}, "Acknowledged", ""},
		"and by its UID in another Service": {func(w *world) {
			w.slices.of["uid-a"] = []endpoints.Listing{{Service: api, Ready: true}}
			w.ledger.routed = append(w.ledger.routed, drain.Service(api))
		}, "Uncovered", message},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.a.Status.PodIPs = []corev1.PodIP{{IP: "10.0.0.1"}}
			w.slices.of = map[health.UID][]endpoints.Listing{address: {{Service: webService, Ready: true}}}
			c.set(w)
			got := w.ask(deletion(w.a))
			if want := []string{"delete allow " + c.want + " 1"}; !slices.Equal(w.counted(), want) ||
				strings.Contains(strings.Join(got.Warnings, " "), "shop/web lists") != (c.says != "") ||
				!strings.HasSuffix(strings.Join(got.Warnings, " "), c.says) {
				t.Errorf("counted %q, want %q; warnings %q, want %q", w.counted(), want, got.Warnings, c.says)
			}
		})
	}
}

func TestGatherFails(t *testing.T) {
	for _, kind := range []string{"*v1.Pod", "*v1.Node", "*v1.Namespace", "*v1.PodDisruptionBudgetList"} {
		w := newWorld(t)
		w.reader.broken = kind
		f, s, err := w.Cluster.gather(t.Context(), time.Now(), w.evictA())
		if err == nil {
			_, err = w.Cluster.judge(t.Context(), &f, &s, true)
		}
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("the cache of %s is broken", kind)) {
			t.Errorf("%s: %v", kind, err)
		}
	}
}
