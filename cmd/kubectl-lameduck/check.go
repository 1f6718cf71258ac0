package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	apiversion "k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/lameduck-io/lameduck/internal/check"
	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/entry"
	"github.com/lameduck-io/lameduck/internal/version"
)

const (
	// nodeAgents is the label selector of the node agents' pods.
	nodeAgents = "app.kubernetes.io/name=lameduck,app.kubernetes.io/component=node"
	// ordinalLabel on a coordinator's pod is the number of its entry.
	ordinalLabel = "lameduck.io/ordinal"
	// admissionPort is the port for admission reviews of a coordinator whose pod has no container
	// port with the name admission.
	admissionPort = 9443
)

// checked is the output of check.
type checked struct {
	metav1.TypeMeta `json:",inline"`
	Findings        []check.Finding `json:"findings"`
}

// diagnose prints the faults of an installation or, with --pre, the obstacles to one. It returns an
// error if it found errors, or warnings with --strict, or if something could not be checked.
func diagnose(ctx context.Context, o options, kube kubernetes.Interface, out io.Writer) error {
	var findings []check.Finding
	if o.pre {
		ctx, cancel := context.WithTimeout(ctx, 3*o.timeout)
		defer cancel()
		var err error
		if findings, err = check.Pre(ctx, kube, o.system); err != nil {
			return fmt.Errorf("%w: %w", cli.ErrUnchecked, err)
		}
	} else {
		facts, err := gather(ctx, o, kube)
		if err != nil {
			return fmt.Errorf("%w: %w", cli.ErrUnchecked, err)
		}
		findings = facts.Findings()
	}
	counts := map[check.Level]int{}
	for _, f := range findings {
		counts[f.Level]++
	}
	done, err := encode(o, checked{kind("CheckResult"), append([]check.Finding{}, findings...)}, out)
	if err != nil {
		return err
	}
	if !done {
		for _, f := range findings {
			fmt.Fprintf(out, "%-8s %s\n         %s\n         fix: %s\n", f.Level, f.Object, f.Problem, f.Fix)
		}
		fmt.Fprintf(out, "errors: %d, warnings: %d, notes: %d, not checked: %d\n", counts[check.Error],
			counts[check.Warning], counts[check.Note], counts[check.Unknown])
	}
	switch bad := counts[check.Error]; {
	case bad > 0:
		return fmt.Errorf("errors were found: %d", bad)
	case o.strict && counts[check.Warning] > 0:
		return fmt.Errorf("warnings were found, and --strict makes errors of them: %d", counts[check.Warning])
	case counts[check.Unknown] > 0:
		return fmt.Errorf("%w: %d", cli.ErrUnchecked, counts[check.Unknown])
	}
	return nil
}

// gather reads the facts that [check.Facts.Findings] judges. It returns an error only if the API
// server does not answer. An object that it could not read becomes a finding.
func gather(ctx context.Context, o options, kube kubernetes.Interface) (check.Facts, error) {
	f := check.Facts{System: o.system, Labels: o.selector, Plugin: version.Build()}
	ahead, server, err := clock(ctx, o)
	if err != nil {
		return f, fmt.Errorf("ask the API server: %w", err)
	}
	f.Server = server
	// read records an object that could not be read, and reports whether it could.
	read := func(object string, err error) bool {
		if err == nil {
			return true
		}
		fix := "the reason names what is missing; if it is time, a longer --timeout"
		if apierrors.IsForbidden(err) {
			fix = "bind the ClusterRole and the Role lameduck-view to your user (docs/kubectl.md)"
		}
		f.Unread = append(f.Unread, check.Finding{Level: check.Unknown, Object: object, Problem: err.Error(), Fix: fix})
		return false
	}
	pods, err := list(ctx, o, kube)
	read("pods", err)
	// After the shutdown of a node, pods that have ended stay listed.
	pods = slices.DeleteFunc(pods, func(p corev1.Pod) bool {
		return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
	})
	var all replicas
	for i := range pods {
		all = append(all, reach(o, kube, &pods[i]))
		f.Secret = cmp.Or(f.Secret, secretOf(&pods[i]))
	}
	defer all.close()
	var asked sync.WaitGroup
	var covers []answer[api.Coverage]
	asked.Go(func() { covers, _ = ask[api.Coverage](ctx, o, all, api.CoveragePath) })
	views, _ := ask[api.View](ctx, o, all, api.ViewPath) // each has its own error
	asked.Wait()
	for i, a := range views {
		f.Coordinators = append(f.Coordinators, check.Coordinator{Pod: pods[i], View: a.said, Err: a.err,
			Ahead: a.said.At.Sub(a.at) - ahead})
	}
	merged := merge(views)
	for _, a := range merged.Agents {
		f.Agents = append(f.Agents, a.Agent)
	}
	f.MoreAgents = merged.MoreAgents
	f.Coverage = least(covers)

	ctx, cancel := context.WithTimeout(ctx, 3*o.timeout)
	defer cancel()
	if namespaces, err := kube.CoreV1().Namespaces().List(ctx, metav1.ListOptions{}); read("namespaces", err) {
		f.Namespaces = namespaces.Items
	}
	if nodes, err := kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{}); read("nodes", err) {
		f.Nodes = nodes.Items
	}
	if services, err := kube.CoreV1().Services("").List(ctx, metav1.ListOptions{}); read("services", err) {
		f.Services = services.Items
	}
	if pods, err := kube.CoreV1().Pods("").List(ctx, metav1.ListOptions{}); read("pods", err) {
		f.Pods = pods.Items
		for _, p := range f.Pods {
			if matches(nodeAgents, p.Labels) {
				f.NodeAgents = append(f.NodeAgents, p)
			}
		}
	}
	leases, err := kube.CoordinationV1().Leases(corev1.NamespaceNodeLease).List(ctx, metav1.ListOptions{})
	if read("leases", err) {
		f.Leases = leases.Items
	}
	f.Now = time.Now().Add(ahead)
	f.Refused, err = refused(ctx, o, kube)
	read("workloads", err)
	if proxy, err := kube.CoreV1().ConfigMaps("kube-system").Get(ctx, "kube-proxy", metav1.GetOptions{}); err == nil {
		f.ProxyMode = check.ProxyMode(proxy)
	} else if !apierrors.IsNotFound(err) {
		read("kube-proxy's mode", err)
	}
	entries, err := check.Entries(ctx, kube)
	read(check.Webhooks, err)
	f.Entries = slices.DeleteFunc(entries, func(e check.Entry) bool { return e.Of != check.Configuration })
	for i := range f.Entries {
		inspect(ctx, o, kube, &f, all, &f.Entries[i], read)
	}
	return f, nil
}

// refused returns Lameduck's workloads whose pods the API server refuses. A Deployment has a
// condition for that, a DaemonSet only Events.
func refused(ctx context.Context, o options, kube kubernetes.Interface) (all []check.Refused, err error) {
	deployments, err := kube.AppsV1().Deployments(o.system).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for _, d := range deployments.Items {
		for _, c := range d.Status.Conditions {
			if matches(o.selector, d.Spec.Template.Labels) && c.Type == appsv1.DeploymentReplicaFailure &&
				c.Status == corev1.ConditionTrue {
				all = append(all, check.Refused{Kind: "Deployment", Namespace: d.Namespace, Name: d.Name,
					Why: c.Message})
			}
		}
	}
	daemons, err := kube.AppsV1().DaemonSets("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return all, err
	}
	for _, d := range daemons.Items {
		if !matches(nodeAgents, d.Spec.Template.Labels) ||
			d.Status.CurrentNumberScheduled >= d.Status.DesiredNumberScheduled {
			continue
		}
		events, err := kube.CoreV1().Events(d.Namespace).List(ctx, metav1.ListOptions{
			FieldSelector: "reason=FailedCreate,involvedObject.kind=DaemonSet,involvedObject.name=" + d.Name})
		if err != nil {
			return all, err
		}
		if n := len(events.Items); n > 0 {
			newest := slices.MaxFunc(events.Items, func(a, b corev1.Event) int {
				return a.LastTimestamp.Compare(b.LastTimestamp.Time)
			})
			all = append(all, check.Refused{Kind: "DaemonSet", Namespace: d.Namespace, Name: d.Name,
				Why: newest.Message})
		}
	}
	return all, nil
}

// matches reports whether a label selector matches. One that cannot be parsed does not: the API
// server has refused it before.
func matches(selector string, of map[string]string) bool {
	by, err := labels.Parse(selector)
	return err == nil && by.Matches(labels.Set(of))
}

// inspect sends a test deletion, or a test creation, through one entry, and reads the certificate
// of the entry's coordinator.
func inspect(ctx context.Context, o options, kube kubernetes.Interface, f *check.Facts, all replicas, e *check.Entry,
	read func(string, error) bool) {
	ordinal := -1
	if _, err := fmt.Sscanf(e.Name, "pods-%d.", &ordinal); !e.Mutating && err == nil {
		_, e.Silent = entry.Ask(ctx, kube, cmp.Or(o.namespace, called("", f.Namespaces, e.Selector),
			metav1.NamespaceDefault), ordinal)
		if apierrors.IsForbidden(e.Silent) {
			read("pods/eviction", e.Silent)
			e.Silent = nil
		}
	}
	if in := called(o.namespace, f.Namespaces, e.Selector); e.Mutating && in != "" {
		var err error
		e.Image, err = check.Hook(ctx, kube, in)
		if errors.Is(err, entry.ErrNotAsked) || errors.Is(err, check.ErrHost) {
			e.Silent = err
		} else if err != nil {
			f.Unread = append(f.Unread, check.Finding{Level: check.Unknown, Object: e.String(),
				Problem: "whether new pods get the hook: " + err.Error(),
				Fix: "run this check as a user that may create pods there (--as), or with -n and a namespace that " +
					"admits a pod of 50m CPU and 64Mi"})
		}
	}
	e.Unserved = errors.New("it has no coordinator")
	for i, r := range all {
		// Of several that serve an entry, one that has not answered would use up the time of the
		// others.
		if ordinal < 0 && i < len(f.Coordinators) && f.Coordinators[i].Err != nil {
			continue
		}
		if of := r.pod.Labels[ordinalLabel]; e.Chain == nil && (ordinal < 0 || of == strconv.Itoa(ordinal)) {
			e.Chain, e.Unserved = certificateOf(ctx, o, r, portOf(r.pod, "admission", admissionPort), e.Host())
		}
	}
}

// called returns a namespace that selector matches: given, default or the first one. Empty: it
// matches none.
func called(given string, all []corev1.Namespace, selector *metav1.LabelSelector) (first string) {
	by, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return ""
	}
	for _, n := range all {
		switch {
		case n.DeletionTimestamp != nil || !by.Matches(labels.Set(n.Labels)):
		case n.Name == given:
			return given
		case first == "", n.Name == metav1.NamespaceDefault:
			first = n.Name
		}
	}
	return first
}

// certificateOf returns the certificate chain that a coordinator serves for a server name. It does
// not verify the chain.
func certificateOf(ctx context.Context, o options, r *replica, port int, name string) ([]*x509.Certificate, error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	raw, err := r.dial(ctx, port)
	if err != nil {
		return nil, r.fault(err)
	}
	defer raw.Close()
	conn := tls.Client(raw, &tls.Config{ServerName: name, InsecureSkipVerify: true})
	if err := conn.HandshakeContext(ctx); err != nil {
		return nil, r.fault(err)
	}
	return conn.ConnectionState().PeerCertificates, nil
}

// secretOf returns the name of the Secret from which a coordinator has its certificate, its volume
// "tls". Empty: the coordinator makes its own certificate.
func secretOf(pod *corev1.Pod) string {
	for _, v := range pod.Spec.Volumes {
		if v.Name == "tls" && v.Secret != nil {
			return v.Secret.SecretName
		}
	}
	return ""
}

// clock returns how far the API server's clock is ahead of this machine's, to within a second, and
// its version, if it states one. It returns an error if the API server does not answer.
func clock(ctx context.Context, o options) (ahead time.Duration, is apiversion.Info, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, err := rest.HTTPClientFor(o.config)
	if err != nil {
		return 0, is, err
	}
	base, _, err := rest.DefaultServerUrlFor(o.config)
	if err != nil {
		return 0, is, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, base.JoinPath("version").String(), nil)
	if err != nil {
		return 0, is, err
	}
	began := time.Now()
	response, err := client.Do(request)
	if err != nil {
		return 0, is, err
	}
	defer response.Body.Close()
	at, err := http.ParseTime(response.Header.Get("Date"))
	if err != nil {
		return 0, is, err
	}
	// The header's time is rounded down to seconds.
	ahead = at.Add(time.Second / 2).Sub(began.Add(time.Since(began) / 2))
	_ = json.NewDecoder(response.Body).Decode(&is) // then it stays unknown
	return ahead, is, nil
}
