package admission

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/internal/podfacts"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// BreakGlassAnnotation, with the value "true" on a pod: its deletion does not wait. If it is
// deleted, not evicted, gateways stop routing to it in the background.
const BreakGlassAnnotation = "lameduck.io/break-glass"

// outOfService is the taint by which operators declare a node dead.
const outOfService = "node.kubernetes.io/out-of-service"

// Ledger is what the handler needs of the coordinator.
type Ledger interface {
	Drain(ctx context.Context, request coordinator.Request, until time.Time) (status drain.Status, held bool, err error)
	Unroute(request coordinator.Request)
	// Observe measures what the deletion of a pod would have waited for. young is for how long
	// gateways may still not have learned that the pod is ready.
	Observe(request coordinator.Request, targets []netip.AddrPort, young time.Duration)
	// Claim opens a drain on behalf of another replica, without waiting for it. crowded is why that
	// replica's call may not wait either.
	Claim(request coordinator.Request) (status drain.Status, crowded error)
	Standings
	// Draining returns how many of pods are being drained, not counting those that are queued.
	Draining(pods []drain.UID) int
	// ReliedOn reports whether another replica that is stopping may have left a call about the pod
	// to this one.
	ReliedOn(uid drain.UID) bool
	// Ahead returns how many of others have an open drain, and -1 if these are fewer than allowed
	// or the pod has one itself. Then it is Claim too, if claim is set. No other drain is opened in
	// between, so that of several simultaneous evictions only as many are allowed as the budget
	// permits.
	Ahead(request coordinator.Request, others []drain.UID, allowed int, claim bool) int
}

// Standings looks up the state of a pod in the ledger.
type Standings interface {
	Expecting() (expected, missing int)
	CouldRoute(services []drain.Service) bool
	// Pod returns the standing of a pod: its drain, and when deletions that were allowed turned out
	// to be refused.
	Pod(uid drain.UID) drain.Standing
}

// Slices is what the handler needs to know of EndpointSlices.
type Slices interface {
	Pod(now time.Time, namespace string, uid health.UID) []endpoints.Listing
	// Usable is sorted, and must not be modified.
	Usable(service types.NamespacedName) []health.UID
}

// Coverage finds out who routes Services.
type Coverage interface {
	// Uncovered names what routes one of services and is not waited for. barrier says whether the
	// pod in question has the preStop barrier.
	Uncovered(ctx context.Context, services []drain.Service, barrier bool) ([]string, error)
}

// liveRead bounds a read from Cluster.Live. It counts toward the hold.
const liveRead = time.Second

// Cluster collects [Facts] from caches, EndpointSlices and the ledger.
type Cluster struct {
	// Reader is a cache. It is asked on every deletion, and must not do I/O.
	Reader client.Reader
	// Live reads pods from the API server where the cache alone must not decide. Nil: the cache
	// decides.
	Live   client.Reader
	Slices Slices
	Ledger Ledger
	// Synced reports whether Reader and Slices know the cluster.
	Synced func() bool
	// Coverage reports gateways without an agent.
	Coverage Coverage
	// Excluded lists the namespaces whose pods never wait. Mode is that of pods where neither they
	// nor their namespace say another. Empty: enforce.
	Excluded []string
	Mode     string
	Started  time.Time
}

// subject is the pod in question, with what gather found out about its drain.
type subject struct {
	pod *corev1.Pod
	// targets are the Services that list the pod, with their usable targets. Nil if none does.
	targets []drain.Targets
	// place is what the opener says of its drain, turn whether its call may wait. The zero values:
	// this replica decides.
	place drain.Place
	turn  coordinator.Turn
	// controller: a workload controller of Kubernetes calls.
	controller bool
	// role is opener or witness. Empty: this replica has not asked.
	role string
}

func (s subject) drainPod() drain.Pod {
	return drain.Pod{Namespace: s.pod.Namespace, Name: s.pod.Name, UID: drain.UID(s.pod.UID)}
}

// request is what the ledger is asked.
func (s subject) request() coordinator.Request {
	r := coordinator.Request{Pod: s.drainPod(), Targets: s.targets, Place: s.place, Turn: s.turn}
	if owner := metav1.GetControllerOf(s.pod); owner != nil {
		r.Owner = owner.Kind + "/" + string(owner.UID)
		if s.controller {
			r.Controller = owner.Kind
		}
	}
	return r
}

// gather collects the facts of q at now. The subject's pod is nil if it could not be found.
func (c *Cluster) gather(ctx context.Context, now time.Time, q *request) (Facts, subject, error) {
	f := Facts{
		Operation: q.operation,
		DryRun:    q.dryRun,
		Excluded:  slices.Contains(c.Excluded, q.namespace),
		Forced:    q.grace != nil && *q.grace == 0 && !graceless(q.pod),
		Cold:      !c.Synced(),
		Up:        now.Sub(c.Started),

		NamespaceTerminating: q.collection && q.username == "system:serviceaccount:kube-system:namespace-controller",
	}
	s := subject{pod: q.pod, controller: q.controller}
	if f.Cold {
		// A cache that has not synced would wait for it.
		var own map[string]string
		if s.pod != nil {
			f.ofPod(now, s.pod)
			own = s.pod.Labels
		}
		f.Mode = keys.ModeOf(own, nil, c.Mode)
		return f, s, nil
	}
	namespace, err := c.ofNamespace(ctx, q, &f)
	if err != nil {
		return f, s, err
	}
	pod, err := c.pod(ctx, q)
	if err != nil {
		return f, s, err
	}
	f.Unknown = pod == nil
	if s.pod == nil {
		s.pod = pod
	}
	if s.pod == nil {
		return f, s, nil
	}
	f.Forced = f.Forced && !graceless(s.pod)
	f.ofPod(now, s.pod)
	f.Mode = keys.ModeOf(s.pod.Labels, namespace, c.Mode)
	if err := c.ofNode(ctx, s.pod.Spec.NodeName, &f); err != nil {
		return f, s, err
	}
	if f.Unknown {
		return f, s, nil
	}
	s.targets = f.OfRouting(now, c.Slices, c.Ledger, s.drainPod())
	return f, s, nil
}

// judge decides, for an eviction also by its budget. If claim is set and the eviction takes a place
// in the budget, its drain is open when judge returns.
func (c *Cluster) judge(ctx context.Context, f *Facts, s *subject, claim bool) (Verdict, error) {
	v := Decide(*f)
	if f.Operation != Evict || v.Reason != Draining && v.Reason != CoolOff && v.Reason != LastTarget {
		return v, nil
	}
	claim = claim && v.Reason == Draining // else it is allowed without a drain, or refused
	room, err := c.budget(ctx, s, f.NotReadyFor == 0, claim)
	if err != nil {
		return v, err
	}
	f.Budget, f.BudgetBroken = room.refusal, room.broken
	return Decide(*f), nil
}

// pod returns the pod that q concerns, nil if there is none. The cache may be stale and have an
// earlier pod of the same name. The API server is asked where that would let a deletion pass: if
// the cache has no such pod, or if it shows the pod of an eviction as not running.
func (c *Cluster) pod(ctx context.Context, q *request) (*corev1.Pod, error) {
	if q.name == "" {
		return nil, nil
	}
	pod, err := q.find(ctx, c.Reader)
	runs := pod != nil && pod.DeletionTimestamp == nil && pod.Status.Phase == corev1.PodRunning
	if err != nil || c.Live == nil || q.dryRun || runs || pod != nil && q.operation == Delete {
		return pod, err
	}
	ctx, cancel := context.WithTimeout(ctx, liveRead)
	defer cancel()
	return q.find(ctx, c.Live)
}

// find reads the pod that q concerns. Nil: no pod has this name, or its UID or resourceVersion is
// not the one that q asks for.
func (q *request) find(ctx context.Context, from client.Reader) (*corev1.Pod, error) {
	var pod corev1.Pod
	err := from.Get(ctx, types.NamespacedName{Namespace: q.namespace, Name: q.name}, &pod)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read pod %s/%s: %w", q.namespace, q.name, err)
	}
	uid, version := ptr.Deref(q.preconditions.UID, ""), ptr.Deref(q.preconditions.ResourceVersion, "")
	if err != nil || q.pod != nil && q.pod.UID != pod.UID || uid != "" && uid != pod.UID || version != "" &&
		version != pod.ResourceVersion {
		return nil, nil
	}
	return &pod, nil
}

// graceless reports whether the pod's own grace period is 0. The API server writes that into every
// deletion of it before the webhook sees it, so a forced deletion of such a pod cannot be
// recognized: it waits like any other.
func graceless(pod *corev1.Pod) bool {
	return pod != nil && pod.Spec.TerminationGracePeriodSeconds != nil && *pod.Spec.TerminationGracePeriodSeconds == 0
}

// ofPod reads the facts that are in the pod itself.
func (f *Facts) ofPod(now time.Time, pod *corev1.Pod) {
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
				// Condition times are whole seconds; a pod that has just turned counts as unready,
				// not as ready.
				f.NotReadyFor = max(now.Sub(condition.LastTransitionTime.Time), time.Nanosecond)
			}
		}
	}
}

// ofNamespace reads the facts that are in the namespace, and returns its labels.
func (c *Cluster) ofNamespace(ctx context.Context, q *request, f *Facts) (map[string]string, error) {
	var namespace corev1.Namespace
	err := c.Reader.Get(ctx, types.NamespacedName{Name: q.namespace}, &namespace)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read namespace %s from the cache: %w", q.namespace, err)
	}
	f.NamespaceTerminating = f.NamespaceTerminating || namespace.DeletionTimestamp != nil
	return namespace.Labels, nil
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

// OfRouting sets the facts about routing: the Services that list the pod, whether an agent at the
// hold may route them, and whether another pod could take the traffic. It returns the Services with
// their usable targets, nil if no such agent routes one of them.
func (f *Facts) OfRouting(now time.Time, from Slices, ledger Standings, pod drain.Pod) (all []drain.Targets) {
	listings := from.Pod(now, pod.Namespace, pod.UID)
	f.Listed = len(listings) > 0
	services := make([]drain.Service, 0, len(listings))
	for _, l := range listings {
		services = append(services, drain.Service{Namespace: l.Service.Namespace, Name: l.Service.Name})
		f.Ready = f.Ready || l.Ready
	}
	f.Agents, _ = ledger.Expecting()
	f.CouldRoute = ledger.CouldRoute(services)
	if !f.CouldRoute {
		return nil
	}
	all, f.LastOf = LastOf(from, listings, ledger, pod.UID)
	for _, at := range ledger.Pod(pod.UID).Refused {
		if now.Sub(at) < RefusedWindow {
			f.Refused++
		}
	}
	return all
}

// Targets returns the usable targets of the Services in listings, in their order. A pod that is
// being drained still counts: if its drain is queued, gateways route to it, and if not, it is
// deleted before the pod in question or readmitted.
func Targets(from Slices, listings []endpoints.Listing) []drain.Targets {
	all := make([]drain.Targets, len(listings))
	for i, l := range listings {
		usable := from.Usable(l.Service)
		all[i] = drain.Targets{Service: drain.Service{Namespace: l.Service.Namespace, Name: l.Service.Name},
			Usable: make([]drain.UID, len(usable))}
		copy(all[i].Usable, usable)
	}
	return all
}

// LastOf returns the usable targets of the Services in listings. If the pod is the only usable one
// in each of them that a gateway may route, last names one: no gateway could take the pod out.
// Where that holds for some of them, agents report it: see [drain.Report.Kept].
func LastOf(from Slices, listings []endpoints.Listing, ledger Standings, uid drain.UID) (all []drain.Targets,
	last string) {
	all = Targets(from, listings)
	for i, l := range listings {
		switch {
		case !ledger.CouldRoute([]drain.Service{all[i].Service}):
		case !l.Ready || l.Terminating || !all[i].Last(uid):
			return all, ""
		case last == "":
			last = l.Service.String()
		}
	}
	return all, last
}

// observe measures a deletion that does not wait. What nodes send to a pod that uses the network of
// one cannot be told from what they send to others there.
func (c *Cluster) observe(now time.Time, f Facts, s subject) {
	listings := c.Slices.Pod(now, s.pod.Namespace, health.UID(s.pod.UID))
	if f.Unknown || len(listings) == 0 || f.NotReadyFor > longNotReady || s.pod.Spec.HostNetwork {
		return // it would not have waited, or nothing can be seen of it
	}
	s.targets = Targets(c.Slices, listings)
	c.Ledger.Observe(s.request(), podfacts.Addresses(s.pod), Young(s.pod, now))
}

// Young returns for how long after its deletion gateways may still not have learned that a pod is
// ready. One that is not may have become ready just before.
func Young(pod *corev1.Pod, deleted time.Time) time.Duration {
	at, ready := podfacts.ReadySince(pod)
	if !ready {
		return endpoints.Linger
	}
	return max(0, endpoints.Linger-max(0, deleted.Sub(at)))
}

// live brings the targets of s up to date. It names a Service if the pod has become the last one of
// all that are routed.
func (c *Cluster) live(now time.Time, s *subject) (lastOf string) {
	uid := health.UID(s.pod.UID)
	s.targets, lastOf = LastOf(c.Slices, c.Slices.Pod(now, s.pod.Namespace, uid), c.Ledger, uid)
	return lastOf
}

// uncovered names the consumers that route a Service of the pod and are not waited for. A pod of
// which a container has no hook has no barrier.
func (c *Cluster) uncovered(ctx context.Context, s subject) ([]string, error) {
	services := make([]drain.Service, len(s.targets))
	for i, t := range s.targets {
		services[i] = t.Service
	}
	return c.Coverage.Uncovered(ctx, services, keys.Barred(s.pod.Annotations))
}

// fullService is a Service that has no capacity for another drain: draining of its usable targets
// are being drained through this replica.
type fullService struct {
	service          string
	draining, usable int
}

// fullService names the Service that a queued drain of the pod waits for: the one with the least
// capacity.
func (c *Cluster) fullService(s subject) (least fullService) {
	own := drain.UID(s.pod.UID)
	room := 0
	for _, t := range s.targets {
		if _, usable := slices.BinarySearch(t.Usable, own); !usable {
			continue // it takes nothing from this one
		}
		is := fullService{t.Service.String(), c.Ledger.Draining(t.Usable), len(t.Usable)}
		if r := max(1, is.usable/2) - is.draining; least.service == "" || r < room {
			least, room = is, r
		}
	}
	return least
}
