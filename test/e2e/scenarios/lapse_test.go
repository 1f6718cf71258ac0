package scenarios

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// lease is how long an exclusion stands without a coordinator.
const lease = 60 * time.Second

// A coordinator dies in the middle of a drain, and no client deletes the pod again. The pod is
// excluded until the expiry, and routed again once the agent has found its EndpointSlices fresh at
// the API server.
func TestAnExclusionLapsesWithoutACoordinator(t *testing.T) {
	// Not parallel: it takes the coordinator from all, and has an agent that does not answer.
	s := open(t)
	agents, ns := harness.Namespace(t, s.Kube, "lapse-agents", nil), harness.Namespace(t, s.Kube, "lapse", nil)
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 3}); err != nil {
		t.Fatal(err)
	}
	address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	// Without it the drain would be over before the coordinator is.
	harness.SilentAgent(t, s, agents)
	pods, err := s.Pods(t.Context(), ns, "app=web")
	if err != nil {
		t.Fatal(err)
	}
	pod := pods[0]
	why := func() string {
		t.Helper()
		return whyNoTraffic(t, strings.TrimSuffix(address, ":8080")+":9101", pod.Status.PodIP)
	}
	if got := why(); got != "chosen" {
		t.Fatalf("before its deletion the pod gets no traffic: %s", got)
	}
	asked := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	if err := s.Kube.CoreV1().Pods(ns).Delete(ctx, pod.Name, metav1.DeleteOptions{}); err == nil {
		t.Fatal("the pod is deleted although an agent is silent")
	}
	harness.Until(t, lease/2, "the agent says that the pod is excluded", func() bool { return why() == "excluded" })
	if out, err := s.Cluster.Kubectl(t.Context(), "-n", stage.System, "scale", "deployment/lameduck-webhook-0",
		"--replicas=0"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	began := time.Now()
	if err := s.Await(t.Context(), stage.System, "lameduck-webhook-0"); err != nil {
		t.Fatal(err)
	}
	for why() != "chosen" {
		if time.Since(began) > lease+60*time.Second {
			t.Fatalf("the pod is out still: %q", why())
		}
		settle(t, 100*time.Millisecond)
	}
	// The lease is renewed every 10 s, and never began before the deletion.
	if took := time.Since(asked); took < lease {
		t.Errorf("the pod was in again after %s, before its lease was over", took)
	} else {
		t.Logf("in again after %s", took)
	}
	if out, err := s.Cluster.Kubectl(t.Context(), "-n", stage.System, "scale", "deployment/lameduck-webhook-0",
		"--replicas=1"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := s.Await(t.Context(), stage.System, "lameduck-webhook-0"); err != nil {
		t.Fatal(err)
	}
	noRaces(t, s, ns)
}

// whyNoTraffic asks an agent about the one target at an address.
func whyNoTraffic(t *testing.T, agent, ip string) string {
	t.Helper()
	response, err := http.Get("http://" + agent + "/v1/targets")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	var answer struct {
		Targets []struct{ Address, Pod, Why string }
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	for _, target := range answer.Targets {
		if strings.HasPrefix(target.Address, ip+":") {
			if target.Pod == "" {
				t.Errorf("the target has no name: %s", body)
			}
			return target.Why
		}
	}
	t.Fatalf("the agent does not know %s: %s", ip, body)
	return ""
}
