package admission

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const replicaSets = "system:serviceaccount:kube-system:replicaset-controller"

var silent = drain.Waiting{Agent: "agent-1", Name: "edge/haproxy-1", State: drain.Routing, Connected: true}

// routedBy implements Coverage.
type routedBy []string

func (u routedBy) Uncovered(context.Context, []drain.Service, bool) ([]string, error) { return u, nil }

func TestADrainThatIsReleasedIsAllowed(t *testing.T) {
	w := newWorld(t)
	got := w.ask(deletion(w.a))
	if !got.Allowed || got.Result != nil || got.Warnings != nil {
		t.Errorf("%+v", got)
	}
	if want := []string{"drain shop/a uid-a [shop/web]"}; !slices.Equal(w.ledger.calls, want) {
		t.Errorf("calls %q, want %q", w.ledger.calls, want)
	}
	if want := []string{"delete allow Acknowledged 1"}; !slices.Equal(w.counted(), want) {
		t.Errorf("counted %q, want %q", w.counted(), want)
	}
	if len(w.events) != 0 {
		t.Errorf("events %v", w.events)
	}
	if got := w.ask(eviction(w.a, "policy/v1", "")); !got.Allowed {
		t.Errorf("eviction: %+v", got)
	}
	if want := []string{"delete allow Acknowledged 1", "evict allow Acknowledged 1"}; !slices.Equal(w.counted(), want) {
		t.Errorf("counted %q, want %q", w.counted(), want)
	}
}

// kubectl, client-go and the API server go by code, reason and details: see what a denial looks
// like on the wire.
func TestADrainThatIsNotReleasedIsDeniedWith429(t *testing.T) {
	w := newWorld(t)
	w.status(drain.Unrouting, drain.ReasonNone, 20*time.Second, true, nil, silent)
	got := w.ask(deletion(w.a))
	if got.Allowed || got.Result == nil || got.Warnings != nil {
		t.Fatalf("%+v", got)
	}
	r := got.Result
	if r.Status != metav1.StatusFailure || r.Code != http.StatusTooManyRequests ||
		r.Reason != metav1.StatusReasonTooManyRequests || r.Details == nil || r.Details.RetryAfterSeconds != 3 {
		t.Errorf("%+v, details %+v", r, r.Details)
	}
	for _, want := range []string{
		"pod shop/a is still routed by 1 of 2 gateways, since 20.0s: edge/haproxy-1 (routing)",
		"in 10.0s at the latest",
		"kubectl annotate pod -n shop a lameduck.io/break-glass=true",
	} {
		if !strings.Contains(r.Message, want) {
			t.Errorf("message %q, want %q", r.Message, want)
		}
	}
	if want := []string{"delete deny Draining 1"}; !slices.Equal(w.counted(), want) {
		t.Errorf("counted %q, want %q", w.counted(), want)
	}
	if len(w.events) != 1 || w.events[0] != (happening{"shop/a", false, "LameduckWaiting", r.Message}) {
		t.Errorf("events %v", w.events)
	}
}

func TestRetryAfterGrows(t *testing.T) {
	for name, c := range map[string]struct {
		who     string
		elapsed time.Duration
		held    bool
		err     error
		reason  Reason
		want    int32
	}{
		"a person at first":         {"jane", 2 * time.Second, true, nil, Draining, 1},
		"a person after 10 s":       {"jane", 14 * time.Second, true, nil, Draining, 2},
		"a person after 20 s":       {"jane", 20 * time.Second, true, nil, Draining, 3},
		"a person who was not held": {"jane", 15 * time.Second, false, coordinator.ErrTooManyHolds, TooManyHolds, 9},
		"a person before the deadline": {"jane", 27500 * time.Millisecond, false, coordinator.ErrTooManyHolds,
			TooManyHolds, 3},
		"a person while stopping":   {"jane", 20 * time.Second, true, coordinator.ErrStopping, Stopping, 1},
		"a person who has given up": {"jane", 20 * time.Second, true, context.Canceled, CallerGone, 3},
		// Without Retry-After its call fails, and it chooses its victims again.
		"a ReplicaSet at first":   {replicaSets, 2 * time.Second, true, nil, Draining, 1},
		"a ReplicaSet after 8 s":  {replicaSets, 8 * time.Second, true, nil, Draining, 1},
		"a ReplicaSet after 14 s": {replicaSets, 14 * time.Second, true, nil, Draining, 2},
		"a ReplicaSet that was not held": {replicaSets, 6 * time.Second, false, coordinator.ErrTooManyHolds,
			TooManyHolds, 4},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.status(drain.Unrouting, drain.ReasonNone, c.elapsed, c.held, c.err, silent)
			got := w.ask(deletion(w.a, by(c.who)))
			var after int32
			if got.Result != nil && got.Result.Details != nil {
				after = got.Result.Details.RetryAfterSeconds
			}
			if got.Allowed || got.Result.Code != 429 || after != c.want {
				t.Errorf("allowed %t, retry after %d s, want %d", got.Allowed, after, c.want)
			}
			if want := []string{"delete deny " + string(c.reason) + " 1"}; !slices.Equal(w.counted(), want) {
				t.Errorf("counted %q, want %q", w.counted(), want)
			}
		})
	}
}

// A drain may be released at the very moment at which the coordinator stops or has too many calls.
// That is no answer to allow.
func TestAnErrorOfTheLedgerIsNeverAnAllow(t *testing.T) {
	for _, err := range []error{coordinator.ErrStopping, coordinator.ErrTooManyHolds, context.Canceled,
		errors.New("anything")} {
		w := newWorld(t)
		w.status(drain.Released, drain.NoAgents, 20*time.Second, true, err)
		if got := w.ask(deletion(w.a)); got.Allowed || got.Result.Code != 429 {
			t.Errorf("%v: %+v", err, got)
		}
	}
}

func TestHoldsNoLongerThanTheTimeoutPermits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for query, want := range map[string]time.Duration{
			"": 2 * time.Second, "?timeout=5s": 2 * time.Second, "?timeout=30s": 2 * time.Second,
			"?timeout=3s": 1500 * time.Millisecond, "?timeout=1s": 0,
		} {
			w := newWorld(t)
			w.ledger.answer = func(until time.Time) (drain.Status, bool, error) {
				time.Sleep(time.Until(until))
				return drain.Status{Phase: drain.Unrouting, Deadline: time.Now().Add(time.Minute)}, true, nil
			}
			began := time.Now()
			w.post(text(deletion(w.a)), query)
			if got := time.Since(began); got != want {
				t.Errorf("%q: held for %s, want %s", query, got, want)
			}
		}
	})
}

// Two pods of a Service that are deleted together wait for each other only until one of them has
// gone: gateways keep the other, and would keep it until the deadline.
func TestBecomesTheLastWhileItIsHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.ledger.draining["uid-b"] = time.Now()
		began := time.Now()
		w.ledger.answer = func(until time.Time) (drain.Status, bool, error) {
			time.Sleep(time.Until(until))
			if time.Since(began) >= time.Second {
				w.slices.usable[webService] = []health.UID{"uid-a"}
			}
			return drain.Status{Phase: drain.Unrouting, Deadline: time.Now().Add(time.Minute)}, true, nil
		}
		got := w.ask(deletion(w.a))
		if took := time.Since(began); !got.Allowed || took != time.Second {
			t.Errorf("allowed %t after %s, want at once after 1s", got.Allowed, took)
		}
		if want := []string{"delete allow LastTarget 1"}; !slices.Equal(w.counted(), want) {
			t.Errorf("counted %q, want %q", w.counted(), want)
		}
	})
}

func TestWarningsAndEventsOnlyWhenAbnormal(t *testing.T) {
	for name, c := range map[string]struct {
		set     func(w *world)
		allowed bool
		counted string
		warning string
		event   string
	}{
		"acknowledged": {func(*world) {}, true, "Acknowledged", "", ""},
		"no agent must acknowledge": {func(w *world) { w.status(drain.Released, drain.NoAgents, 0, false, nil) }, true,
			"NoAgents", "", ""},
		"dead": {func(w *world) { w.status(drain.Closed, drain.PodDeleted, 0, false, nil) }, true,
			"PodDeleted", "", ""},
		"deadline": {func(w *world) { w.status(drain.Released, drain.Deadline, 30*time.Second, true, nil, silent) },
			true, "Deadline",
			"Lameduck: pod shop/a deleted after 30.0s although not every gateway has stopped routing " +
				"to it (Deadline): " +
				"edge/haproxy-1 (routing)", "LameduckDeadline"},
		"idle bound": {func(w *world) { w.status(drain.Released, drain.IdleBound, 12*time.Second, true, nil, silent) },
			true, "IdleBound",
			"although not every gateway has stopped routing to it (IdleBound)", "LameduckIdleBound"},
		"an agent lost": {func(w *world) {
			w.status(drain.Released, drain.AgentsLost, 6*time.Second, true, nil)
			answer := w.ledger.answer
			w.ledger.answer = func(until time.Time) (drain.Status, bool, error) {
				status, held, err := answer(until)
				status.Lost = []drain.Waiting{{Agent: "agent-1", Name: "edge/haproxy-1"}}
				return status, held, err
			}
		}, true, "AgentsLost", "deleted after 6.0s although gateways were lost that had not stopped " +
			"routing to it (AgentsLost): " +
			"edge/haproxy-1 (not connected)", "LameduckAgentsLost"},
		"a gateway without an agent": {func(w *world) {
			w.status(drain.Released, drain.Acknowledged, time.Second, true, nil)
			w.Cluster.Coverage = routedBy{"Ingress shop/front routes Service shop/web"}
		}, true, "Uncovered", "deleted without waiting for everything that routes it (Uncovered): Ingress " +
			"shop/front routes Service shop/web", "LameduckUncovered"},
		"last target": {func(w *world) { w.slices.usable[webService] = []health.UID{"uid-a"} }, true, "LastTarget",
			"no other pod of Service shop/web is ready", "LameduckLastTarget"},
		"last target of one of its Services": {func(w *world) {
			w.status(drain.Released, drain.LastTarget, 0, true, nil)
		}, true, "LastTarget",
			"no other pod of one of its Services is ready", "LameduckLastTarget"},
		"cool-off": {func(w *world) { w.ledger.refused = 2 }, true, "CoolOff", "deletion was allowed 2 times",
			"LameduckCoolOff"},
		"cold": {func(w *world) { w.cold = true }, true, "Cold", "no view of the cluster", "LameduckCold"},
		"unreadable": {func(w *world) { w.reader.broken = "*v1.Namespace" }, true, "NoFacts",
			"deleted without asking gateways: read namespace shop from the cache", "LameduckNoFacts"},
		"starting": {func(w *world) { w.cold, w.Cluster.Started = true, time.Now() }, false,
			"Starting", "", "LameduckWaiting"},
		"terminated": {func(w *world) { w.a.DeletionTimestamp = &metav1.Time{Time: time.Now()} }, true,
			"Terminating", "", ""},
		"no agents": {func(w *world) { w.ledger.expected, w.ledger.routed = 0, nil }, true, "NoAgents", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			c.set(w)
			got := w.ask(deletion(w.a))
			answer := map[bool]string{true: "allow", false: "deny"}[got.Allowed]
			if got.Allowed != c.allowed {
				t.Errorf("allowed %t", got.Allowed)
			}
			if want := []string{"delete " + answer + " " + c.counted + " 1"}; !slices.Equal(w.counted(), want) {
				t.Errorf("counted %q, want %q", w.counted(), want)
			}
			if warning := strings.Join(got.Warnings, "\n"); !strings.Contains(warning, c.warning) || c.warning == "" &&
				warning != "" {
				t.Errorf("warning %q, want %q", warning, c.warning)
			}
			var event string
			for _, e := range w.events {
				event += e.reason
				if e.warning != got.Allowed || e.message == "" {
					t.Errorf("event %+v", e)
				}
			}
			if event != c.event {
				t.Errorf("events %q, want %q", event, c.event)
			}
		})
	}
}

func TestABudgetIsDeniedWithoutUnrouting(t *testing.T) {
	w := newWorld(t)
	w.reader.broken = "*v1.PodDisruptionBudgetList"
	if got := w.ask(eviction(w.a, "policy/v1", "")); !got.Allowed {
		t.Error("an unreadable budget keeps a pod")
	}
	// The API server refuses without Retry-After (createTooManyRequestsError of eviction.go). With
	// it, client-go asks ten times more within one call: kubectl drain, Karpenter and the
	// descheduler would wait ten seconds for each such pod.
	for _, who := range []string{"jane", replicaSets, "system:serviceaccount:karpenter:karpenter"} {
		w := newWorld(t)
		w.add(budget("pdb", 0, map[string]string{"app": "web"}))
		got := w.ask(eviction(w.a, "policy/v1", "", by(who)))
		if got.Allowed || got.Result.Code != 429 ||
			!strings.HasPrefix(got.Result.Message,
				"Cannot evict pod as it would violate the pod's disruption budget.") {
			t.Errorf("%s: %+v", who, got)
		}
		d := got.Result.Details
		if d == nil || d.RetryAfterSeconds != 0 {
			t.Fatalf("%s: details %+v", who, d)
		}
		if want := (metav1.StatusCause{Type: policyv1.DisruptionBudgetCause,
			Message: "The disruption budget pdb needs 2 healthy pods and has 2 currently"}); !slices.Equal(d.Causes,
			[]metav1.StatusCause{want}) {
			t.Errorf("%s: causes %+v, want %+v", who, d.Causes, want)
		}
		if len(w.ledger.calls) != 0 {
			t.Errorf("calls %q", w.ledger.calls)
		}
	}
}

func TestWhatDoesNotWaitIsUnroutedInTheBackground(t *testing.T) {
	w := newWorld(t)
	got := w.ask(deletion(w.a, options(`{"gracePeriodSeconds":0}`)))
	if !got.Allowed || got.Warnings != nil {
		t.Errorf("%+v", got)
	}
	if want := []string{"unroute shop/a uid-a [shop/web]"}; !slices.Equal(w.ledger.calls, want) {
		t.Errorf("calls %q, want %q", w.ledger.calls, want)
	}
}

// Rule 10: an unknown UID starts no drain, nor does a dry run in either place.
func TestWhatMustNotUnroute(t *testing.T) {
	yes := true
	for name, ask := range map[string]func(w *world) *admissionv1.AdmissionReview{
		"an unknown UID": func(w *world) *admissionv1.AdmissionReview {
			p := runningPod("a")
			p.UID = "forged"
			p.Annotations[BreakGlassAnnotation] = "true"
			return deletion(p)
		},
		"an unknown pod": func(w *world) *admissionv1.AdmissionReview {
			return deletion(runningPod("c"), options(`{"gracePeriodSeconds":0}`))
		},
		"a dry run": func(w *world) *admissionv1.AdmissionReview {
			return deletion(w.a, func(r *admissionv1.AdmissionRequest) { r.DryRun = &yes })
		},
		"an eviction's dry run in its deleteOptions": func(w *world) *admissionv1.AdmissionReview {
			return eviction(w.a, "policy/v1", `{"dryRun":["All"]}`)
		},
		"a dry run without facts": func(w *world) *admissionv1.AdmissionReview {
			w.reader.broken = "*v1.Namespace"
			return deletion(w.a, options(`{"dryRun":["All"]}`))
		},
		"an eviction of an unknown pod": func(w *world) *admissionv1.AdmissionReview {
			return eviction(runningPod("c"), "policy/v1beta1", "")
		},
		"an excluded namespace": func(w *world) *admissionv1.AdmissionReview {
			w.ns.Labels[keys.Mode] = keys.Off
			return deletion(w.a)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if got := w.ask(ask(w)); !got.Allowed {
				t.Errorf("%+v", got)
			}
			if len(w.ledger.calls) != 0 || len(w.events) != 0 {
				t.Errorf("calls %q, events %v", w.ledger.calls, w.events)
			}
		})
	}
}

func TestListNamesThreeAtMost(t *testing.T) {
	var waiting []drain.Waiting
	if got := list(waiting); got != "no gateway" {
		t.Errorf("%q", got)
	}
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		waiting = append(waiting, drain.Waiting{Name: name, State: drain.Removed, Connected: name != "b"})
	}
	if got := list(waiting); got != "a (removed), b (not connected), c (removed) and 2 more" {
		t.Errorf("%q", got)
	}
}

// A deletion that is asked for again, as the API server does when the pod was written meanwhile, is
// a second answer on one drain.
func TestARepeatJoinsTheDrain(t *testing.T) {
	w := newWorld(t)
	for range 2 {
		if got := w.ask(deletion(w.a)); !got.Allowed {
			t.Errorf("%+v", got)
		}
	}
	if want := []string{"delete allow Acknowledged 2"}; !slices.Equal(w.counted(), want) {
		t.Errorf("counted %q, want %q", w.counted(), want)
	}
}

// What a newer API server sends besides is none of our business.
func TestUnknownFieldsAreIgnored(t *testing.T) {
	w := newWorld(t)
	var review map[string]any
	if err := json.Unmarshal([]byte(text(deletion(w.a))), &review); err != nil {
		t.Fatal(err)
	}
	review["mood"] = "good"
	request := review["request"].(map[string]any)
	request["mood"] = "better"
	request["oldObject"].(map[string]any)["spec"].(map[string]any)["mood"] = "best"
	body, _ := json.Marshal(review)
	if got := w.post(string(body), ""); got.Code != http.StatusOK ||
		!strings.Contains(got.Body.String(), `"allowed":true`) {
		t.Errorf("%d %s", got.Code, got.Body)
	}
}

func TestSeriesExistFromTheStart(t *testing.T) {
	w := newWorld(t)
	families, err := w.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	n := map[string]int{}
	for _, f := range families {
		n[f.GetName()] = len(f.GetMetric())
	}
	before := n["lameduck_admission_answers_total"]
	for reason, action := range answers() {
		w.Metrics.answered(opener, Delete, action, string(reason), 0)
	}
	families, _ = w.registry.Gather()
	for _, f := range families {
		if f.GetName() == "lameduck_admission_answers_total" && len(f.GetMetric()) != before {
			t.Errorf("%d series were there, %d are", before, len(f.GetMetric()))
		}
	}
}

// slow is a body whose time is over before it is there.
type slow struct{}

func (slow) Read([]byte) (int, error) { return 0, os.ErrDeadlineExceeded }

func TestASlowReviewIsRefused(t *testing.T) {
	w := newWorld(t)
	r := httptest.NewRequest(http.MethodPost, "/v1/admit", slow{})
	r.Header.Set("Content-Type", "application/json")
	got := httptest.NewRecorder()
	w.ServeHTTP(got, r)
	if got.Code != http.StatusRequestTimeout || got.Header().Get("Connection") != "close" {
		t.Errorf("%d %v", got.Code, got.Header())
	}
	w.unchanged("slow")
	if want := []string{"malformed 408 1"}; !slices.Equal(w.counted(), want) {
		t.Errorf("counted %q, want %q", w.counted(), want)
	}
}

// Nothing waits in observe, and no gateway is told to stop: that would be another deletion than the
// one to be measured.
func TestAnObservedDeletionIsMeasuredAndDoesNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.ns.Labels[keys.Mode] = keys.Observe
		w.a.Status.PodIPs = []corev1.PodIP{{IP: "10.0.0.7"}}
		if got := w.ask(deletion(w.a)); !got.Allowed || len(got.Warnings) != 0 {
			t.Errorf("%+v", got)
		}
		w.a.Status.Conditions[0].LastTransitionTime = metav1.NewTime(time.Now().Add(-3 * time.Second))
		w.ask(deletion(w.a))
		w.a.Status.Conditions[0].Status = corev1.ConditionFalse // it may have become ready since
		w.ask(deletion(w.a))
		if want := []string{"observe [10.0.0.7:0] young for 0s shop/a uid-a [shop/web]",
			"observe [10.0.0.7:0] young for 7s shop/a uid-a [shop/web]",
			"observe [10.0.0.7:0] young for 10s shop/a uid-a [shop/web]",
		}; !slices.Equal(w.ledger.calls, want) {
			t.Errorf("calls %q, want %q", w.ledger.calls, want)
		}
		w.ledger.calls = nil
		w.slices.of["uid-b"] = nil
		if got := w.ask(deletion(w.b)); !got.Allowed || len(w.ledger.calls) != 0 {
			t.Errorf("a pod that no Service lists: %+v, calls %q", got, w.ledger.calls)
		}
		w.a.Spec.HostNetwork = true
		if got := w.ask(deletion(w.a)); !got.Allowed || len(w.ledger.calls) != 0 {
			t.Errorf("a pod in its node's network: %+v, calls %q", got, w.ledger.calls)
		}
	})
}
