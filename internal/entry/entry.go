// Package entry sends a test deletion through the API server, a dry run, to find out whether a
// coordinator answers for one entry of the webhook configuration. cmd/webhook and kubectl lameduck
// check use it.
package entry

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const (
	// Pod is the name of a pod that need not exist. Coordinators refuse its eviction as a dry run.
	// The refusal proves that the API server asks them and receives the answer, and changes
	// nothing.
	Pod = "lameduck-check"
	// Answer is how that refusal begins.
	Answer = "Lameduck answers"
	// label on the eviction selects one entry of the webhook configuration, through the
	// matchConditions of the entries. Otherwise the first of several refusals would hide an entry
	// that does not work.
	label = "lameduck.io/entry"
	// timeout bounds one question.
	timeout = 10 * time.Second
)

// ErrNotAsked means that the coordinator of the entry has not answered. The API server does not
// return the reason.
var ErrNotAsked = errors.New("the API server does not ask, or its call fails and is ignored. Look whether the " +
	"namespace is excluded, at " +
	"kubectl get validatingwebhookconfiguration,mutatingwebhookconfiguration lameduck -o yaml (caBundle and " +
	"service.path are written by coordinators), at the coordinators' pods and logs, and at the API server's log")

// Name returns the name of an entry.
func Name(ordinal int) string { return fmt.Sprintf("pods-%d.lameduck.io", ordinal) }

// Ask evicts the pod [Pod], as a dry run, in a namespace whose deletions wait, so that the entry
// with that ordinal is asked, and returns what its coordinator answers.
func Ask(ctx context.Context, kube kubernetes.Interface, namespace string, ordinal int) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := kube.PolicyV1().Evictions(namespace).Evict(ctx, &policyv1.Eviction{
		ObjectMeta: metav1.ObjectMeta{Name: Pod, Namespace: namespace,
			Labels: map[string]string{label: strconv.Itoa(ordinal)}},
		DeleteOptions: &metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}},
	})
	var status apierrors.APIStatus
	switch {
	case err != nil && strings.Contains(err.Error(), Answer):
		// During an upgrade another webhook configuration may also call a coordinator, whose
		// refusal then comes first.
		if !strings.Contains(err.Error(), strconv.Quote(Name(ordinal))) {
			return "", fmt.Errorf("%w: %w", ErrNotAsked, err)
		}
		_, said, _ := strings.Cut(err.Error(), Answer)
		return Answer + said, nil
	case apierrors.IsForbidden(err):
		return "", fmt.Errorf("this needs the right to create pods/eviction with the name %s in namespace %s: %w", Pod,
			namespace, err)
	case err == nil || errors.As(err, &status) && apierrors.IsNotFound(err):
		return "", fmt.Errorf("deletions in namespace %s do not wait: %w", namespace, ErrNotAsked)
	default:
		return "", fmt.Errorf("ask the API server: %w", err)
	}
}
