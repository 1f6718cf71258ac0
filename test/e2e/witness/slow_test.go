package witness

import (
	"context"
	"io"
	"net/http"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// Requests take 8 s, and so long does a gateway take to acknowledge a pod. A ReplicaSet that is
// scaled in from 8 to 4 pods must not choose other victims meanwhile: each of them would lose its
// traffic and live on.
func TestScaleInWithSlowAcknowledgements(t *testing.T) {
	s := open(t)
	must(t, s.AwaitCoordinators(t.Context()))
	const before, after = 8, 4
	const work = 8 * time.Second
	const most, longest = 5, 26 * time.Second
	for round := range harness.Number(t, "ROUNDS", 2) {
		sh := newShop(t, s, stage.App{Replicas: before, Work: work})
		stop := sh.busy(t, 10*before, work)
		began, judge := time.Now(), judges(t, s)
		_, err := s.Kube.AppsV1().Deployments(sh.ns).Patch(t.Context(), "web", types.MergePatchType,
			[]byte(`{"spec":{"replicas":4}}`), metav1.PatchOptions{})
		must(t, err)
		victims, alive := map[string]bool{}, before
		for end := began.Add(2 * time.Minute); alive > after &&
			time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			unrouted, _ := sh.traffic(t)
			for _, uid := range unrouted {
				victims[uid] = true
			}
			pods, err := s.Pods(t.Context(), sh.ns, "app=web")
			must(t, err)
			alive = 0
			for _, p := range pods {
				if p.DeletionTimestamp == nil {
					alive++
				}
			}
		}
		took := time.Since(began)
		left := len(sh.unrouted(t))
		for end := time.Now().Add(5 * time.Second); left > 0 && time.Now().Before(end); left = len(sh.unrouted(t)) {
			time.Sleep(50 * time.Millisecond) // an exclusion ends when its coordinator has ended it
		}
		stop()
		t.Logf("round %d: %.1f s, %d pods were taken out of traffic, %d of them live on without", round, took.Seconds(),
			len(victims), left)
		if alive != after || took > longest || len(victims) > most || left > 0 {
			judge("round %d: %d pods after %s, %d were taken out of traffic and %d live on without; want %d "+
				"within %s, at most %d, and 0",
				round, alive, took, len(victims), left, after, longest, most)
		}
	}
}

// busy keeps so many requests in flight, and returns when the first ones are about to be answered
// for the second time. They end with stop.
func (sh *shop) busy(t *testing.T, requests int, work time.Duration) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	var clients sync.WaitGroup
	for i := range requests {
		clients.Go(func() {
			time.Sleep(work * time.Duration(i) / time.Duration(requests)) // one after the other, evenly
			for ctx.Err() == nil {
				r, err := http.NewRequestWithContext(ctx, http.MethodGet, sh.url, nil)
				if err != nil {
					return
				}
				if response, err := client.Do(r); err == nil {
					_, _ = io.Copy(io.Discard, response.Body)
					response.Body.Close()
				}
			}
		})
	}
	time.Sleep(work) // as long as a request takes
	return func() { cancel(); clients.Wait() }
}
