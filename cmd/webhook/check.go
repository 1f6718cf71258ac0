package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/pkg/admission"
)

// checkEvery is how often it is tried while it does not work.
const checkEvery = time.Second

// entryLabel on the eviction has one entry of the webhook configuration asked alone, by its
// matchConditions. Else the first of several refusals would hide an entry that does not work.
const entryLabel = "lameduck.io/entry"

// check proves that the API server asks a coordinator by each entry and hears its answer: it
// evicts, as a dry run, a pod that need not exist. It takes the right to create pods/eviction for
// the name lameduck-check in one namespace.
func check(ctx context.Context, args []string, getenv func(string) string, out io.Writer) error {
	f := flag.NewFlagSet("webhook check", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	kubeconfig := f.String("kubeconfig", getenv("KUBECONFIG"),
		"file to reach the API server with; empty: as a pod does")
	namespace := f.String("namespace", metav1.NamespaceDefault, "a namespace whose deletions wait: not an excluded one")
	entries := f.Int("entries", 2, "how many entries the webhook configuration has, each of which is asked: "+
		"pods-0.lameduck.io and so on")
	wait := f.Duration("wait", time.Minute, "how long it is tried")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(out, "webhook check proves that the API server asks the coordinators. It changes "+
				"nothing.\n\nFlags:")
			f.SetOutput(out)
			f.PrintDefaults()
			return err
		}
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if f.NArg() > 0 || *entries < 1 {
		return fmt.Errorf("%w: --entries %d: must be at least 1, and no other arguments: %q", errUsage, *entries,
			f.Args())
	}
	config, err := restConfig(*kubeconfig)
	if err != nil {
		return err
	}
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("client for the API server: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, max(*wait, checkEvery))
	defer cancel()
	var why error
	for entry := 0; entry < *entries; {
		answer, err := ask(ctx, kube, *namespace, entry)
		switch {
		case err == nil:
			fmt.Fprintf(out, "pods-%d.lameduck.io: %s\n", entry, answer)
			entry, why = entry+1, nil
			continue
		case apierrors.IsForbidden(err):
			return err // asking again gives no right
		case why == nil || ctx.Err() == nil && errors.Is(err, errNotAsked):
			why = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("pods-%d.lameduck.io, within %s: %w", entry, *wait, why)
		case <-time.After(checkEvery):
		}
	}
	return nil
}

// errNotAsked is all that can be seen from here.
var errNotAsked = errors.New("the API server does not ask, or its call fails and it goes on. Look whether the " +
	"namespace is excluded, at " +
	"kubectl get validatingwebhookconfiguration lameduck -o yaml (caBundle and service.path are written by " +
	"coordinators), at the coordinators' pods and logs, and at the API server's log")

func ask(ctx context.Context, kube kubernetes.Interface, namespace string, entry int) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	err := kube.PolicyV1().Evictions(namespace).Evict(ctx, &policyv1.Eviction{
		ObjectMeta: metav1.ObjectMeta{Name: admission.CheckName, Namespace: namespace,
			Labels: map[string]string{entryLabel: strconv.Itoa(entry)}},
		DeleteOptions: &metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}},
	})
	var status apierrors.APIStatus
	switch {
	case err != nil && strings.Contains(err.Error(), admission.CheckAnswer):
		// During an upgrade another webhook configuration may lead here too, and refuse first.
		if !strings.Contains(err.Error(), fmt.Sprintf("\"pods-%d.lameduck.io\"", entry)) {
			return "", fmt.Errorf("%w: %w", errNotAsked, err)
		}
		_, said, _ := strings.Cut(err.Error(), admission.CheckAnswer)
		return admission.CheckAnswer + said, nil
	case apierrors.IsForbidden(err):
		return "", fmt.Errorf("this needs the right to create pods/eviction with the name %s in namespace %s: %w",
			admission.CheckName, namespace, err)
	case err == nil || errors.As(err, &status) && apierrors.IsNotFound(err):
		return "", fmt.Errorf("deletions in namespace %s do not wait: %w", namespace, errNotAsked)
	default:
		return "", fmt.Errorf("ask the API server: %w", err)
	}
}
