package check

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/keys"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// signed returns a CA, and a certificate of it for all Services of lameduck-system that ends with
// it.
func signed(t *testing.T, until time.Time) (ca []byte, chain []*x509.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	sign := func(c, by *x509.Certificate) *x509.Certificate {
		c.SerialNumber, c.NotBefore, c.NotAfter = big.NewInt(1), time.Unix(0, 0), until
		der, err := x509.CreateCertificate(rand.Reader, c, by, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		parsed, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		return parsed
	}
	template := &x509.Certificate{Subject: pkix.Name{CommonName: "authority"}, IsCA: true, BasicConstraintsValid: true}
	authority := sign(template, template)
	leaf := sign(&x509.Certificate{Subject: pkix.Name{CommonName: "leaf"}, DNSNames: []string{"*.lameduck-system.svc"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}, authority)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: authority.Raw}), []*x509.Certificate{leaf}
}

func pod(name, node string, ready bool) corev1.Pod {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "lameduck-system", Name: name},
		Spec: corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{Phase: corev1.PodRunning,
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}}}
}

func node(name, system string) corev1.Node {
	return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kubernetes.io/os": system}},
		Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady,
			Status: corev1.ConditionTrue}}}}
}

// well returns the facts of an installation with nothing to find.
func well(t *testing.T) *Facts {
	ca, chain := signed(t, now.Add(60*24*time.Hour))
	f := &Facts{Now: now, System: "lameduck-system", Labels: "app=lameduck", Plugin: "v1",
		Server: version.Info{Minor: "30+", GitVersion: "v1.30.1"},
		Nodes:  []corev1.Node{node("one", "linux"), node("two", "linux"), node("three", "windows")},
		Namespaces: []corev1.Namespace{{ObjectMeta: metav1.ObjectMeta{Name: "shop",
			Labels: map[string]string{keys.Mode: keys.Enforce}}}, {ObjectMeta: metav1.ObjectMeta{Name: "kube-system"}}},
		NodeAgents: []corev1.Pod{pod("node-1", "one", true), pod("old", "two", false), pod("node-2", "two", true)},
		Coverage:   &api.Coverage{Services: 1, Whole: 1},
		Agents:     []api.Agent{{Name: "lameduck-node/node-1", State: "connected", Version: "v1"}},
		Services: []corev1.Service{service("shop", "web"), service("lab", "web"), service("kube-system", "web"),
			{ObjectMeta: metav1.ObjectMeta{Namespace: "lab", Name: "without-selector"}}},
		Pods: []corev1.Pod{of("shop", "web", ""), of("kube-system", "web", ""), of("lameduck-system", "web", "")},
		Leases: []coordinationv1.Lease{lease("one", -49*time.Second), lease("two", 4*time.Second),
			lease("deleted", -time.Hour), {ObjectMeta: metav1.ObjectMeta{Name: "three"}}},
	}
	f.Pods[0].Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: keys.WaitContainer,
		State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "PodInitializing"}}}}
	for i, on := range []string{"one", "two"} {
		f.Coordinators = append(f.Coordinators, Coordinator{Pod: pod(fmt.Sprint("webhook-", i), on, true),
			View: api.View{Replica: api.Replica{Version: "v1"}}})
		f.Coordinators[i].Pod.Spec.Containers = []corev1.Container{{Name: "webhook", Image: "lameduck/webhook:v1"},
			{Name: "proxy", Image: "proxy:v9"}}
		f.Entries = append(f.Entries, Entry{Of: Configuration, Name: fmt.Sprintf("pods-%d.lameduck.io", i),
			Chain: chain, Policy: ptr.To(admissionv1.Ignore), Timeout: ptr.To[int32](4),
			Client: admissionv1.WebhookClientConfig{CABundle: ca, Service: &admissionv1.ServiceReference{
				Namespace: "lameduck-system", Name: fmt.Sprint("lameduck-webhook-", i),
				Path: ptr.To("/v1/admit/s3cret")}}})
	}
	f.Entries = append(f.Entries, Entry{Mutating: true, Of: Configuration, Name: "namespaces.barrier.lameduck.io",
		Chain: chain, Policy: ptr.To(admissionv1.Ignore), Client: f.Entries[0].Client,
		Image: "mirror.example.com:5000/lameduck-wait:v1@sha256:0123"})
	return f
}

// proxies adds node agents on n0, n1 and so on, which have found these modes of kube-proxy. A
// second word is the agent's state.
func proxies(f *Facts, modes ...string) {
	for i, m := range modes {
		mode, state, _ := strings.Cut(m, " ")
		f.Agents = append(f.Agents, api.Agent{Gateway: "kube-proxy", GatewayMode: mode, Node: fmt.Sprint("n", i),
			State: state})
	}
	f.Coordinators[0].View.Agents.GatewayModes = map[string]int{}
	for _, a := range f.Agents {
		if a.HasMode() {
			f.Coordinators[0].View.Agents.GatewayModes[a.GatewayMode]++
		}
	}
}

func service(namespace, app string) corev1.Service {
	return corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: app},
		Spec: corev1.ServiceSpec{Selector: map[string]string{"app": app}}}
}

// of returns a pod of an app. mode is its label, empty: it has none.
func of(namespace, app, mode string) corev1.Pod {
	p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: app + "-1",
		Labels: map[string]string{"app": app}}}
	if mode != "" {
		p.Labels[keys.Mode] = mode
	}
	return p
}

// lease returns the Lease of a node whose clock was ahead by so much when it renewed it.
func lease(node string, ahead time.Duration) coordinationv1.Lease {
	return coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: node},
		Spec: coordinationv1.LeaseSpec{RenewTime: ptr.To(metav1.NewMicroTime(now.Add(ahead)))}}
}

// One thing at a time is wrong, and is all that is found.
func TestFindings(t *testing.T) {
	for name, c := range map[string]struct {
		change func(f *Facts)
		// want is the level, the object and a part of the problem of each finding.
		want []string
	}{
		"all is well": {func(*Facts) {}, nil},
		"no coordinator": {func(f *Facts) { f.Coordinators = nil },
			[]string{"error namespace lameduck-system: no pod has the labels app=lameduck"}},
		"pods could not be listed": {func(f *Facts) {
			f.Coordinators, f.NodeAgents = nil, nil
			f.Unread = []Finding{{Unknown, "pods", "forbidden", "ask"}}
		}, []string{"unknown pods: forbidden"}},
		"a coordinator is not ready": {func(f *Facts) {
			f.Coordinators[0].Pod = pod("webhook-0", "one", false)
			f.Coordinators[0].Pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "webhook",
				State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff",
					Message: "no such image"}}}}
		}, []string{"error Pod lameduck-system/webhook-0: ready: container webhook: ImagePullBackOff: no such image"}},
		"coverage does not come": {func(f *Facts) { f.Coverage = nil },
			[]string{"unknown coverage: no coordinator has reported"}},
		"one is not reached": {func(f *Facts) { f.Coordinators[1].Err = errors.New("no route") },
			[]string{"unknown Pod lameduck-system/webhook-1: no route"}},
		"all on one node": {func(f *Facts) { f.Coordinators[1].Pod.Spec.NodeName = "one" },
			[]string{"warning coordinators: all run on node one"}},
		"a clock that is ahead":  {func(f *Facts) { f.Coordinators[0].Ahead = 7 * time.Second }, clock},
		"a clock that is behind": {func(f *Facts) { f.Coordinators[0].Ahead = -7 * time.Second }, clock},
		"coordinators of two versions": {func(f *Facts) { f.Coordinators[1].View.Replica.Version = "v2" },
			[]string{"error coordinators: they are of different versions: v1; v2"}},
		"an agent of another version": {func(f *Facts) { f.Agents[0].Version = "v2" },
			[]string{"error agent lameduck-node/node-1: it is of version v2, the coordinators of v1"}},
		"an agent that does not say": {func(f *Facts) { f.Agents[0].Version = "" }, nil},
		"an agent is not connected": {func(f *Facts) { f.Agents[0].State = "missing" },
			[]string{"error agent lameduck-node/node-1: not connected to each coordinator"}},
		"an agent is suspended": {func(f *Facts) { f.Agents[0].State = "suspended" },
			[]string{"error agent lameduck-node/node-1: let three drains expire"}},
		"no entry": {func(f *Facts) { f.Entries = f.Entries[2:] },
			[]string{"error ValidatingWebhookConfiguration lameduck: no deletion waits"}},
		"one entry": {func(f *Facts) { f.Entries = f.Entries[1:] },
			[]string{"warning ValidatingWebhookConfiguration lameduck: there is no witness"}},
		"failurePolicy Fail": {func(f *Facts) { f.Entries[0].Policy = nil },
			[]string{entry0 + "failurePolicy is not Ignore"}},
		"too short a timeout": {func(f *Facts) { f.Entries[0].Timeout = ptr.To[int32](1) },
			[]string{entry0 + "timeoutSeconds is 1"}},
		"no path": {func(f *Facts) {
			service := *f.Entries[0].Client.Service
			service.Path = nil
			f.Entries[0].Client.Service = &service
		}, []string{entry0 + `its path "" has no secret`}},
		"a path without the secret": {func(f *Facts) {
			service := *f.Entries[0].Client.Service
			service.Path = ptr.To("/v1/admit/")
			f.Entries[0].Client.Service = &service
		}, []string{entry0 + `its path "/v1/admit/" has no secret`}},
		"no answer": {func(f *Facts) { f.Entries[0].Silent = errors.New("not asked") }, []string{entry0 + "not asked"}},
		"no host in hooks": {func(f *Facts) { f.Entries[2].Silent = fmt.Errorf("%w: forbidden", ErrHost) },
			[]string{"error MutatingWebhookConfiguration lameduck, namespaces.barrier.lameduck.io: " +
				"pods with the barrier's httpGet hook are refused: forbidden"}},
		"another CA": {func(f *Facts) { f.Entries[0].Client.CABundle, _ = signed(t, now.Add(time.Hour)) },
			[]string{entry0 + "certificate signed by unknown authority"}},
		"no CA": {func(f *Facts) { f.Entries[0].Client.CABundle = nil },
			[]string{entry0 + "certificate signed by unknown authority"}},
		"a CA that is none": {func(f *Facts) { f.Entries[0].Client.CABundle = []byte("none") },
			[]string{entry0 + "caBundle cannot be used: data does not contain any valid"}},
		"another name": {func(f *Facts) {
			f.Entries[0].Client = admissionv1.WebhookClientConfig{CABundle: f.Entries[0].Client.CABundle,
				URL: ptr.To("https://10.0.0.1:9443/v1/admit/s3cret")}
		}, []string{entry0 + "cannot validate certificate for 10.0.0.1"}},
		"expired": {func(f *Facts) { f.Now, f.Leases = now.Add(61*24*time.Hour), nil },
			[]string{entry0 + "certificate has expired", "error ValidatingWebhookConfiguration lameduck, " +
				"pods-1.lameduck.io: expired", "error MutatingWebhookConfiguration lameduck, " +
				"namespaces.barrier.lameduck.io: expired"}},
		"soon to expire": {func(f *Facts) {
			f.Entries = f.Entries[:2]
			f.Namespaces = nil
			f.Entries[0].Client.CABundle, f.Entries[0].Chain = signed(t, now.Add(6*24*time.Hour))
		}, []string{"warning ValidatingWebhookConfiguration lameduck, pods-0.lameduck.io: ends at 2026-01-08"}},
		"a certificate that was not seen": {func(f *Facts) {
			f.Entries[0].Chain, f.Entries[0].Unserved = nil, errors.New("no route")
		}, []string{"unknown ValidatingWebhookConfiguration lameduck, pods-0.lameduck.io: was not seen: no route"}},
		"no barrier anywhere": {func(f *Facts) {
			f.Entries, f.NodeAgents, f.Namespaces[0].Labels = f.Entries[:2], nil, nil
		}, []string{"note pods of Services: 1 are not in mode enforce (shop: 1)"}},
		"pods without a mode": {func(f *Facts) {
			f.Namespaces = append(f.Namespaces, corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "lab"}},
				corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "lameduck-system"}})
			done, deleted := of("lab", "web", ""), of("lab", "web", "")
			done.Status.Phase, deleted.DeletionTimestamp = corev1.PodSucceeded, ptr.To(metav1.NewTime(now))
			f.Pods = append(f.Pods, of("lab", "web", keys.Enforce), of("lab", "web", ""), of("lab", "web", keys.Off),
				of("lab", "of-no-service", ""), of("shop", "web", keys.Observe), done, deleted)
		}, []string{"note pods of Services: 3 are not in mode enforce (lab: 2, shop: 1)"}},
		"pods whose Services are not known": {func(f *Facts) {
			f.Namespaces[0].Labels, f.Entries, f.NodeAgents = nil, f.Entries[:2], nil
			f.Unread = []Finding{{Unknown, "services", "forbidden", "ask"}}
		}, []string{"unknown services: forbidden"}},
		"lameduck-wait cannot be pulled": {func(f *Facts) {
			f.Pods[0].Status.InitContainerStatuses[0].Image = "lameduck/lameduck-wait:v1"
			*f.Pods[0].Status.InitContainerStatuses[0].State.Waiting = corev1.ContainerStateWaiting{
				Reason: "ErrImagePull", Message: "no such image"}
		}, []string{"error namespace shop: 1 of its pods do not start (web-1), because the container that the " +
			"barrier adds does not: lameduck/lameduck-wait:v1: ErrImagePull: no such image"}},
		"another init container cannot be pulled": {func(f *Facts) {
			f.Pods[0].Status.InitContainerStatuses[0].Name = "own"
			f.Pods[0].Status.InitContainerStatuses[0].State.Waiting.Reason = "ErrImagePull"
		}, nil},
		"lameduck-wait of another version": {func(f *Facts) { f.Entries[2].Image = "lameduck/lameduck-wait:v2" },
			[]string{"warning MutatingWebhookConfiguration lameduck, namespaces.barrier.lameduck.io: it adds the " +
				"image lameduck/lameduck-wait:v2 to pods, and the coordinators run lameduck/webhook:v1"}},
		"lameduck-wait by its digest alone": {func(f *Facts) { f.Entries[2].Image = "lameduck/wait@sha256:0123" }, nil},
		"no hook": {func(f *Facts) { f.Entries[2].Silent = errors.New("not asked") },
			[]string{"error MutatingWebhookConfiguration lameduck, namespaces.barrier.lameduck.io: not asked"}},
		"pods of coordinators are refused": {func(f *Facts) {
			f.Coordinators = nil
			f.Refused = []Refused{{"Deployment", "lameduck-system", "lameduck-webhook-0", "exceeded quota"}}
		}, []string{"error Deployment lameduck-system/lameduck-webhook-0: its pods are refused: exceeded quota"}},
		"pods of node agents are refused": {func(f *Facts) {
			f.NodeAgents = nil
			f.Refused = []Refused{{"DaemonSet", "lameduck-node", "lameduck-node", "exceeded quota"}}
		}, []string{"error DaemonSet lameduck-node/lameduck-node: its pods are refused: exceeded quota"}},
		"an old API server": {func(f *Facts) { f.Server = version.Info{Minor: "29", GitVersion: "v1.29.3"} },
			[]string{"error API server: its version is v1.29.3"}},
		"an API server of an unknown version": {func(f *Facts) { f.Server = version.Info{} },
			[]string{"unknown API server: it does not state its version"}},
		"a plugin of another version": {func(f *Facts) { f.Plugin = "v2" },
			[]string{"warning kubectl lameduck: it is of version v2, the coordinators of v1"}},
		"clocks of nodes": {func(f *Facts) {
			f.Leases[0], f.Leases[1] = lease("one", -time.Minute), lease("two", 8*time.Second)
		}, []string{"warning nodes: the clocks of 2 differ from the API server's, by the times in their Leases, " +
			"and at least by so much (one: 10s behind, two: 8s ahead)"}},
		"a mode that says nothing": {func(f *Facts) { f.Namespaces[0].Labels[keys.Mode] = "enabled" },
			[]string{"warning namespace shop: lameduck.io/mode: enabled says nothing",
				"note pods of Services: 1 are not in mode enforce"}},
		"no mutating webhook": {func(f *Facts) { f.Entries = f.Entries[:2] },
			[]string{"error MutatingWebhookConfiguration lameduck: new pods of shop get no hook"}},
		"no node agents": {func(f *Facts) { f.NodeAgents = nil },
			[]string{"error nodes: 2 of 3 have no agent (one, two)"}},
		"one node has none": {func(f *Facts) { f.NodeAgents = f.NodeAgents[:1] },
			[]string{"error nodes: 1 of 3 have no agent (two)"}},
		"a node agent is not ready": {func(f *Facts) { f.NodeAgents[0] = pod("node-1", "one", false) },
			[]string{"error Pod lameduck-system/node-1: the agent of node one is not ready"}},
		"ipvs": {func(f *Facts) { f.ProxyMode = "ipvs" }, []string{"error kube-proxy: it runs in mode ipvs"}},
		"another mode on one node": {func(f *Facts) {
			proxies(f, "iptables", "nftables", "nftables", "", "absent gone")
		}, []string{"note node n0: kube-proxy is in mode iptables there, and in mode nftables on most nodes"}},
		"no kube-proxy on one node": {func(f *Facts) { proxies(f, "nftables", "absent", "nftables") },
			[]string{"warning node n1: no rules of kube-proxy are there, and on other nodes it is in mode nftables"}},
		"Cilium on some nodes": {func(f *Facts) {
			proxies(f, "nftables", "nftables")
			f.Agents = append(f.Agents, api.Agent{GatewayMode: api.GatewayBeside + "Cilium", Node: "n9"})
			f.Coordinators[0].View.Agents.GatewayModes[api.GatewayBeside+"Cilium"] = 1
		}, []string{"warning Cilium: it chooses pods by itself on 1 nodes"}},
		"no kube-proxy on any node": {func(f *Facts) { proxies(f, "absent", "absent", "") },
			[]string{"warning kube-proxy: none of its rules are on any of 2 nodes"}},
		"no kube-proxy on many nodes": {func(f *Facts) {
			proxies(f, append(slices.Repeat([]string{"absent"}, 12), "nftables")...)
		}, []string{"warning node n0: no rules", "warning node n1: no rules", "warning node n2: no rules",
			"warning node n3: no rules", "warning node n4: no rules", "warning node n5: no rules",
			"warning node n6: no rules", "warning node n7: no rules", "warning node n8: no rules",
			"warning node n9: no rules", "warning nodes: 2 more have no rules of kube-proxy"}},
		"pods without the hook": {func(f *Facts) {
			f.Coordinators[1].View.Barriers.MissingIn = map[string]int{"shop": 3}
		}, []string{"warning namespace shop: 3 of its pods ask for the barrier"}},
		"Services that are not waited for": {func(f *Facts) {
			f.Coverage = &api.Coverage{Uncovered: 12, Error: "list pods", Items: slices.Repeat([]api.Consumer{{
				Service: "shop/web", Name: "kube-proxy", Kind: "kube-proxy", Why: "no agent"}}, 11)}
		}, append(slices.Concat([]string{"unknown coverage: list pods"}, slices.Repeat([]string{
			"warning Service shop/web: kube-proxy routes it and is not waited for: no agent"}, 10)),
			"warning Services: 2 more")},
	} {
		t.Run(name, func(t *testing.T) {
			f := well(t)
			c.change(f)
			got := f.Findings()
			for i, g := range got {
				line := fmt.Sprintf("%s %s: ", g.Level, g.Object)
				if i >= len(c.want) {
					continue
				}
				about, problem, _ := strings.Cut(c.want[i], ": ")
				if about+": " != line || !strings.Contains(g.Problem, problem) || g.Fix == "" {
					t.Errorf("%+v, want %s", g, c.want[i])
				}
			}
			if len(got) != len(c.want) {
				t.Errorf("%d findings, want %d: %+v", len(got), len(c.want), got)
			}
		})
	}
}

const entry0 = "error ValidatingWebhookConfiguration lameduck, pods-0.lameduck.io: "

var clock = []string{"warning Pod lameduck-system/webhook-0: its clock and the API server's are 7s apart"}

// The certificate is that of the Secret which the Deployment names.
func TestTheFixNamesTheSecret(t *testing.T) {
	f := well(t)
	f.Now, f.Secret = now.Add(61*24*time.Hour), "lameduck-tls"
	if got := f.Findings(); len(got) == 0 || !strings.Contains(got[0].Fix, "Secret lameduck-system/lameduck-tls") {
		t.Errorf("%+v", got)
	}
}

func TestProxyMode(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "kind: x\nmode: \"\"\nportRange: \"\"\n": "iptables", "mode: ipvs\n": "ipvs",
		"mode: \"nftables\"\n": "nftables", "# mode: ipvs\nipvs:\n  strictARP: true\nmode: nftables\n": "nftables",
	} {
		if got := ProxyMode(&corev1.ConfigMap{Data: map[string]string{"config.conf": text}}); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestDeletesPods(t *testing.T) {
	rule := func(operation admissionv1.OperationType, group, resource string) admissionv1.RuleWithOperations {
		return admissionv1.RuleWithOperations{Operations: []admissionv1.OperationType{operation},
			Rule: admissionv1.Rule{APIGroups: []string{group}, Resources: []string{resource}}}
	}
	for _, c := range []struct {
		rule admissionv1.RuleWithOperations
		want bool
	}{
		{rule("DELETE", "", "pods"), true}, {rule("*", "*", "*"), true}, {rule("DELETE", "*", "*/*"), true},
		{rule("CREATE", "", "pods/eviction"), true}, {rule("CREATE", "", "pods"), false},
		{rule("DELETE", "apps", "pods"), false}, {rule("DELETE", "", "services"), false},
	} {
		if got := deletesPods(c.rule); got != c.want {
			t.Errorf("%+v: %t", c.rule, got)
		}
	}
}
