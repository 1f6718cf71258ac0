// Package podcontext computes the context of a pod at the barrier from caches: its Services,
// whether nodes may keep sending to it, whether every node knows it yet, and its stated waits. It
// decides nothing; package coordinator asks it four times a second for each waiting pod.
package podcontext

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
	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/internal/podfacts"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// idleBound is an annotation of a pod or a Service: how long to wait for its connections, including
// idle keep-alive ones.
const idleBound = "lameduck.io/idle-bound"

// labelProxyName is a label of Services that kube-proxy leaves to another proxy.
const labelProxyName = "service.kubernetes.io/service-proxy-name"

// heardBy is how long after a pod became ready the kernels of all nodes know it. It is as long as
// gateways take to learn that a pod is not ready any more. A kernel that does not know the pod yet
// looks as if it had removed the pod, but it may begin to send after its agent has reported
// Removed. An agent whose kernel was seen to send to the pod does not need this time.
const heardBy = endpoints.Linger

func grace(p *corev1.Pod) time.Duration {
	if p.DeletionGracePeriodSeconds == nil {
		return 0
	}
	return time.Duration(*p.DeletionGracePeriodSeconds) * time.Second
}

// maxBadWaits bounds the remembered annotations that could not be read and were logged.
const maxBadWaits = 1000

// Source returns the contexts of pods, from a cache. It implements [coordinator.PodContexts].
type Source struct {
	Reader client.Reader
	// Mode is the default mode: of pods without the mode label whose namespace does not have it
	// either.
	Mode  string
	Index admission.Slices
	// Known reports whether the cache of everything but Services has synced. Synced reports whether
	// that of Services has. Nothing waits for Synced.
	Known, Synced func() bool
	// Going reports whether a pod is terminating, even if EndpointSlices do not show it yet.
	Going    func(drain.UID) bool
	Coverage *coverage.Source
	Log      *slog.Logger
	// Now is the clock.
	Now func() time.Time

	mu    sync.Mutex
	wrong map[string]bool
}

// PodContext implements [coordinator.PodContexts].
func (v *Source) PodContext(ctx context.Context, agent string, pod drain.Pod) (s coordinator.PodContext,
	err error) {
	if !v.Known() {
		return s, errors.New("the view of the cluster is not complete yet")
	}
	var is corev1.Pod
	switch err := v.Reader.Get(ctx, types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, &is); {
	case apierrors.IsNotFound(err), err == nil && drain.UID(is.UID) != pod.UID:
		s.Young = heardBy // this cache does not know of it either
		return s, nil
	case err != nil:
		return s, fmt.Errorf("read pod %s from the cache: %w", pod, err)
	}
	if s.Known, s.Terminating = true, is.DeletionTimestamp != nil; s.Terminating {
		s.Grace = grace(&is)
	}
	s.Partly, s.Workload = is.Annotations[keys.BarrierUncovered] != "", podfacts.Workload(&is)
	s.IdleBound = v.duration(&is, idleBound, time.ParseDuration)
	if agent == "" {
		return s, nil
	}
	var in corev1.Namespace
	if err := v.Reader.Get(ctx, types.NamespacedName{Name: pod.Namespace}, &in); client.IgnoreNotFound(err) != nil {
		return s, fmt.Errorf("read namespace %s from the cache: %w", pod.Namespace, err)
	}
	s.NotEnforced = keys.ModeOf(is.Labels, in.Labels, v.Mode) != keys.Enforce
	namespace, name, _ := strings.Cut(agent, "/")
	var asks corev1.Pod
	if err := v.Reader.Get(ctx, types.NamespacedName{Namespace: namespace, Name: name}, &asks); err != nil {
		return s, fmt.Errorf("read agent's pod %s from the cache: %w", agent, err)
	}
	s.Addresses = podfacts.Addresses(&is)
	s.Here = is.Spec.NodeName != "" && asks.Spec.NodeName == is.Spec.NodeName
	_, ready := podfacts.ReadySince(&is)
	if ready || !s.Terminating {
		deleted := v.Now() // or just before: the agent that asks learned of it earlier
		if s.Terminating {
			deleted = is.DeletionTimestamp.Add(-grace(&is))
		}
		s.Young = admission.Young(&is, deleted)
	}
	listings := admission.Listings(v.Now(), v.Index, &is)
	s.Targets = admission.Targets(v.Index, listings)
	var all []standing
	for i, l := range listings {
		if !l.LeftAt.IsZero() && v.Now().Sub(l.LeftAt) >= endpoints.Linger {
			continue // it states nothing about the pod any more, and its gateways may still have requests
		}
		of, err := v.service(ctx, l.Service)
		if err != nil {
			return s, err
		}
		var stated drain.StatedWait
		v.duration(&of, coverage.StatedWait, func(text string) (_ time.Duration, err error) {
			stated, err = drain.ParseStatedWait(text)
			return stated.Wait, err
		})
		if stated.Quiet > 0 {
			s.AtMost.Wait, s.AtMost.Quiet = max(s.AtMost.Wait, stated.Wait), max(s.AtMost.Quiet, stated.Quiet)
		} else {
			s.Stated = max(s.Stated, stated.Wait)
		}
		s.IdleBound = max(s.IdleBound, v.duration(&of, idleBound, time.ParseDuration))
		if l.LeftAt.IsZero() && of.Spec.ClusterIP != corev1.ClusterIPNone {
			all = append(all, standing{of: of, name: l.Service, last: s.Targets[i].Last(pod.UID)})
			s.Listed = s.Listed || ready && everywhere(&of)
		}
	}
	return s, v.last(ctx, all, &is, &s)
}

// Uncovered implements [coordinator.PodContexts].
func (v *Source) Uncovered(ctx context.Context, services []drain.Service, barred bool) []string {
	names, err := v.Coverage.Uncovered(ctx, services, barred)
	if err != nil { // the rest was found
		v.Log.Warn("find out what routes Services", "services", services, "error", err)
	}
	return names
}

// standing is the role of a pod in a Service for which kernels have rules: one with a cluster IP.
type standing struct {
	of   corev1.Service
	name types.NamespacedName
	// last: no other endpoint is ready.
	last bool
}

// service returns a Service, empty if it is not known.
func (v *Source) service(ctx context.Context, name types.NamespacedName) (of corev1.Service, err error) {
	if !v.Synced() {
		return of, nil // stated waits, headless Services and local policies are not known; the bound holds
	}
	if err := v.Reader.Get(ctx, name, &of); client.IgnoreNotFound(err) != nil {
		return of, fmt.Errorf("read Service %s from the cache: %w", name, err)
	}
	return of, nil
}

// last sets Last, LastOne, LastHere and Stated of s: whether kernels may keep sending to the pod
// because it is the last endpoint of a Service, or because a Service publishes addresses that are
// not ready.
func (v *Source) last(ctx context.Context, all []standing, pod *corev1.Pod, s *coordinator.PodContext) error {
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
		// Kernels send to the pod until it is deleted, so reports show nothing about its other
		// Services. But heardBy after the deletion, all kernels have removed the pod from those.
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
		// If the node's kernel keeps the pod for traffic from this node, that does not show what it
		// does with external traffic.
		always := inside(&in.of) && (outside(&in.of) || in.of.Spec.Type == corev1.ServiceTypeClusterIP ||
			in.of.Spec.Type == "")
		one, here = one && known, here && (known || always && !beside)
		lastHere = lastHere || !beside && local
	}
	s.LastOne, s.LastHere = last && one, lastHere && here
	return nil
}

// everywhere reports whether each change of a Service's endpoints makes kube-proxy write on each
// node. With an internal Local policy it may have nothing to write on a node without an endpoint.
func everywhere(of *corev1.Service) bool {
	return of.Spec.ClusterIP != "" && !inside(of) && of.Labels[labelProxyName] == ""
}

func inside(of *corev1.Service) bool {
	return of.Spec.InternalTrafficPolicy != nil &&
		*of.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
}

func outside(of *corev1.Service) bool {
	return of.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// others reports whether a Service has another ready endpoint that every kernel must know (known),
// and whether it has one on the pod's node (beside). A kernel that is late keeps the pod as the
// last endpoint that it knows or, with a local policy, as the last one on its node.
func (v *Source) others(
	ctx context.Context, name types.NamespacedName, pod *corev1.Pod, local bool,
) (known, beside bool, err error) {
	near := false
	var slices discovery.EndpointSliceList
	if err := v.Reader.List(ctx, &slices, client.InNamespace(name.Namespace),
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

// readyForLong reports whether every kernel knows of a pod as ready. A terminating pod does not
// count, even if this cache does not show that it is terminating: a kernel that already knows may
// keep the deleted pod as the last one.
func (v *Source) readyForLong(ctx context.Context, ref *corev1.ObjectReference) bool {
	var is corev1.Pod
	if ref == nil || v.Reader.Get(ctx, types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}, &is) != nil ||
		is.UID != ref.UID {
		return false
	}
	at, ready := podfacts.ReadySince(&is)
	return ready && v.Now().Sub(at) >= heardBy && !v.Going(drain.UID(ref.UID))
}

// duration reads an annotation. An annotation that cannot be read counts as 0, and is logged once.
func (v *Source) duration(of client.Object, annotation string,
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
	why := fmt.Sprintf("%.200s", err) // the text may have 256 KiB
	key := fmt.Sprintf("%T %s/%s %s %s", of, of.GetNamespace(), of.GetName(), annotation, why)
	said := v.wrong[key]
	if v.wrong == nil || len(v.wrong) >= maxBadWaits {
		v.wrong = map[string]bool{}
	}
	v.wrong[key] = true
	v.mu.Unlock()
	if !said {
		v.Log.Warn("annotation cannot be read: it states nothing", "kind", fmt.Sprintf("%T", of),
			"namespace", of.GetNamespace(), "name", of.GetName(), "annotation", annotation, "error", why)
	}
	return 0
}
