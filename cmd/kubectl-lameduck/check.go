package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/lameduck-io/lameduck/internal/check"
	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/entry"
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
	f := check.Facts{Now: time.Now(), System: o.system, Labels: o.selector}
	ahead, err := clock(ctx, o)
	if err != nil {
		return f, fmt.Errorf("ask the API server: %w", err)
	}
	unread := func(object string, err error) {
		f.Unread = append(f.Unread, check.Finding{Level: check.Unknown, Object: object, Problem: err.Error(),
			Fix: "bind the ClusterRole and the Role lameduck-view to your user (docs/kubectl.md)"})
	}
	pods, err := list(ctx, o, kube)
	if err != nil {
		unread("pods", err)
	}
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
	for _, a := range merge(views).Agents {
		f.Agents = append(f.Agents, a.Agent)
	}
	f.Coverage = least(covers)

	ctx, cancel := context.WithTimeout(ctx, 3*o.timeout)
	defer cancel()
	if namespaces, err := kube.CoreV1().Namespaces().List(ctx, metav1.ListOptions{}); err != nil {
		unread("namespaces", err)
	} else {
		f.Namespaces = namespaces.Items
	}
	if nodes, err := kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{}); err != nil {
		unread("nodes", err)
	} else {
		f.Nodes = nodes.Items
	}
	if agents, err := kube.CoreV1().Pods("").List(ctx, metav1.ListOptions{LabelSelector: nodeAgents}); err != nil {
		unread("pods", err)
	} else {
		f.NodeAgents = agents.Items
	}
	if proxy, err := kube.CoreV1().ConfigMaps("kube-system").Get(ctx, "kube-proxy", metav1.GetOptions{}); err == nil {
		f.ProxyMode = check.ProxyMode(proxy)
	} else if !apierrors.IsNotFound(err) {
		unread("kube-proxy's mode", err)
	}
	entries, err := check.Entries(ctx, kube)
	if err != nil {
		unread(check.Webhooks, err)
	}
	f.Entries = slices.DeleteFunc(entries, func(e check.Entry) bool { return e.Of != check.Configuration })
	for i := range f.Entries {
		inspect(ctx, o, kube, f.Namespaces, all, &f.Entries[i], unread)
	}
	return f, nil
}

// inspect sends a test deletion through one entry, and reads the certificate of the entry's
// coordinator.
func inspect(ctx context.Context, o options, kube kubernetes.Interface, namespaces []corev1.Namespace, all replicas,
	e *check.Entry, unread func(string, error)) {
	ordinal := -1
	if _, err := fmt.Sscanf(e.Name, "pods-%d.", &ordinal); !e.Mutating && err == nil {
		_, e.Silent = entry.Ask(ctx, kube, waiting(o.namespace, namespaces, e.Selector), ordinal)
		if apierrors.IsForbidden(e.Silent) {
			unread("pods/eviction", e.Silent)
			e.Silent = nil
		}
	}
	e.Unserved = errors.New("it has no coordinator")
	for _, r := range all {
		if of := r.pod.Labels[ordinalLabel]; e.Chain == nil && (ordinal < 0 || of == strconv.Itoa(ordinal)) {
			e.Chain, e.Unserved = certificateOf(ctx, o, r, portOf(r.pod, "admission", admissionPort), e.Host())
		}
	}
}

// waiting returns a namespace whose deletions the entry is called for: given if that is not empty,
// otherwise default or the first one that selector matches.
func waiting(given string, all []corev1.Namespace, selector *metav1.LabelSelector) string {
	by, err := metav1.LabelSelectorAsSelector(selector)
	i := slices.IndexFunc(all, func(n corev1.Namespace) bool { return err == nil && by.Matches(labels.Set(n.Labels)) })
	j := slices.IndexFunc(all, func(n corev1.Namespace) bool { return n.Name == metav1.NamespaceDefault })
	switch {
	case given != "":
		return given
	case i < 0, j >= 0 && by.Matches(labels.Set(all[j].Labels)):
		return metav1.NamespaceDefault
	}
	return all[i].Name
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

// secretOf returns the name of the Secret that is mounted at a coordinator's --cert-dir. Empty: the
// coordinator makes its own certificate.
func secretOf(pod *corev1.Pod) string {
	for _, c := range pod.Spec.Containers {
		for _, arg := range c.Args {
			dir, found := strings.CutPrefix(arg, "--cert-dir=")
			for _, m := range c.VolumeMounts {
				for _, v := range pod.Spec.Volumes {
					if found && m.MountPath == dir && v.Name == m.Name && v.Secret != nil {
						return v.Secret.SecretName
					}
				}
			}
		}
	}
	return ""
}

// clock returns how far the API server's clock is ahead of this machine's, to within a second. It
// returns an error if the API server does not answer.
func clock(ctx context.Context, o options) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, err := rest.HTTPClientFor(o.config)
	if err != nil {
		return 0, err
	}
	base, _, err := rest.DefaultServerUrlFor(o.config)
	if err != nil {
		return 0, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, base.JoinPath("version").String(), nil)
	if err != nil {
		return 0, err
	}
	began := time.Now()
	response, err := client.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	at, err := http.ParseTime(response.Header.Get("Date"))
	if err != nil {
		return 0, err
	}
	// The header's time is rounded down to seconds.
	return at.Add(time.Second / 2).Sub(began.Add(time.Since(began) / 2)), nil
}
