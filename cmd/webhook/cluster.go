package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/identity"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// agentLabel on a pod says that it is an agent: directed or following.
const agentLabel = "lameduck.io/agent"

// handler is what informers take.
type handler = toolscache.ResourceEventHandler

// handlers turns an informer's three calls, and its tombstones, into typed ones.
type handlers[T any] struct {
	set, gone func(*T)
	// missed is called instead of gone where a list after an interruption lacks an object, which it
	// does too if it is older than the object. Nil: that counts as gone.
	missed func(*T)
}

func (h handlers[T]) asHandler() handler {
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { h.call(h.set, o) },
		// An old object with another UID means that its deletion was missed.
		UpdateFunc: func(old, o any) {
			if uidOf(old) != uidOf(o) {
				h.call(h.gone, old)
			}
			h.call(h.set, o)
		},
		DeleteFunc: func(o any) {
			gone := h.gone
			if missed, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
				o = missed.Obj
				if h.missed != nil {
					gone = h.missed
				}
			}
			h.call(gone, o)
		},
	}
}

func (h handlers[T]) call(f func(*T), o any) {
	if typed, ok := o.(*T); ok {
		f(typed)
	}
}

func uidOf(o any) types.UID {
	if object, ok := o.(metav1.Object); ok {
		return object.GetUID()
	}
	return ""
}

// pods reads pods live.
type pods struct{ reader client.Reader }

// Life implements [coordinator.Pods].
func (p pods) Life(ctx context.Context, pod drain.Pod) (coordinator.Life, error) {
	var object corev1.Pod
	err := p.reader.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, &object)
	switch {
	case apierrors.IsNotFound(err):
		return coordinator.Leaving, nil
	case err != nil:
		return coordinator.LifeUnknown, fmt.Errorf("read pod %s: %w", pod, err)
	case drain.UID(object.UID) != pod.UID || object.DeletionTimestamp != nil:
		return coordinator.Leaving, nil
	default:
		return coordinator.Living, nil
	}
}

// rosterRetry is how often the right of agents is asked for again.
const rosterRetry = 30 * time.Second

// maxAccounts bounds the service accounts of one namespace whose right is asked for: whoever may
// create pods can put the agent's label on them, and replicas are not ready before they know who is
// an agent.
const maxAccounts = 20

// roster keeps the list of agents that the API says exist: pods with the agent's label that are not
// over, whose service account may acknowledge drains.
type roster struct {
	coord *coordinator.Coordinator
	who   *identity.Kubernetes
	log   *slog.Logger
	wake  chan struct{}

	mu     sync.Mutex
	agents map[types.UID]*corev1.Pod
	// version counts the changes of agents. handed is the version that was last handed over, -1
	// before the first. first is what version was when listed was first asked, -1 before that.
	version, handed, first int
}

func newRoster(coord *coordinator.Coordinator, who *identity.Kubernetes, log *slog.Logger) *roster {
	return &roster{coord: coord, who: who, log: log, wake: make(chan struct{}, 1), agents: map[types.UID]*corev1.Pod{},
		handed: -1, first: -1}
}

func (r *roster) set(p *corev1.Pod) {
	_, labelled := p.Labels[agentLabel]
	over := p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
	if !labelled || over {
		r.gone(p)
		return
	}
	r.mu.Lock()
	r.agents[p.UID] = p
	r.version++
	r.mu.Unlock()
	r.poke()
}

func (r *roster) gone(p *corev1.Pod) {
	r.mu.Lock()
	_, known := r.agents[p.UID]
	if known {
		delete(r.agents, p.UID)
		r.version++
	}
	r.mu.Unlock()
	if known {
		r.poke()
	}
}

func (r *roster) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// listed reports whether everything was handed over that the watch had delivered when listed was
// first called. What comes later does not count: a pod that changes every second would keep the
// list from ever being complete.
func (r *roster) listed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.first < 0 {
		r.first = r.version
	}
	if r.handed < r.first {
		r.poke()
	}
	return r.handed >= r.first
}

// run hands the list to the coordinator whenever it has changed.
func (r *roster) run(ctx context.Context) error {
	ticker := time.NewTicker(rosterRetry)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.wake:
		case <-ticker.C:
		}
		r.mu.Lock()
		agents := make([]*corev1.Pod, 0, len(r.agents))
		for _, p := range r.agents {
			agents = append(agents, p)
		}
		version := r.version
		r.mu.Unlock()
		// Those that came first are asked about first.
		slices.SortFunc(agents, func(a, b *corev1.Pod) int {
			return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
				strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name))
		})
		expected := make([]drain.Expected, 0, len(agents))
		accounts := map[string]int{}
		// Each service account is asked about once, so that an API server that does not answer
		// delays the list once.
		rights := map[string]bool{}
		for _, p := range agents {
			username := identity.Username(p.Namespace, p.Spec.ServiceAccountName)
			allowed, asked := rights[username]
			if !asked {
				if accounts[p.Namespace]++; accounts[p.Namespace] > maxAccounts {
					r.log.Debug("too many service accounts in one namespace have pods with the agent's label",
						"serviceAccount", username, "most", maxAccounts)
					continue
				}
				var err error
				if allowed, err = r.who.Allowed(ctx, username); err != nil {
					// Who cannot be asked about is expected: waiting for an agent too many ends,
					// losing requests does not.
					r.log.Warn("agents' right is unknown", "serviceAccount", username, "error", err)
					allowed = true
				}
				rights[username] = allowed
			}
			if !allowed {
				r.log.Debug("pod has the agent's label and not its right", "pod", p.Namespace+"/"+p.Name,
					"serviceAccount", username)
				continue
			}
			expected = append(expected, drain.Expected{
				ID: drain.AgentID(p.UID), Name: p.Namespace + "/" + p.Name, Ready: isReady(p),
				Label:   drain.ParseLabel(p.Labels[agentLabel]),
				Pending: p.Status.Phase == corev1.PodPending,
			})
		}
		slices.SortFunc(expected, func(a, b drain.Expected) int { return strings.Compare(a.Name, b.Name) })
		r.who.Expect(expected)
		r.coord.Expect(expected)
		r.mu.Lock()
		r.handed = version
		r.mu.Unlock()
	}
}

func isReady(p *corev1.Pod) bool {
	if p.DeletionTimestamp != nil {
		return false
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// readySince is when a pod that is ready became so.
func readySince(p *corev1.Pod) (at time.Time, ready bool) {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.LastTransitionTime.Time, c.Status == corev1.ConditionTrue
		}
	}
	return time.Time{}, false
}

const (
	eventTimeout = 5 * time.Second
	// eventBacklog bounds the Events that wait to be written; more are dropped and counted in the
	// log.
	eventBacklog = 1000
	// eventQuiet is how long the same Event of the same pod is not written again.
	eventQuiet = 10 * time.Second
)

// events writes Events on pods, one after the other, never in the way of an answer.
type events struct {
	kube    kubernetes.Interface
	replica string
	log     *slog.Logger
	queue   chan *eventsv1.Event

	mu   sync.Mutex
	last map[string]time.Time
}

func newEvents(kube kubernetes.Interface, replica string, log *slog.Logger) *events {
	return &events{kube: kube, replica: replica, log: log, queue: make(chan *eventsv1.Event, eventBacklog),
		last: map[string]time.Time{}}
}

// Event implements [admission.Events].
func (e *events) Event(pod *corev1.Pod, warning bool, reason, message string) {
	now := time.Now()
	key := string(pod.UID) + "/" + reason
	e.mu.Lock()
	quiet := now.Sub(e.last[key]) < eventQuiet
	if !quiet {
		if len(e.last) >= eventBacklog {
			clear(e.last)
		}
		e.last[key] = now
	}
	e.mu.Unlock()
	if quiet {
		return
	}
	kind := corev1.EventTypeNormal
	if warning {
		kind = corev1.EventTypeWarning
	}
	// 1,024 bytes is the API server's limit.
	message = message[:min(len(message), 1024)]
	event := &eventsv1.Event{
		ObjectMeta:          metav1.ObjectMeta{GenerateName: "lameduck-", Namespace: pod.Namespace},
		EventTime:           metav1.NewMicroTime(now),
		ReportingController: "lameduck.io/webhook",
		ReportingInstance:   e.replica,
		Action:              "Drain",
		Reason:              reason,
		Type:                kind,
		Note:                message,
		Regarding: corev1.ObjectReference{
			APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
			ResourceVersion: pod.ResourceVersion,
		},
	}
	select {
	case e.queue <- event:
	default:
		e.log.Warn("dropped an Event: too many wait to be written", "pod", pod.Namespace+"/"+pod.Name, "reason", reason)
	}
}

// run writes what is queued until ctx is done.
func (e *events) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case event := <-e.queue:
			writeCtx, cancel := context.WithTimeout(ctx, eventTimeout)
			_, err := e.kube.EventsV1().Events(event.Namespace).Create(writeCtx, event, metav1.CreateOptions{})
			cancel()
			// In a namespace that is terminating nothing can be created.
			if err != nil && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
				e.log.Warn("write Event", "pod", event.Namespace+"/"+event.Regarding.Name, "reason", event.Reason,
					"error", err)
			}
		}
	}
}
