package admission

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/endpoints"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// Annotations and labels that people write.
const (
	// OptOut, with the value "disabled" as an annotation of a pod or a label of a namespace: deletions there never wait.
	OptOut = "lameduck.io/drain"
	// BreakGlassAnnotation, with the value "true" on a pod: its deletion goes on now. Gateways are told in the background.
	BreakGlassAnnotation = "lameduck.io/break-glass"
)

// outOfService is the taint by which people declare a node dead.
const outOfService = "node.kubernetes.io/out-of-service"

// Ledger is what the handler needs of the coordinator.
type Ledger interface {
	Drain(ctx context.Context, pod drain.Pod, services []drain.Service, until time.Time) (status drain.Status, held bool, err error)
	Unroute(pod drain.Pod, services []drain.Service)
	Expecting() (expected, missing int)
	CouldRoute(services []drain.Service) bool
	// Draining returns which of uids have an open drain, and since when.
	Draining(uids []drain.UID) map[drain.UID]time.Time
	Refused(uid drain.UID, window time.Duration) int
}

// Slices is what the handler needs to know of EndpointSlices.
type Slices interface {
	Pod(now time.Time, uid health.UID) []endpoints.Listing
	Usable(service types.NamespacedName) []health.UID
}

// Cluster is where facts come from. Reader is a cache: it is asked on every deletion, and must not do I/O.
type Cluster struct {
	Reader client.Reader
	Slices Slices
	Ledger Ledger
	// Synced reports whether Reader and Slices know the cluster.
	Synced func() bool
	// Excluded lists the namespaces whose pods never wait.
	Excluded []string
	Started  time.Time

	promises promises
}

// subject is the pod in question, and where it stands.
type subject struct {
	pod      *corev1.Pod
	services []drain.Service
	// promised says that this call holds a promise of its budget's room, until [Cluster.settled].
	promised bool
}

func (s subject) drainPod() drain.Pod {
	return drain.Pod{Namespace: s.pod.Namespace, Name: s.pod.Name, UID: drain.UID(s.pod.UID)}
}

// gather collects the facts of q at now. The subject's pod is nil if it could not be found.
func (c *Cluster) gather(ctx context.Context, now time.Time, q *request) (Facts, subject, error) {
	f := Facts{
		Operation: q.operation,
		DryRun:    q.dryRun,
		Excluded:  slices.Contains(c.Excluded, q.namespace),
		ByNode:    slices.Contains(q.groups, "system:nodes"),
		Forced:    q.grace != nil && *q.grace == 0 && !graceless(q.pod),
		Cold:      !c.Synced(),
		Up:        now.Sub(c.Started),

		NamespaceTerminating: q.collection && q.username == "system:serviceaccount:kube-system:namespace-controller",
	}
	s := subject{pod: q.pod}
	if f.Cold {
		// A cache that has not synced would wait for it.
		if s.pod != nil {
			f.ofPod(now, s.pod)
		}
		return f, s, nil
	}
	if err := c.ofNamespace(ctx, q, &f); err != nil {
		return f, s, err
	}
	var cached corev1.Pod
	err := c.Reader.Get(ctx, types.NamespacedName{Namespace: q.namespace, Name: q.name}, &cached)
	switch {
	case apierrors.IsNotFound(err):
		f.Unknown = true
	case err != nil:
		return f, s, fmt.Errorf("read pod %s/%s from the cache: %w", q.namespace, q.name, err)
	case s.pod == nil:
		s.pod = &cached
	case s.pod.UID != cached.UID:
		f.Unknown = true
	}
	if s.pod == nil {
		return f, s, nil
	}
	f.Forced = f.Forced && !graceless(s.pod)
	f.ofPod(now, s.pod)
	if err := c.ofNode(ctx, s.pod.Spec.NodeName, &f); err != nil {
		return f, s, err
	}
	if f.Unknown {
		return f, s, nil
	}
	c.ofRouting(now, &s, &f)
	if q.operation == Evict && f.CouldRoute && !q.dryRun {
		room, err := c.budget(ctx, s.pod, f.NotReadyFor == 0)
		if err != nil {
			return f, s, err
		}
		f.Budget, f.BudgetBroken, s.promised = room.refusal, room.broken, room.promised
	}
	return f, s, nil
}

// graceless reports whether the pod's own grace period is 0. The API server writes that into every deletion of it before the webhook sees
// it, so that nobody can tell who forces one of these; they wait like others.
func graceless(pod *corev1.Pod) bool {
	return pod != nil && pod.Spec.TerminationGracePeriodSeconds != nil && *pod.Spec.TerminationGracePeriodSeconds == 0
}

// ofPod reads what the pod itself says.
func (f *Facts) ofPod(now time.Time, pod *corev1.Pod) {
	f.OptedOut = pod.Annotations[OptOut] == "disabled"
	f.BreakGlass = pod.Annotations[BreakGlassAnnotation] == "true"
	f.Terminating = pod.DeletionTimestamp != nil
	f.Finished = pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
	f.NotRunning = pod.Status.Phase == corev1.PodPending || pod.Spec.NodeName == ""
	_, f.Mirror = pod.Annotations[corev1.MirrorPodAnnotationKey]
	f.NotReadyFor = longNotReady + 1 // without the condition it never was ready
	for _, condition := range pod.Status.Conditions {
		switch condition.Type {
		case corev1.DisruptionTarget:
			f.DisruptionTarget = condition.Status == corev1.ConditionTrue
		case corev1.PodReady:
			f.NotReadyFor = 0
			if condition.Status != corev1.ConditionTrue {
				// Condition times are whole seconds; a pod that has just turned counts as unready, not as ready.
				f.NotReadyFor = max(now.Sub(condition.LastTransitionTime.Time), time.Nanosecond)
			}
		}
	}
}

func (c *Cluster) ofNamespace(ctx context.Context, q *request, f *Facts) error {
	var namespace corev1.Namespace
	err := c.Reader.Get(ctx, types.NamespacedName{Name: q.namespace}, &namespace)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read namespace %s from the cache: %w", q.namespace, err)
	}
	f.Excluded = f.Excluded || namespace.Labels[OptOut] == "disabled"
	f.NamespaceTerminating = f.NamespaceTerminating || namespace.DeletionTimestamp != nil
	return nil
}

func (c *Cluster) ofNode(ctx context.Context, name string, f *Facts) error {
	if name == "" {
		return nil
	}
	var node corev1.Node
	err := c.Reader.Get(ctx, types.NamespacedName{Name: name}, &node)
	if apierrors.IsNotFound(err) {
		f.NodeLost = true
		return nil
	}
	if err != nil {
		return fmt.Errorf("read node %s from the cache: %w", name, err)
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady && condition.Status != corev1.ConditionTrue {
			f.NodeLost = true
		}
	}
	for _, taint := range node.Spec.Taints {
		if taint.Key == outOfService {
			f.NodeLost = true
		}
	}
	return nil
}

// ofRouting reads which Services list the pod, who may route them, and who else could take its traffic.
func (c *Cluster) ofRouting(now time.Time, s *subject, f *Facts) {
	uid := health.UID(s.pod.UID)
	listings := c.Slices.Pod(now, uid)
	f.Listed = len(listings) > 0
	for _, l := range listings {
		s.services = append(s.services, drain.Service{Namespace: l.Service.Namespace, Name: l.Service.Name})
		f.Ready = f.Ready || l.Ready
	}
	f.Agents, _ = c.Ledger.Expecting()
	f.CouldRoute = c.Ledger.CouldRoute(s.services)
	if !f.CouldRoute {
		return
	}
	f.LastOf = c.lastOf(listings, uid)
	f.Refused = c.Ledger.Refused(drain.UID(uid), RefusedWindow)
}

// lastOf names a Service that lists the pod as usable, ready and not terminating, and no other. A pod that is being drained still counts: it
// is there, and goes before this one or comes back. Empty: there is none.
func (c *Cluster) lastOf(listings []endpoints.Listing, uid health.UID) string {
	for _, l := range listings {
		if !l.Ready || l.Terminating {
			continue
		}
		usable := c.Slices.Usable(l.Service)
		if !slices.ContainsFunc(usable, func(other health.UID) bool { return other != uid }) {
			return l.Service.String()
		}
	}
	return ""
}

// becameLast is lastOf at a later time.
func (c *Cluster) becameLast(now time.Time, s subject) string {
	uid := health.UID(s.pod.UID)
	return c.lastOf(c.Slices.Pod(now, uid), uid)
}
