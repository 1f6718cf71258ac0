package main

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/pkg/admission"
)

// Each probe says what its own check says, and closes its connection: the port has few.
func TestProbes(t *testing.T) {
	var live, ready error
	handler := probes(func() error { return live }, func() error { return ready })
	ask := func(path string) int {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		if w.Code != http.StatusNotFound && w.Header().Get("Connection") != "close" {
			t.Errorf("%s keeps its connection", path)
		}
		return w.Code
	}
	for _, c := range []struct {
		live, ready error
		want        [3]int
	}{
		{nil, nil, [3]int{200, 200, 404}},
		{errors.New("stuck"), nil, [3]int{503, 200, 404}},
		{nil, errors.New("cold"), [3]int{200, 503, 404}},
	} {
		live, ready = c.live, c.ready
		if got := [3]int{ask("/livez"), ask("/readyz"), ask("/metrics")}; got != c.want {
			t.Errorf("live %v, ready %v: %v, want %v", live, ready, got, c.want)
		}
	}
}

// What a replica keeps of a pod has everything that is read of it.
func TestStrip(t *testing.T) {
	hook := &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 5}}}
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Unix(1, 0)}}
	whole := func() *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: map[string]string{"app": "a"},
				Annotations:   map[string]string{"lameduck.io/break-glass": "true"},
				ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl"}}},
			Spec: corev1.PodSpec{
				NodeName: "node-1", NodeSelector: map[string]string{"kubernetes.io/os": "linux"},
				Volumes:    []corev1.Volume{{Name: "v"}},
				Containers: []corev1.Container{{Name: "c", Image: "i", Lifecycle: hook}},
			},
			Status: corev1.PodStatus{
				PodIPs:            []corev1.PodIP{{IP: "10.1.0.7"}},
				Conditions:        []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
				ContainerStatuses: []corev1.ContainerStatus{{Name: "c", State: running}},
			},
		}
	}
	want := whole()
	want.ManagedFields, want.Spec.Volumes, want.Spec.Containers[0].Image = nil, nil, ""
	want.Status.ContainerStatuses[0].Name = ""
	got, err := strip(whole())
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("strip (-want +got): %v\n%s", err, diff)
	}
	for name, set := range map[string]func(*corev1.PodSpec){
		"a container's options": func(s *corev1.PodSpec) {
			s.Containers[0].SecurityContext = &corev1.SecurityContext{
				WindowsOptions: &corev1.WindowsSecurityContextOptions{}}
		},
		"affinity": func(s *corev1.PodSpec) {
			windows := []corev1.NodeSelectorRequirement{{Key: corev1.LabelOSStable,
				Operator: corev1.NodeSelectorOpIn, Values: []string{"windows"}}}
			s.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
					NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: windows}}}}}
		},
	} {
		pod := whole()
		set(&pod.Spec)
		if _, err := strip(pod); err != nil || !admission.OnWindows(&pod.Spec) {
			t.Errorf("%s: not known to be for Windows any more (%v)", name, err)
		}
	}
	got, err = strip(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Status: corev1.NodeStatus{
		Images: []corev1.ContainerImage{{Names: []string{"i"}}}}})
	if diff := cmp.Diff(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}, got); diff != "" || err != nil {
		t.Errorf("strip (-want +got): %v\n%s", err, diff)
	}
}
