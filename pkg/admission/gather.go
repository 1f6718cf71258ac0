package admission

import (
	"context"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
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
	// Decided is [drain.Ledger.Decided].
	Decided(uid drain.UID, allowed bool)
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
	// Hooks returns what is known of the hooks of a pod of a workload on a node.
	Hooks(node, workload string) coordinator.Hooks
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

// liveRead bounds a read from Cluster.Live, liveCheck one that only confirms what the cache shows.
// Both count toward the hold.
const (
	liveRead  = time.Second
	liveCheck = 300 * time.Millisecond
)

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
	// Services reports whether Reader has Services. Nil: it has none.
	Services func() bool
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
	// barrierWaits and workload are as in coordinator.Request.
	barrierWaits bool
	workload     string
	// evicted: the pod is evicted, not deleted.
	evicted bool
}

func (s subject) drainPod() drain.Pod {
	return drain.Pod{Namespace: s.pod.Namespace, Name: s.pod.Name, UID: drain.UID(s.pod.UID)}
}

// request is what the ledger is asked.
func (s subject) request() coordinator.Request {
	r := coordinator.Request{Pod: s.drainPod(), Targets: s.targets, Place: s.place, Turn: s.turn,
		BarrierWaits: s.barrierWaits, Workload: s.workload}
	r.Place.Evicted = s.evicted
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
	s := subject{pod: q.pod, evicted: q.operation == Evict, controller: q.controller}
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
	listings := Listings(now, c.Slices, s.pod)
	if len(listings) == 0 && !f.NotRunning && !f.Finished && !f.Terminating {
		if listings, err = c.selecting(ctx, s.pod); err != nil {
			return f, s, err
		}
	}
	s.targets = f.OfRouting(now, listings, c.Slices, c.Ledger, s.drainPod())
	f.ofBarrier(s.pod, q.grace)
	s.workload = podfacts.Workload(s.pod)
	c.hooks(&f, &s)
	return f, s, nil
}

// selecting returns the Services that select a pod which no EndpointSlice lists. The slices, or
// their cache, may be behind: gateways may know the pod, and their agents are asked.
func (c *Cluster) selecting(ctx context.Context, pod *corev1.Pod) (all []endpoints.Listing, err error) {
	if c.Services == nil || !c.Services() {
		return nil, nil
	}
	var services corev1.ServiceList
	if err := c.Reader.List(ctx, &services, client.InNamespace(pod.Namespace)); err != nil {
		return nil, fmt.Errorf("list Services of namespace %s from the cache: %w", pod.Namespace, err)
	}
	for _, s := range services.Items {
		if len(s.Spec.Selector) > 0 && s.Spec.Type != corev1.ServiceTypeExternalName &&
			labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(pod.Labels)) {
			all = append(all, endpoints.Listing{Service: client.ObjectKeyFromObject(&s)})
		}
	}
	return all, nil
}

// judge decides, for an eviction also by its budget. If claim is set and the eviction takes a place
// in the budget, its drain is open when judge returns.
func (c *Cluster) judge(ctx context.Context, f *Facts, s *subject, claim bool) (Verdict, error) {
	v := Decide(*f)
	if f.Operation != Evict || v.Action != Drain && v.Reason != CoolOff && v.Reason != LastTarget {
		return v, nil
	}
	claim = claim && v.Action == Drain // else it is allowed without a drain, or refused
	room, err := c.budget(ctx, s, f.NotReadyFor == 0, claim)
	if err != nil {
		return v, err
	}
	f.Budget, f.BudgetBroken = room.refusal, room.broken
	return Decide(*f), nil
}

// pod returns the pod that q concerns, nil if there is none. The cache may be stale and have an
// earlier pod of the same name. So the API server is asked about a pod that the cache does not
// have, and about each eviction that does not state the UID, as a deletion and a claim do. If it
// does not confirm a running pod in time, the cache counts: that pod is drained.
func (c *Cluster) pod(ctx context.Context, q *request) (*corev1.Pod, error) {
	if q.name == "" {
		return nil, nil
	}
	pod, err := q.find(ctx, c.Reader)
	runs := pod != nil && pod.DeletionTimestamp == nil && pod.Status.Phase == corev1.PodRunning
	certain := q.operation == Delete || runs && q.preconditions.UID != nil
	if err != nil || c.Live == nil || q.dryRun || pod != nil && certain {
		return pod, err
	}
	within := liveRead
	if runs {
		within = liveCheck
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	live, err := q.find(ctx, c.Live)
	if err != nil && runs {
		return pod, nil
	}
	return live, err
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

// ofBarrier reads the facts about the pod's barrier that are in the pod itself. grace is the grace
// period of the deletion, nil for the pod's own.
func (f *Facts) ofBarrier(pod *corev1.Pod, grace *int64) {
	barrier, ok := podfacts.BarrierOf(pod)
	// A copy of a pod may use the node's network, and has no address of its own then.
	f.Barred = ok && !pod.Spec.HostNetwork && len(pod.Spec.Containers) > 0 &&
		!slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool {
			return barrier.Hook(&c) == podfacts.HookNone
		})
	if !f.Barred {
		return
	}
	if grace == nil {
		grace = pod.Spec.TerminationGracePeriodSeconds
	}
	f.Bound, f.Own = barrier.Bound, barrier.Grace
	f.Grace = time.Duration(max(0, min(ptr.Deref(grace, defaultGrace), math.MaxInt32))) * time.Second
}

// hooks brings up to date what is known of the pod's hooks.
func (c *Cluster) hooks(f *Facts, s *subject) {
	if f.Barred {
		f.Hooks = c.Ledger.Hooks(s.pod.Spec.NodeName, s.workload)
	}
	s.barrierWaits, _ = barrierWillWait(*f)
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
func (f *Facts) OfRouting(now time.Time, listings []endpoints.Listing, from Slices, ledger Standings,
	pod drain.Pod) (all []drain.Targets) {
	f.Listed = len(listings) > 0
	services := make([]drain.Service, 0, len(listings))
	for _, l := range listings {
		services = append(services, drain.Service{Namespace: l.Service.Namespace, Name: l.Service.Name})
		f.Ready = f.Ready || l.Ready
	}
	f.Agents, _ = ledger.Expecting()
	standing := ledger.Pod(pod.UID)
	f.Draining = standing.Draining
	f.CouldRoute = f.Draining || ledger.CouldRoute(services)
	if !f.CouldRoute {
		return nil
	}
	all, f.LastOf = LastOf(from, listings, ledger, pod.UID)
	for _, at := range standing.Refused {
		if now.Sub(at) < RefusedWindow {
			f.Refused++
		}
	}
	return all
}

// Listings returns the Services that list a pod, and those that list its address without naming a
// pod. No agent of a directed gateway can tell such an endpoint by the UID that it is to exclude.
func Listings(now time.Time, from Slices, pod *corev1.Pod) []endpoints.Listing {
	all := from.Pod(now, pod.Namespace, health.UID(pod.UID))
	for _, at := range podfacts.Addresses(pod) {
		for _, l := range from.Pod(now, pod.Namespace, endpoints.At(at.Addr())) {
			named := slices.ContainsFunc(all, func(o endpoints.Listing) bool { return o.Service == l.Service })
			if !named && l.LeftAt.IsZero() { // else another pod may have had the address
				l.Unnamed = true
				all = append(all, l)
			}
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
	listings := Listings(now, c.Slices, s.pod)
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

// decided records the answer to a call about a pod, if the pod has a drain.
func (c *Cluster) decided(uid drain.UID, allowed bool) {
	if c.Ledger.Pod(uid).Draining {
		c.Ledger.Decided(uid, allowed)
	}
}

// live brings the targets of s up to date. It names a Service if the pod has become the last one of
// all that are routed.
func (c *Cluster) live(now time.Time, s *subject) (lastOf string) {
	listings := Listings(now, c.Slices, s.pod)
	if len(listings) == 0 {
		return "" // the drain keeps its Services
	}
	s.targets, lastOf = LastOf(c.Slices, listings, c.Ledger, health.UID(s.pod.UID))
	return lastOf
}

// uncovered names the consumers that route a Service of the pod and are not waited for. A pod of
// which a container has no hook has no barrier.
func (c *Cluster) uncovered(ctx context.Context, s subject) ([]string, error) {
	services := make([]drain.Service, len(s.targets))
	for i, t := range s.targets {
		services[i] = t.Service
	}
	names, err := c.Coverage.Uncovered(ctx, services, keys.Barred(s.pod.Annotations))
	for _, l := range Listings(time.Now(), c.Slices, s.pod) {
		if l.Unnamed && c.Ledger.CouldRoute([]drain.Service{drain.Service(l.Service)}) {
			names = append(names, "Service "+l.Service.String()+" lists its address without a "+
				"targetRef, by which agents would know the pod")
		}
	}
	return names, err
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
