package dashboard

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// view reads the API.
func view(t *testing.T) (v api.View) {
	t.Helper()
	response, err := http.Get("http://" + address + api.ViewPath)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil {
		err = json.Unmarshal(text, &v)
	}
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// A person watches pods with both gates go: HAProxy lets go at the hold, kube-proxy after the
// deletion, and both are shown, by name and with what is waited for; explain has said so before;
// and when an application breaks, the page says so within seconds, where it fails open.
func TestBothGatesAndHealthAreSeen(t *testing.T) {
	b := start(t)
	s := open(t)
	harness.InstallFollowing(t, s)
	harness.Barred(t, s.Kube, "both", nil)
	shop(t, s, "both", 200*time.Millisecond, 0)
	nodes, err := s.Pods(t.Context(), "lameduck-node", "app.kubernetes.io/component=node")
	if err != nil || len(nodes) != 1 {
		t.Fatalf("%d node agents: %v", len(nodes), err)
	}
	node := "lameduck-node/" + nodes[0].Name
	// The Service states a wait for consumers that cannot answer, and how its targets are checked.
	annotate := `{"metadata":{"annotations":{"lameduck.io/stated-wait":"2s","lameduck.io/health-check":"{path: /readyz, interval: 1s, healthy: {successes: 1}}"}}}`
	if _, err := s.Kube.CoreV1().Services("both").Patch(t.Context(), "web", types.MergePatchType, []byte(annotate),
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	old, err := s.Pods(t.Context(), "both", "app=web")
	if err != nil {
		t.Fatal(err)
	}

	b.look(wide, "light")
	b.open("http://" + address + "/")
	b.await("#connection", "Live")
	b.await("#agents-table", node)
	b.await("#health-table", "both/web well 4 healthy")
	b.await("#verdict", "Nothing is draining, and all is well")
	explain(b, "both", old[0].Name)
	for _, says := range []string{
		"1 gateway that routes to it has acknowledged. Requests in flight would have to end first",
		"Then it would be told to stop when 1 observed gateway has acknowledged, 30s after the deletion at most.",
		node + " (kube-proxy on node-1), at the barrier", "Hooks: app httpGet",
		"On node-1 " + node + " answers them, and is connected", "both/web states a wait of 2.0 s",
	} {
		b.await("#explain-result", says)
	}
	b.pictureOf("page-explain", "#explain")
	if got := b.text("#explain-result"); strings.Contains(got, "clients that find pods by themselves") {
		t.Errorf("a ClusterIP Service is said to have clients of its own: %s", got)
	}

	of[bool](b, record)
	of[bool](b, strings.ReplaceAll(strings.Split(record, "window.lost")[0], "#drains-table", "#barriers-table")+"true")
	done := make(chan error, 1)
	go func() {
		_, err := s.Restart(context.WithoutCancel(t.Context()), "both", "web")
		done <- err
	}()
	// At one time: a stated wait is shown as long as the pod waits, and who looks twice may come
	// late.
	b.awaitThat("pod at the barrier, with its hook, its node and what is stated", func() bool {
		got := b.text("#barriers-table")
		return strings.Contains(got, "asked by "+node) && strings.Contains(got, "hook httpGet") &&
			strings.Contains(got, "a stated wait of 2.0 s") && strings.Contains(got, "on node-1")
	})
	pictures(b, func() bool { return b.text("#barriers-table") != "" && b.text("#drains-table") != "" })
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	b.await("#barriers-empty", "No pod waits at the barrier")
	b.await("#speed-table", "kube-proxy removed")
	outcomes := view(t).Outcomes
	for _, pod := range old {
		var gates []string
		for _, o := range outcomes {
			if o.UID == string(pod.UID) {
				gates = append(gates, o.Gate+" "+o.Reason)
			}
		}
		slices.Sort(gates)
		// HAProxy keeps a connection without requests for seconds, which the node's kernel cannot
		// tell from one with (docs/barrier.md).
		got, want := strings.Join(gates, ", "), "^barrier (Acknowledged|IdleBound), hold (Acknowledged|BarrierWaits)$"
		if !regexp.MustCompile(want).MatchString(got) {
			t.Errorf("pod %s went through %s", pod.Name, got)
		}
	}
	var seen []row
	if err := json.Unmarshal([]byte(of[string](b, "JSON.stringify(seen)")), &seen); err != nil {
		t.Fatal(err)
	}
	for _, pod := range old {
		if !slices.ContainsFunc(seen, func(r row) bool {
			return strings.HasPrefix(r.Pod, "both/"+pod.Name) && r.Phase == "Unrouting" &&
				strings.Contains(r.Waits, "asked by "+node)
		}) && !slices.ContainsFunc(seen, func(r row) bool {
			return strings.HasPrefix(r.Pod, "both/"+pod.Name) && r.Phase == "Quiescing" &&
				strings.Contains(r.Waits, "a stated wait")
		}) {
			t.Errorf("pod %s was not shown waiting to stop", pod.Name)
		}
	}

	// A check that no target passes: the gateway fails open, and the page says where, with what the
	// checks got.
	broken := `{"metadata":{"annotations":{"lameduck.io/health-check":"{path: /no-such-path, interval: 1s, statuses: [299], unhealthy: {httpFailures: 1}}"}}}`
	if _, err := s.Kube.CoreV1().Services("both").Patch(t.Context(), "web", types.MergePatchType, []byte(broken),
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.await("#health-table", "both/web fails open at 1 of 1 gateway")
	b.await("#health-table", "gets traffic all the same: http failure")
	b.await("#verdict", "both/web fails open at 1 of 1 gateway")
	b.await("#verdict", "LameduckFailingOpen")
	now, err := s.Pods(t.Context(), "both", "app=web")
	if err != nil {
		t.Fatal(err)
	}
	if got := b.text("#health-table"); !slices.ContainsFunc(now, func(p corev1.Pod) bool {
		return strings.Contains(got, "both/"+p.Name)
	}) {
		t.Errorf("no pod is named: %s", got)
	}
	b.pictureOf("page-health", "#health")
	mended := `{"metadata":{"annotations":{"lameduck.io/health-check":"{path: /readyz, interval: 1s, healthy: {successes: 1}}"}}}`
	if _, err := s.Kube.CoreV1().Services("both").Patch(t.Context(), "web", types.MergePatchType, []byte(mended),
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b.await("#health-table", "both/web well 4 healthy")
	for _, of := range [][3]string{{stage.System, "app.kubernetes.io/component=webhook", "webhook"},
		{"lameduck-node", "app.kubernetes.io/component=node", "agent"}, {"both", "app=gateway", "agent"}} {
		log, err := s.Logs(t.Context(), of[0], of[1], of[2])
		if err != nil {
			t.Fatal(err)
		}
		if i := strings.Index(log, "DATA RACE"); i >= 0 {
			t.Error(log[i:min(len(log), i+4000)])
		}
	}
}
