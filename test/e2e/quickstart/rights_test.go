//go:build e2e

package quickstart

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/lameduck-io/lameduck/test/e2e/rights"
)

// auditPolicy has the API server write down what the ServiceAccounts of Lameduck and its agents ask
// for.
const auditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    userGroups: ["system:serviceaccounts:lameduck-system", "system:serviceaccounts:lameduck-node",
      "system:serviceaccounts:shop"]
  - level: None
`

// testRights compares what the ServiceAccounts of the quick start may do with what they have done
// by now. What the coordinator does seldom is left to the test of package install; here it must
// only not have been refused.
func (l *lab) testRights(t *testing.T) {
	t.Helper()
	l.restartContainer(t)
	webhook := rights.Account{Namespace: "lameduck-system", Name: "lameduck-webhook"}
	for _, of := range []struct {
		account rights.Account
		// asked are rights that coordinators ask about: whether an agent may acknowledge, or ask at
		// the barrier.
		asked []string
	}{
		{webhook, nil},
		{rights.Account{Namespace: "lameduck-node", Name: "lameduck-node"},
			[]string{"acknowledge lameduck.io/drains", "create lameduck.io/barriers"}},
		{rights.Account{Namespace: shop, Name: "gateway"}, []string{"acknowledge lameduck.io/drains"}},
	} {
		used, refused, err := rights.Used(l.audit, of.account)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %s", of.account.Name, strings.Join(slices.Sorted(maps.Keys(used)), ", "))
		if len(refused) > 0 {
			t.Errorf("%s asked for what it may not: %q", of.account.Name, refused)
		}
		if len(used) == 0 {
			t.Errorf("%s asked for nothing", of.account.Name)
		}
		if of.account == webhook {
			continue
		}
		granted, err := rights.Granted(t.Context(), l.Kube, of.account)
		if err != nil {
			t.Fatal(err)
		}
		for _, right := range rights.Unused(granted, used) {
			if !slices.Contains(of.asked, right) {
				t.Errorf("%s may %s and never did", of.account.Name, right)
			}
		}
	}
	// Its one right, used by the Job of the quick start, which is gone by now with what granted it.
	used, refused, err := rights.Used(l.audit, rights.Account{Namespace: "lameduck-system", Name: "lameduck-check"})
	if err != nil {
		t.Fatal(err)
	}
	// A refused eviction is how the check knows: by a coordinator, and not by the lack of a right.
	// The audit log has the same code for both.
	if want := []string{"create /pods/eviction"}; !slices.Equal(slices.Sorted(maps.Keys(used)), want) {
		t.Errorf("the check used %q, %q of it refused: want %q", slices.Sorted(maps.Keys(used)), refused, want)
	}
}

// restartContainer has a container stopped whose pod stays, so that the node's agent looks the pod
// up live.
func (l *lab) restartContainer(t *testing.T) {
	t.Helper()
	ill := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "ill"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "web", Image: "haproxy:2.6", Command: []string{"haproxy", "-W", "-f", "/etc/haproxy/haproxy.cfg"},
			VolumeMounts: []corev1.VolumeMount{{Name: "config", MountPath: "/etc/haproxy"}},
			LivenessProbe: &corev1.Probe{
				PeriodSeconds: 1, FailureThreshold: 1,
				ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(9)}},
			},
		}}, Volumes: []corev1.Volume{{Name: "config",
			VolumeSource: corev1.VolumeSource{
				ConfigMap: &corev1.ConfigMapVolumeSource{
					LocalObjectReference: corev1.LocalObjectReference{Name: "web"}}}}}},
	}
	if _, err := l.Kube.CoreV1().Pods(shop).Create(t.Context(), ill, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	l.Await(t, time.Minute, "a container is restarted", func() error {
		p, err := l.Kube.CoreV1().Pods(shop).Get(t.Context(), ill.Name, metav1.GetOptions{})
		if err == nil && (len(p.Status.ContainerStatuses) == 0 || p.Status.ContainerStatuses[0].RestartCount == 0) {
			err = errors.New("it is not")
		}
		return err
	})
	if err := l.Kube.CoreV1().Pods(shop).Delete(t.Context(), ill.Name, *metav1.NewDeleteOptions(0)); err != nil {
		t.Fatal(err)
	}
}
