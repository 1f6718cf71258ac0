package apiserver_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/lameduck-io/lameduck/test/cluster/node"
)

// podSpec is a pod on a node. Where the node does not exist, no kubelet runs the pod or ends its
// deletion, so that all reviews are those that the test has caused: the pod garbage collector
// grants such a pod 40 s, more than any test takes.
func podSpec(nodeName string) corev1.PodSpec {
	return corev1.PodSpec{
		NodeName:   nodeName,
		Containers: []corev1.Container{{Name: "app", Image: "none", Command: []string{"/bin/sleep", "3600"}}},
	}
}

// pod creates a pod that is Running and ready, says its status, on a node that does not exist.
func (s *scene) pod(name string, edit ...func(*corev1.Pod)) *corev1.Pod {
	s.t.Helper()
	pod := s.create(name, podSpec("no-node-for-"+s.namespace), edit...)
	now := metav1.Now()
	pod.Status.Phase = corev1.PodRunning
	pod.Status.StartTime = &now
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue,
		LastTransitionTime: now}}
	pods := s.client.CoreV1().Pods(s.namespace)
	pod, err := pods.UpdateStatus(s.ctx, pod, metav1.UpdateOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	// The API server tries each deletion with what it has in its cache and, if that turns out to be
	// old, once more. A read at this version waits for the cache.
	if pod, err = pods.Get(s.ctx, name, metav1.GetOptions{ResourceVersion: pod.ResourceVersion}); err != nil {
		s.t.Fatal(err)
	}
	return pod
}

func (s *scene) create(name string, spec corev1.PodSpec, edit ...func(*corev1.Pod)) *corev1.Pod {
	s.t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}}, Spec: spec}
	for _, e := range edit {
		e(pod)
	}
	pod, err := s.client.CoreV1().Pods(s.namespace).Create(s.ctx, pod, metav1.CreateOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return pod
}

func (s *scene) delete(name string, options metav1.DeleteOptions) error {
	return s.client.CoreV1().Pods(s.namespace).Delete(s.ctx, name, options)
}

func (s *scene) evict(name string, options *metav1.DeleteOptions) error {
	return s.client.PolicyV1().Evictions(s.namespace).Evict(s.ctx, &policyv1.Eviction{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.namespace, Name: name}, DeleteOptions: options,
	})
}

// touch writes to a pod, as every status update of a kubelet does.
func (s *scene) touch(name string) error {
	patch := fmt.Sprintf(`{"metadata":{"annotations":{"touched":%q}}}`, time.Now())
	_, err := s.client.CoreV1().Pods(s.namespace).Patch(s.ctx, name, "application/merge-patch+json", []byte(patch),
		metav1.PatchOptions{})
	return err
}

// terminating are the names of the pods that have a deletionTimestamp.
func (s *scene) terminating() []string {
	s.t.Helper()
	pods, err := s.client.CoreV1().Pods(s.namespace).List(s.ctx, metav1.ListOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	names := []string{}
	for _, pod := range pods.Items {
		if pod.DeletionTimestamp != nil {
			names = append(names, pod.Name)
		}
	}
	slices.Sort(names)
	return names
}

// request does one HTTP request, as a client does that knows nothing of retries, and returns the
// response and the message in its body, which a failure has.
func (s *scene) request(method, path, body string) (*http.Response, string) {
	s.t.Helper()
	client, err := rest.HTTPClientFor(s.cluster.Config())
	if err != nil {
		s.t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(s.ctx, method, s.cluster.Server()+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := client.Do(request)
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	var answer struct {
		Message string `json:"message"`
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		s.t.Fatal(err)
	}
	return response, answer.Message
}

// path is that of a pod in the API.
func (s *scene) path(pod string) string { return "/api/v1/namespaces/" + s.namespace + "/pods/" + pod }

// nodes counts those started, so that their pod ranges do not meet.
var nodes atomic.Int32

// node starts a node, which runs until the test ends.
func (s *scene) node() (*node.Node, string) {
	s.t.Helper()
	number := nodes.Add(1)
	name := fmt.Sprintf("node-%d", number)
	n, err := node.New(s.cluster.Config(), node.Options{
		Name: name, PodRange: netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", number)),
	})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- n.Run(ctx) }()
	s.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			s.t.Error(err)
		}
	})
	select {
	case <-n.Ready():
	case <-s.ctx.Done():
		s.t.Fatal("the node does not become ready")
	}
	return n, name
}

// started waits until the pods are ready.
func (s *scene) started(n *node.Node, pods ...*corev1.Pod) {
	s.t.Helper()
	for _, pod := range pods {
		if _, err := n.Wait(s.ctx, pod.UID, node.Ready); err != nil {
			s.t.Fatal(err, n.Timeline(pod.UID))
		}
	}
}
