//go:build long

package soak

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"text/template"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

const (
	namespace = "soak"
	lifeLabel = "soak"
	nodes     = 2
	services  = 10
	// sampleEvery is how often each process is measured.
	sampleEvery = 5 * time.Second
	// expected share of the lives is acknowledged at the hold, and at the barrier.
	expected = 0.95
)

//go:embed agents.yaml
var agents string

func TestMain(m *testing.M) { cluster.Main(m) }

// Pods are created, listed, held, wait at the barrier and end: LIVES of them, RATE a second. What
// two coordinators and four agents take is measured all the while. From LIVES/5 on a linear fit
// must be flat, and at the end each process has what it had when it was idle before. The fit says
// something only once as much is remembered of deleted pods as ever will be; that takes
// drain.Times.Memory. EDITS names changes of the programs.
func TestSoak(t *testing.T) {
	if os.Getenv("LAMEDUCK_BIN") == "" {
		t.Fatal("LAMEDUCK_BIN is not set: programs with the race detector are not to be measured")
	}
	edited(t)
	count, rate := harness.Number(t, "LIVES", 50_000), harness.Number(t, "RATE", 15)
	memory := drain.DefaultTimes().Memory
	if slices.Contains(strings.Fields(os.Getenv("EDITS")), "memory") {
		memory = time.Minute
	}
	s, all := open(t)
	config := s.Cluster.Config()
	config.WarningHandler = rest.NoWarnings{} // the first and the last pods are the last targets of their Services
	kube, err := kubernetes.NewForConfig(config)
	must(t, err)
	kubelet, err := kubernetes.NewForConfig(s.Cluster.ConfigFor("system:node:node-1", "system:nodes"))
	must(t, err)
	l := &lives{kube: kube, kubelet: kubelet, listed: map[types.UID]chan struct{}{}}
	must(t, l.watch(t.Context()))

	// Some lives first, so that what each process makes once is there: connections, for example.
	const few = 5 * services
	l.run(t.Context(), 0, few, rate, func() {})
	idle := settled(t, all, 5*time.Second, func(*process, sample) bool { return false })

	var ended atomic.Int64
	ctx, stop := context.WithCancel(t.Context())
	done, measured := make(chan struct{}), make(chan error, 1)
	go func() { defer close(done); l.run(ctx, few, count, rate, func() { ended.Add(1) }) }()
	began := time.Now()
	go func() {
		tick := time.NewTicker(sampleEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-done:
				measured <- nil
				return
			}
			for _, p := range all {
				s, err := p.take(int(ended.Load()))
				if err != nil {
					stop()
					measured <- fmt.Errorf("measure %s: %w", p.name, err)
					return
				}
				s.waiting = float64(l.waiting.Load())
				p.samples = append(p.samples, s)
			}
			if n := len(all[0].samples); n%12 == 0 {
				for _, p := range all {
					t.Logf("after %s: %s %+v", time.Since(began).Round(time.Second), p.name, p.samples[n-1])
				}
			}
		}
	}()
	<-done
	must(t, <-measured)
	stop()
	took := time.Since(began)
	t.Logf("%d lives in %s, %.1f a second; hold p50 %s, p99 %s; hook p50 %s, p99 %s", len(l.holds),
		took.Round(time.Second), float64(count)/took.Seconds(), harness.Quantile(l.holds, 0.5),
		harness.Quantile(l.holds, 0.99),
		harness.Quantile(l.waits, 0.5), harness.Quantile(l.waits, 0.99))
	if len(l.errs) > 0 {
		t.Errorf("%d errors, the first: %v", len(l.errs), l.errs[:min(10, len(l.errs))])
	}
	acknowledged(t, all, count)

	first := count / 5
	from := slices.IndexFunc(all[0].samples, func(s sample) bool { return s.lives >= first })
	full := time.Duration(from)*sampleEvery >= memory
	for _, p := range all {
		for _, q := range quantities {
			remembered := memory
			if !q.remembers {
				remembered = 0 // in a short form the pods that are remembered grow as the lives do
			}
			slope, stderr := fit(p.samples, first, remembered, q.of)
			// A shorter form sees the same growth in fewer lives, so it is less precise.
			precise := q.slope * max(1, 40_000/float64(count-first))
			t.Logf("%-16s %-18s %10.4f a life, standard error %.4f", p.name, q.name, slope, stderr)
			switch {
			case q.remembers && !full:
			case slope-3*stderr > q.slope:
				t.Errorf("%s: %s grow by %.4f a life, standard error %.4f, want %.4f at most", p.name, q.name, slope,
					stderr, q.slope)
			case stderr > precise:
				t.Errorf("%s: the slope of %s has a standard error of %.4f: %.4f could not be told from 0", p.name,
					q.name, stderr, precise)
			}
		}
	}
	if !full {
		t.Logf("memory and journal are not judged: %d lives took less than %s", first, memory)
	}
	// What is remembered is forgotten, too, and not written any more with the next change.
	select {
	case <-time.After(memory + 10*time.Second): // the time is what is waited for
	case <-t.Context().Done():
	}
	l.run(t.Context(), few+count, few, rate, func() {})
	last := settled(t, all, 2*time.Minute, func(p *process, s sample) bool {
		return !slices.ContainsFunc(quantities, func(q quantity) bool { return q.of(s) > q.of(idle[p.name])+q.limit })
	})
	for _, p := range all {
		t.Logf("%-16s idle before %+v, after %+v", p.name, idle[p.name], last[p.name])
		for _, q := range quantities {
			if was, is := q.of(idle[p.name]), q.of(last[p.name]); is > was+q.limit {
				t.Errorf("%s has %.0f %s when it is idle, and had %.0f before", p.name, is, q.name, was)
			}
		}
	}
}

// settled measures each process until it is as ok wants, at most so long, and returns what it
// measured last.
func settled(t *testing.T, all []*process, most time.Duration, ok func(*process, sample) bool) map[string]sample {
	t.Helper()
	last := map[string]sample{}
	_ = harness.Poll(most, func() error {
		var err error
		for _, p := range all {
			s, failed := p.take(0)
			must(t, failed)
			if last[p.name] = s; !ok(p, s) {
				err = fmt.Errorf("%s is not idle", p.name)
			}
		}
		return err
	})
	return last
}

// acknowledged fails unless most lives were acknowledged, at the hold and at the barrier.
func acknowledged(t *testing.T, all []*process, count int) {
	t.Helper()
	var held, waited float64
	for _, p := range all {
		// Each deletion is answered by both replicas, by one of them as the opener.
		held += p.metric(t, `lameduck_admission_answers_total{answer="allow",operation="delete",`+
			`reason="Acknowledged",role="opener"}`)
		waited += p.metric(t, `lameduck_barrier_waits_total{outcome="Acknowledged"}`)
	}
	t.Logf("%.0f deletions were acknowledged at the hold, %.0f at the barrier", held, waited)
	if least := expected * float64(count); held < least || waited < least {
		t.Errorf("want at least %.0f of %d at both", least, count)
	}
}

// open starts two coordinators, two gateways with agents, and two node agents, and returns the
// processes to measure.
func open(t *testing.T) (*stage.Stage, []*process) {
	t.Helper()
	haproxy := harness.HAProxy(t)
	// Compaction every minute, because each life is some versions of some objects.
	s := harness.Stage(t, cluster.Options{APIServer: []string{"--etcd-compaction-interval=1m"}}, stage.Options{
		Entries: 2, LogLevel: "info",
		Ignore: func(p *corev1.Pod) bool { _, is := p.Labels[lifeLabel]; return is },
	})
	must(t, s.AddNode(t.Context(), "node-2", netip.MustParsePrefix("10.244.9.0/24")))
	objects, err := stage.Objects(t.Context(), s.Cluster, "barrier", "Namespace", "ServiceAccount", "ClusterRole",
		"ClusterRoleBinding", "RoleBinding")
	must(t, err)
	manifests, err := stage.Join(objects)
	must(t, err)
	must(t, s.Apply(t.Context(), manifests))
	must(t, s.InstallBarrier(t.Context()))
	harness.Barred(t, s.Kube, namespace, nil)
	var sheet bytes.Buffer
	must(t, template.Must(template.New("").Parse(agents)).Execute(&sheet, map[string]any{
		"Bin": s.Bin, "HAProxy": haproxy, "KubeProxy": s.Cluster.Binaries().Path("kube-proxy"),
		"Kubeconfig": s.Cluster.Kubeconfig(), "Nodes": []int{1, 2}, "Services": []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9},
	}))
	must(t, s.Apply(t.Context(), sheet.String()))
	for _, of := range [][2]string{{namespace, "gateway"}, {"lameduck-node", "node-1"}, {"lameduck-node", "node-2"}} {
		must(t, s.Await(t.Context(), of[0], of[1]))
	}
	var all []*process
	for _, of := range []struct{ namespace, selector, program, port string }{
		{stage.System, "app.kubernetes.io/component=webhook", "webhook", "8080"},
		{namespace, "app=gateway", "agent", "9101"}, {"lameduck-node", "lameduck.io/agent", "agent", "9101"},
	} {
		pods, err := s.Pods(t.Context(), of.namespace, of.selector)
		must(t, err)
		for i, pod := range pods {
			pid, err := s.Process(&pod, of.program)
			must(t, err)
			all = append(all, &process{name: fmt.Sprintf("%s %d", of.namespace, i), pid: pid,
				journal: journalOf(t, pid), metrics: fmt.Sprintf("http://%s:%s/metrics", pod.Status.PodIP, of.port)})
		}
	}
	if len(all) != 6 {
		t.Fatalf("%d processes, want two coordinators and four agents", len(all))
	}
	for _, p := range all[:2] {
		harness.Until(t, time.Minute, p.name+" has four agents", func() bool {
			return p.metric(t, `lameduck_agents{state="connected"}`) == 4
		})
	}
	return s, all
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
