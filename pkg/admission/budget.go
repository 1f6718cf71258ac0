package admission

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// mostDisrupted is how many evictions the API server lets wait for a budget's controller
// (MaxDisruptedPodSize in k8s.io/kubernetes/pkg/registry/core/pod/storage/eviction.go).
const mostDisrupted = 2000

// room is the decision whether a pod's PodDisruptionBudget allows its eviction.
type room struct {
	// refusal is why it does not, in the API server's words. Empty: it does.
	refusal string
	// broken: the API server refuses the eviction itself, with a code other than 429, whatever this
	// webhook answers.
	broken bool
}

// budget reports whether the pod's PodDisruptionBudget allows its eviction, by the rules that the
// API server applies after the webhooks
// (k8s.io/kubernetes/pkg/registry/core/pod/storage/eviction.go, 1.36). Other pods of the budget
// that have an open drain count as disrupted, deletions included: the budget's controller has not
// counted them yet. claim is that of [Ledger.Ahead]. Only the opener calls it: see package peers.
func (c *Cluster) budget(ctx context.Context, s *subject, ready, claim bool) (room, error) {
	of, err := c.budgetsOf(ctx, s.pod)
	switch {
	case err != nil:
		return room{}, err
	case len(of) == 0:
		return room{}, nil
	case len(of) > 1:
		return room{broken: true}, nil
	}
	b := of[0]
	if !ready {
		policy := b.Spec.UnhealthyPodEvictionPolicy
		always := policy != nil && *policy == policyv1.AlwaysAllow
		if always || b.Status.CurrentHealthy >= b.Status.DesiredHealthy && b.Status.DesiredHealthy > 0 {
			return room{}, nil
		}
	}
	switch {
	case b.Status.ObservedGeneration < b.Generation:
		return room{refusal: "The disruption budget " + b.Name + " is still being processed by the server."}, nil
	case b.Status.DisruptionsAllowed < 0 || len(b.Status.DisruptedPods) > mostDisrupted:
		return room{broken: true}, nil
	case b.Status.DisruptionsAllowed == 0:
		return room{refusal: exhausted(b)}, nil
	}
	others, err := c.othersOf(ctx, s.pod, b)
	if err != nil {
		return room{}, err
	}
	if ahead := c.Ledger.Ahead(s.request(), others, int(b.Status.DisruptionsAllowed), claim); ahead >= 0 {
		return room{refusal: fmt.Sprintf("The disruption budget %s needs %d healthy pods and has %d currently of "+
			"which %d are being drained",
			b.Name, b.Status.DesiredHealthy, b.Status.CurrentHealthy, ahead)}, nil
	}
	return room{}, nil
}

// exhausted returns why a budget allows no disruption, in the API server's words.
func exhausted(b *policyv1.PodDisruptionBudget) string {
	why := meta.FindStatusCondition(b.Status.Conditions, policyv1.DisruptionAllowedCondition)
	said := why != nil && why.Status == metav1.ConditionFalse && why.Message != ""
	switch {
	case said && why.Reason == policyv1.SyncFailedReason:
		return fmt.Sprintf("The disruption budget %s does not allow evicting pods currently because it failed sync: %s",
			b.Name, why.Message)
	case b.Status.CurrentHealthy <= b.Status.DesiredHealthy:
		return fmt.Sprintf("The disruption budget %s needs %d healthy pods and has %d currently", b.Name,
			b.Status.DesiredHealthy, b.Status.CurrentHealthy)
	case said:
		return fmt.Sprintf("The disruption budget %s does not allow evicting pods currently (%s): %s", b.Name,
			why.Reason, why.Message)
	default:
		return fmt.Sprintf("The disruption budget %s does not allow evicting pods currently", b.Name)
	}
}

// budgetsOf returns the budgets that the API server will find for pod.
func (c *Cluster) budgetsOf(ctx context.Context, pod *corev1.Pod) ([]*policyv1.PodDisruptionBudget, error) {
	var budgets policyv1.PodDisruptionBudgetList
	if err := c.Reader.List(ctx, &budgets, client.InNamespace(pod.Namespace)); err != nil {
		return nil, fmt.Errorf("list budgets of namespace %s from the cache: %w", pod.Namespace, err)
	}
	var of []*policyv1.PodDisruptionBudget
	for i := range budgets.Items {
		selector, err := metav1.LabelSelectorAsSelector(budgets.Items[i].Spec.Selector)
		if err == nil && selector.Matches(labels.Set(pod.Labels)) {
			of = append(of, &budgets.Items[i])
		}
	}
	return of, nil
}

// othersOf returns the pods of a budget, other than pod, that it does not count as disrupted yet.
func (c *Cluster) othersOf(ctx context.Context, pod *corev1.Pod, b *policyv1.PodDisruptionBudget) ([]drain.UID, error) {
	selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	if err != nil {
		return nil, fmt.Errorf("selector of budget %s/%s: %w", b.Namespace, b.Name, err)
	}
	var pods corev1.PodList
	if err := c.Reader.List(ctx, &pods, client.InNamespace(pod.Namespace),
		client.MatchingLabelsSelector{Selector: selector}); err != nil {
		return nil, fmt.Errorf("list pods of namespace %s from the cache: %w", pod.Namespace, err)
	}
	var others []drain.UID
	for _, other := range pods.Items {
		_, evicted := b.Status.DisruptedPods[other.Name]
		if other.UID != pod.UID && other.DeletionTimestamp == nil && !evicted {
			others = append(others, drain.UID(other.UID))
		}
	}
	return others, nil
}
