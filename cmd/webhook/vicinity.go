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

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/coordinator"
	"github.com/lameduck-io/lameduck/pkg/endpoints"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// statedWait is an annotation of a Service: how long those of its consumers that can never acknowledge need to let go of a pod.
const statedWait = "lameduck.io/stated-wait"

// A kernel that has not heard yet that a pod is ready does not send to it, and will when it hears, perhaps after its node's agent has said that
// nothing is sent. heardBy is how long after a pod became ready all have heard. It is the time that gateways have to hear that a pod is listed
// no more, or not ready any more: the same news, on the same way. Who has been seen to send to the pod since needs no such time.
const heardBy = endpoints.Linger

// grace is that of a deletion.
func grace(p *corev1.Pod) time.Duration {
	if p.DeletionGracePeriodSeconds == nil {
		return 0
	}
	return time.Duration(*p.DeletionGracePeriodSeconds) * time.Second
}

// statedWrongMost bounds the annotations that cannot be read and were logged.
const statedWrongMost = 1000

// vicinity tells the coordinator what surrounds a pod, from the cache. It implements [coordinator.Vicinity].
type vicinity struct {
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

// Surroundings implements coordinator.Vicinity.
func (v *vicinity) Surroundings(ctx context.Context, agent string, pod drain.Pod) (s coordinator.Surroundings, err error) {
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
	uid := health.UID(pod.UID)
	for _, l := range v.index.Pod(time.Now(), pod.Namespace, uid) {
		usable := v.index.Usable(l.Service)
		t := drain.Targets{Service: drain.Service{Namespace: l.Service.Namespace, Name: l.Service.Name}, Usable: make([]drain.UID, len(usable))}
		others := 0
		for i, other := range usable {
			t.Usable[i] = drain.UID(other)
			if other != uid {
				others++
			}
		}
		s.Targets = append(s.Targets, t)
		if l.Left {
			continue
		}
		s.Last = s.Last || others == 0
		if err := v.service(ctx, l.Service, &is, &s); err != nil {
			return s, err
		}
	}
	return s, nil
}

// service adds what a Service itself says.
func (v *vicinity) service(ctx context.Context, name types.NamespacedName, pod *corev1.Pod, s *coordinator.Surroundings) error {
	if !v.synced() {
		return nil // stated waits and local policies are not known; the bound holds
	}
	var of corev1.Service
	if err := v.reader.Get(ctx, name, &of); err != nil {
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("read Service %s from the cache: %w", name, err)
	}
	if text, ok := of.Annotations[statedWait]; ok {
		wait, err := drain.ParseStatedWait(text)
		if err != nil {
			v.complain(name, text, err)
		}
		s.Stated = max(s.Stated, wait)
	}
	s.Last = s.Last || of.Spec.PublishNotReadyAddresses
	fromInside := of.Spec.InternalTrafficPolicy != nil && *of.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
	fromOutside := of.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	if !fromInside && !fromOutside || s.Last || s.LastHere {
		return nil
	}
	var slices discovery.EndpointSliceList
	if err := v.reader.List(ctx, &slices, client.InNamespace(name.Namespace), client.MatchingLabels{discovery.LabelServiceName: name.Name}); err != nil {
		return fmt.Errorf("list EndpointSlices of %s from the cache: %w", name, err)
	}
	// What the node's kernel keeps for its own traffic says nothing of what it sends to endpoints of all nodes, if it does so as well: one that is
	// late keeps the pod there too, for want of another that it has heard of. So there must be one of which it must have heard.
	heard := fromInside && (fromOutside || of.Spec.Type == corev1.ServiceTypeClusterIP || of.Spec.Type == "")
	for i := range slices.Items {
		for _, e := range slices.Items[i].Endpoints {
			ready := (e.Conditions.Ready == nil || *e.Conditions.Ready) && (e.Conditions.Terminating == nil || !*e.Conditions.Terminating)
			if !ready || e.TargetRef != nil && e.TargetRef.UID == pod.UID {
				continue
			}
			if e.NodeName != nil && *e.NodeName == pod.Spec.NodeName {
				return nil
			}
			heard = heard || v.heard(ctx, e.TargetRef)
		}
	}
	s.LastHere = heard
	return nil
}

// heard says whether a pod has been ready for so long that every kernel has heard so. One that is going does not count: an agent that knows so keeps
// another beside it as the last, and this cache may be behind.
func (v *vicinity) heard(ctx context.Context, ref *corev1.ObjectReference) bool {
	var is corev1.Pod
	if ref == nil || v.reader.Get(ctx, types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}, &is) != nil || is.UID != ref.UID {
		return false
	}
	at, ready := readySince(&is)
	return ready && time.Since(at) >= heardBy && !v.going(drain.UID(ref.UID))
}

// complain logs an annotation that cannot be read, once.
func (v *vicinity) complain(name types.NamespacedName, text string, err error) {
	v.mu.Lock()
	key := name.String() + " " + text
	said := v.wrong[key]
	if v.wrong == nil || len(v.wrong) >= statedWrongMost {
		v.wrong = map[string]bool{}
	}
	v.wrong[key] = true
	v.mu.Unlock()
	if !said {
		v.log.Warn("Service states no wait that can be read: none is made", "service", name.String(), "annotation", statedWait, "error", err)
	}
}
