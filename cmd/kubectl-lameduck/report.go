package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
)

// observed is the output of report: the measurements of all coordinators. Each deletion is measured
// by one coordinator.
type observed struct {
	metav1.TypeMeta `json:",inline"`
	// Since is the start of the coordinator that started last. Measurements from before then are
	// not complete.
	Since time.Time             `json:"since"`
	Items []api.NamespaceReport `json:"items"`
}

// report prints how long deletions in mode observe would have waited with enforcement.
func report(ctx context.Context, o options, from replicas, out, stderr io.Writer) error {
	answers, err := ask[api.Report](ctx, o, from, api.ReportPath)
	if err != nil {
		return err
	}
	var all api.Report
	for _, a := range answers {
		if a.err == nil {
			all = all.Join(a.said)
		}
	}
	is := observed{kind("Report"), all.Since, slices.DeleteFunc(all.Namespaces, func(r api.NamespaceReport) bool {
		return o.namespace != "" && o.namespace != r.Namespace
	})}
	complain(answers, stderr)
	if done, err := encode(o, is, out); done {
		return err
	}
	if len(is.Items) == 0 {
		fmt.Fprintf(out, "Nothing was measured since %s: no pod in mode observe was deleted that a Service lists.\n",
			is.Since.UTC().Format(time.RFC3339))
	}
	for _, r := range is.Items {
		fmt.Fprintf(out, "%s, since %s: %s\n", r.Namespace, is.Since.UTC().Format(time.RFC3339), sentence(r))
	}
	return nil
}

// sentence describes how long the deletions of a namespace would have waited.
func sentence(r api.NamespaceReport) string {
	text := "no deletion was measured"
	if n := len(r.WaitSeconds); n > 0 {
		waits := slices.Sorted(slices.Values(r.WaitSeconds))
		text = fmt.Sprintf("with enforcement %d deletions would have waited %s at the median, %s at most; %d had "+
			"requests or connections in flight", r.Deletions, wait(waits[(n-1)/2]), wait(waits[n-1]), r.InFlight)
	}
	if r.Unmeasured > 0 {
		text += fmt.Sprintf("; %d more could not be measured", r.Unmeasured)
	}
	return text
}

func wait(seconds float64) string {
	if seconds < 1 {
		return fmt.Sprintf("%.0f ms", 1000*seconds)
	}
	return fmt.Sprintf("%.1f s", seconds)
}
