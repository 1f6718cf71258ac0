package podcontext

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// going is shop/a on node n1, terminating since now with a grace of 35 s, ready for long.
func going() *corev1.Pod {
	now := time.Now()
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "a", UID: "uid-a", Finalizers: []string{"test/kept"},
			DeletionTimestamp:          ptr.To(metav1.NewTime(now.Add(35 * time.Second))),
			DeletionGracePeriodSeconds: ptr.To(int64(35)),
		},
		Spec: corev1.PodSpec{NodeName: "n1"},
		Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{
			Type: corev1.PodReady, Status: corev1.ConditionTrue,
			LastTransitionTime: metav1.NewTime(now.Add(-time.Minute)),
		}}},
	}
}

// entry is one endpoint of shop/web.
func entry(uid types.UID, node string, ready, terminating bool) discovery.Endpoint {
	return discovery.Endpoint{
		Addresses: []string{"10.0.0." + string('1'+uid[len(uid)-1]-'a')}, NodeName: &node,
		Conditions: discovery.EndpointConditions{Ready: ptr.To(ready), Terminating: ptr.To(terminating),
			Serving: ptr.To(true)},
		TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "shop", Name: string(uid), UID: uid},
	}
}

func TestPodContext(t *testing.T) {
	agent := func(node string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "lameduck-node", Name: "agent-x", UID: "x"},
			Spec: corev1.PodSpec{NodeName: node}}
	}
	self := entry("uid-a", "n1", false, true)
	local := corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort,
		ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal}
	inside := corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP,
		InternalTrafficPolicy: ptr.To(corev1.ServiceInternalTrafficPolicyLocal)}
	mixed := corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort,
		InternalTrafficPolicy: ptr.To(corev1.ServiceInternalTrafficPolicyLocal)}
	for name, c := range map[string]struct {
		pod         func(*corev1.Pod)
		node        string
		with        []discovery.Endpoint
		spec        corev1.ServiceSpec
		state, idle string
		// other is for how long the pod of the other endpoint has been ready; 0: it is not known.
		other time.Duration
		// mode is the namespace's label.
		mode string
		// unsynced: Services cannot be read.
		unsynced bool
		// otherGoes: the pod of the other endpoint is being drained.
		otherGoes bool
		want      coordinator.PodContext
	}{
		"another is ready": {
			with: []discovery.Endpoint{self, entry("uid-b", "n2", true, false)},
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true},
		},
		"no other is ready": {
			with: []discovery.Endpoint{self, entry("uid-b", "n2", false, false)},
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true, Last: true},
		},
		"all are going": {
			with: []discovery.Endpoint{self, entry("uid-b", "n2", false, true)},
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true, Last: true},
		},
		"those that are not ready are published": {
			with: []discovery.Endpoint{self, entry("uid-b", "n2", true, false)},
			spec: corev1.ServiceSpec{PublishNotReadyAddresses: true},
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true, Last: true},
		},
		"local, another node has one": {
			with: []discovery.Endpoint{self, entry("uid-b", "n2", true, false)}, spec: local, other: time.Minute,
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true, LastHere: true},
		},
		"local, another node has one of which this one may not have heard": {
			with: []discovery.Endpoint{self, entry("uid-b", "n2", true, false)}, spec: local, other: 2 * time.Second,
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true},
		},
		"local, another node has one that is going, which EndpointSlices do not say yet": {
			with: []discovery.Endpoint{self, entry("uid-b", "n2", true, false)}, spec: local, other: time.Minute,
			otherGoes: true,
			want:      coordinator.PodContext{Known: true, Terminating: true, Here: true},
		},
		"local, another node has one of which nothing is known": {
			with: []discovery.Endpoint{self, entry("uid-b", "n2", true, false)}, spec: local,
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true},
		},
		"nothing is sent to other nodes": {
			with: []discovery.Endpoint{self, entry("uid-b", "n2", true, false)}, spec: inside,
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true, LastHere: true},
		},
		"only what comes from outside is sent to other nodes": {
			with: []discovery.Endpoint{self, entry("uid-b", "n2", true, false)}, spec: mixed, other: 2 * time.Second,
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true},
		},
		"local, this node has another": {
			with: []discovery.Endpoint{self, entry("uid-b", "n1", true, false)}, spec: local, other: time.Minute,
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true},
		},
		"local, Services are not known": {
			with: []discovery.Endpoint{self, entry("uid-b", "n2", true, false)}, spec: local, other: time.Minute,
			unsynced: true,
			want:     coordinator.PodContext{Known: true, Terminating: true, Here: true},
		},
		"a wait is stated": {
			with:  []discovery.Endpoint{self, entry("uid-b", "n2", true, false)},
			state: "checkInterval=10s,unhealthyThreshold=2,timeout=1s",
			want:  coordinator.PodContext{Known: true, Terminating: true, Here: true, Stated: 21 * time.Second},
		},
		"a wait that may end early is stated": {
			with:  []discovery.Endpoint{self, entry("uid-b", "n2", true, false)},
			state: "at most 2m, checkInterval=15s, timeout=5s",
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true,
				AtMost: drain.StatedWait{Wait: 2 * time.Minute, Quiet: 20 * time.Second}},
		},
		"a wait that cannot be read": {
			with: []discovery.Endpoint{self, entry("uid-b", "n2", true, false)}, state: "soon",
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true},
		},
		"the grace period of the deletion": {
			pod:  func(p *corev1.Pod) { p.DeletionGracePeriodSeconds = ptr.To(int64(35)) },
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true, Grace: 35 * time.Second},
		},
		"connections are to be waited for, says the pod": {
			pod:  func(p *corev1.Pod) { p.Annotations = map[string]string{idleBound: "25s"} },
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true, IdleBound: 25 * time.Second},
		},
		"connections are to be waited for, says the Service more": {
			pod:  func(p *corev1.Pod) { p.Annotations = map[string]string{idleBound: "5s"} },
			with: []discovery.Endpoint{self, entry("uid-b", "n2", true, false)}, idle: "25s",
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true, IdleBound: 25 * time.Second},
		},
		"connections are to be waited for, for a time that cannot be read": {
			pod:  func(p *corev1.Pod) { p.Annotations = map[string]string{idleBound: "long"} },
			with: []discovery.Endpoint{self, entry("uid-b", "n2", true, false)}, idle: "-1s",
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true},
		},
		"of another node": {
			node: "n2", with: []discovery.Endpoint{self, entry("uid-b", "n2", true, false)},
			want: coordinator.PodContext{Known: true, Terminating: true},
		},
		"another of its name": {pod: func(p *corev1.Pod) { p.UID = "uid-z" },
			want: coordinator.PodContext{Young: 10 * time.Second}},
		"not terminating here": {pod: func(p *corev1.Pod) {
			p.DeletionTimestamp, p.DeletionGracePeriodSeconds = nil, nil
		}, want: coordinator.PodContext{Known: true, Here: true}},
		// Without this, a pod that became ready and was deleted at once counts as one that no
		// gateway has ever routed to.
		"neither terminating nor ready here": {
			pod: func(p *corev1.Pod) {
				p.DeletionTimestamp, p.DeletionGracePeriodSeconds = nil, nil
				p.Status.Conditions[0].Status = corev1.ConditionFalse
			},
			want: coordinator.PodContext{Known: true, Here: true, Young: 10 * time.Second},
		},
		"in no Service": {want: coordinator.PodContext{Known: true, Terminating: true, Here: true}},
		"ready for a moment": {
			pod: func(p *corev1.Pod) {
				p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(
					p.DeletionTimestamp.Add(-grace(p) - 2*time.Second))
			},
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true, Young: 8 * time.Second},
		},
		"ready for a moment, and its deletion not heard of here": {
			pod: func(p *corev1.Pod) {
				p.DeletionTimestamp, p.DeletionGracePeriodSeconds = nil, nil
				// its clock is ahead
				p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(time.Now().Add(time.Minute))
			},
			want: coordinator.PodContext{Known: true, Here: true, Young: 10 * time.Second},
		},
		"nothing waits": {
			mode: keys.Observe,
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true, NotEnforced: true},
		},
		"a pod that waits where nothing else does": {
			mode: keys.Observe, pod: func(p *corev1.Pod) { p.Labels = map[string]string{keys.Mode: keys.Enforce} },
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true},
		},
		"off": {
			mode: keys.Off, pod: func(p *corev1.Pod) { p.Labels = map[string]string{keys.Mode: keys.Enforce} },
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true, NotEnforced: true},
		},
		"unready since the deletion": {
			pod: func(p *corev1.Pod) {
				p.Status.Conditions[0].Status, p.Status.Conditions[0].LastTransitionTime = corev1.ConditionFalse,
					metav1.Now()
			},
			want: coordinator.PodContext{Known: true, Terminating: true, Here: true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod, node := going(), "n1"
			if c.pod != nil {
				c.pod(pod)
			}
			if c.node != "" {
				node = c.node
			}
			slice := &discovery.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-1",
					Labels: map[string]string{discovery.LabelServiceName: "web"}, ResourceVersion: "7"},
				AddressType: discovery.AddressTypeIPv4, Endpoints: c.with,
				Ports: []discovery.EndpointPort{{Port: ptr.To(int32(80))}},
			}
			service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: c.spec}
			if c.state != "" {
				service.Annotations = map[string]string{coverage.StatedWait: c.state}
			}
			if c.idle != "" {
				service.Annotations = map[string]string{idleBound: c.idle}
			}
			in := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop",
				Labels: map[string]string{keys.Mode: c.mode}}}
			objects := []client.Object{pod, agent(node), service, slice, in}
			if c.other > 0 {
				other := going()
				other.Name, other.UID, other.DeletionTimestamp, other.DeletionGracePeriodSeconds = "uid-b", "uid-b",
					nil, nil
				other.Status.Conditions[0].LastTransitionTime = metav1.NewTime(time.Now().Add(-c.other))
				objects = append(objects, other)
			}
			v := &Source{
				Reader: fake.NewClientBuilder().WithObjects(objects...).Build(), Index: endpoints.NewIndex(),
				Log:   slog.New(slog.DiscardHandler),
				Now:   time.Now,
				Known: func() bool { return true }, Synced: func() bool { return !c.unsynced },
				Going: func(uid drain.UID) bool { return c.otherGoes && uid == "uid-b" },
			}
			v.Index.(*endpoints.Index).Apply(time.Now(), slice)
			got, err := v.PodContext(t.Context(), "lameduck-node/agent-x",
				drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"})
			if err != nil {
				t.Fatal(err)
			}
			// The Service's selector leaves the pod: what it states holds for those that have not
			// heard of that.
			without := slice.DeepCopy()
			without.ResourceVersion, without.Endpoints = "8", nil
			v.Index.(*endpoints.Index).Apply(time.Now(), without)
			left, err := v.PodContext(t.Context(), "lameduck-node/agent-x",
				drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"})
			if err != nil || left.Stated != got.Stated || left.AtMost != got.AtMost ||
				left.IdleBound != got.IdleBound {
				t.Errorf("%+v before its Service has left it, and %+v after: %v", got, left, err)
			}
			listed := len(got.Targets) == 1
			got.Targets = nil
			if got.Known != c.want.Known || got.NotEnforced != c.want.NotEnforced ||
				got.Terminating != c.want.Terminating || got.Here != c.want.Here ||
				got.Stated != c.want.Stated || got.AtMost != c.want.AtMost || got.IdleBound != c.want.IdleBound ||
				got.Young != c.want.Young || got.Last != c.want.Last || got.LastHere != c.want.LastHere ||
				got.Known && listed != (len(c.with) > 0) {
				t.Errorf("%+v, listed %t; want %+v", got, listed, c.want)
			}
		})
	}
}

// A pod is in several Services. In those that kernels have rules for, and in which another endpoint
// is ready, a kernel that still sends to the pod is late and must be waited for. The governing
// Service of a StatefulSet is headless: kernels have no rules for it.
func TestTheLastTargetIsJudgedForEachService(t *testing.T) {
	ip := corev1.ServiceSpec{ClusterIP: "10.96.0.7"}
	headless := corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone, PublishNotReadyAddresses: true}
	local := corev1.ServiceSpec{
		ClusterIP: "10.96.0.9", Type: corev1.ServiceTypeNodePort,
		ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
	}
	publishes := corev1.ServiceSpec{ClusterIP: "10.96.0.8", PublishNotReadyAddresses: true}
	type service struct {
		spec  corev1.ServiceSpec
		alone bool
	}
	for name, c := range map[string]struct {
		in []service
		// other is for how long the pod of the other endpoint has been ready.
		other time.Duration
		// near is the same of another one, on the pod's node. 0: there is none.
		near            time.Duration
		last, one, here bool
		stated          time.Duration
	}{
		"a headless one lists it too": {in: []service{{ip, false}, {headless, false}},
			other: time.Minute},
		"it is the last of a headless one": {in: []service{{ip, false}, {headless, true}},
			other: time.Minute},
		"the last of the one that is not headless": {in: []service{{ip, true}, {headless, false}}, last: true},
		"in headless ones only":                    {in: []service{{headless, false}}},
		"the last of one": {in: []service{{ip, true}, {ip, false}},
			other: time.Minute, one: true, here: true},
		"the last of one, and kernels may not know another": {in: []service{{ip, true}, {ip, false}},
			other: time.Second},
		"the last of one, and the node may not know another of its own": {
			in: []service{{ip, true}, {local, false}}, other: time.Minute, near: time.Second,
		},
		"the last of one, and the node knows another of its own": {
			in: []service{{ip, true}, {local, false}}, other: time.Minute, near: time.Minute, one: true, here: true,
		},
		"the last of both":                       {in: []service{{ip, true}, {ip, true}}, last: true},
		"one publishes those that are not ready": {in: []service{{publishes, false}}, last: true},
		"one publishes those that are not ready, and one does not": {in: []service{{publishes, false}, {ip, false}},
			last: true, stated: heardBy},
	} {
		t.Run(name, func(t *testing.T) {
			pod, other := going(), going()
			other.Name, other.UID, other.DeletionTimestamp, other.DeletionGracePeriodSeconds = "uid-b", "uid-b", nil,
				nil
			other.Status.Conditions[0].LastTransitionTime = metav1.NewTime(time.Now().Add(-c.other))
			near := other.DeepCopy()
			near.Name, near.UID = "uid-c", "uid-c"
			near.Status.Conditions[0].LastTransitionTime = metav1.NewTime(time.Now().Add(-c.near))
			objects := []client.Object{pod, other, near, &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "lameduck-node", Name: "agent-x", UID: "x"},
				Spec:       corev1.PodSpec{NodeName: "n1"},
			}}
			v := &Source{
				Index: endpoints.NewIndex(), Log: slog.New(slog.DiscardHandler), Known: func() bool { return true },
				Now:    time.Now,
				Synced: func() bool { return true },
				Going:  func(drain.UID) bool { return false },
			}
			for i, in := range c.in {
				name := "db-" + string(rune('a'+i))
				slice := &discovery.EndpointSlice{
					ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name + "-1",
						Labels: map[string]string{discovery.LabelServiceName: name}, ResourceVersion: "7"},
					AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Port: ptr.To(int32(80))}},
					Endpoints: []discovery.Endpoint{entry("uid-a", "n1", in.spec.PublishNotReadyAddresses, true)},
				}
				if !in.alone {
					slice.Endpoints = append(slice.Endpoints, entry("uid-b", "n2", true, false))
				}
				if !in.alone && c.near > 0 {
					slice.Endpoints = append(slice.Endpoints, entry("uid-c", "n1", true, false))
				}
				v.Index.(*endpoints.Index).Apply(time.Now(), slice)
				objects = append(objects, slice,
					&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Spec: in.spec})
			}
			v.Reader = fake.NewClientBuilder().WithObjects(objects...).Build()
			got, err := v.PodContext(t.Context(), "lameduck-node/agent-x",
				drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"})
			if err != nil {
				t.Fatal(err)
			}
			if got.Last != c.last || got.LastOne != c.one || got.LastHere != c.here || got.Stated != c.stated ||
				len(got.Targets) != len(c.in) {
				t.Errorf("%+v", got)
			}
		})
	}
}

// The node of a pod for which there must be rules does not acknowledge by having none. In every
// other case the absence of rules shows nothing, and must not cost the deletion its bound.
func TestForWhichPodsEveryNodeHasRules(t *testing.T) {
	local := ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	for name, c := range map[string]struct {
		spec               corev1.ServiceSpec
		label              string
		unready, left, out bool
		want               bool
	}{
		"a Service":             {spec: corev1.ServiceSpec{ClusterIP: "10.96.0.7"}, want: true},
		"none":                  {spec: corev1.ServiceSpec{ClusterIP: "10.96.0.7"}, out: true},
		"headless":              {spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone}},
		"not known":             {},
		"never ready":           {spec: corev1.ServiceSpec{ClusterIP: "10.96.0.7"}, unready: true},
		"of another proxy":      {spec: corev1.ServiceSpec{ClusterIP: "10.96.0.7"}, label: "other"},
		"that the pod has left": {spec: corev1.ServiceSpec{ClusterIP: "10.96.0.7"}, left: true},
		"of the node's own pods": {
			spec: corev1.ServiceSpec{ClusterIP: "10.96.0.7", InternalTrafficPolicy: local},
		},
		"of the node's own pods for clients outside": {
			spec: corev1.ServiceSpec{ClusterIP: "10.96.0.7", ExternalTrafficPolicy: "Local"}, want: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := going()
			if c.unready {
				pod.Status.Conditions[0].Status = corev1.ConditionFalse
			}
			slice := &discovery.EndpointSlice{
				ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-1",
					Labels: map[string]string{discovery.LabelServiceName: "web"}, ResourceVersion: "7"},
				AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Port: ptr.To(int32(80))}},
				Endpoints: []discovery.Endpoint{entry("uid-a", "n1", true, false)},
			}
			service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web",
				Labels: map[string]string{labelProxyName: c.label}}, Spec: c.spec}
			v := &Source{
				Reader: fake.NewClientBuilder().WithObjects(pod, service, slice, &corev1.Pod{
					ObjectMeta: metav1.ObjectMeta{Namespace: "lameduck-node", Name: "agent-x", UID: "x"},
				}).Build(),
				Index: endpoints.NewIndex(), Log: slog.New(slog.DiscardHandler), Now: time.Now,
				Known: func() bool { return true }, Synced: func() bool { return true },
				Going: func(drain.UID) bool { return false },
			}
			index := v.Index.(*endpoints.Index) //nolint:forcetypeassert // see above
			if !c.out {
				index.Apply(time.Now(), slice)
			}
			if c.left {
				without := slice.DeepCopy()
				without.ResourceVersion, without.Endpoints = "8", nil
				index.Apply(time.Now(), without)
			}
			got, err := v.PodContext(t.Context(), "lameduck-node/agent-x",
				drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"})
			if err != nil || got.Listed != c.want {
				t.Errorf("%+v, %v; want listed %t", got, err, c.want)
			}
		})
	}
}

// Without this, a replica that has just started ends the barriers of pods that it has not heard of
// yet.
func TestAColdViewKnowsNothing(t *testing.T) {
	v := &Source{Known: func() bool { return false }}
	if s, err := v.PodContext(context.Background(),
		"", drain.Pod{Namespace: "shop", Name: "a", UID: "uid-a"}); err == nil {
		t.Errorf("it says %+v", s)
	}
}

// An annotation may have 256 KiB, and its author may change it again and again.
func TestLongAnnotationsAreCut(t *testing.T) {
	var log bytes.Buffer
	v := &Source{Log: slog.New(slog.NewJSONHandler(&log, nil)), Now: time.Now}
	of := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web",
		Annotations: map[string]string{idleBound: strings.Repeat("x", 256<<10)}}}
	for range 2 {
		v.duration(of, idleBound, time.ParseDuration)
	}
	if n := log.Len(); n == 0 || n > 1000 || strings.Count(log.String(), "\n") != 1 {
		t.Errorf("it logs %d bytes, %d lines", n, strings.Count(log.String(), "\n"))
	}
	for key := range v.wrong {
		if len(key) > 1000 {
			t.Errorf("it remembers %d bytes", len(key))
		}
	}
}
