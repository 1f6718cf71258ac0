// Package check finds faults in an installation of Lameduck, from [Facts] that its caller has read
// from the API server, the coordinators and their certificates. [Facts.Findings] reads nothing
// itself; [Entries], [Hook] and [Pre] ask the API server. kubectl lameduck check prints the
// findings, each with a fix.
package check

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/cert"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/internal/podfacts"
)

// Level is how bad a finding is.
type Level string

// The levels, the worst first.
const (
	// Error: deletions that should wait do not, or may fail.
	Error Level = "error"
	// Unknown: it could not be checked.
	Unknown Level = "unknown"
	// Warning: the installation works, but protects less than it could.
	Warning Level = "warning"
	// Note: a choice, or a limit of the check.
	Note Level = "note"
)

// Levels are all of them, the worst first.
var Levels = []Level{Error, Unknown, Warning, Note}

// Finding is one thing that an operator should know.
type Finding struct {
	Level   Level  `json:"level"`
	Object  string `json:"object"`
	Problem string `json:"problem"`
	// Fix is a command or, where no command is enough, an instruction.
	Fix string `json:"fix"`
}

// Entry is one webhook of a webhook configuration.
type Entry struct {
	// Mutating: the entry adds the barrier's hook to new pods. Lameduck's other entries hold
	// deletions.
	Mutating bool
	// Of is the name of the configuration.
	Of, Name string
	Client   admissionv1.WebhookClientConfig
	Policy   *admissionv1.FailurePolicyType
	Timeout  *int32
	Selector *metav1.LabelSelector
	Rules    []admissionv1.RuleWithOperations
	// Chain is the certificate chain that the entry's coordinator serves. Unserved is the reason
	// why it is not known.
	Chain    []*x509.Certificate
	Unserved error
	// Silent is why no coordinator answered through the API server.
	Silent error
	// Image is the image of lameduck-wait that a mutating entry adds to pods. Empty: not known.
	Image string
}

func (e Entry) String() string {
	if e.Mutating {
		return "MutatingWebhookConfiguration " + e.Of + ", " + e.Name
	}
	return "ValidatingWebhookConfiguration " + e.Of + ", " + e.Name
}

// Entries returns the entries of all webhook configurations in the cluster. With an error it
// returns those that it could read.
func Entries(ctx context.Context, kube kubernetes.Interface) (all []Entry, err error) {
	validating, err := kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().List(ctx, metav1.ListOptions{})
	if err == nil {
		for _, c := range validating.Items {
			for _, w := range c.Webhooks {
				all = append(all, Entry{Of: c.Name, Name: w.Name, Client: w.ClientConfig, Policy: w.FailurePolicy,
					Timeout: w.TimeoutSeconds, Selector: w.NamespaceSelector, Rules: w.Rules})
			}
		}
	}
	mutating, other := kube.AdmissionregistrationV1().MutatingWebhookConfigurations().List(ctx, metav1.ListOptions{})
	if other == nil {
		for _, c := range mutating.Items {
			for _, w := range c.Webhooks {
				all = append(all, Entry{Mutating: true, Of: c.Name, Name: w.Name, Client: w.ClientConfig,
					Policy: w.FailurePolicy, Timeout: w.TimeoutSeconds, Selector: w.NamespaceSelector, Rules: w.Rules})
			}
		}
	}
	return all, errors.Join(err, other)
}

// Coordinator is one replica.
type Coordinator struct {
	Pod corev1.Pod
	// View is the coordinator's answer. Err is the reason why there is none.
	View api.View
	Err  error
	// Ahead is how far its clock is ahead of the API server's.
	Ahead time.Duration
}

// Facts are the state of an installation, as its caller has read it.
type Facts struct {
	// Now is the API server's time.
	Now time.Time
	// System is the namespace of the coordinators. Labels is the label selector of their pods.
	// Secret is the name of the Secret with their certificate; empty: they make it themselves.
	System, Labels, Secret string
	Coordinators           []Coordinator
	Entries                []Entry
	// Agents are merged from all coordinators, each with its worst state.
	Agents []api.Agent
	// MoreAgents is how many others coordinators know, and do not list.
	MoreAgents int
	// Coverage is taken from the coordinator that finds the most uncovered consumers. Nil: none
	// answered.
	Coverage   *api.Coverage
	Namespaces []corev1.Namespace
	Nodes      []corev1.Node
	// NodeAgents are the pods of the node agents.
	NodeAgents []corev1.Pod
	// ProxyMode is kube-proxy's, as its ConfigMap says. Empty: not known.
	ProxyMode string
	// Plugin is the version and the commit of kubectl lameduck. Server is the API server's version.
	Plugin string
	Server version.Info
	// Pods and Services are those of all namespaces.
	Pods     []corev1.Pod
	Services []corev1.Service
	// Leases are those by which kubelets report that they run.
	Leases []coordinationv1.Lease
	// Refused are the workloads of Lameduck whose pods the API server refuses.
	Refused []Refused
	// Unread are the objects that could not be read, as findings. Nothing that depends on them is
	// judged.
	Unread []Finding
}

const (
	// renewal is how long before its expiry a certificate should have been replaced.
	renewal = 7 * 24 * time.Hour
	// skew is how far two clocks may be apart. The coordinator compares the time at which a pod
	// became ready, by the node's clock, with its own clock, to find pods that have been ready for
	// less than 10 s.
	skew = 5 * time.Second
	// named bounds how many items of a list a finding names.
	named = 10

	// Configuration is the name of Lameduck's webhook configurations. Webhooks is the Object of
	// their finding in [Facts.Unread].
	Configuration = "lameduck"
	Webhooks      = "webhook configurations"

	install = "kubectl apply -k manifests/base, or helm upgrade --install with the chart"
)

// Findings judges the facts, and returns the findings, the worst first.
func (f Facts) Findings() []Finding {
	all := slices.Clone(f.Unread)
	add := func(l Level, object, fix, problem string, args ...any) {
		all = append(all, Finding{l, object, fmt.Sprintf(problem, args...), fix})
	}
	tooOld(f.Server, add)
	for _, r := range f.Refused {
		add(Error, r.Kind+" "+r.Namespace+"/"+r.Name, admits(r.Namespace), "its pods are refused: %s", r.Why)
	}
	f.coordinators(add)
	f.clocks(add)
	f.entries(add)
	f.barrier(add)
	f.agents(add)
	f.proxies(add)
	f.coverage(add)
	return worstFirst(all)
}

func worstFirst(all []Finding) []Finding {
	slices.SortStableFunc(all, func(a, b Finding) int {
		return cmp.Compare(slices.Index(Levels, a.Level), slices.Index(Levels, b.Level))
	})
	return all
}

// Refused is a workload whose pods the API server refuses, and why.
type Refused struct{ Kind, Namespace, Name, Why string }

// refused reports whether a workload of that kind is among [Facts.Refused].
func (f Facts) refused(kind string) bool {
	return slices.ContainsFunc(f.Refused, func(r Refused) bool { return r.Kind == kind })
}

// admits returns commands that show what a namespace admits.
func admits(namespace string) string {
	return "kubectl -n " + namespace + " get resourcequota,limitrange; kubectl get namespace " + namespace +
		" --show-labels"
}

type adder func(l Level, object, fix, problem string, args ...any)

// coordinators judges the replicas themselves.
func (f Facts) coordinators(add adder) {
	if len(f.Coordinators) == 0 && f.read("pods") && !f.refused("Deployment") {
		add(Error, "namespace "+f.System, install, "no pod has the labels %s: there is no coordinator, and deletions "+
			"continue as without Lameduck (--lameduck-namespace, --lameduck-selector)", f.Labels)
	}
	versions, nodes := map[string]string{}, map[string]bool{}
	for _, c := range f.Coordinators {
		object := "Pod " + f.System + "/" + c.Pod.Name
		look := "kubectl -n " + f.System + " describe pod " + c.Pod.Name
		nodes[c.Pod.Spec.NodeName] = true
		switch {
		case !podfacts.Ready(&c.Pod):
			add(Error, object, look, "the coordinator is not ready: %s", Why(&c.Pod))
		case c.Err != nil:
			add(Unknown, object, "the reason names what is missing", "%v", c.Err)
		}
		if c.Err != nil {
			continue
		}
		versions[c.View.Replica.Version] = c.Pod.Name
		if c.Ahead.Abs() > skew {
			add(Warning, object, "timedatectl status, on node "+c.Pod.Spec.NodeName+" and on those of the API server",
				"its clock and the API server's are %s apart: pods that have just become ready are taken for older or "+
					"younger than they are", c.Ahead.Abs().Round(time.Second))
		}
	}
	if len(f.Coordinators) > 1 && len(nodes) == 1 && len(f.Nodes) > 1 {
		add(Warning, "coordinators", "kubectl -n "+f.System+" rollout restart deployment -l "+f.Labels,
			"all run on node %s: if it is lost, deletions that wait continue", f.Coordinators[0].Pod.Spec.NodeName)
	}
	all := slices.Sorted(maps.Keys(versions))
	if len(all) > 1 {
		add(Error, "coordinators", install, "they are of different versions: %s", strings.Join(all, "; "))
	}
	if len(all) > 0 && versions[f.Plugin] == "" {
		add(Warning, "kubectl lameduck",
			"make build, at the coordinators' commit, and bin/kubectl-lameduck on the PATH",
			"it is of version %s, the coordinators of %s: it may not know what they report", f.Plugin,
			strings.Join(all, "; "))
	}
	for _, a := range f.Agents {
		if a.Version != "" && len(all) > 0 && versions[a.Version] == "" {
			namespace, pod, _ := strings.Cut(a.Name, "/")
			add(Error, "agent "+a.Name, "write the coordinators' version into the image of its workload, which this "+
				"names: kubectl -n "+namespace+" get pod "+pod+" -o jsonpath='{.metadata.ownerReferences[0].name}'",
				"it is of version %s, the coordinators of %s: they may not understand each other, and deletions then "+
					"wait up to the deadline", a.Version, strings.Join(all, "; "))
		}
	}
}

// clocks judges the clocks of nodes by the times at which kubelets renewed their Leases. The clock
// of a ready node is behind if its Lease is older than the time after which Kubernetes calls a node
// not ready. Smaller differences in that direction do not show.
func (f Facts) clocks(add adder) {
	const late = 50 * time.Second
	var apart []string
	for _, l := range f.Leases {
		if l.Spec.RenewTime == nil {
			continue
		}
		ready := slices.ContainsFunc(f.Nodes, func(n corev1.Node) bool { return n.Name == l.Name && nodeReady(&n) })
		switch ahead := l.Spec.RenewTime.Sub(f.Now); {
		case ahead > skew:
			apart = append(apart, fmt.Sprintf("%s: %s ahead", l.Name, ahead.Round(time.Second)))
		case ready && -ahead > late+skew:
			apart = append(apart, fmt.Sprintf("%s: %s behind", l.Name, (-ahead-late).Round(time.Second)))
		}
	}
	if len(apart) > 0 {
		add(Warning, "nodes", "timedatectl status, on these nodes and on those of the API server",
			"the clocks of %d differ from the API server's, by the times in their Leases, and at least by so much "+
				"(%s): pods that have just become ready are taken for older or younger than they are", len(apart),
			some(apart))
	}
}

// entries judges the webhook configurations.
func (f Facts) entries(add adder) {
	holding := 0
	for _, e := range f.Entries {
		if !e.Mutating {
			holding++
		}
	}
	switch {
	case holding == 0 && f.read(Webhooks):
		add(Error, "ValidatingWebhookConfiguration "+Configuration, install,
			"there is none, or it has no entry: the API server does not ask, and no deletion waits")
	case holding == 1:
		add(Warning, "ValidatingWebhookConfiguration "+Configuration, install,
			"it has one entry, so there is no witness: deletions that wait continue if the coordinator is lost")
	}
	restart := "kubectl -n " + f.System + " rollout restart deployment -l " + f.Labels
	for _, e := range f.Entries {
		if ptr.Deref(e.Policy, admissionv1.Fail) != admissionv1.Ignore {
			add(Error, e.String(), install,
				"failurePolicy is not Ignore: without coordinators the API server refuses what it would ask them")
		}
		if !e.Mutating && ptr.Deref(e.Timeout, 10) < 2 {
			add(Error, e.String(), install, "timeoutSeconds is 1: nothing is held, because a hold ends 1.5 s before it")
		}
		name, path := e.Host(), e.path()
		if i := strings.LastIndex(path, "/"); i <= 0 || path[i+1:] == "" {
			add(Error, e.String(), restart+", and read their logs",
				"its path %q has no secret: coordinators write it, and refuse calls without it", path)
		}
		switch {
		case errors.Is(e.Silent, ErrHost):
			add(Error, e.String(), "set barrier.execOnly in ConfigMap "+f.System+"/lameduck-coordinator "+
				"(config.barrier.execOnly of the chart), then restart the coordinators", "%v", e.Silent)
		case e.Silent != nil:
			add(Error, e.String(), "kubectl -n "+f.System+" logs --tail=-1 -l "+f.Labels, "%v", e.Silent)
		}
		f.certificate(add, e, name, restart)
	}
	f.images(add)
}

// images compares the tag of the image that entries add to pods with that of the coordinators.
func (f Facts) images(add adder) {
	for _, e := range f.Entries {
		for _, c := range f.Coordinators {
			for _, of := range c.Pod.Spec.Containers {
				if of.Name == "webhook" && tag(of.Image) != "" && tag(e.Image) != "" && tag(of.Image) != tag(e.Image) {
					add(Warning, e.String(), f.image(), "it adds the image %s to pods, and the coordinators run %s",
						e.Image, of.Image)
					return
				}
			}
		}
	}
}

// image returns where the image of lameduck-wait is set.
func (f Facts) image() string {
	return "barrier.image and barrier.imagePullSecrets in ConfigMap " + f.System + "/lameduck-coordinator " +
		"(barrier.waitImage and image.pullSecrets of the chart), then restart the coordinators"
}

// Host returns the name that the API server verifies in the certificate of the entry's coordinator.
func (e Entry) Host() string {
	if s := e.Client.Service; s != nil {
		return s.Name + "." + s.Namespace + ".svc"
	}
	return e.url().Hostname()
}

func (e Entry) path() string {
	if s := e.Client.Service; s != nil {
		return ptr.Deref(s.Path, "")
	}
	return e.url().Path
}

func (e Entry) url() *url.URL {
	if u, err := url.Parse(ptr.Deref(e.Client.URL, "")); err == nil {
		return u
	}
	return &url.URL{}
}

// certificate judges whether the API server accepts the certificate of an entry's coordinator.
func (f Facts) certificate(add adder, e Entry, name, restart string) {
	fix := restart
	if f.Secret != "" {
		fix = "renew the certificate in Secret " + f.System + "/" + f.Secret + " (tls.crt, tls.key), and caBundle"
	}
	roots, bad := bundle(e.Client.CABundle)
	if bad != nil {
		add(Error, e.String(), fix, "caBundle cannot be used: %v", bad)
		return
	}
	switch {
	case len(e.Chain) == 0 && e.Unserved != nil:
		add(Unknown, e.String(), "the reason names what is missing", "its certificate was not seen: %v", e.Unserved)
	case len(e.Chain) > 0:
		rest := x509.NewCertPool()
		for _, c := range e.Chain[1:] {
			rest.AddCert(c)
		}
		leaf := e.Chain[0]
		_, err := leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: rest, DNSName: name, CurrentTime: f.Now})
		switch {
		case err != nil:
			add(Error, e.String(), fix,
				"the API server does not accept the coordinator's certificate (%s, until %s): %v",
				leaf.Subject.CommonName, leaf.NotAfter.UTC().Format(time.RFC3339), err)
		case leaf.NotAfter.Before(f.Now.Add(renewal)):
			add(Warning, e.String(), fix, "the coordinator's certificate ends at %s and was not renewed",
				leaf.NotAfter.UTC().Format(time.RFC3339))
		}
	}
}

// bundle parses a caBundle. It returns nil, which stands for the system's CAs, if the caBundle is
// empty.
func bundle(text []byte) (*x509.CertPool, error) {
	if len(text) == 0 {
		return nil, nil
	}
	return cert.NewPoolFromBytes(text)
}

// barrier judges the second gate: its webhook, its hooks, and the node agents that answer them.
func (f Facts) barrier(add adder) {
	var with []string
	for _, n := range f.Namespaces {
		switch mode := n.Labels[keys.Mode]; {
		case mode == keys.Enforce:
			with = append(with, n.Name)
		case mode != "" && !keys.IsMode(mode):
			add(Warning, "namespace "+n.Name, "kubectl label --overwrite namespace "+n.Name+" "+keys.Mode+"=enforce",
				"its label %s: %s says nothing (it may be enforce, observe or off): the cluster's default counts there",
				keys.Mode, mode)
		}
	}
	const barrier = "kubectl apply -k manifests/barrier, or barrier.enabled of the chart"
	f.unenforced(add)
	f.stuck(add)
	missing := map[string]int{}
	for _, c := range f.Coordinators {
		for namespace, n := range c.View.Barriers.MissingIn {
			missing[namespace] = max(missing[namespace], n)
		}
	}
	for _, namespace := range slices.Sorted(maps.Keys(missing)) {
		add(Warning, "namespace "+namespace,
			"kubectl -n "+namespace+" rollout restart deployment,statefulset,daemonset",
			"%d of its pods ask for the barrier and were created without it: they stop without waiting",
			missing[namespace])
	}
	mutating := slices.ContainsFunc(f.Entries, func(e Entry) bool { return e.Mutating })
	if len(with) == 0 && !mutating {
		return
	}
	if !mutating && f.read(Webhooks) {
		add(Error, "MutatingWebhookConfiguration "+Configuration, barrier,
			"there is none: new pods of %s get no hook, and stop without waiting", some(with))
	}
	if f.ProxyMode == "ipvs" {
		add(Error, "kube-proxy", "mode: nftables in ConfigMap kube-system/kube-proxy",
			"it runs in mode ipvs, which node agents cannot observe: no barrier waits for it")
	}
	if !f.read("pods") {
		return
	}
	at, agent := map[string]*corev1.Pod{}, ""
	for i := range f.NodeAgents {
		p := &f.NodeAgents[i]
		if agent = p.Namespace; at[p.Spec.NodeName] == nil || podfacts.Ready(p) {
			at[p.Spec.NodeName] = p
		}
	}
	agent = cmp.Or(agent, "lameduck-node")
	var none []string
	for _, n := range f.Nodes {
		p := at[n.Name]
		switch {
		case n.Labels[corev1.LabelOSStable] == "windows" || !nodeReady(&n):
		case p == nil:
			none = append(none, n.Name)
		case !podfacts.Ready(p):
			add(Error, "Pod "+p.Namespace+"/"+p.Name, "kubectl -n "+p.Namespace+" describe pod "+p.Name,
				"the agent of node %s is not ready: %s. Pods there stop without waiting", n.Name, Why(p))
		}
	}
	if len(none) > 0 && !f.refused("DaemonSet") {
		fix := "kubectl -n " + agent + " describe daemonset"
		if len(f.NodeAgents) == 0 {
			fix = barrier
		}
		add(Error, "nodes", fix, "%d of %d have no agent (%s): the barrier's hooks find nothing there, and pods stop "+
			"without waiting", len(none), len(f.Nodes), some(none))
	}
}

// unenforced counts the pods of Services for whose deletion observed gateways are not waited for,
// because neither they nor their namespace have the label for that.
func (f Facts) unenforced(add adder) {
	if !f.read("pods") || !f.read("services") {
		return
	}
	selectors, modes := map[string][]labels.Selector{}, map[string]map[string]string{}
	for _, s := range f.Services {
		if len(s.Spec.Selector) > 0 {
			selectors[s.Namespace] = append(selectors[s.Namespace], labels.SelectorFromSet(s.Spec.Selector))
		}
	}
	for _, n := range f.Namespaces {
		if !strings.HasPrefix(n.Name, "kube-") && n.Name != f.System {
			modes[n.Name] = n.Labels
		}
	}
	counts, total := map[string]int{}, 0
	for _, p := range f.Pods {
		namespace, judged := modes[p.Namespace]
		if judged && p.DeletionTimestamp == nil && p.Status.Phase != corev1.PodSucceeded &&
			p.Status.Phase != corev1.PodFailed &&
			keys.ModeOf(p.Labels, namespace, keys.Off) != keys.Enforce &&
			slices.ContainsFunc(selectors[p.Namespace], func(s labels.Selector) bool {
				return s.Matches(labels.Set(p.Labels))
			}) {
			counts[p.Namespace]++
			total++
		}
	}
	if total == 0 {
		return
	}
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b))
	})
	fix := "kubectl label --overwrite namespace " + names[0] + " " + keys.Mode + "=enforce, then restart its pods"
	for i, name := range names {
		names[i] = fmt.Sprintf("%s: %d", name, counts[name])
	}
	add(Note, "pods of Services", fix, "%d are not in mode enforce (%s). kube-proxy and other observed gateways are "+
		"not waited for when they are deleted", total, some(names))
}

// stuck finds pods that do not start because of the container that the barrier adds.
func (f Facts) stuck(add adder) {
	first, pods := map[string]string{}, map[string][]string{}
	for _, p := range f.Pods {
		for _, c := range p.Status.InitContainerStatuses {
			if why := waits(c); c.Name == keys.WaitContainer && why != "" {
				pods[p.Namespace] = append(pods[p.Namespace], p.Name)
				first[p.Namespace] = cmp.Or(first[p.Namespace], c.Image+": "+why)
			}
		}
	}
	for _, namespace := range slices.Sorted(maps.Keys(pods)) {
		add(Error, "namespace "+namespace, f.image(), "%d of its pods do not start (%s), because the container that "+
			"the barrier adds does not: %s", len(pods[namespace]), some(pods[namespace]), first[namespace])
	}
}

// agents judges the connections of agents to coordinators.
func (f Facts) agents(add adder) {
	if f.MoreAgents > 0 {
		add(Note, "agents", "", "coordinators do not list %d more agents: whether they are connected, and their "+
			"versions, was not checked", f.MoreAgents)
	}
	for _, a := range f.Agents {
		namespace, pod, _ := strings.Cut(a.Name, "/")
		logs := "kubectl -n " + namespace + " logs " + pod + " --all-containers"
		switch a.State {
		case "missing":
			says := "deletions wait for it in vain"
			if !a.Ready {
				says = "its pod is not ready, so deletions do not wait for it, and its gateway may still send to " +
					"pods that stop"
			}
			add(Error, "agent "+a.Name, logs, "it is not connected to each coordinator: %s", says)
		case "suspended":
			add(Error, "agent "+a.Name, logs,
				"it let three drains expire and is not waited for until it acknowledges one")
		}
	}
}

// coverage adds a warning for each uncovered consumer.
func (f Facts) coverage(add adder) {
	c := f.Coverage
	switch {
	case c == nil:
		if slices.ContainsFunc(f.Coordinators, func(c Coordinator) bool { return c.Err == nil }) {
			add(Unknown, "coverage", "a longer --timeout, or kubectl -n "+f.System+" logs --tail=-1 -l "+f.Labels,
				"no coordinator has reported which consumers are not waited for")
		}
		return
	case c.Error != "":
		add(Unknown, "coverage", "kubectl -n "+f.System+" logs --tail=-1 -l "+f.Labels,
			"coordinators could not read all of it: %s", c.Error)
	}
	for _, i := range c.Items[:min(len(c.Items), named)] {
		namespace, service, _ := strings.Cut(i.Service, "/")
		var fix string
		switch i.Kind {
		case "kube-proxy":
			fix = "kubectl label namespace " + namespace + " " + keys.Mode + "=enforce, then restart its pods"
		case "LoadBalancer", "DNS":
			fix = "kubectl -n " + namespace + " annotate service " + service + " lameduck.io/stated-wait=DURATION"
		default:
			fix = "an agent beside the gateway, and the gateway in ConfigMap " + f.System +
				"/lameduck-coordinator (docs/coverage.md)"
		}
		add(Warning, "Service "+i.Service, fix, "%s routes it and is not waited for: %s", i.Name, i.Why)
	}
	if more := c.Uncovered - min(len(c.Items), named); more > 0 {
		add(Warning, "Services", "kubectl lameduck status -o wide", "%d more consumers are not waited for", more)
	}
}

// read reports whether all objects of a kind could be read.
func (f Facts) read(resource string) bool {
	return !slices.ContainsFunc(f.Unread, func(u Finding) bool { return u.Object == resource })
}

// some names the first of a list.
func some(all []string) string {
	text := strings.Join(all[:min(len(all), named)], ", ")
	if more := len(all) - named; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

func nodeReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// Why returns why a pod is not ready, from its status.
func Why(p *corev1.Pod) string {
	for _, c := range append(slices.Clone(p.Status.InitContainerStatuses), p.Status.ContainerStatuses...) {
		if why := waits(c); why != "" {
			return "container " + c.Name + ": " + why
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Status == corev1.ConditionFalse && c.Message != "" {
			return cmp.Or(c.Reason, string(c.Type)) + ": " + c.Message
		}
	}
	if p.DeletionTimestamp != nil {
		return "it is being deleted"
	}
	return "its phase is " + string(p.Status.Phase)
}

// waits returns why a container does not start. Empty: it runs, or starts.
func waits(c corev1.ContainerStatus) string {
	w := c.State.Waiting
	if w == nil || w.Reason == "PodInitializing" || w.Reason == "ContainerCreating" {
		return ""
	}
	return strings.TrimSuffix(w.Reason+": "+w.Message, ": ")
}

var mode = regexp.MustCompile(`(?m)^\s*mode:[ \t]*"?(\w*)`)

// ProxyMode returns kube-proxy's mode from its ConfigMap as kubeadm writes it. Empty: the ConfigMap
// has no mode.
func ProxyMode(config *corev1.ConfigMap) string {
	if found := mode.FindStringSubmatch(config.Data["config.conf"]); found != nil {
		return cmp.Or(found[1], "iptables")
	}
	return ""
}
