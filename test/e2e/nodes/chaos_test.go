//go:build e2e && long

package nodes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiwatch "k8s.io/apimachinery/pkg/watch"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/load"
)

const (
	// chaosRate is how many requests each app gets on each way in a second.
	chaosRate = 10
	// slack is what a wait may take beyond its bound: computers are busy, and kubelets look once a
	// second.
	slack = 15 * time.Second
	// margin is how long after a fault, or after a deletion that did not wait, requests may be lost
	// by it: EndpointSlices, a sync of kube-proxy, and 5 s of a request that hangs.
	margin = 10 * time.Second
	// pause is for how long kube-proxy may receive no changes after an outage of the control plane:
	// client-go doubles the time between two tries up to 30 s, and lengthens it by up to as much.
	pause = time.Minute
)

// excuses are the reasons, of a deletion or of a hook, that say that not every gateway was waited
// for. The other reasons of an early answer claim that no gateway routes the pod.
var excuses = []string{"Deadline", "IdleBound", "LastTarget", "Suspended", "AgentsLost", "Uncovered", "NoAgents",
	"NotRouted", "Cold", "NoFacts", "NodeLost", "DisruptionTarget", "UnknownPod", "Bound", "Local", "NoTime",
	"NoTargets", "Stopping", "Unknown", "TooMany"}

// window is a time in which requests on some ways may be lost, and why. Those of faults are kept
// even if they excuse nothing: bounds do not run while one is active.
type window struct {
	why  string
	ways []string
	// service is the one that lost requests were for: namespace/name. Empty: any.
	service  string
	from, to time.Time // to is zero while it is open
	fault    bool
	outage   bool // of the control plane
	// kinds are those of the failures that it explains. Nil: all.
	kinds []load.Kind
}

// chaos is a lab in which things break by a schedule.
type chaos struct {
	*lab
	t            *testing.T
	works        []work
	kinds        []kind
	began        time.Time
	gateway      string   // the address of HAProxy
	coordinators []string // the addresses of coordinators

	mu      sync.Mutex
	windows []*window
	logged  map[string]bool // lines
	late    map[string]bool // what took too long, and was said to
	done    map[string]int  // how often what was done
	longest map[string]time.Duration
}

// Rolling updates, scale-ins and -outs, node drains and deletions go on under load while faults
// that SEED alone determines come and go for MINUTES. All the time, no request is lost that the
// promise covers, no deletion takes longer than its bound, and no pod is out of traffic for longer
// than an exclusion may last. No pod waits longer than a minute for a node: otherwise there would
// soon be none to delete. After it everything is as before: connected, routed and ready, and an
// update loses nothing.
func TestChaos(t *testing.T) {
	seed, minutes := harness.Number(t, "SEED", 1), harness.Number(t, "MINUTES", 10)
	t.Setenv("TIMELINE", "1") // coordinators log the deletions that do not wait, too
	c := &chaos{t: t, logged: map[string]bool{}, late: map[string]bool{}, done: map[string]int{},
		longest: map[string]time.Duration{},
		works: []work{{Namespace: "lameduck", Kind: "Deployment", Replicas: 4},
			{Namespace: "stateful", Kind: "StatefulSet", Replicas: 3}},
		// What is killed often is started again as soon as what is killed once.
		lab: newLab(t, 3, machine.Options{Kubelet: []string{"crashLoopBackOff: {maxContainerRestartPeriod: 1s}"}}),
	}
	c.kinds = c.allKinds()
	length := time.Duration(minutes) * time.Minute
	schedule := draw(uint64(seed), c.kinds, length)
	c.prepare()
	clients := c.startLoad()
	c.began = time.Now()
	ctx, cancel := context.WithDeadline(t.Context(), c.began.Add(length))
	defer cancel()
	var faults, rest sync.WaitGroup
	for _, f := range schedule {
		faults.Go(func() { c.strike(f) })
	}
	rest.Go(func() { c.change(ctx, rand.New(rand.NewPCG(uint64(seed), 1))) })
	looking, stop := context.WithCancel(t.Context())
	defer stop()
	var looks sync.WaitGroup
	looks.Go(func() { c.look(looking) })
	looks.Go(func() { c.Keep(looking) })
	for _, w := range c.works {
		looks.Go(func() { c.watch(looking, w.Namespace) })
	}
	looks.Go(func() {
		harness.WatchClock(looking, time.Second/2, func(from, to time.Time) {
			c.open(window{why: "the computer stood still", ways: ways, from: from.Add(-5 * time.Second),
				to: to.Add(5 * time.Second)})
		})
	})
	faults.Wait()
	rest.Wait()
	c.awaitWhole()
	t.Logf("%s: the faults are over", c.at(time.Now()))
	c.finalUpdate() // suspended agents are waited for again once they have acknowledged in time
	clean := time.Now()
	c.finalUpdate()
	stop()
	looks.Wait()
	c.judge(clients, clean)
	t.Logf("faults and changes: %v; longest: %v", c.done, c.longest)
	if t.Failed() {
		for _, f := range schedule {
			t.Log(c.describe(f))
		}
		t.Logf("again: make chaos SEED=%d MINUTES=%d", seed, minutes)
	}
}

// prepare installs a gateway whose disk is small, and what it routes to.
func (c *chaos) prepare() {
	var namespaces []string
	for _, w := range c.works {
		c.namespace(c.t, w.Namespace, map[string]string{"lameduck.io/mode": "enforce"})
		namespaces = append(namespaces, w.Namespace)
	}
	gatewaySheet = strings.Replace(gatewaySheet, "emptyDir: {}", "emptyDir: {medium: Memory, sizeLimit: 2Mi}", 1)
	c.addGateway(c.t, namespaces)
	// A rotation has three steps, each as long as this.
	c.configure(c.t, object{"certificates": object{"overlap": "20s"}})
	c.addWebhooks(c.t)
	for _, w := range c.works {
		c.deploy(c.t, w)
		c.age(c.t, w.Namespace)
	}
	c.gateway = c.gatewayAddress(c.t)
	pods, err := c.Kube.CoreV1().Pods(system).List(c.t.Context(), metav1.ListOptions{})
	if err != nil || len(pods.Items) != 2 {
		c.t.Fatalf("coordinators: %v, %v", pods, err)
	}
	for _, p := range pods.Items {
		c.coordinators = append(c.coordinators, p.Status.PodIP)
	}
}

func (c *chaos) startLoad() *clients {
	all := &clients{}
	for i, w := range c.works {
		for j, app := range apps {
			haproxy := fmt.Sprintf("http://%s:%d/", c.gateway, 8000+10*i+j)
			for k, target := range c.targets(c.t, w.Namespace, app, haproxy) {
				all.add(c.t, c.lab, ways[k], perRequest, chaosRate, load.Options{Target: target, Failures: 1 << 20})
			}
		}
	}
	return all
}

func (c *chaos) at(when time.Time) string { return fmt.Sprintf("%.1f s", when.Sub(c.began).Seconds()) }

func (c *chaos) violated(invariant, format string, args ...any) {
	c.t.Errorf("%s: violated: %s: %s", c.at(time.Now()), invariant, fmt.Sprintf(format, args...))
}

func (c *chaos) count(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.done[what]++
}

// open begins a window.
func (c *chaos) open(w window) *window {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.windows = append(c.windows, &w)
	return &w
}

func (c *chaos) close(w *window, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	w.to = at
}

// strike does what a fault says, when it says so, and undoes it.
func (c *chaos) strike(f fault) {
	ctx, k := c.t.Context(), c.kinds[f.kind]
	time.Sleep(time.Until(c.began.Add(f.at))) // the schedule has times
	w := window{why: k.name, from: time.Now(), fault: true, outage: k.group == controlPlane}
	if k.loses != nil {
		w.ways = k.loses(f.target)
	}
	opened := c.open(w)
	// A process may be starting, and the API server away.
	err := poll(f.lasts, func() error { return k.begin(ctx, f) })
	c.t.Logf("%s (%v)", c.describe(f), err)
	if err == nil {
		c.count(c.name(f))
	}
	time.Sleep(time.Until(c.began.Add(f.at + f.lasts))) // the schedule has times
	if err := poll(time.Minute, func() error { return k.end(ctx, f) }); err != nil {
		c.t.Errorf("end of %s: %v", c.describe(f), err)
	}
	if k.over != nil {
		if err := poll(90*time.Second, func() error { return k.over(ctx, f) }); err != nil {
			c.violated("nothing left behind", "90 s after %s: %v", c.describe(f), err)
		}
	}
	c.close(opened, time.Now().Add(margin))
}

// change changes the works one after the other, and waits for each change for a while.
func (c *chaos) change(ctx context.Context, random *rand.Rand) {
	forget := context.WithoutCancel(ctx)
	for ctx.Err() == nil {
		w := c.works[random.IntN(len(c.works))]
		node := c.Set.Machines[random.IntN(len(c.Set.Machines))].Name
		replicas, which := 2+random.IntN(4), random.IntN(1000)
		var err error
		what := []string{"rolling update of a ", "scale a ", "drain a node", "delete a pod of a "}[random.IntN(4)]
		switch what {
		case "rolling update of a ":
			err = restart(ctx, c.lab, w)
		case "scale a ":
			err = each(ctx, c.lab, func(app string) []string {
				return []string{"scale", "-n", w.Namespace, w.Kind, app, fmt.Sprintf("--replicas=%d", replicas)}
			})
		case "drain a node":
			_, err = c.Kubectl(ctx, "drain", node, "--ignore-daemonsets", "--delete-emptydir-data",
				"--pod-selector=app in (exit,graceful)", "--timeout=45s")
			if err := poll(time.Minute, func() error {
				_, err := c.Kubectl(forget, "uncordon", node)
				return err
			}); err != nil {
				c.t.Error(err)
			}
		default:
			err = c.deleteOne(ctx, w, which)
		}
		if strings.HasSuffix(what, " a ") {
			what += w.Kind
		}
		if err != nil {
			what += ", failed" // as with an API server that is away
		}
		c.count(what)
		_ = poll(45*time.Second, func() error {
			if err := c.settledNow(ctx); ctx.Err() == nil {
				return err
			}
			return nil
		})
	}
}

// deleteOne deletes a pod as a client does that asks again for as long as it is told to.
func (c *chaos) deleteOne(ctx context.Context, w work, which int) error {
	pods, err := c.Kube.CoreV1().Pods(w.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil || len(pods.Items) == 0 {
		return err
	}
	name, began := pods.Items[which%len(pods.Items)].Name, time.Now()
	for {
		err := c.Kube.CoreV1().Pods(w.Namespace).Delete(ctx, name, metav1.DeleteOptions{})
		if apierrors.IsTooManyRequests(err) {
			time.Sleep(100 * time.Millisecond) // between two requests
			continue
		}
		if err == nil {
			c.bounded("deletion of "+name, time.Since(began), time.Now(), drain.DefaultTimes().Deadline)
		}
		return err
	}
}

// settledNow returns nil if all pods are ready that should be there, and none is terminating.
func (c *chaos) settledNow(ctx context.Context) error {
	for _, w := range c.works {
		get, sum := c.Kube.AppsV1().Deployments(w.Namespace).GetScale, 0
		if w.Kind == "StatefulSet" {
			get = c.Kube.AppsV1().StatefulSets(w.Namespace).GetScale
		}
		for _, app := range apps {
			scale, err := get(ctx, app, metav1.GetOptions{})
			if err != nil {
				return err
			}
			sum += int(scale.Spec.Replicas)
		}
		if err := c.podsReady(ctx, w.Namespace, sum); err != nil {
			return err
		}
	}
	return nil
}

func (c *chaos) podsReady(ctx context.Context, namespace string, want int) error {
	pods, err := c.Kube.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, p := range pods.Items {
		if p.DeletionTimestamp != nil || !harness.Ready(&p) {
			return fmt.Errorf("pod %s/%s is terminating, or not ready", namespace, p.Name)
		}
	}
	if len(pods.Items) != want {
		return fmt.Errorf("namespace %s has %d pods, want %d", namespace, len(pods.Items), want)
	}
	return nil
}

// finalUpdate updates all works and waits until everything is as before.
func (c *chaos) finalUpdate() {
	for _, w := range c.works {
		c.age(c.t, w.Namespace)
		if err := restart(c.t.Context(), c.lab, w); err != nil {
			c.t.Fatal(err)
		}
		for _, app := range apps {
			c.kubectl(c.t, "rollout", "status", "-n", w.Namespace, strings.ToLower(w.Kind)+"/"+app, "--timeout=110s")
		}
	}
	c.awaitWhole()
}

// awaitWhole waits until nothing is left behind.
func (c *chaos) awaitWhole() {
	if err := poll(2*time.Minute, func() error { return c.whole(c.t.Context()) }); err != nil {
		c.Explain(c.t)
		c.violated("nothing left behind", "after 2 min: %v", err)
	}
}

// poll is harness.Poll for what is not asked often.
func poll(most time.Duration, ask func() error) error {
	for end := time.Now().Add(most); ; time.Sleep(300 * time.Millisecond) {
		if err := ask(); err == nil || time.Now().After(end) {
			return err
		}
	}
}

// whole returns nil if nothing is left behind.
func (c *chaos) whole(ctx context.Context) error {
	errs := []error{c.nodeReady(ctx, ""), c.settledNow(ctx), c.connected(ctx), c.listed(ctx),
		c.podsReady(ctx, system, 2), c.podsReady(ctx, agents, len(c.Set.Machines)), c.podsReady(ctx, gateway, 1)}
	out, err := inMaintenance(c.gateway)
	if errs = append(errs, err); len(out) > 0 {
		errs = append(errs, fmt.Errorf("servers in maintenance: %v", out))
	}
	for _, address := range c.coordinators {
		for _, name := range []string{"lameduck_drains", "lameduck_barriers_waiting", "lameduck_holds"} {
			errs = append(errs, is0(address+":8080", name))
		}
	}
	errs = append(errs, is0(c.gateway+":9101", "lameduck_agent_journal_failing"))
	for _, m := range c.Set.Machines {
		errs = append(errs, is0(m.Address.String()+":9101", "lameduck_barrier_waiting"))
	}
	return errors.Join(errs...)
}

// listed returns nil if EndpointSlices list both coordinators as ready. After an outage of the API
// server that takes longer than for the pods, and until then no new pod gets the barrier.
func (c *chaos) listed(ctx context.Context) error {
	all, err := c.Kube.DiscoveryV1().EndpointSlices(system).List(ctx, metav1.ListOptions{
		LabelSelector: "kubernetes.io/service-name=lameduck-webhook"})
	if err != nil {
		return err
	}
	ready := 0
	for _, s := range all.Items {
		for _, e := range s.Endpoints {
			if e.Conditions.Ready != nil && *e.Conditions.Ready {
				ready++
			}
		}
	}
	if ready != 2 {
		return fmt.Errorf("the Service of the webhooks has %d ready endpoints, want 2", ready)
	}
	return nil
}

// connected returns nil if all agents are connected to all coordinators.
func (c *chaos) connected(context.Context) error {
	for _, address := range c.coordinators {
		text, err := get("http://" + address + ":8080/metrics")
		for state, want := range map[string]int{"connected": len(c.Set.Machines) + 1, "missing": 0} {
			if err == nil && !strings.Contains(text, fmt.Sprintf("lameduck_agents{state=%q} %d\n", state, want)) {
				err = fmt.Errorf("agents %s to coordinator %s: not %d", state, address, want)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// is0 returns nil if all values of a metric are 0.
func is0(address, name string) error {
	text, err := get("http://" + address + "/metrics")
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, name) && !strings.HasSuffix(line, " 0\n") {
			return errors.New(line)
		}
	}
	return err
}

// watch opens windows for Services for which EndpointSlices list no ready endpoint. When an API
// server was away for long, nodes and with them all pods count as not ready for a while.
func (c *chaos) watch(ctx context.Context, namespace string) {
	api := c.Kube.DiscoveryV1().EndpointSlices(namespace)
	open := map[string]*window{}
	look := func() error {
		all, err := api.List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		w, err := api.Watch(ctx, metav1.ListOptions{ResourceVersion: all.ResourceVersion})
		if err != nil {
			return err
		}
		defer w.Stop()
		known := map[string]*discoveryv1.EndpointSlice{}
		for i := range all.Items {
			known[all.Items[i].Name] = &all.Items[i]
		}
		for {
			c.unready(namespace, known, open)
			e, ok := <-w.ResultChan()
			s, isSlice := e.Object.(*discoveryv1.EndpointSlice)
			if !ok || !isSlice {
				return errors.New("the watch has ended")
			}
			if known[s.Name] = s; e.Type == apiwatch.Deleted {
				delete(known, s.Name)
			}
		}
	}
	for ctx.Err() == nil {
		_ = look()
		time.Sleep(200 * time.Millisecond) // between two tries
	}
}

// unready opens windows for the Services of a namespace that have no ready endpoint, and closes
// those of the others.
func (c *chaos) unready(namespace string, all map[string]*discoveryv1.EndpointSlice, open map[string]*window) {
	ready := map[string]bool{}
	for _, s := range all {
		for _, e := range s.Endpoints {
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				ready[s.Labels["kubernetes.io/service-name"]] = true
			}
		}
	}
	for _, app := range apps {
		switch w, now := open[app], time.Now(); {
		case !ready[app] && w == nil:
			open[app] = c.open(window{why: "no endpoint is ready", ways: ways, service: namespace + "/" + app,
				from: now.Add(-3 * time.Second)})
		case ready[app] && w != nil:
			c.close(w, now.Add(margin))
			delete(open, app)
		}
	}
}

// look looks, once a second, for pods that terminate or are out of traffic for too long, and for
// what excuses lost requests.
func (c *chaos) look(ctx context.Context) {
	terminating, out := map[string]time.Time{}, map[string]time.Time{}
	hookless := map[string]*window{}
	var blind *window
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for i := 0; ctx.Err() == nil; i++ {
		if i%10 == 0 {
			c.collect(ctx)
		}
		<-tick.C
		now := time.Now()
		ready := slices.ContainsFunc(c.coordinators, func(address string) bool {
			_, err := get("http://" + address + ":8081/readyz")
			return err == nil
		})
		switch {
		case !ready && blind == nil:
			blind = c.open(window{why: "no coordinator is ready", ways: ways, from: now.Add(-2 * time.Second)})
		case ready && blind != nil:
			c.close(blind, now.Add(2*margin)) // hooks that met no coordinator wait for their node for 10 s
			blind = nil
		}
		listing, cancel := context.WithTimeout(ctx, 2*time.Second)
		pods, err := c.Kube.CoreV1().Pods("").List(listing, metav1.ListOptions{})
		cancel()
		if err != nil {
			continue // nothing can be said
		}
		maintenance, err := inMaintenance(c.gateway)
		nowTerminating, nowOut := map[string]time.Time{}, map[string]time.Time{}
		since := func(before, now map[string]time.Time, uid string) time.Time {
			if now[uid] = before[uid]; now[uid].IsZero() {
				now[uid] = time.Now()
			}
			return now[uid]
		}
		for _, p := range pods.Items {
			uid, name := string(p.UID), p.Namespace+"/"+p.Name
			if p.DeletionTimestamp != nil {
				began := since(terminating, nowTerminating, uid)
				c.bounded("end of "+name, now.Sub(began), now,
					time.Duration(*p.Spec.TerminationGracePeriodSeconds)*time.Second)
				works := slices.ContainsFunc(c.works, func(w work) bool { return w.Namespace == p.Namespace })
				if works && p.Annotations["lameduck.io/barrier-id"] == "" && hookless[uid] == nil {
					hookless[uid] = c.open(window{why: "no hook", ways: byKubeProxy, from: began.Add(-2 * time.Second)})
				}
				if w := hookless[uid]; w != nil {
					c.close(w, now.Add(margin))
				}
			} else if p.Spec.NodeName == "" {
				c.bounded("placing of "+name, now.Sub(p.CreationTimestamp.Time), now, time.Minute)
			} else if maintenance[uid] && harness.Ready(&p) {
				// A client may ask for the deletion until its deadline.
				times := drain.DefaultTimes()
				c.bounded("time out of traffic of "+name, now.Sub(since(out, nowOut, uid)), now,
					times.Deadline+times.Expiry)
			}
		}
		if terminating = nowTerminating; err == nil {
			out = nowOut
		}
	}
	c.collect(context.WithoutCancel(ctx))
}

// bounded checks that what took so long until now did not take longer than its bound. Time in which
// a fault was active does not count.
func (c *chaos) bounded(what string, took time.Duration, now time.Time, bound time.Duration) {
	counted := took
	if took > bound+slack {
		counted -= c.covered(now.Add(-took), now, func(w *window) bool { return w.fault })
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	kind, _, _ := strings.Cut(what, " of ")
	c.longest[kind] = max(c.longest[kind], took)
	if counted > bound+slack && !c.late[what] {
		c.late[what] = true
		c.violated("bounds", "%s took %s, %s of it without a fault, want %s at most", what, took, counted, bound)
	}
}

// covered returns for how much of a time at least one of the windows was open.
func (c *chaos) covered(from, to time.Time, which func(*window) bool) (sum time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	slices.SortStableFunc(c.windows, func(a, b *window) int { return a.from.Compare(b.from) })
	for _, w := range c.windows {
		end := to
		if !w.to.IsZero() && w.to.Before(to) {
			end = w.to
		}
		begin := from
		if w.from.After(from) {
			begin = w.from
		}
		if which(w) && end.After(begin) {
			sum += end.Sub(begin)
			from = end
		}
	}
	return sum
}

// collect keeps what Lameduck has logged of deletions and hooks. Kubelets remove the logs of
// containers that have ended.
func (c *chaos) collect(ctx context.Context) {
	for _, m := range c.Set.Machines {
		out, _ := m.Run(ctx, "bash", "-c",
			`grep -hsE '"msg":"(deletion|drain|barrier passed|hook is answered)"' /run/node/pods/lameduck-*/*/*.log*
			true`)
		c.mu.Lock()
		for line := range strings.Lines(out) {
			if _, text, ok := strings.Cut(line, "{"); ok {
				c.logged["{"+text] = true
			}
		}
		c.mu.Unlock()
	}
}

// judge counts failed requests by what explains them. Those that nothing explains, and those after
// clean, are violations.
func (c *chaos) judge(all *clients, clean time.Time) {
	reasons := map[string]int{}
	for line := range c.logged {
		c.judgeLine(line, clean, reasons)
	}
	type failure struct {
		load.Failure
		way string
	}
	var lost []failure
	for _, w := range c.windows {
		if w.service == "" {
			continue
		}
		// An agent that is frozen cannot show its gateway the endpoints that become ready.
		c.prolong(w, w.to)
		for _, f := range c.windows {
			to := f.to.Add(pause - margin) // f.to is margin later than the end of the fault
			if f.outage && f.from.Before(w.to) && to.After(w.to) {
				c.open(window{why: "kube-proxy pauses", ways: byKubeProxy, service: w.service, from: w.to, to: to,
					kinds: []load.Kind{load.Refused, load.Timeout, load.Unreachable}}) // it has no address that answers
			}
		}
	}
	explained, requests, end := map[string]int{}, map[string]int{}, time.Now()
	for i, one := range all.loads {
		r := one.Stop()
		requests[all.by[i]] += r.Total
		service := c.works[i/len(ways)/len(apps)].Namespace + "/" + apps[i/len(ways)%len(apps)]
		for _, f := range r.Failures {
			from, to := f.Due, f.Due.Add(time.Duration(f.TookMillis*float64(time.Millisecond)))
			at := slices.IndexFunc(c.windows, func(w *window) bool {
				return slices.Contains(w.ways, all.by[i]) && (w.service == "" || w.service == service) &&
					w.from.Before(to) && (w.to.IsZero() || w.to.After(from)) &&
					(w.kinds == nil || slices.Contains(w.kinds, f.Kind))
			})
			switch {
			case f.Kind == load.Local:
				explained["the load generator"]++
			case at >= 0 && from.Before(clean):
				explained[c.windows[at].why]++
			default:
				lost = append(lost, failure{f, service + " by " + all.by[i]})
			}
		}
	}
	for _, way := range ways {
		took := end.Sub(c.began)
		strict := took - c.covered(c.began, end, func(w *window) bool {
			return w.service == "" && slices.Contains(w.ways, way)
		})
		c.t.Logf("by %s: %d requests; for %.0f of %.0f s nothing excuses a lost one", way, requests[way],
			strict.Seconds(), took.Seconds())
	}
	c.t.Logf("lost requests by what explains them: %v; not explained: %d; reasons: %v", explained, len(lost), reasons)
	slices.SortFunc(lost, func(a, b failure) int {
		return cmp.Or(strings.Compare(a.way, b.way), cmp.Compare(a.Kind, b.Kind), a.Due.Compare(b.Due))
	})
	for len(lost) > 0 { // those of one kind, with pauses below 5 s, are one incident
		n, first := 1, lost[0]
		for n < len(lost) && lost[n].way == first.way && lost[n].Kind == first.Kind &&
			lost[n].Due.Sub(lost[n-1].Due) < 5*time.Second {
			n++
		}
		c.violated("no request lost", "%d of %s, due from %s to %s: %s. The first, from %s to %q, took %.0f ms: %s",
			n, first.way, c.at(first.Due), c.at(lost[n-1].Due), first.Kind, first.Source, first.Pod,
			first.TookMillis, first.Error)
		lost = lost[n:]
	}
	c.keep()
	if len(requests) == 0 || len(c.done) == 0 || len(reasons) == 0 {
		c.t.Error("nothing was sent, done, or logged")
	}
}

// judgeLine opens a window for a deletion or a hook that was not kept waiting, and checks how long
// those took that were.
func (c *chaos) judgeLine(text string, clean time.Time, reasons map[string]int) {
	var line struct {
		Time                                              time.Time
		Msg, Namespace, Pod, Reason, Outcome, Phase, Role string
		Allowed                                           bool
		SinceSeconds, Seconds                             float64
	}
	if !strings.HasPrefix(text, "{") || json.Unmarshal([]byte(text), &line) != nil {
		return
	}
	reason, lost, times := line.Reason, byKubeProxy, drain.DefaultTimes()
	took, bound := time.Duration(max(line.SinceSeconds, line.Seconds)*float64(time.Second)), time.Duration(0)
	switch {
	case line.Msg == "deletion" && line.Allowed && line.Role != "witness":
		if reason != "Uncovered" { // all agents have acknowledged, and the pod has no hook
			lost = directed
		}
	case line.Msg == "drain" && line.Phase == "Released":
		lost, bound = directed, times.Deadline
	case line.Msg == "barrier passed":
		bound = barrierBound * time.Second
	case line.Msg == "hook is answered":
		reason, bound = line.Outcome, barrierBound*time.Second
	default:
		return
	}
	if bound > 0 {
		c.bounded(line.Msg+" of "+line.Pod, took, line.Time, bound)
	}
	reasons[line.Msg+" "+reason]++
	if !slices.Contains(excuses, reason) {
		return
	}
	if line.Time.After(clean) {
		c.violated("nothing left behind", "after all faults %s", text)
	}
	w := window{why: line.Msg + " " + reason, ways: lost, from: line.Time.Add(-2 * time.Second),
		to: line.Time.Add(margin)}
	// A gateway that did not answer may send to the pod until it is well again.
	c.prolong(&w, line.Time)
	c.open(w)
}

// prolong extends a window to the end of the faults that were active at a time.
func (c *chaos) prolong(w *window, at time.Time) {
	for _, f := range c.windows {
		if f.fault && f.from.Before(at) && f.to.After(w.to) {
			w.to = f.to
		}
	}
}

// keep keeps what Lameduck has logged, and when lost requests were excused, beside the other logs.
func (c *chaos) keep() {
	lines := slices.Sorted(maps.Keys(c.logged))
	for _, w := range c.windows {
		lines = append(lines, fmt.Sprintf("%s to %s: %s, by %v %s\n", c.at(w.from), c.at(w.to), w.why, w.ways,
			w.service))
	}
	lines = append(lines, fmt.Sprintf("0 s is %s\n", c.began.UTC()))
	path := filepath.Join(c.LogDir(), "lameduck.log")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "")), 0o600); err != nil {
		c.t.Error(err)
	}
}
