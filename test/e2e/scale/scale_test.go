//go:build long

package scale

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// What is asserted: loosely, because machines differ. docs/cost.md has what was measured.
const (
	// mostPerAgent bounds the resident memory of the coordinator for each agent, in KiB.
	mostPerAgent = 150
	// mostBack bounds the time until all agents are connected again, for a thousand.
	mostBack = 6 * time.Second
	// mostSlower bounds the median of a deletion that all agents acknowledge, one a second, by that
	// of one for which no webhook is called.
	mostSlower = 500 * time.Millisecond
	// mostBytes bounds what one agent sends and receives for one drain.
	mostBytes = 2000.0
	// mostLate bounds each deletion: two cores may be too slow for a hundred a second.
	mostLate = 60 * time.Second
)

func TestMain(m *testing.M) { cluster.Main(m) }

// measured is the coordinator's process.
type measured struct {
	s *stage.Stage
	t *testing.T
}

// series returns the coordinator's metrics. ok is false while it does not answer.
func (m measured) series() (all stage.Series, ok bool) {
	client := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	all, err := stage.ReadSeries(client, "http://"+stage.CoordinatorAddress.String()+":8080/metrics")
	return all, err == nil
}

// metric returns the sum of the series whose name and labels begin with prefix.
func (m measured) metric(prefix string) (sum float64, ok bool) {
	all, ok := m.series()
	return all.Sum(prefix), ok
}

// answers returns how often the opener has given each answer to a deletion since former.
func (m measured) answers(former stage.Series) stage.Series {
	all, _ := m.series()
	maps.DeleteFunc(all, func(series string, n float64) bool {
		return n == former[series] || !strings.HasPrefix(series, "lameduck_admission_answers_total{") ||
			!strings.Contains(series, `role="opener"`)
	})
	for labels := range all {
		all[labels] -= former[labels]
	}
	return all
}

func (m measured) must(series string) float64 {
	m.t.Helper()
	value, ok := m.metric(series)
	if !ok {
		m.t.Fatalf("the coordinator does not answer for %s", series)
	}
	return value
}

func (m measured) cpu() float64      { return m.must("process_cpu_seconds_total") }
func (m measured) resident() float64 { return m.must("process_resident_memory_bytes") / 1024 }

// agents waits until so many are in a state, and returns how long that took.
func (m measured) agents(state string, n int) time.Duration {
	m.t.Helper()
	began := time.Now()
	for end := began.Add(5 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		is, _ := m.metric(fmt.Sprintf("lameduck_agents{state=%q}", state))
		if int(is) == n {
			return time.Since(began)
		}
		if time.Now().After(end) {
			m.t.Fatalf("%.0f of %d agents are %s after %s", is, n, state, time.Since(began))
		}
	}
}

// open returns the stage, a client without warnings, and how many agents there are: AGENTS, or a
// thousand.
func open(t *testing.T) (m measured, kube *kubernetes.Clientset, agents int) {
	t.Helper()
	if os.Getenv("LAMEDUCK_BIN") == "" {
		t.Fatal("LAMEDUCK_BIN is not set: programs with the race detector are not to be measured")
	}
	s := harness.Stage(t, cluster.Options{}, stage.Options{LogLevel: "info"})
	config := s.Cluster.Config()
	config.WarningHandler = rest.NoWarnings{}
	kube, err := kubernetes.NewForConfig(config)
	must(t, err)
	return measured{s, t}, kube, harness.Number(t, "AGENTS", 1000)
}

// routes is what each agent declares.
func routes(ns string) []drain.Route {
	return []drain.Route{{Service: drain.Service{Namespace: ns, Name: "web"}, Via: drain.Endpoints,
		Kind: drain.Directed}}
}

// The coordinator is killed while 500 made-up tokens come each second. After its restart the tokens
// of all agents are new to it, and only the keys of the API server tell them from the others.
func TestRestart(t *testing.T) {
	m, kube, agents := open(t)
	ns := harness.Namespace(t, kube, "restart", nil)
	pods := m.s.PaperPods(t, ns, 100)
	f := newFleet(t, m.s, "paper-"+ns, agents)
	m.agents("expected", agents)
	f.start(t.Context(), routes(ns))
	m.agents("connected", agents)
	bare := floor(t, m.s, agents)
	stop := f.madeUp(t)
	defer stop()
	m.restart(kube, pods, agents, bare)
}

// A thousand agents route one Service, so each deletion of its pods waits for all of them: the most
// that so many agents can cost.
func TestScale(t *testing.T) {
	m, kube, agents := open(t)
	s := m.s

	ns, off := harness.Namespace(t, s.Kube, "scale", nil), harness.Namespace(t, s.Kube, "off",
		map[string]string{"lameduck.io/mode": "off"})
	pods := s.PaperPods(t, ns, 20+200+1000+100+400+300)
	unprotected := s.PaperPods(t, off, 20+200+1000)
	take := func(n int) (some []*corev1.Pod) { some, pods = pods[:n], pods[n:]; return some }
	f := newFleet(t, s, "paper-"+ns, agents)
	m.agents("expected", agents)
	storm := newStorm(t, s)
	before := m.resident()

	cpu := m.cpu()
	f.start(t.Context(), routes(ns))
	connected := m.agents("connected", agents)
	t.Logf("all %d agents connected for the first time after %.1f s; the coordinator took %.2f s of CPU", agents,
		connected.Seconds(), m.cpu()-cpu)

	const quiet = 15 * time.Second
	cpu, bytes := m.cpu(), f.bytes()
	time.Sleep(quiet) // a time without drains is what is measured
	idle, idleBytes := (m.cpu()-cpu)/quiet.Seconds(), (f.bytes()-bytes)/quiet.Seconds()
	perAgent := (m.resident() - before) / float64(agents)
	t.Logf("idle: %.1f MiB before, %.1f KiB for each agent, %.1f %% of a core, %.0f bytes a second for each agent",
		before/1024, perAgent, 100*idle, idleBytes/float64(agents))
	if perAgent > mostPerAgent {
		t.Errorf("each agent takes %.1f KiB of the coordinator's memory, want %d at most", perAgent, mostPerAgent)
	}

	// row measures deletions, of which a share must be acknowledged, while also does something
	// else.
	row := func(name string, rate, n int, share float64, also func(ctx context.Context) string) (p50 time.Duration) {
		acknowledged := `lameduck_admission_answers_total{answer="allow",operation="delete",` +
			`reason="Acknowledged",role="opener"}`
		some := take(n)
		ctx, stop := context.WithCancel(t.Context())
		var beside sync.WaitGroup
		var said string
		if also != nil {
			beside.Go(func() { said = also(ctx) })
		}
		former, _ := m.series()
		cpu, bytes, had, began := m.cpu(), f.bytes(), m.must(acknowledged), time.Now()
		took := deletions(t, kube, some, rate)
		lasted := time.Since(began).Seconds()
		cpu, bytes, had = m.cpu()-cpu-idle*lasted, f.bytes()-bytes-idleBytes*lasted, m.must(acknowledged)-had
		stop()
		beside.Wait()
		t.Logf("| %s | %d | p50 %s, p99 %s | %.1f ms of CPU a drain | %.0f bytes a drain and agent | "+
			"%.0f acknowledged in %.1f s, %.0f MiB resident %s %v", name, n, harness.Quantile(took, 0.5),
			harness.Quantile(took, 0.99),
			1000*cpu/float64(n), bytes/float64(n)/float64(agents), had, lasted, m.resident()/1024, said,
			m.answers(former))
		if had < share*float64(n) {
			t.Errorf("%.0f of %d deletions were acknowledged, want %.0f %%", had, n, 100*share)
		}
		if late := slices.Max(took); late > mostLate {
			t.Errorf("a deletion took %s, want %s at most", late, mostLate)
		}
		if bytes/float64(n)/float64(agents) > mostBytes {
			t.Errorf("a drain takes %.0f bytes for each agent, want %.0f at most", bytes/float64(n)/float64(agents),
				mostBytes)
		}
		return harness.Quantile(took, 0.5)
	}
	for _, of := range []struct {
		rate, n int
		share   float64
	}{{1, 20, 0.95}, {10, 200, 0.95}, {100, 1000, 0.5}} { // two cores are at times too slow for the last
		floor := deletions(t, kube, unprotected[:of.n], of.rate)
		unprotected = unprotected[of.n:]
		t.Logf("| no webhook, %d a second | %d | p50 %s, p99 %s |", of.rate, of.n, harness.Quantile(floor, 0.5),
			harness.Quantile(floor, 0.99))
		p50 := row(fmt.Sprintf("%d a second", of.rate), of.rate, of.n, of.share, nil)
		if of.rate == 1 && p50 > harness.Quantile(floor, 0.5)+mostSlower {
			t.Errorf("a deletion takes %s, and %s without a webhook", p50, harness.Quantile(floor, 0.5))
		}
	}
	row("5 a second, EndpointSlice storm", 5, 100, 0, func(ctx context.Context) string {
		began := time.Now()
		changes := storm.run(ctx, 500)
		return fmt.Sprintf("with %.0f changes a second", float64(changes)/time.Since(began).Seconds())
	})

	bare := floor(t, s, agents)
	m.restart(kube, take(400), agents, bare)
}

// restart kills the coordinator and waits until all agents are back, while pods are deleted.
func (m measured) restart(kube kubernetes.Interface, pods []*corev1.Pod, agents int, bare time.Duration) {
	t := m.t
	coordinators, err := m.s.Pods(t.Context(), stage.System, "app.kubernetes.io/component=webhook")
	must(t, err)
	var all sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	var mu sync.Mutex
	var took []time.Duration
	deleting := make(chan struct{})
	go func() {
		defer close(deleting)
		ticker := time.NewTicker(200 * time.Millisecond)
		defer ticker.Stop()
		for _, pod := range pods {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			all.Go(func() {
				began := time.Now()
				err := kube.CoreV1().Pods(pod.Namespace).Delete(t.Context(), pod.Name, metav1.DeleteOptions{
					Preconditions: &metav1.Preconditions{UID: new(pod.UID)}})
				mu.Lock()
				defer mu.Unlock()
				if took = append(took, time.Since(began)); err != nil {
					t.Errorf("deletion of %s after %s: %v", pod.Name, time.Since(began), err)
				}
			})
		}
	}()
	former := m.must("process_start_time_seconds")
	must(t, m.s.Signal(&coordinators[0], "webhook", syscall.SIGKILL))
	harness.Until(t, time.Minute, "the coordinator runs again", func() bool {
		began, ok := m.metric("process_start_time_seconds")
		return ok && began > former
	})
	back := m.agents("connected", agents)
	cpu := m.cpu()
	stop()
	<-deleting
	all.Wait()
	t.Logf("restart: all %d agents are back %.1f s after the coordinator answers, which took %.2f s of CPU; bare TLS "+
		"connections and a line: %.2f s (%.1fx); %d deletions meanwhile: p50 %s, p99 %s", agents,
		back.Seconds(), cpu, bare.Seconds(), back.Seconds()/bare.Seconds(), len(took), harness.Quantile(took, 0.5),
		harness.Quantile(took, 0.99))
	harness.Goal(t, "back, seconds", back.Seconds(), 2, fmt.Sprint(agents, " agents"))
	if limit := mostBack * time.Duration(max(1, agents/1000)); back > limit {
		t.Errorf("want all back within %s", limit)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
