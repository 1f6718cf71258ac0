package admission

import (
	"context"
	"fmt"
	"sync"

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

// room is what a pod's PodDisruptionBudget says to its eviction.
type room struct {
	// refusal is why there is none, as the API server words the cause. Empty: there is.
	refusal string
	// broken says that the API server will refuse it by itself and with another code than 429,
	// whatever is answered here.
	broken bool
	// promised says that there is a promise to be given back by [Cluster.settled].
	promised bool
}

// promises count the evictions that were found room for and have not opened their drain yet.
// Without them, evictions that come at the very same moment would all find the same room. The zero
// value holds none.
type promises struct {
	mu sync.Mutex
	of map[drain.UID]int
}

// settled gives the promise of s back, if it has one: its drain is open, or it will have none.
func (c *Cluster) settled(s *subject) {
	if !s.promised {
		return
	}
	s.promised = false
	uid := drain.UID(s.pod.UID)
	c.promises.mu.Lock()
	defer c.promises.mu.Unlock()
	if c.promises.of[uid]--; c.promises.of[uid] == 0 {
		delete(c.promises.of, uid)
	}
}

// budget says whether the pod's PodDisruptionBudget has room for its eviction, as the API server
// will after the webhooks (k8s.io/kubernetes/pkg/registry/core/pod/storage/eviction.go, 1.36).
// Other pods of the budget that have an open drain count as used: they are disruptions that the
// budget's controller has not seen yet, deletions too. Room that was found is promised to this
// call, so that of several at one moment only as many find it as there is. Only the opener calls
// it: see package peers.
func (c *Cluster) budget(ctx context.Context, pod *corev1.Pod, ready bool) (room, error) {
	of, err := c.budgetsOf(ctx, pod)
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
	others, err := c.othersOf(ctx, pod, b)
	if err != nil {
		return room{}, err
	}
	if ahead := c.take(drain.UID(pod.UID), others, int(b.Status.DisruptionsAllowed)); ahead >= 0 {
		return room{refusal: fmt.Sprintf("The disruption budget %s needs %d healthy pods and has %d currently of "+
			"which %d are being drained",
			b.Name, b.Status.DesiredHealthy, b.Status.CurrentHealthy, ahead)}, nil
	}
	return room{promised: true}, nil
}

// exhausted words why a budget allows no disruption, as the API server does.
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

// othersOf returns the pods of a budget beside pod that it does not count as disrupted yet.
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

// take promises uid a place among those that may be disrupted, and returns -1, if it has an open
// drain, or if fewer than allowed of others have one or a promise. Without a place it returns how
// many have.
func (c *Cluster) take(uid drain.UID, others []drain.UID, allowed int) (ahead int) {
	c.promises.mu.Lock()
	defer c.promises.mu.Unlock()
	if !c.Ledger.Pod(uid).Draining {
		for _, other := range others {
			if c.promises.of[other] > 0 || c.Ledger.Pod(other).Draining {
				ahead++
			}
		}
		if ahead >= allowed {
			return ahead
		}
	}
	if c.promises.of == nil {
		c.promises.of = map[drain.UID]int{}
	}
	c.promises.of[uid]++
	return -1
}
