package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/internal/entry"
	"github.com/lameduck-io/lameduck/internal/kubeclient"
)

// checkEvery is the pause between two attempts.
const checkEvery = time.Second

// check proves that the API server reaches a coordinator by each entry of the webhook
// configuration: it evicts, as a dry run, a pod that need not exist. The caller needs the right to
// create pods/eviction with the name lameduck-check in the given namespace.
func check(ctx context.Context, args []string, getenv func(string) string, out io.Writer) error {
	f := flag.NewFlagSet("webhook check", flag.ContinueOnError)
	kubeconfig := f.String("kubeconfig", getenv("KUBECONFIG"),
		"kubeconfig file for the API server; empty: the pod's service account")
	namespace := f.String("namespace", metav1.NamespaceDefault, "a namespace whose deletions wait: not an excluded one")
	entries := f.Int("entries", 2, "how many entries the webhook configuration has, each of which is asked: "+
		"pods-0.lameduck.io and so on")
	wait := f.Duration("wait", time.Minute, "how long it is tried")
	if err := cli.Parse(f, args, "webhook check proves that the API server asks the coordinators. It changes nothing.",
		out); err != nil {
		return err
	}
	if *entries < 1 {
		return fmt.Errorf("%w: --entries %d: must be at least 1", errUsage, *entries)
	}
	kube, _, err := kubeclient.New(*kubeconfig, "lameduck-webhook")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, max(*wait, checkEvery))
	defer cancel()
	proved, whys := make([]bool, *entries), make([]error, *entries)
	for {
		// Those that have answered are asked again: while only one that fails were called, an alert
		// would say that all of them do.
		for n := range *entries {
			answer, err := entry.Ask(ctx, kube, *namespace, n)
			switch {
			case err == nil && !proved[n]:
				fmt.Fprintf(out, "pods-%d.lameduck.io: %s\n", n, answer)
				proved[n] = true
			case apierrors.IsForbidden(err):
				return err // a missing right: trying again does not help
			case err != nil && (whys[n] == nil || ctx.Err() == nil && errors.Is(err, entry.ErrNotAsked)):
				whys[n] = err
			}
		}
		n := slices.Index(proved, false)
		if n < 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("pods-%d.lameduck.io, within %s: %w", n, *wait, whys[n])
		case <-time.After(checkEvery):
		}
	}
}
