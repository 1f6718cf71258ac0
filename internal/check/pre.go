package check

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// leastMinor is the first minor version of Kubernetes 1 whose webhook configurations have
// matchConditions.
const leastMinor = 30

// installed are the API group and the resource of each kind of object that the manifests create.
var installed = [][2]string{
	{"", "namespaces"}, {"", "serviceaccounts"}, {"", "secrets"}, {"", "configmaps"}, {"", "services"},
	{"", "resourcequotas"}, {"apps", "deployments"}, {"apps", "daemonsets"}, {"policy", "poddisruptionbudgets"},
	{"networking.k8s.io", "networkpolicies"}, {"rbac.authorization.k8s.io", "roles"},
	{"rbac.authorization.k8s.io", "clusterroles"}, {"rbac.authorization.k8s.io", "clusterrolebindings"},
	{"admissionregistration.k8s.io", "validatingwebhookconfigurations"},
	{"admissionregistration.k8s.io", "mutatingwebhookconfigurations"},
	{"admissionregistration.k8s.io", "validatingadmissionpolicies"},
	{"admissionregistration.k8s.io", "validatingadmissionpolicybindings"},
	{"rbac.authorization.k8s.io", "rolebindings"}, {"flowcontrol.apiserver.k8s.io", "flowschemas"},
	{"flowcontrol.apiserver.k8s.io", "prioritylevelconfigurations"},
}

// Pre finds obstacles to an installation. It changes nothing: it creates only access reviews, and
// pods as a dry run. It returns an error if the API server does not answer.
func Pre(ctx context.Context, kube kubernetes.Interface, system string) ([]Finding, error) {
	var all []Finding
	add := func(l Level, object, fix, problem string, args ...any) {
		all = append(all, Finding{l, object, fmt.Sprintf(problem, args...), fix})
	}
	server, err := discovery.ToServerVersionInterfaceWithContext(kube.Discovery()).ServerVersionWithContext(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask the API server for its version: %w", err)
	}
	tooOld(*server, add)
	for _, of := range installed {
		review, err := kube.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx,
			&authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
				ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "create", Group: of[0], Resource: of[1],
					Namespace: system}}}, metav1.CreateOptions{})
		switch {
		case err != nil:
			add(Unknown, of[1], "kubectl auth can-i create "+of[1], "whether you may create them: %v", err)
		case !review.Status.Allowed:
			add(Error, of[1], "kubectl auth can-i --list; the ClusterRole cluster-admin is enough",
				"you may not create them")
		}
	}
	preWebhooks(ctx, kube, add)
	for _, namespace := range []string{system, "lameduck-node"} {
		prePods(ctx, kube, namespace, namespace != system, add)
	}
	if config, err := kube.CoreV1().ConfigMaps("kube-system").Get(ctx, "kube-proxy", metav1.GetOptions{}); err != nil {
		add(Note, "kube-proxy", "docs/barrier.md",
			"its mode is not known: %v. Node agents observe nftables and iptables", err)
	} else if mode := ProxyMode(config); mode == "ipvs" {
		add(Warning, "kube-proxy", "mode: nftables in ConfigMap kube-system/kube-proxy",
			"it runs in mode ipvs, which node agents cannot observe: leave out the barrier")
	}
	add(Note, "images", "kubectl -n "+system+" get events, after the installation",
		"whether nodes can pull them is known only when one tries")
	return worstFirst(all), nil
}

// tooOld judges the version of the API server.
func tooOld(is version.Info, add adder) {
	minor, err := strconv.Atoi(strings.TrimRight(is.Minor, "+"))
	switch {
	case is.GitVersion == "":
		add(Unknown, "API server", "kubectl get --raw /version", "it does not state its version")
	case err != nil || minor < leastMinor:
		add(Error, "API server", fmt.Sprintf("upgrade to 1.%d or later", leastMinor),
			"its version is %s, and the webhook configurations need matchConditions", is.GitVersion)
	}
}

// preWebhooks finds webhooks of other software that the API server calls for deletions of pods.
func preWebhooks(ctx context.Context, kube kubernetes.Interface, add adder) {
	all, err := Entries(ctx, kube)
	if err != nil {
		add(Unknown, "webhooks of others", "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations",
			"they could not be read: %v", err)
	}
	for _, w := range all {
		switch {
		case w.Of == Configuration:
			add(Note, w.String(), "kubectl lameduck check", "Lameduck is installed already")
		case !slices.ContainsFunc(w.Rules, deletesPods):
		case ptr.Deref(w.Policy, admissionv1.Fail) == admissionv1.Ignore:
			add(Note, w.String(), "none is needed", "it is asked about deletions of pods, too")
		default:
			add(Warning, w.String(), "failurePolicy: Ignore, or a namespaceSelector",
				"it is asked about deletions of pods, too, and refuses them if it does not answer")
		}
	}
}

// deletesPods reports whether a rule matches deletions or evictions of pods.
func deletesPods(r admissionv1.RuleWithOperations) bool {
	has := func(operation admissionv1.OperationType, resources ...string) bool {
		return (slices.Contains(r.Operations, operation) || slices.Contains(r.Operations, admissionv1.OperationAll)) &&
			(slices.Contains(r.APIGroups, "") || slices.Contains(r.APIGroups, "*")) &&
			slices.ContainsFunc(resources, func(name string) bool { return slices.Contains(r.Resources, name) })
	}
	return has(admissionv1.Delete, "pods", "*", "*/*") || has(admissionv1.Create, "pods/eviction", "pods/*", "*/*")
}

// prePods creates a pod like Lameduck's as a dry run, so that Pod Security, quotas, limits and
// other admission policies of the cluster judge it.
func prePods(ctx context.Context, kube kubernetes.Interface, namespace string, node bool, add adder) {
	_, err := kube.CoreV1().Namespaces().Get(ctx, namespace, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		way := "kubectl create namespace " + namespace + ", then this check again"
		if node {
			way += "; delete the namespace before an installation by the chart, which makes it"
		}
		add(Note, "namespace "+namespace, way,
			"it does not exist yet: whether quotas, Pod Security and policies allow its pods is not known")
		return
	}
	asked := testPod()
	asked.Spec.PriorityClassName = "system-cluster-critical"
	if node {
		asked.Spec.PriorityClassName, asked.Spec.HostNetwork = "system-node-critical", true
		may := asked.Spec.Containers[0].SecurityContext
		may.RunAsNonRoot, may.Capabilities.Add = nil, []corev1.Capability{"NET_ADMIN"}
	}
	if err == nil {
		_, err = kube.CoreV1().Pods(namespace).Create(ctx, asked, dryRun)
	}
	if err != nil && strings.Contains(err.Error(), "insufficient quota to match these scopes") {
		add(Note, "namespace "+namespace, "none is needed: the manifests and the chart create ResourceQuota "+
			"lameduck-priority there", "it has no ResourceQuota for priority class %s, which this cluster requires: %v",
			asked.Spec.PriorityClassName, err)
		asked.Spec.PriorityClassName = ""
		_, err = kube.CoreV1().Pods(namespace).Create(ctx, asked, dryRun)
	}
	if err != nil {
		add(Error, "namespace "+namespace, admits(namespace), "it refuses a pod like Lameduck's: %v", err)
	}
}
