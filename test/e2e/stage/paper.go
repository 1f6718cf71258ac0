package stage

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Client returns a client of a user who may do everything in a namespace. Unlike the
// administrator, the user is not exempt from the flow control of the API server: the seats of
// manifests/base/flow-control.yaml bound how many deletions reach a coordinator at one moment.
func (s *Stage) Client(t testing.TB, ns string) *kubernetes.Clientset {
	t.Helper()
	const user = "tester"
	if _, err := s.Kube.RbacV1().RoleBindings(ns).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "admin"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	config := s.Cluster.ConfigFor(user, "system:authenticated")
	config.WarningHandler = rest.NoWarnings{} // one for each deletion that reaches its deadline
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if _, err := kube.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{Limit: 1}); err == nil {
			return kube
		} else if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// PaperPods makes n pods that the Service web lists as ready and that no kubelet runs, on a node
// that reports itself ready until the test ends. The pods are removed then.
func (s *Stage) PaperPods(t testing.TB, ns string, n int) []*corev1.Pod {
	t.Helper()
	name := "paper-" + ns
	ready := func() *corev1.Node {
		now := metav1.Now()
		return &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			// No other pods are scheduled here.
			Spec: corev1.NodeSpec{Unschedulable: true},
			Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
				{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Paper", LastHeartbeatTime: now,
					LastTransitionTime: now},
			}},
		}
	}
	nodes := s.Kube.CoreV1().Nodes()
	if _, err := nodes.Create(t.Context(), ready(), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var beating sync.WaitGroup
	beating.Go(func() {
		for ctx.Err() == nil {
			if have, err := nodes.Get(ctx, name, metav1.GetOptions{}); err == nil {
				have.Status = ready().Status
				_, _ = nodes.UpdateStatus(ctx, have, metav1.UpdateOptions{})
			}
			select {
			case <-time.After(5 * time.Second):
			case <-ctx.Done():
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		beating.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
		defer cancel()
		now := int64(0)
		_ = s.Kube.CoreV1().Pods(ns).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &now},
			metav1.ListOptions{})
		_ = nodes.Delete(ctx, name, metav1.DeleteOptions{})
	})
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: corev1.ServiceSpec{Selector: map[string]string{"app": "web"},
			Ports: []corev1.ServicePort{{Port: 80}}},
	}
	if _, err := s.Kube.CoreV1().Services(ns).Create(t.Context(), service, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	pods := make([]*corev1.Pod, n)
	var making sync.WaitGroup
	turns := make(chan struct{}, 16)
	for i := range pods {
		making.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			var err error
			if pods[i], err = paperPod(t.Context(), s.Kube, ns, name, i); err != nil {
				t.Errorf("pod %d: %v", i, err)
			}
		})
	}
	making.Wait()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		slices, err := s.Kube.DiscoveryV1().EndpointSlices(ns).List(t.Context(),
			metav1.ListOptions{LabelSelector: discovery.LabelServiceName + "=web"})
		if err != nil {
			t.Fatal(err)
		}
		listed := 0
		for _, slice := range slices.Items {
			for _, e := range slice.Endpoints {
				if e.Conditions.Ready != nil && *e.Conditions.Ready {
					listed++
				}
			}
		}
		if listed == n {
			time.Sleep(time.Second) // coordinators watch the same, and do not say how far they are
			return pods
		}
		if t.Failed() || time.Now().After(end) {
			t.Fatalf("%d of %d pods are listed", listed, n)
		}
	}
}

func paperPod(ctx context.Context, kube kubernetes.Interface, ns, nodeName string, n int) (*corev1.Pod, error) {
	pod, err := kube.CoreV1().Pods(ns).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("paper-%d", n), Labels: map[string]string{"app": "web"}},
		Spec: corev1.PodSpec{
			NodeName: nodeName, Containers: []corev1.Container{{Name: "app", Image: "none"}},
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	now := metav1.Now()
	ip := fmt.Sprintf("10.245.%d.%d", n/250, n%250+1)
	pod.Status = corev1.PodStatus{
		Phase: corev1.PodRunning, StartTime: &now, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue,
			LastTransitionTime: now}},
	}
	return kube.CoreV1().Pods(ns).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
}
