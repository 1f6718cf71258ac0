package admission

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// replicas is an Others that a test sets.
type replicas struct {
	claimed []wire.Claimed
	claims  []wire.Claim
	asked   bool
	// meanwhile is what happens during a claim.
	meanwhile func()
}

func (r *replicas) Opener() bool { return len(r.claimed) == 0 }

func (r *replicas) Claim(_ context.Context, claim wire.Claim) (wire.Claimed, bool) {
	r.claims = append(r.claims, claim)
	if r.meanwhile != nil {
		r.meanwhile()
	}
	if len(r.claimed) == 0 {
		return wire.Claimed{}, false
	}
	claimed := r.claimed[0]
	if len(r.claimed) > 1 {
		r.claimed = r.claimed[1:]
	}
	return claimed, true
}

func (r *replicas) Asked(context.Context, drain.Pod, time.Duration) bool { return r.asked }

// Budgets are the opener's to judge: a witness whose cache is ahead or behind must not refuse what
// the opener lets go, nor the reverse.
func TestAWitnessLeavesBudgetsToTheOpener(t *testing.T) {
	w := newWorld(t)
	w.add(budget("pdb", 0, map[string]string{"app": "web"}))
	others := &replicas{claimed: []wire.Claimed{{Verdict: wire.VerdictDrain, Hold: true, ElapsedMillis: 12_000}}}
	w.Others = others
	w.ledger.draining["uid-a"] = time.Now().Add(-time.Second)
	if o, _ := w.decide(t.Context(), time.Now(), w.evictA()); !o.Allowed || o.Reason != "Acknowledged" {
		t.Errorf("the opener lets it drain, the witness answers %+v", o)
	}
	if c := others.claims[0]; c.Operation != "evict" || c.Pod.UID != "uid-a" || c.ElapsedMillis < 1000 {
		t.Errorf("it claims %+v", c)
	}
	want := drain.Place{Is: drain.Granted, Elapsed: 12 * time.Second, Evicted: true}
	if got := w.ledger.requests[0]; got.Place != want || got.Turn != coordinator.TurnHeld {
		t.Errorf("it opens its drain with %+v, turn %d", got.Place, got.Turn)
	}
	others.claimed = []wire.Claimed{{Verdict: wire.VerdictDeny, Reason: "Budget", Message: "used up",
		Budget: "used up"}}
	before := len(w.ledger.calls)
	if o, _ := w.decide(t.Context(), time.Now(), w.evictA()); o.Allowed || o.Reason != "Budget" ||
		o.Budget != "used up" || o.RetryAfter != 0 {
		t.Errorf("the opener refuses, the witness answers %+v", o)
	}
	if len(w.ledger.calls) != before {
		t.Errorf("and yet it opens a drain: %v", w.ledger.calls[before:])
	}
}

// Without this, a pod whose eviction its budget forbids by now stays out of traffic for 45 s, and a
// pod that is allowed to be deleted for another reason than its drain counts as refused.
func TestTheLedgerLearnsOfAnswersWithoutTheDrain(t *testing.T) {
	ask := func(w *world, q *request) { w.decide(t.Context(), time.Now(), q) }
	for name, c := range map[string]struct {
		do   func(w *world)
		want []string
	}{
		"no budget is left": {func(w *world) { ask(w, w.evictA()) }, []string{"uid-a false"}},
		"none is left at the opener": {func(w *world) {
			w.Others = &replicas{claimed: []wire.Claimed{{Verdict: wire.VerdictDeny, Reason: "Budget"}}}
			ask(w, w.evictA())
		}, []string{"uid-a false"}},
		"a witness asks": {func(w *world) {
			w.Claim(t.Context(), wire.Claim{Operation: "evict",
				Pod: drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"}})
		}, []string{"uid-a false"}},
		"forced": {func(w *world) {
			q := w.deleteA()
			q.grace = new(int64)
			ask(w, q)
		}, []string{"uid-a true"}},
		"a dry run": {func(w *world) {
			q := w.evictA()
			q.dryRun = true
			ask(w, q)
		}, nil},
		"it has no drain": {func(w *world) {
			clear(w.ledger.draining)
			ask(w, w.evictA())
		}, nil},
		"this replica starts": {func(w *world) {
			w.cold, w.Cluster.Started = true, time.Now()
			ask(w, w.deleteA())
		}, nil},
	} {
		w := newWorld(t)
		w.add(budget("pdb", 0, map[string]string{"app": "web"}))
		w.ledger.draining["uid-a"] = time.Now()
		c.do(w)
		if !slices.Equal(w.ledger.decided, c.want) {
			t.Errorf("%s: %q, want %q", name, w.ledger.decided, c.want)
		}
	}
}

// A drain that waits at the opener waits at the witness too, until the opener has given it
// capacity.
func TestAWitnessWaitsForTheOpenersTurn(t *testing.T) {
	w := newWorld(t)
	w.Others = &replicas{claimed: []wire.Claimed{{Verdict: wire.VerdictDrain, Hold: true, Queued: true},
		{Verdict: wire.VerdictDrain, Hold: true}}}
	w.ledger.answer = func(time.Time) (drain.Status, bool, error) {
		if w.ledger.requests[len(w.ledger.requests)-1].Place.Is == drain.Deferred {
			return drain.Status{Phase: drain.Queued}, true, nil
		}
		return drain.Status{Phase: drain.Released, Reason: drain.Acknowledged}, true, nil
	}
	if o, _ := w.decide(t.Context(), time.Now(), w.deleteA()); !o.Allowed {
		t.Errorf("%+v", o)
	}
	if n := len(w.ledger.requests); n != 2 || w.ledger.requests[1].Place.Is != drain.Granted {
		t.Errorf("%d requests, the last with %+v", n, w.ledger.requests[n-1].Place)
	}
}

// Without a replica before it that answers, a witness acts as the opener: it judges budgets too.
func TestAWitnessAlone(t *testing.T) {
	w := newWorld(t)
	w.add(budget("pdb", 0, map[string]string{"app": "web"}))
	w.Others = &replicas{}
	if o, _ := w.decide(t.Context(), time.Now(), w.evictA()); o.Allowed || o.Reason != "Budget" {
		t.Errorf("%+v", o)
	}
}

// What a replica tells a witness is what it would answer the API server.
func TestClaim(t *testing.T) {
	claim := wire.Claim{Operation: "evict", Pod: drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"},
		ElapsedMillis: 3000}
	w := newWorld(t)
	w.status(drain.Queued, drain.ReasonNone, 12*time.Second, true, nil)
	w.ledger.queued = map[drain.UID]bool{"uid-a": true}
	if got := w.Claim(t.Context(), claim); got.Verdict != wire.VerdictDrain || !got.Queued || !got.Hold ||
		got.ElapsedMillis < 11_900 {
		t.Errorf("a drain: %+v", got)
	}
	if got := w.ledger.requests[0].Place; got != (drain.Place{Elapsed: 3 * time.Second, Evicted: true}) {
		t.Errorf("it is opened with %+v", got)
	}
	// Past its deadline the deletion may go on, and still no agent is to be told.
	w.status(drain.Released, drain.Deadline, 31*time.Second, true, nil)
	if got := w.Claim(t.Context(), claim); got.Verdict != wire.VerdictDrain || !got.Queued {
		t.Errorf("a drain that had no room until its deadline: %+v", got)
	}
	w.add(budget("pdb", 0, map[string]string{"app": "web"}))
	if got := w.Claim(t.Context(), claim); got.Verdict != wire.VerdictDeny || got.Reason != "Budget" ||
		!strings.HasPrefix(got.Message, violates) || got.Budget == "" {
		t.Errorf("no room: %+v", got)
	}
	claim.Pod.UID = "another"
	if got := w.Claim(t.Context(), claim); got != (wire.Claimed{}) {
		t.Errorf("a pod that is not known here: %+v", got)
	}
	w.cold = true
	claim.Pod.UID = "uid-a"
	if got := w.Claim(t.Context(), claim); got != (wire.Claimed{}) {
		t.Errorf("a replica that knows nothing yet: %+v", got)
	}
}

// A replica that stops must not answer "ask again" where another one has been asked as well and
// says yes; where none was, it must.
func TestAReplicaThatStopsAbstains(t *testing.T) {
	for asked, want := range map[bool]string{true: string(Abstained), false: string(Stopping)} {
		w := newWorld(t)
		w.Others = &replicas{asked: asked}
		w.status(drain.Unrouting, drain.ReasonNone, 0, true, coordinator.ErrStopping)
		if o, _ := w.decide(t.Context(), time.Now(), w.deleteA()); o.Allowed != asked || o.Reason != want {
			t.Errorf("asked %t: %+v", asked, o)
		}
	}
}

// Of two replicas that stop at one moment, one answers "ask again".
func TestAReplicaOnWhichAnotherReliesDoesNotAbstain(t *testing.T) {
	w := newWorld(t)
	w.Others = &replicas{asked: true}
	w.ledger.relied = true
	w.status(drain.Unrouting, drain.ReasonNone, 0, true, coordinator.ErrStopping)
	if o, _ := w.decide(t.Context(), time.Now(), w.deleteA()); o.Allowed || o.Reason != string(Stopping) {
		t.Errorf("%+v", o)
	}
}

// A caller that has gone is no reason to judge what the opener has not: its pod would be out of
// traffic until the drain is abandoned.
func TestACallerThatHasGoneOpensNoDrain(t *testing.T) {
	w := newWorld(t)
	w.Others = &replicas{}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if o, _ := w.decide(ctx, time.Now(), w.deleteA()); o.Allowed || o.Reason != string(CallerGone) ||
		len(w.ledger.calls) != 0 {
		t.Errorf("%+v, and %v", o, w.ledger.calls)
	}
}

// One replica tells operators about a deletion: else each would be said twice.
func TestAWitnessIsQuiet(t *testing.T) {
	w := newWorld(t)
	others := &replicas{claimed: []wire.Claimed{{Verdict: wire.VerdictDrain, Hold: true}}}
	w.Others = others
	w.status(drain.Released, drain.Deadline, 30*time.Second, true, nil, drain.Waiting{Name: "edge/one"})
	w.tell(witness, w.deleteA(), subject{pod: w.a},
		Outcome{Allowed: true, Warn: true, Reason: "Deadline", Message: "late"})
	if len(w.events) != 0 {
		t.Errorf("Events of a witness: %v", w.events)
	}
	w.tell(opener, w.deleteA(), subject{pod: w.a},
		Outcome{Allowed: true, Warn: true, Reason: "Deadline", Message: "late"})
	if got := []string{w.events[0].reason}; !slices.Equal(got, []string{"LameduckDeadline"}) {
		t.Errorf("Events of the opener: %v", got)
	}
}

// A claim may take a second. A Service that lists the pod by then is waited for too.
func TestADrainBeginsWithTheServicesAfterTheClaim(t *testing.T) {
	w := newWorld(t)
	own := types.NamespacedName{Namespace: "shop", Name: "web-a"}
	w.Others = &replicas{meanwhile: func() {
		w.slices.of["uid-a"] = []endpoints.Listing{{Service: webService, Ready: true}, {Service: own, Ready: true}}
		w.slices.usable[own] = []health.UID{"uid-a", "uid-b"}
	}}
	w.ask(deletion(w.a))
	if got := w.ledger.requests[0].Targets; len(got) != 2 {
		t.Errorf("the drain begins with %v", got)
	}
}

// The opener counts for how many owners a controller is held. Without Retry-After the controller's
// worker is free; a witness that sent one would keep it.
func TestAControllerThatIsHeldForOtherOwners(t *testing.T) {
	w := newWorld(t)
	w.status(drain.Unrouting, drain.ReasonNone, time.Second, false, coordinator.ErrTooManyOwners)
	w.a.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", UID: "set", Controller: new(true)}}
	q := w.deleteA()
	q.username, q.controller = "system:serviceaccount:kube-system:replicaset-controller", true
	o, _ := w.decide(t.Context(), time.Now(), q)
	if o.Allowed || o.Reason != "TooManyOwners" || o.RetryAfter != 0 ||
		!strings.Contains(o.Message, "3 other ReplicaSets") {
		t.Errorf("%+v", o)
	}
	if got := w.ledger.requests[0].Controller; got != "ReplicaSet" {
		t.Errorf("the controller %q calls", got)
	}
	claim := wire.Claim{Operation: "delete", Controller: true,
		Pod: drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"}}
	claimed := w.Claim(t.Context(), claim)
	if claimed.Verdict != wire.VerdictDeny || claimed.Reason != "TooManyOwners" {
		t.Errorf("the opener answers a claim with %+v", claimed)
	}
	others := &replicas{claimed: []wire.Claimed{claimed}}
	w.Others = others
	before := len(w.ledger.calls)
	o, _ = w.decide(t.Context(), time.Now(), q)
	if o.Allowed || o.Reason != "TooManyOwners" || o.RetryAfter != 0 || len(w.ledger.calls) != before {
		t.Errorf("the witness: %+v, %v", o, w.ledger.calls[before:])
	}
	if !others.claims[0].Controller {
		t.Error("the claim does not say that a controller calls")
	}
}

// The names are those of Kubernetes 1.36.3 (cmd/kube-controller-manager/app).
func TestIsController(t *testing.T) {
	for username, want := range map[string]bool{
		"system:serviceaccount:kube-system:replicaset-controller":     true,
		"system:serviceaccount:kube-system:daemon-set-controller":     true,
		"system:serviceaccount:kube-system:statefulset-controller":    true,
		"system:serviceaccount:kube-system:job-controller":            true,
		"system:serviceaccount:kube-system:replication-controller":    true,
		"system:kube-controller-manager":                              true, // without accounts of their own
		"system:serviceaccount:kube-system:generic-garbage-collector": false,
		"system:serviceaccount:shop:replicaset-controller":            false,
		"system:serviceaccount:kube-system:":                          false,
		"":                                                            false,
	} {
		if got := isController(username); got != want {
			t.Errorf("%q: %t, want %t", username, got, want)
		}
	}
}
