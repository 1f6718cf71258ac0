// Package stage starts what demonstrations and end-to-end tests need: Lameduck's coordinator, an
// application, and HAProxy with its agent in front of it, all as pods of a real control plane on
// the stand-in of a node.
package stage

import (
	"bufio"
	"bytes"
	"context"
	"embed"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"text/template"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/node"
)

//go:embed *.yaml
var sheets embed.FS

var sheet = template.Must(template.ParseFS(sheets, "*.yaml"))

// CoordinatorAddress is what the API server is told of the first entry, because there is no
// kube-proxy: where the coordinator's pod is or, with Options.Entries, a stand-in of its Service.
// The other entries have the addresses that follow.
var CoordinatorAddress = netip.MustParseAddr("10.244.250.1")

// address is that of an entry.
func address(entry int) netip.Addr {
	a := CoordinatorAddress.As4()
	a[3] += byte(entry)
	return netip.AddrFrom4(a)
}

// System is the namespace of the coordinator.
const System = "lameduck-system"

// Options of a Stage.
type Options struct {
	// Bin is the directory with the programs webhook, agent and app.
	Bin string
	// Entries of the webhook configuration, each with one coordinator behind a stand-in of its
	// Service. 0: one, which has the Service's address itself.
	Entries int
	// Delay is how much later each piece of what the API server writes to a coordinator arrives,
	// with Entries. Nil: at once.
	Delay func() time.Duration
	// Overlap is certificates.overlap of the coordinator. 0: the default.
	Overlap time.Duration
	// CRDs are CustomResourceDefinitions that are established before the coordinator starts.
	CRDs string
	// Dashboard is addresses.dashboard of the coordinator. Empty: the page is not served.
	Dashboard string
	// LogLevel is logLevel of the coordinator. Empty: debug.
	LogLevel string
	// Dir is where volumes and logs of pods are kept. Empty: in a temporary folder.
	Dir string
	// Observe is told what happens to pods. May be nil.
	Observe func(node.Event)
	// Ignore is that of all nodes. May be nil.
	Ignore func(*corev1.Pod) bool
	Log    *slog.Logger
}

// admissionPort is the port of the same name of the coordinator's pods.
const admissionPort = 9443

// Stage is a cluster with a node, ready for pods. Make it with Open.
type Stage struct {
	Options
	Cluster *cluster.Cluster
	Node    *node.Node
	Kube    *kubernetes.Clientset

	running context.Context
	stop    context.CancelFunc
	nodes   sync.WaitGroup
	// lose ends a node of AddNode, by its name.
	lose map[string]context.CancelFunc
	// entries are those that coordinators run for, balanced those whose Service has its stand-in.
	entries, balanced int
	dropped           atomic.Int64
}

// Open starts a node in c and waits until it is ready. Close it.
func Open(ctx context.Context, c *cluster.Cluster, o Options) (*Stage, error) {
	kube, err := kubernetes.NewForConfig(c.Config())
	if err != nil {
		return nil, err
	}
	n, err := node.New(c.Config(), node.Options{
		Name: "node-1", PodRange: netip.MustParsePrefix("10.244.64.0/18"), Dir: o.Dir, Observe: o.Observe,
		Ignore: o.Ignore, Logger: o.Log,
		Address: func(p *corev1.Pod) netip.Addr {
			if o.Entries == 0 && p.Namespace == System && p.Labels["app.kubernetes.io/component"] == "webhook" {
				return CoordinatorAddress
			}
			return netip.Addr{}
		},
	})
	if err != nil {
		return nil, err
	}
	s := &Stage{Options: o, Cluster: c, Node: n, Kube: kube, lose: map[string]context.CancelFunc{}}
	s.running, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	if err := s.run(ctx, s.running, n); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// run runs a node until running ends, and waits until it is ready.
func (s *Stage) run(ctx, running context.Context, n *node.Node) error {
	failed := make(chan error, 1)
	s.nodes.Go(func() { failed <- n.Run(running) })
	select {
	case <-n.Ready():
		return nil
	case err := <-failed:
		return fmt.Errorf("run node: %w", err)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// AddNode adds a node for pods that select it and tolerate its taint, such as those of an App.
func (s *Stage) AddNode(ctx context.Context, name string, pods netip.Prefix) error {
	n, err := node.New(s.Cluster.Config(), node.Options{
		Name: name, PodRange: pods, Observe: s.Observe, Ignore: s.Ignore, Logger: s.Log,
		Taints: []corev1.Taint{{Key: "stage", Value: name, Effect: corev1.TaintEffectNoSchedule}},
	})
	if err != nil {
		return err
	}
	running, lose := context.WithCancel(s.running)
	s.lose[name] = lose
	return s.run(ctx, running, n)
}

// LoseNode ends a node of AddNode without a word to the API server: its pods' processes are killed,
// its Lease is not renewed, and its objects stay.
func (s *Stage) LoseNode(name string) { s.lose[name]() }

// Close kills all pods' processes. The cluster stays.
func (s *Stage) Close() {
	s.stop()
	s.nodes.Wait()
}

// Manifests is the directory of what everybody installs.
func Manifests() string {
	_, here, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(here), "..", "..", "..", "manifests", "base")
}

// HAProxy returns the path of haproxy, or an error that says how to get it.
func HAProxy() (string, error) {
	for _, path := range []string{"haproxy", "/usr/sbin/haproxy", "/usr/local/sbin/haproxy"} {
		if found, err := exec.LookPath(path); err == nil {
			return found, nil
		}
	}
	return "", fmt.Errorf("haproxy is not installed: apt-get install haproxy")
}

// Object is what is known of any object.
type Object = map[string]any

// render fills a sheet.
func render(name string, values any) (string, error) {
	var out bytes.Buffer
	if err := sheet.ExecuteTemplate(&out, name, values); err != nil {
		return "", err
	}
	return out.String(), nil
}

// Apply applies manifests.
func (s *Stage) Apply(ctx context.Context, manifests string) error {
	out, err := s.Cluster.KubectlInput(ctx, manifests, "apply", "-f", "-")
	if err != nil {
		return fmt.Errorf("kubectl apply: %w: %s", err, out)
	}
	return nil
}

// Objects returns the objects of a folder of the manifests that are of one of the given
// kinds, or all.
func Objects(ctx context.Context, c *cluster.Cluster, folder string, kinds ...string) ([]Object, error) {
	out, err := c.Kubectl(ctx, "kustomize", filepath.Join(Manifests(), "..", folder))
	if err != nil {
		return nil, fmt.Errorf("kubectl kustomize: %w: %s", err, out)
	}
	var all []Object
	for _, document := range strings.Split(out, "\n---\n") {
		var o Object
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			return nil, fmt.Errorf("manifest: %w", err)
		}
		if kind, _ := o["kind"].(string); len(kinds) == 0 || slices.Contains(kinds, kind) {
			all = append(all, o)
		}
	}
	return all, nil
}

// Join returns the manifest of objects.
func Join(objects []Object) (string, error) {
	var documents []string
	for _, o := range objects {
		y, err := yaml.Marshal(o)
		if err != nil {
			return "", err
		}
		documents = append(documents, string(y))
	}
	return strings.Join(documents, "---\n"), nil
}

// InstallCoordinator installs everything of the manifests but the webhook configuration, so that
// nothing waits yet, and waits until the coordinator runs.
func (s *Stage) InstallCoordinator(ctx context.Context) error {
	objects, err := Objects(ctx, s.Cluster, "base", "Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding",
		"Role", "RoleBinding", "Secret", "ConfigMap", "Service", "PriorityLevelConfiguration", "FlowSchema",
		"PodDisruptionBudget", "NetworkPolicy", "ResourceQuota", "ValidatingAdmissionPolicy",
		"ValidatingAdmissionPolicyBinding")
	if err != nil {
		return err
	}
	manifests, err := Join(objects)
	if err != nil {
		return err
	}
	if err := s.Apply(ctx, manifests); err != nil {
		return err
	}
	if s.CRDs != "" {
		if err := s.Apply(ctx, s.CRDs); err != nil {
			return err
		}
		if err := s.Cluster.Established(ctx, s.CRDs); err != nil {
			return err
		}
	}
	return s.SetEntries(ctx, max(s.Entries, 1))
}

// SetEntries has so many coordinators run, and waits for them. The webhook configuration stays as
// it is.
func (s *Stage) SetEntries(ctx context.Context, n int) error {
	type entry struct {
		Ordinal int
		Address netip.Addr
	}
	var all []entry
	for i := range n {
		all = append(all, entry{i, address(i)})
		if s.Entries > 0 && i >= s.balanced {
			if err := s.balance(netip.AddrPortFrom(address(i), admissionPort),
				fmt.Sprint("lameduck-webhook-", i)); err != nil {
				return err
			}
			s.balanced++
		}
	}
	manifests, err := render("coordinator.yaml", struct {
		Options
		All []entry
	}{s.Options, all})
	if err != nil {
		return err
	}
	if err := s.Apply(ctx, manifests); err != nil {
		return err
	}
	for i := n; i < s.entries; i++ {
		if err := s.Kube.AppsV1().Deployments(System).Delete(ctx, fmt.Sprint("lameduck-webhook-", i),
			metav1.DeleteOptions{}); err != nil {
			return err
		}
	}
	s.entries = n
	return s.AwaitCoordinators(ctx)
}

// Running is how many coordinators SetEntries has set.
func (s *Stage) Running() int { return s.entries }

// AwaitCoordinators waits until the coordinators of all entries are ready and no others are left.
func (s *Stage) AwaitCoordinators(ctx context.Context) error {
	for i := range s.entries {
		if err := s.Await(ctx, System, fmt.Sprint("lameduck-webhook-", i)); err != nil {
			return err
		}
	}
	return nil
}

// RestartCoordinators restarts those of all entries at the same time, as kubectl rollout restart
// does with a selector.
func (s *Stage) RestartCoordinators(ctx context.Context) error {
	for i := range s.entries {
		if err := s.restart(ctx, System, fmt.Sprint("lameduck-webhook-", i)); err != nil {
			return err
		}
	}
	return s.AwaitCoordinators(ctx)
}

// InstallWebhook installs the first entries of the webhook configuration of the manifests that
// holds deletions, with the coordinators' addresses in the place of their Services', and waits
// until a coordinator has written its CA and the path into each. Entries that the manifests do not
// have are like their last.
func (s *Stage) InstallWebhook(ctx context.Context, entries int) error {
	return s.installWebhook(ctx, "base", "ValidatingWebhookConfiguration", "/v1/admit/", entries)
}

// InstallBarrier installs the one that gives new pods the barrier's hook.
func (s *Stage) InstallBarrier(ctx context.Context) error {
	return s.installWebhook(ctx, "barrier", "MutatingWebhookConfiguration", "/v1/mutate/", 0)
}

func (s *Stage) installWebhook(ctx context.Context, folder, kind, path string, entries int) error {
	objects, err := Objects(ctx, s.Cluster, folder, kind)
	if err != nil {
		return err
	}
	for _, o := range objects {
		hooks := o["webhooks"].([]any)
		if entries > 0 {
			for last := len(hooks) - 1; len(hooks) < entries; {
				more, err := another(hooks[last], last, len(hooks))
				if err != nil {
					return err
				}
				hooks = append(hooks, more)
			}
			hooks = hooks[:entries]
			o["webhooks"] = hooks
		}
		for i, w := range hooks {
			to := CoordinatorAddress // the barrier's have one Service
			if entries > 0 {
				to = address(i)
			}
			w.(Object)["clientConfig"] = Object{"url": fmt.Sprintf("https://%s:%d", to, admissionPort)}
		}
	}
	manifests, err := Join(objects)
	if err != nil {
		return err
	}
	if err := s.Apply(ctx, manifests); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, awaitMost)
	defer cancel()
	for {
		all, err := s.clientConfigs(ctx, kind)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(all, func(c admissionv1.WebhookClientConfig) bool {
			return len(c.CABundle) == 0 || !strings.Contains(*c.URL, path)
		}) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s lameduck: the coordinator writes no CA and no path: %+v", kind, all)
		case <-time.After(awaitEvery):
		}
	}
}

// another returns an entry of a webhook configuration with another ordinal, as the chart makes it.
func another(entry any, ordinal, another int) (more Object, err error) {
	text, err := yaml.Marshal(entry)
	if err != nil {
		return nil, err
	}
	of := func(n int) []string {
		return []string{fmt.Sprintf("pods-%d.", n), fmt.Sprintf("webhook-%d", n), fmt.Sprintf("== '%d'", n)}
	}
	for i, from := range of(ordinal) {
		text = bytes.ReplaceAll(text, []byte(from), []byte(of(another)[i]))
	}
	return more, yaml.Unmarshal(text, &more)
}

// clientConfigs are those of all entries of a configuration.
func (s *Stage) clientConfigs(ctx context.Context, kind string) (all []admissionv1.WebhookClientConfig, err error) {
	api := s.Kube.AdmissionregistrationV1()
	if kind == "MutatingWebhookConfiguration" {
		got, err := api.MutatingWebhookConfigurations().Get(ctx, "lameduck", metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		for _, w := range got.Webhooks {
			all = append(all, w.ClientConfig)
		}
		return all, nil
	}
	got, err := api.ValidatingWebhookConfigurations().Get(ctx, "lameduck", metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	for _, w := range got.Webhooks {
		all = append(all, w.ClientConfig)
	}
	return all, nil
}

// RemoveWebhook deletes the webhook configuration.
func (s *Stage) RemoveWebhook(ctx context.Context) error {
	return s.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Delete(ctx,
		"lameduck", metav1.DeleteOptions{})
}

// Gateway says what to put in front of the application.
type Gateway struct {
	Namespace string
	// Lag is how late a proxy of the API server passes changes of EndpointSlices to the agent.
	Lag time.Duration
	// Blames: an answer that is an error has the header Server-Pod, with HAProxy's name of the
	// server that was tried last. It contains the pod's UID.
	Blames bool
}

// InstallGateway installs HAProxy and its agent, waits until they are ready, and returns where
// HAProxy listens.
func (s *Stage) InstallGateway(ctx context.Context, g Gateway) (address string, err error) {
	haproxy, err := HAProxy()
	if err != nil {
		return "", err
	}
	server := ""
	if g.Lag > 0 {
		if server, err = s.lagging(g.Namespace, g.Lag); err != nil {
			return "", err
		}
	}
	manifests, err := render("gateway.yaml", struct {
		Gateway
		Bin, HAProxy, Server string
	}{g, s.Bin, haproxy, server})
	if err != nil {
		return "", err
	}
	if err := s.Apply(ctx, manifests); err != nil {
		return "", err
	}
	if err := s.Await(ctx, g.Namespace, "gateway"); err != nil {
		return "", err
	}
	pods, err := s.Pods(ctx, g.Namespace, "app=gateway")
	if err != nil {
		return "", err
	}
	return pods[0].Status.PodIP + ":8080", nil
}

// App is the application of app.yaml.
type App struct {
	Namespace        string
	Replicas         int
	StartDelay, Work time.Duration
	// PreStop is the seconds that the preStop hook sleeps; 0: no hook.
	PreStop int
	// Node is where all pods go, a node of AddNode. Empty: the first.
	Node string
}

// InstallApp installs the application, or changes it, and waits until it is complete and nothing of
// an earlier one is left.
func (s *Stage) InstallApp(ctx context.Context, a App) error {
	manifests, err := render("app.yaml", struct {
		App
		Bin string
	}{a, s.Bin})
	if err != nil {
		return err
	}
	if err := s.Apply(ctx, manifests); err != nil {
		return err
	}
	return s.Await(ctx, a.Namespace, "web")
}

// CreateNamespace creates a namespace.
func (s *Stage) CreateNamespace(ctx context.Context, name string) error {
	_, err := s.Kube.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}},
		metav1.CreateOptions{})
	return err
}

// Pods lists the pods of a namespace that selector matches.
func (s *Stage) Pods(ctx context.Context, namespace, selector string) ([]corev1.Pod, error) {
	pods, err := s.Kube.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return nil, fmt.Errorf("list pods %q in %s: %w", selector, namespace, err)
	}
	return pods.Items, nil
}

// Metric reads one value, a name and its labels, from the metrics of a coordinator.
func Metric(coordinator *corev1.Pod, name string) (value float64, ok bool) {
	client := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	all, err := ReadSeries(client, "http://"+coordinator.Status.PodIP+":8080/metrics")
	if err != nil {
		return 0, false
	}
	value, ok = all[name]
	return value, ok
}

// Series are values of metrics, by name and labels as their page has them.
type Series map[string]float64

// ReadSeries reads a page of metrics.
func ReadSeries(client *http.Client, url string) (Series, error) {
	response, err := client.Get(url)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	all := Series{}
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		line := lines.Text()
		if at := strings.LastIndexByte(line, ' '); at > 0 && line[0] != '#' {
			if all[line[:at]], err = strconv.ParseFloat(line[at+1:], 64); err != nil {
				return nil, fmt.Errorf("%s: %q: %w", url, line, err)
			}
		}
	}
	return all, lines.Err()
}

// Sum returns the sum of the series whose name and labels begin with prefix.
func (all Series) Sum(prefix string) (sum float64) {
	for series, value := range all {
		if strings.HasPrefix(series, prefix) {
			sum += value
		}
	}
	return sum
}

// Logs returns what the containers of that name of all pods that selector matches have written.
func (s *Stage) Logs(ctx context.Context, namespace, selector, container string) (string, error) {
	pods, err := s.Pods(ctx, namespace, selector)
	if err != nil {
		return "", err
	}
	var all strings.Builder
	for _, pod := range pods {
		all.WriteString(s.Node.Log(pod.UID, container))
	}
	return all.String(), nil
}

// Restart changes the template of a Deployment as kubectl rollout restart does, and returns how
// long it took until the Deployment was complete and the last old pod was gone.
func (s *Stage) Restart(ctx context.Context, namespace, name string) (time.Duration, error) {
	began := time.Now()
	if err := s.restart(ctx, namespace, name); err != nil {
		return 0, err
	}
	err := s.Await(ctx, namespace, name)
	return time.Since(began), err
}

func (s *Stage) restart(ctx context.Context, namespace, name string) error {
	patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":%q}}}}}`,
		time.Now().Format(time.RFC3339Nano))
	if _, err := s.Kube.AppsV1().Deployments(namespace).Patch(ctx, name, types.StrategicMergePatchType, []byte(patch),
		metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("restart %s/%s: %w", namespace, name, err)
	}
	return nil
}

const (
	// awaitEvery is how often Await looks, awaitMost how long.
	awaitEvery = 25 * time.Millisecond
	awaitMost  = 2 * time.Minute
)

// Await waits until a Deployment is complete and has no pods but the ready ones of its present
// template. The error says how far it was when the time was up, and what its pods said last.
func (s *Stage) Await(ctx context.Context, namespace, name string) error {
	ctx, cancel := context.WithTimeout(ctx, awaitMost)
	defer cancel()
	ticker := time.NewTicker(awaitEvery)
	defer ticker.Stop()
	for {
		state, err := s.state(ctx, namespace, name)
		if err == nil && state == "" {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("deployment %s/%s: %w: %s%s", namespace, name, ctx.Err(), state,
				s.explain(context.WithoutCancel(ctx), namespace))
		}
	}
}

// state is empty when the Deployment is complete.
func (s *Stage) state(ctx context.Context, namespace, name string) (string, error) {
	d, err := s.Kube.AppsV1().Deployments(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	selector, err := metav1.LabelSelectorAsSelector(d.Spec.Selector)
	if err != nil {
		return "", err
	}
	want := *d.Spec.Replicas
	if d.Status.ObservedGeneration < d.Generation || d.Status.UpdatedReplicas != want || d.Status.Replicas != want ||
		d.Status.AvailableReplicas != want {
		return describe(d), nil
	}
	pods, err := s.Pods(ctx, namespace, selector.String())
	if err != nil {
		return "", err
	}
	if len(pods) != int(want) {
		return fmt.Sprintf("%s, but %d pods", describe(d), len(pods)), nil
	}
	return "", nil
}

// explain tells what the containers of a namespace that are not ready wrote last.
func (s *Stage) explain(ctx context.Context, namespace string) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	pods, err := s.Pods(ctx, namespace, "")
	if err != nil {
		return "; " + err.Error()
	}
	var text strings.Builder
	for _, pod := range pods {
		for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
			if c.Ready {
				continue
			}
			lines := strings.Split(strings.TrimSpace(s.Node.Log(pod.UID, c.Name)), "\n")
			fmt.Fprintf(&text, "\n%s, container %s is not ready (%d restarts), and wrote last:\n  %s",
				pod.Name, c.Name, c.RestartCount, strings.Join(lines[max(0, len(lines)-5):], "\n  "))
		}
	}
	return text.String()
}

func describe(d *appsv1.Deployment) string {
	return fmt.Sprintf("%d replicas wanted, %d updated, %d available, %d in all", *d.Spec.Replicas,
		d.Status.UpdatedReplicas, d.Status.AvailableReplicas, d.Status.Replicas)
}
