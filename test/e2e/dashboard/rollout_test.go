package dashboard

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/load"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// address is where the coordinator's page is: pods of the stand-in of a node have the test's
// loopback address.
const address = "127.0.0.1:9445"

// open returns the stage that the tests share: one node, one coordinator with its page, the
// webhook.
func open(t *testing.T) *stage.Stage {
	t.Helper()
	harness.HAProxy(t)
	// The API server finds the kubelet, see serveKubelet, by the node's address: there is no DNS.
	return harness.Stage(t, cluster.Options{APIServer: []string{"--kubelet-preferred-address-types=InternalIP"}},
		stage.Options{Dashboard: address})
}

// shop installs into a namespace an application of four pods, behind HAProxy and its agent, with
// clients whose requests take their time, so that drains last long enough to be looked at. preStop
// is for how many seconds a pod continues to run after its deletion.
func shop(t *testing.T, s *stage.Stage, ns string, work time.Duration, preStop int) {
	t.Helper()
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 4, StartDelay: 300 * time.Millisecond,
		Work: work, PreStop: preStop}); err != nil {
		t.Fatal(err)
	}
	proxy, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns})
	if err != nil {
		t.Fatal(err)
	}
	clients, err := load.Run(t.Context(), load.Options{
		Target: "http://" + proxy + "/", Rate: 20, Timeout: 10 * time.Second, WantBody: []byte("ok\n"),
		MaxInFlight: 1000,
		SourceAddrs: []netip.Addr{netip.MustParseAddr("10.244.251.1"), netip.MustParseAddr("10.244.251.2")},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if got := clients.Stop(); got.Failed > 0 {
			t.Errorf("%d of %d requests failed: %v", got.Failed, got.Total, got.FailedBy)
		}
	})
}

// row is what a person saw of a drain.
type row struct{ Pod, Phase, Waits string }

// record notes every state of the table of drains from now on, as it is drawn, and whether the
// connection stays.
const record = `window.seen = []; new MutationObserver(() => {
	for (const r of document.querySelectorAll('#drains-table tbody tr')) {
		const [pod, phase, , waits] = [...r.cells].map((c) => c.innerText);
		seen.push({Pod: pod, Phase: phase.split('\n')[0], Waits: waits});
	}
}).observe(document.querySelector('#drains-table'), {subtree: true, childList: true});
window.lost = 0; new MutationObserver(() => { lost++; }).observe(document.querySelector('#connection'), {attributes: true}); true`

// A person opens the page and performs a rolling update. He must see each old pod appear by its
// name, with how far it is and who is waited for, and then how it ended; and the page must say
// nothing else than kubectl does.
func TestARollingUpdateIsSeen(t *testing.T) {
	b := start(t)
	s := open(t)
	harness.Namespace(t, s.Kube, "shop", nil)
	shop(t, s, "shop", 1500*time.Millisecond, 0)
	old, err := s.Pods(t.Context(), "shop", "app=web")
	if err != nil {
		t.Fatal(err)
	}
	gateways, err := s.Pods(t.Context(), "shop", "app=gateway")
	if err != nil {
		t.Fatal(err)
	}
	gateway := "shop/" + gateways[0].Name

	b.look(wide, "light")
	b.open("http://" + address + "/")
	b.await("#connection", "Live")
	b.await("#replica", "Answered by lameduck-webhook-")
	b.await("#agents-table", gateway)
	for _, says := range []string{"haproxy", "node-1", "connected"} {
		if got := b.text("#agents-table"); !strings.Contains(got, says) {
			t.Errorf("the agent is %q, want %q", got, says)
		}
	}
	if got := b.text("#drains-empty"); !strings.Contains(got, "Nothing is draining") {
		t.Errorf("before: %q", got)
	}
	explain(b, "shop", old[0].Name)
	b.await("#explain-result", "It would be deleted when 1 gateway that routes to it has acknowledged.")
	b.await("#explain-result", gateway)
	if got := b.text("#drains-table"); got != "" {
		t.Errorf("to ask has opened a drain: %q", got)
	}

	of[bool](b, record)
	done := make(chan error, 1)
	go func() {
		_, err := s.Restart(context.WithoutCancel(t.Context()), "shop", "web")
		done <- err
	}()
	b.awaitThat("drains", func() bool { return b.text("#drains-table") != "" })
	b.awaitThat("drain that waits for "+gateway, func() bool {
		return strings.Contains(b.text("#drains-table"), gateway)
	})
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	for _, pod := range old {
		b.await("#outcomes-table", pod.Name)
	}
	b.await("#drains-empty", "Nothing is draining")
	b.await("#rollouts-table", fmt.Sprintf("shop/web %d of %d 0", len(old), len(old)))
	b.await("#speed-table", "haproxy idle")

	var seen []row
	if err := json.Unmarshal([]byte(of[string](b, "JSON.stringify(seen)")), &seen); err != nil {
		t.Fatal(err)
	}
	for _, pod := range old {
		of := slices.DeleteFunc(slices.Clone(seen), func(r row) bool { return r.Pod != "shop/"+pod.Name })
		if len(of) == 0 {
			t.Errorf("pod %s was never shown", pod.Name)
			continue
		}
		if !slices.ContainsFunc(of, func(r row) bool {
			return (r.Phase == "Unrouting" || r.Phase == "Quiescing") && strings.Contains(r.Waits, gateway)
		}) {
			t.Errorf("what pod %s waited for was not shown: %v", pod.Name, of)
		}
	}
	if n := of[int](b, "lost"); n > 0 {
		t.Errorf("the connection was lost and came back: %d changes", n)
	}
	outcomes := of[[]string](b, "[...document.querySelectorAll('#outcomes-table tbody tr')].map((r) => "+
		"r.innerText.replace(/\\s+/g, ' '))")
	for _, pod := range old {
		if !slices.ContainsFunc(outcomes, func(text string) bool {
			return strings.Contains(text, "shop/"+pod.Name) && strings.Contains(text, "Acknowledged")
		}) {
			t.Errorf("the end of %s is not shown: %q", pod.Name, outcomes)
		}
	}
	log, err := s.Logs(t.Context(), stage.System, "app.kubernetes.io/component=webhook", "webhook")
	if err != nil {
		t.Fatal(err)
	}
	if i := strings.Index(log, "DATA RACE"); i >= 0 {
		t.Error(log[i:min(len(log), i+4000)])
	}
}

// The page as it is seen most often: during ordinary rollouts, whose drains last some 100 ms, on a
// desk and on a phone, by day and by night. Nothing is wider than the window, and axe-core finds
// nothing wrong, while rows come and go.
func TestAnOrdinaryRolloutIsReadable(t *testing.T) {
	b := start(t)
	s := open(t)
	harness.InstallFollowing(t, s)
	harness.Barred(t, s.Kube, "ordinary", nil)
	shop(t, s, "ordinary", 100*time.Millisecond, 0)
	b.open("http://" + address + "/")
	b.await("#connection", "Live")
	b.axe()
	rolling, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() {
		for rolling.Err() == nil {
			if _, err := s.Restart(context.WithoutCancel(rolling), "ordinary", "web"); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for _, scheme := range []string{"light", "dark"} {
		for _, width := range []int64{1440, 400} {
			b.look(width, scheme)
			b.awaitThat("pods at both gates", func() bool {
				return b.text("#drains-table") != "" && b.text("#barriers-table") != ""
			})
			b.picture(fmt.Sprintf("rollout-%s-%d", scheme, width), true)
			if over := b.settled(b.overflows); over != "" {
				t.Errorf("at %d: wider than the window: %s", width, over)
			}
			if wrong := b.settled(b.violations); wrong != "" {
				t.Errorf("at %d, %s: %s", width, scheme, wrong)
			}
		}
	}
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	var took []float64
	for _, o := range view(t).Outcomes {
		if o.Namespace == "ordinary" && o.Gate == "hold" && o.TookSeconds != nil {
			took = append(took, *o.TookSeconds)
		}
	}
	slices.Sort(took)
	if len(took) == 0 {
		t.Fatal("no pod was drained")
	}
	t.Logf("%d drains took %.0f ms at the median, %.0f ms at most", len(took),
		1000*took[len(took)/2], 1000*took[len(took)-1])
}

// explain asks the page what would become of a pod.
func explain(b *browser, namespace, pod string) {
	b.t.Helper()
	b.do(chromedp.SetValue("#explain-namespace", namespace), chromedp.SetValue("#explain-pod", pod),
		chromedp.Click("#explain-form button"))
}

// pictures are for the documents: the page during a rolling update, in both colours and on a phone,
// each when it shows what it should.
func pictures(b *browser, shows func() bool) {
	if os.Getenv("LAMEDUCK_SCREENSHOTS") == "" {
		return
	}
	for _, c := range []struct {
		name, scheme string
		width        int64
	}{{"page-light", "light", wide}, {"page-dark", "dark", wide}, {"page-phone", "light", phone}} {
		b.look(c.width, c.scheme)
		of[bool](b, "scrollTo(0, 0), true")
		for end := time.Now().Add(5 * time.Second); !shows() && time.Now().Before(end); {
			time.Sleep(20 * time.Millisecond) // a picture with less in it is one too
		}
		b.picture(c.name, false)
	}
	b.look(wide, "light")
}
