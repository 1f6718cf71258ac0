package podfacts

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A pod without a readiness probe stays ready while its container is started again. Its kubelet
// then writes another start.
func TestBackSince(t *testing.T) {
	ready := metav1.Unix(100, 0)
	pod := &corev1.Pod{Status: corev1.PodStatus{Conditions: []corev1.PodCondition{
		{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: ready}}}}
	for _, c := range []struct {
		name    string
		started []int64 // seconds; 0: it does not run
		after   time.Duration
	}{
		{"nothing runs", []int64{0}, 0},
		{"it was started before it was ready", []int64{98}, 0},
		{"one of two was started again", []int64{98, 160}, 61*time.Second - 1},
	} {
		pod.Status.ContainerStatuses = nil
		for _, at := range c.started {
			var is corev1.ContainerStatus
			if at > 0 {
				is.State.Running = &corev1.ContainerStateRunning{StartedAt: metav1.Unix(at, 0)}
			}
			pod.Status.ContainerStatuses = append(pod.Status.ContainerStatuses, is)
		}
		if at, ok := BackSince(pod); !ok || at.Sub(ready.Time) != c.after {
			t.Errorf("%s: %s later, %t; want %s", c.name, at.Sub(ready.Time), ok, c.after)
		}
	}
}
