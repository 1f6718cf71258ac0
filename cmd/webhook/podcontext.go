package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// statedWait is an annotation of a Service: how long those of its consumers that can never
// acknowledge need to let go of a pod.
const statedWait = "lameduck.io/stated-wait"

// idleBound is an annotation of a pod or a Service: how long connections to the pod are waited for,
// also those that clients keep.
const idleBound = "lameduck.io/idle-bound"

// A kernel that has not heard yet that a pod is ready does not send to it, and will when it hears,
// perhaps after its node's agent has said that nothing is sent. heardBy is how long after a pod
// became ready all have heard. It is the time that gateways have to hear that a pod is listed no
// more, or not ready any more: the same news, on the same way. Who has been seen to send to the pod
// since needs no such time.
const heardBy = endpoints.Linger

// grace is that of a deletion.
func grace(p *corev1.Pod) time.Duration {
	if p.DeletionGracePeriodSeconds == nil {
		return 0
	}
	return time.Duration(*p.DeletionGracePeriodSeconds) * time.Second
}

// maxBadWaits bounds the annotations that cannot be read and were logged.
const maxBadWaits = 1000

// podContexts tells the coordinator what surrounds a pod, from the cache. It implements
// [coordinator.PodContexts].
type podContexts struct {
	reader client.Reader
	index  *endpoints.Index
	// known says that everything else can be.
	known func() bool
	// synced says that Services can be read from reader; nothing waits for that.
	synced func() bool
	// going says that a pod is known to be going, whatever EndpointSlices say.
	going func(drain.UID) bool
	log   *slog.Logger

	mu    sync.Mutex
	wrong map[string]bool
}

// PodContext implements [coordinator.PodContexts].
func (v *podContexts) PodContext(ctx context.Context, agent string, pod drain.Pod) (s coordinator.PodContext,
	err error) {
	if !v.known() {
		return s, errors.New("the view of the cluster is not complete yet")
	}
	var is corev1.Pod
	switch err := v.reader.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, &is); {
	case apierrors.IsNotFound(err), err == nil && drain.UID(is.UID) != pod.UID:
		s.Young = heardBy // this cache has not heard of it either
		return s, nil
	case err != nil:
		return s, fmt.Errorf("read pod %s from the cache: %w", pod, err)
	}
	s.Known, s.Terminating = true, is.DeletionTimestamp != nil
	s.IdleBound = v.duration(&is, idleBound, time.ParseDuration)
	if agent == "" {
		return s, nil
	}
	namespace, name, _ := strings.Cut(agent, "/")
	var asks corev1.Pod
	if err := v.reader.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, &asks); err != nil {
		return s, fmt.Errorf("read agent's pod %s from the cache: %w", agent, err)
	}
	s.Here = is.Spec.NodeName != "" && asks.Spec.NodeName == is.Spec.NodeName
	at, ready := readySince(&is)
	switch {
	case ready:
		deleted := time.Now() // or a moment ago: who asks has heard of it earlier
		if s.Terminating {
			deleted = is.DeletionTimestamp.Add(-grace(&is))
		}
		s.Young = max(0, heardBy-max(0, deleted.Sub(at)))
	case !s.Terminating:
		s.Young = heardBy // this cache is behind: the pod may have become ready just before its deletion
	}
	listings := v.index.Pod(time.Now(), pod.Namespace, pod.UID)
	s.Targets = admission.Targets(v.index, listings)
	var all []standing
	for i, l := range listings {
		if l.Left {
			continue
		}
		of, err := v.service(ctx, l.Service)
		if err != nil {
			return s, err
		}
		s.Stated = max(s.Stated, v.duration(&of, statedWait, drain.ParseStatedWait))
		s.IdleBound = max(s.IdleBound, v.duration(&of, idleBound, time.ParseDuration))
		if of.Spec.ClusterIP != corev1.ClusterIPNone {
			all = append(all, standing{of: of, name: l.Service, last: s.Targets[i].Last(pod.UID)})
		}
	}
	return s, v.last(ctx, all, &is, &s)
}

// standing is how a pod stands in a Service for which kernels have rules: one with a cluster IP.
type standing struct {
	of   corev1.Service
	name types.NamespacedName
	// last says that no other endpoint is ready.
	last bool
}

// service returns a Service, empty if it is not known.
func (v *podContexts) service(ctx context.Context, name types.NamespacedName) (of corev1.Service, err error) {
	if !v.synced() {
		return of, nil // stated waits, headless Services and local policies are not known; the bound holds
	}
	if err := v.reader.Get(ctx, name, &of); client.IgnoreNotFound(err) != nil {
		return of, fmt.Errorf("read Service %s from the cache: %w", name, err)
	}
	return of, nil
}

// last finds in which Services kernels may go on sending to the pod.
func (v *podContexts) last(ctx context.Context, all []standing, pod *corev1.Pod, s *coordinator.PodContext) error {
	last, publish, local, rest := false, false, false, false
	for _, in := range all {
		switch {
		case in.last:
			last = true
		case in.of.Spec.PublishNotReadyAddresses:
			publish = true
		default:
			rest = true
			local = local || inside(&in.of) || outside(&in.of)
		}
	}
	switch {
	case !rest:
		s.Last = last || publish
		return nil
	case publish:
		// Kernels send to the pod to its end. What they do in the other Services does not show, but
		// by then they have heard.
		s.Last, s.Stated = true, max(s.Stated, heardBy)
		return nil
	case !last && !local:
		return nil
	}
	one, here, lastHere := true, true, last
	for _, in := range all {
		if in.last {
			continue
		}
		local := inside(&in.of) || outside(&in.of)
		known, beside, err := v.others(ctx, in.name, pod, local)
		if err != nil {
			return err
		}
		// What the node's kernel keeps for its own traffic says nothing of what it sends to
		// endpoints of all nodes, if it does so as well.
		always := inside(&in.of) && (outside(&in.of) || in.of.Spec.Type == corev1.ServiceTypeClusterIP ||
			in.of.Spec.Type == "")
		one, here = one && known, here && (known || always && !beside)
		lastHere = lastHere || !beside && local
	}
	s.LastOne, s.LastHere = last && one, lastHere && here
	return nil
}

func inside(of *corev1.Service) bool {
	return of.Spec.InternalTrafficPolicy != nil &&
		*of.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
}

func outside(of *corev1.Service) bool {
	return of.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// others reports whether a Service has another ready endpoint that every kernel must know, and
// whether it has one on the pod's node. A kernel that is late keeps the pod as the last endpoint
// that it knows, with a local policy as the last one on its node.
func (v *podContexts) others(
	ctx context.Context, name types.NamespacedName, pod *corev1.Pod, local bool,
) (known, beside bool, err error) {
	near := false
	var slices discovery.EndpointSliceList
	if err := v.reader.List(ctx, &slices, client.InNamespace(name.Namespace),
		client.MatchingLabels{discovery.LabelServiceName: name.Name}); err != nil {
		return false, false, fmt.Errorf("list EndpointSlices of %s from the cache: %w", name, err)
	}
	for i := range slices.Items {
		for _, e := range slices.Items[i].Endpoints {
			ready := (e.Conditions.Ready == nil || *e.Conditions.Ready) &&
				(e.Conditions.Terminating == nil || !*e.Conditions.Terminating)
			if !ready || e.TargetRef != nil && e.TargetRef.UID == pod.UID {
				continue
			}
			here := e.NodeName != nil && *e.NodeName == pod.Spec.NodeName
			// Read only what may still change the answer: there may be thousands of endpoints.
			knows := (!known || local && here && !near) && v.readyForLong(ctx, e.TargetRef)
			known, beside, near = known || knows, beside || here, near || here && knows
		}
	}
	return known && (near || !local || !beside), beside, nil
}

// readyForLong reports whether a pod has been ready for so long that every kernel knows of it. A
// terminating pod does not count: an agent that knows so keeps another beside it as the last, and
// this cache may be behind.
func (v *podContexts) readyForLong(ctx context.Context, ref *corev1.ObjectReference) bool {
	var is corev1.Pod
	if ref == nil || v.reader.Get(ctx, types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}, &is) != nil ||
		is.UID != ref.UID {
		return false
	}
	at, ready := readySince(&is)
	return ready && time.Since(at) >= heardBy && !v.going(drain.UID(ref.UID))
}

// duration reads an annotation of an object. One that cannot be read states nothing, and is logged
// once.
func (v *podContexts) duration(of client.Object, annotation string,
	parse func(string) (time.Duration, error)) time.Duration {
	text, ok := of.GetAnnotations()[annotation]
	if !ok {
		return 0
	}
	d, err := parse(text)
	if err == nil {
		return max(0, d)
	}
	v.mu.Lock()
	key := fmt.Sprintf("%T %s/%s %s %s", of, of.GetNamespace(), of.GetName(), annotation, text)
	said := v.wrong[key]
	if v.wrong == nil || len(v.wrong) >= maxBadWaits {
		v.wrong = map[string]bool{}
	}
	v.wrong[key] = true
	v.mu.Unlock()
	if !said {
		v.log.Warn("annotation cannot be read: it states nothing", "kind", fmt.Sprintf("%T", of),
			"namespace", of.GetNamespace(), "name", of.GetName(), "annotation", annotation, "error", err)
	}
	return 0
}
