//go:build long

package callers

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

// The clients of Python and Node, as make clients has them, take a 429 as final: that of Python for
// an eviction, that of Node for any request. What they ask for succeeds wherever the gateway is
// done within a hold, because requests are short or because the pod has the hook.
func TestOtherClients(t *testing.T) {
	harness.HAProxy(t)
	s := harness.Stage(t, cluster.Options{}, stage.Options{Entries: 1})
	harness.InstallFollowing(t, s)
	type row struct {
		shop
		want map[string]string
	}
	done := map[string]string{"python evict": "200", "python delete": "200", "node evict": "200", "node delete": "200"}
	rows := []row{
		{shop{s, t, harness.Barred(t, s.Kube, "long-hooked", nil), work}, done},
		{shop{s, t, harness.Namespace(t, s.Kube, "short-plain", nil), time.Second}, done},
		{shop{s, t, harness.Namespace(t, s.Kube, "long-plain", nil), work}, map[string]string{"python evict": "429",
			"python delete": "200", "node evict": "429", "node delete": "429"}},
	}
	for _, r := range rows {
		r.install(map[string]int{"stay": sets + 1}, map[string]int{"web": len(done) + 1})
		must(t, s.Kube.CoreV1().Pods(r.ns).Delete(t.Context(), "web-0", metav1.DeleteOptions{})) // its hook is heard
		r.await(map[string]int{"web": len(done)})
		r.clients()
	}
	time.Sleep(work + time.Second) // until each pod has a request in progress
	for _, r := range rows {
		t.Run(r.ns, func(t *testing.T) {
			i := 0
			for what, want := range r.want {
				i++
				client, verb, _ := strings.Cut(what, " ")
				cmd := exec.CommandContext(t.Context(), gatewaytest.LookPath(t, "remove-by-"+client), verb, r.ns,
					fmt.Sprint("web-", i))
				cmd.Env = append(cmd.Environ(), "KUBECONFIG="+s.Cluster.Kubeconfig())
				began := time.Now()
				out, err := cmd.CombinedOutput()
				got := strings.TrimSpace(string(out))
				t.Logf("%s: %s after %s", what, got, time.Since(began))
				if err != nil || got != want {
					t.Errorf("want %s: %v", want, err)
				}
			}
		})
	}
}
