package admission

import (
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"

	"github.com/lameduck-io/lameduck/internal/entry"
)

// The check is refused, and nothing else is: neither the dry run of another pod's eviction, nor a
// deletion or an eviction that is meant of a pod that has the name by chance.
func TestTheCheckIsRefusedAndNothingElse(t *testing.T) {
	yes := true
	named := func(r *admissionv1.AdmissionRequest) { r.Name = entry.Pod }
	dry := func(r *admissionv1.AdmissionRequest) { r.DryRun = &yes }
	for name, c := range map[string]struct {
		review func(w *world) *admissionv1.AdmissionReview
		want   bool
	}{
		"the check": {func(w *world) *admissionv1.AdmissionReview {
			return eviction(runningPod(entry.Pod), "policy/v1", `{"dryRun":["All"]}`, named, dry)
		}, true},
		"dry in its options alone": {func(w *world) *admissionv1.AdmissionReview {
			return eviction(runningPod(entry.Pod), "policy/v1", `{"dryRun":["All"]}`, named)
		}, true},
		"another pod": {func(w *world) *admissionv1.AdmissionReview {
			return eviction(w.a, "policy/v1", `{"dryRun":["All"]}`)
		}, false},
		"meant": {func(w *world) *admissionv1.AdmissionReview {
			return eviction(runningPod(entry.Pod), "policy/v1", `{}`, named)
		}, false},
		"a deletion": {func(w *world) *admissionv1.AdmissionReview {
			return deletion(runningPod(entry.Pod), named, dry)
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.Handler.Replica = "webhook-7"
			answer := w.ask(c.review(w))
			refused := !answer.Allowed && answer.Result != nil &&
				strings.HasPrefix(answer.Result.Message,
					entry.Answer+": replica webhook-7, its view of the cluster is complete")
			if refused != c.want {
				t.Errorf("%+v", answer)
			}
			if c.want {
				w.unchanged("a check")
			}
		})
	}
}
