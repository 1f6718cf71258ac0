package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// cache is what the watches of a replica have brought, as objects. It implements [client.Reader],
// for the shipped code that reads the replica's cache.
type cache struct {
	c *coord
	// live says that the API server is asked, which answers at once.
	live bool
}

// stamp is a time in an object, which has whole seconds. ahead is how far the clock is that it was
// read from.
func stamp(at, ahead time.Duration) metav1.Time {
	return metav1.NewTime(epoch.Add(at + ahead).Truncate(time.Second))
}

// ahead returns how far the clock of the pod's kubelet is ahead.
func (p *pod) ahead(at time.Duration) time.Duration {
	if p.host == nil {
		return 0
	}
	return p.host.w.skews[p.host.node].ahead(at)
}

// object is a pod as a replica knows it.
func (p *pod) object(v podView) *corev1.Pod {
	if p.shown != nil && p.shownOf == v {
		return p.shown
	}
	of := p.drainPod()
	ready := corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionFalse,
		LastTransitionTime: stamp(v.lostAt, p.ahead(v.lostAt))}
	if v.ready {
		ready.Status, ready.LastTransitionTime = corev1.ConditionTrue, stamp(v.readyAt, p.ahead(v.readyAt))
	}
	object := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: of.Namespace, Name: of.Name, UID: types.UID(of.UID)},
		Spec:       corev1.PodSpec{NodeName: "node"},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{ready},
			PodIPs: []corev1.PodIP{{IP: p.addr.Addr().String()}}},
	}
	owner := fmt.Sprint(p.services)
	if p.hooks == hooksCutOff {
		owner += " cut off"
	}
	object.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: owner, UID: types.UID(owner),
		Controller: new(true)}}
	if p.daemon {
		object.OwnerReferences[0].Kind, object.OwnerReferences[0].UID = "DaemonSet", types.UID("owner-"+of.UID)
	}
	for _, i := range p.services {
		metav1.SetMetaDataLabel(&object.ObjectMeta, service(i).Name, "true")
	}
	if slices.Contains(p.services, 0) {
		metav1.SetMetaDataLabel(&object.ObjectMeta, "budget", "true")
	}
	if v.restartedAt > 0 {
		object.Status.ContainerStatuses = []corev1.ContainerStatus{{State: corev1.ContainerState{
			Running: &corev1.ContainerStateRunning{StartedAt: stamp(v.restartedAt, p.ahead(v.restartedAt))}}}}
	}
	if v.mode != "" {
		metav1.SetMetaDataLabel(&object.ObjectMeta, keys.Mode, v.mode)
	}
	if v.target {
		object.Status.Conditions = append(object.Status.Conditions,
			corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue})
	}
	if v.failed {
		object.Status.Phase = corev1.PodFailed
	}
	if p.host != nil {
		object.Spec.NodeName = p.host.name
		p.bar(object)
	}
	if v.terminating {
		grace := int64(p.allowed / time.Second)
		at := stamp(v.committed+p.allowed, 0)
		object.DeletionTimestamp, object.DeletionGracePeriodSeconds = &at, &grace
	}
	p.shown, p.shownOf = object, v
	return object
}

// bar gives the object of a pod its barrier.
func (p *pod) bar(object *corev1.Pod) {
	id := object.Namespace + "." + object.Name
	object.Annotations = map[string]string{keys.BarrierID: id, keys.BarrierBound: p.bound().String(),
		keys.BarrierGrace: fmt.Sprint(int(appGrace / time.Second))}
	object.Spec.TerminationGracePeriodSeconds = new(int64(p.grace() / time.Second))
	object.Spec.Containers = []corev1.Container{{Lifecycle: &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{
		HTTPGet: &corev1.HTTPGetAction{Path: keys.WaitPath + id}}}}}
	if p.hooks == hooksOfOne {
		object.Spec.Containers = append(object.Spec.Containers, corev1.Container{})
	}
}

// Get implements [client.Reader]. The pod of an agent has its name, any other pod its UID.
func (k cache) Get(_ context.Context, key client.ObjectKey, into client.Object, _ ...client.GetOption) error {
	w := k.c.w
	switch into := into.(type) {
	case *corev1.Pod:
		for _, a := range w.agents {
			if a.name == key.Name {
				into.Spec.NodeName = a.name
				return nil
			}
		}
		view, known := k.c.pods[drain.UID(key.Name)]
		if p := w.api.find(drain.UID(key.Name)); k.live {
			view, known = p.view(), !p.gone
		}
		if !known {
			return apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, key.Name)
		}
		w.api.find(drain.UID(key.Name)).object(view).DeepCopyInto(into)
	case *corev1.Service:
		for i := range w.api.services {
			if of := service(i); of.Name == key.Name && of.Namespace == key.Namespace {
				w.api.service(i).DeepCopyInto(into)
			}
		}
	}
	return nil
}

// List implements [client.Reader].
func (k cache) List(_ context.Context, into client.ObjectList, options ...client.ListOption) error {
	var o client.ListOptions
	o.ApplyOptions(options)
	selects := func(object client.Object) bool {
		return object.GetNamespace() == o.Namespace &&
			(o.LabelSelector == nil || o.LabelSelector.Matches(labels.Set(object.GetLabels())))
	}
	switch into := into.(type) {
	case *discovery.EndpointSliceList:
		for i, s := range k.c.slices {
			if object := s.object(i); s.version > 0 && selects(object) {
				into.Items = append(into.Items, *object)
			}
		}
	case *corev1.ServiceList:
		for i := range k.c.w.api.services {
			if object := k.c.w.api.service(i); selects(object) {
				into.Items = append(into.Items, *object)
			}
		}
	case *corev1.PodList:
		for _, uid := range sorted(k.c.pods) {
			if object := k.c.w.api.find(uid).object(k.c.pods[uid]); selects(object) {
				into.Items = append(into.Items, *object)
			}
		}
	case *policyv1.PodDisruptionBudgetList:
		if object := k.c.budget(); k.c.w.api.budget && selects(object) {
			into.Items = append(into.Items, *object)
		}
	}
	return nil
}

// budget is the PodDisruptionBudget of the first Service: one pod less than are wanted.
func (c *coord) budget() *policyv1.PodDisruptionBudget {
	healthy, desired := 0, c.w.api.want[0]-1
	for _, e := range c.slices[0].endpoints {
		healthy += oneIf(e.ready && !e.terminating)
	}
	return &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: service(0).Namespace, Name: "budget"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"budget": "true"}},
		},
		Status: policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: int32(max(0, healthy-desired)),
			CurrentHealthy: int32(healthy), DesiredHealthy: int32(desired)},
	}
}

// inNamespace lists the EndpointSlices of a namespace as of now.
func (a *api) inNamespace(namespace string) *discovery.EndpointSliceList {
	list := &discovery.EndpointSliceList{ListMeta: metav1.ListMeta{
		ResourceVersion: slice{at: a.w.at}.resourceVersion()}}
	for i, s := range a.slices {
		if s.version > 0 && service(i).Namespace == namespace {
			list.Items = append(list.Items, *s.object(i))
		}
	}
	return list
}

// service is the i-th Service as the API server shows it.
func (a *api) service(i int) *corev1.Service {
	of := service(i)
	object := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: of.Namespace, Name: of.Name},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, ClusterIP: "10.96.0.1",
			Selector: map[string]string{of.Name: "true"}},
	}
	local := corev1.ServiceInternalTrafficPolicyLocal
	switch a.policies[i] {
	case allNodes:
	case localAlways:
		object.Spec.InternalTrafficPolicy = &local
		object.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	case localFromOutside:
		object.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if stated := a.stated[i]; stated > 0 {
		object.Annotations = map[string]string{coverage.StatedWait: stated.String()}
	}
	return object
}
