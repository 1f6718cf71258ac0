package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
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
	"github.com/lameduck-io/lameduck/internal/podfacts"
	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/internal/watch"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// agentLabel on a pod marks an agent: directed or observed.
const agentLabel = "lameduck.io/agent"

// handle returns a handler that calls set with each object that was added or changed, and gone with
// each object that was deleted.
func handle[T watch.Object](set, gone func(T)) toolscache.ResourceEventHandler {
	return watch.Handler(func(was, is T) {
		var none T
		if is == none || was != none && was.GetUID() != is.GetUID() { // the deletion was missed
			gone(was)
		}
		if is != none {
			set(is)
		}
	})
}

// pods reads pods live.
type pods struct{ reader client.Reader }

// Life implements [coordinator.Pods].
func (p pods) Life(ctx context.Context, pod drain.Pod) (coordinator.Life, error) {
	var object corev1.Pod
	err := p.reader.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, &object)
	switch {
	case apierrors.IsNotFound(err), err == nil && drain.UID(object.UID) != pod.UID:
		return coordinator.Gone, nil
	case err != nil:
		return coordinator.LifeUnknown, fmt.Errorf("read pod %s: %w", pod, err)
	case object.DeletionTimestamp != nil:
		return coordinator.Leaving, nil
	default:
		return coordinator.Living, nil
	}
}

// rosterRetry is the interval at which the rights of agents are checked again.
const rosterRetry = 30 * time.Second

// maxAccounts bounds the service accounts of one namespace whose rights are checked. Every user who
// may create pods can set the agent's label, and a replica is not ready before it has checked all
// accounts.
const maxAccounts = 20

// accountsAtOnce is how many service accounts are asked about simultaneously.
const accountsAtOnce = 100

// roster keeps the list of expected agents: pods with the agent's label that have not ended and
// whose service account may acknowledge drains.
type roster struct {
	coord *coordinator.Coordinator
	who   *identity.Kubernetes
	log   *slog.Logger
	wake  signal.Signal

	mu     sync.Mutex
	agents map[types.UID]*corev1.Pod
	// version counts the changes of agents. handed is the last version that the coordinator
	// received. first is the version at the first call of listed. -1 in handed or first: none yet.
	version, handed, first int
}

func newRoster(coord *coordinator.Coordinator, who *identity.Kubernetes, log *slog.Logger) *roster {
	return &roster{coord: coord, who: who, log: log, wake: signal.New(), agents: map[types.UID]*corev1.Pod{},
		handed: -1, first: -1}
}

func (r *roster) set(p *corev1.Pod) {
	_, labeled := p.Labels[agentLabel]
	over := p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
	if !labeled || over {
		r.gone(p)
		return
	}
	r.mu.Lock()
	r.agents[p.UID] = p
	r.version++
	r.mu.Unlock()
	r.wake.Raise()
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
		r.wake.Raise()
	}
}

// listed reports whether the coordinator has received all agents that the watch had delivered when
// listed was first called. Later changes do not count, or a pod that changes every second could
// prevent that forever.
func (r *roster) listed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.first < 0 {
		r.first = r.version
	}
	if r.handed < r.first {
		r.wake.Raise()
	}
	return r.handed >= r.first
}

// rights returns the user names of agents that may acknowledge everywhere. Each is asked about
// once, and many simultaneously, so that an API server that does not answer delays the list once.
func (r *roster) rights(ctx context.Context, agents []*corev1.Pod) map[string]bool {
	var mu sync.Mutex
	allowed, known, accounts := map[string]bool{}, map[string]bool{}, map[string]int{}
	var all errgroup.Group
	all.SetLimit(accountsAtOnce)
	for _, p := range agents {
		username := identity.Username(p.Namespace, p.Spec.ServiceAccountName)
		if known[username] {
			continue
		}
		if accounts[p.Namespace]++; accounts[p.Namespace] > maxAccounts {
			r.log.Debug("too many service accounts in one namespace have pods with the agent's label",
				"serviceAccount", username, "most", maxAccounts)
			continue
		}
		known[username] = true
		all.Go(func() error {
			may, err := r.who.Allowed(ctx, username)
			if err != nil {
				// The agent counts as expected. Waiting for one agent too many ends at the
				// deadline, but a lost request stays lost.
				r.log.Warn("cannot check the rights of an agent: it counts as expected", "serviceAccount", username,
					"error", err)
			}
			mu.Lock()
			allowed[username] = may || err != nil
			mu.Unlock()
			return nil
		})
	}
	_ = all.Wait() // they return none
	return allowed
}

// run passes the list to the coordinator whenever it has changed.
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
		agents := slices.Collect(maps.Values(r.agents))
		version := r.version
		r.mu.Unlock()
		// The oldest pods are checked first.
		slices.SortFunc(agents, func(a, b *corev1.Pod) int {
			return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
				strings.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name))
		})
		expected := make([]drain.Expected, 0, len(agents))
		rights := r.rights(ctx, agents)
		for _, p := range agents {
			username := identity.Username(p.Namespace, p.Spec.ServiceAccountName)
			if !rights[username] {
				r.log.Debug("pod has the label of an agent but no right to acknowledge", "pod", p.Namespace+"/"+p.Name,
					"serviceAccount", username)
				continue
			}
			expected = append(expected, drain.Expected{
				ID: drain.AgentID(p.UID), Name: p.Namespace + "/" + p.Name, Ready: podfacts.Ready(p),
				Label:   drain.ParseLabel(p.Labels[agentLabel]),
				Pending: p.Status.Phase == corev1.PodPending, Node: p.Spec.NodeName,
			})
		}
		slices.SortFunc(expected, func(a, b drain.Expected) int { return strings.Compare(a.Name, b.Name) })
		r.coord.Expect(expected)
		r.mu.Lock()
		r.handed = version
		r.mu.Unlock()
	}
}

const (
	eventTimeout = 5 * time.Second
	// eventBacklog bounds the Events that wait to be written; more are dropped and logged.
	eventBacklog = 1000
	// eventQuiet is how long the same Event on the same pod is not repeated. The Event for
	// uncovered pods is also not repeated on other pods of the same owner, because a rollout would
	// write it for each of them.
	eventQuiet = 10 * time.Second
)

// events writes Events on pods from a queue, one after the other, so that admission answers do not
// wait for the API server.
type events struct {
	kube kubernetes.Interface
	// warned is called for each warning, also if its Event is not repeated.
	warned  func(pod drain.Pod, reason, message string)
	replica string
	log     *slog.Logger
	queue   chan *eventsv1.Event

	mu   sync.Mutex
	last map[string]time.Time
}

func newEvents(kube kubernetes.Interface, replica string, warned func(pod drain.Pod, reason, message string),
	log *slog.Logger) *events {
	return &events{kube: kube, warned: warned, replica: replica, log: log,
		queue: make(chan *eventsv1.Event, eventBacklog), last: map[string]time.Time{}}
}

// Event implements [admission.Events].
func (e *events) Event(pod *corev1.Pod, warning bool, reason, message string) {
	if warning {
		// It takes the lock of the ledger, and the answer to the API server must not wait for that.
		go e.warned(drain.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: drain.UID(pod.UID)},
			strings.TrimPrefix(reason, "Lameduck"), message)
	}
	now := time.Now()
	key := string(pod.UID) + "/" + reason
	if owner := metav1.GetControllerOf(pod); owner != nil && reason == "Lameduck"+drain.Uncovered.String() {
		key = string(owner.UID) + "/" + reason
	}
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
	// The API server accepts at most 1,024 bytes.
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
		e.log.Warn("dropped an Event: the queue is full", "pod", pod.Namespace+"/"+pod.Name, "reason", reason)
	}
}

func (e *events) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case event := <-e.queue:
			writeCtx, cancel := context.WithTimeout(ctx, eventTimeout)
			_, err := e.kube.EventsV1().Events(event.Namespace).Create(writeCtx, event, metav1.CreateOptions{})
			cancel()
			// Nothing can be created in a terminating namespace.
			if err != nil && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
				e.log.Warn("write Event", "pod", event.Namespace+"/"+event.Regarding.Name, "reason", event.Reason,
					"error", err)
			}
		}
	}
}
