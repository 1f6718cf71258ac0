package scenarios

import (
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// A blue/green switch: the selector of a Service is changed, and the old pods are deleted a delay
// later, while a request that began before the switch still runs through HAProxy. Nothing lists
// the pod any more then, and only its agent knows of the request.
func TestARequestOutlastsASwitch(t *testing.T) {
	t.Parallel()
	// Longer than gateways may take to learn of the switch, and no longer after the deletion than
	// the Idle bound.
	const work = 14 * time.Second
	for _, after := range []time.Duration{5 * time.Second, 12 * time.Second} {
		t.Run(after.String(), func(t *testing.T) {
			t.Parallel()
			s := open(t)
			ns := harness.Namespace(t, s.Kube, "switch-", nil)
			if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 1, Work: work}); err != nil {
				t.Fatal(err)
			}
			address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns})
			if err != nil {
				t.Fatal(err)
			}
			deployments := s.Kube.AppsV1().Deployments(ns)
			blue, err := deployments.Get(t.Context(), "web", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			green := blue.DeepCopy()
			green.ObjectMeta = metav1.ObjectMeta{Name: "green", Namespace: ns}
			green.Spec.Selector.MatchLabels = map[string]string{"app": "green"}
			green.Spec.Template.Labels = map[string]string{"app": "green"}
			if _, err := deployments.Create(t.Context(), green, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			if err := s.Await(t.Context(), ns, "green"); err != nil {
				t.Fatal(err)
			}
			answered := make(chan string, 1)
			began := time.Now()
			go func() {
				answer, err := http.Get("http://" + address + "/")
				if err != nil {
					answered <- fmt.Sprintf("%v after %s", err, time.Since(began))
					return
				}
				defer answer.Body.Close()
				if _, err = io.Copy(io.Discard, answer.Body); err != nil || answer.StatusCode != http.StatusOK {
					answered <- fmt.Sprintf("%s, %v after %s", answer.Status, err, time.Since(began))
				}
				close(answered)
			}()
			settle(t, 500*time.Millisecond)
			if _, err := s.Kube.CoreV1().Services(ns).Patch(t.Context(), "web", types.StrategicMergePatchType,
				[]byte(`{"spec":{"selector":{"app":"green"}}}`), metav1.PatchOptions{}); err != nil {
				t.Fatal(err)
			}
			settle(t, after)
			if err := deployments.Delete(t.Context(), "web",
				metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}); err != nil {
				t.Fatal(err)
			}
			if why, failed := <-answered; failed {
				t.Errorf("the request was cut: %s", why)
			}
			for _, a := range answers(t, s, ns) {
				t.Logf("%s was allowed after %s: %s", a.Pod, a.took, a.Reason)
			}
		})
	}
}
