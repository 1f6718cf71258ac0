package admission

import (
	"fmt"
	"net/http"
)

// CheckName is the name of a pod that need not exist. Who evicts it as a dry run is refused by this
// webhook, whose refusal proves that the API server asks it and hears the answer; nothing is looked
// up and nothing changes.
const CheckName = "lameduck-check"

// CheckAnswer is how that refusal begins.
const CheckAnswer = "Lameduck answers"

// isCheck reports whether a review is such an eviction.
func (q *request) isCheck() bool { return q.operation == Evict && q.dryRun && q.name == CheckName }

// answerCheck refuses it.
func (h *Handler) answerCheck(w http.ResponseWriter, q *request) {
	view := "its view of the cluster is complete"
	if !h.Cluster.Synced() {
		view = "its view of the cluster is not complete yet"
	}
	h.write(w, q, Outcome{Reason: "Check", Message: fmt.Sprintf("%s: replica %s, %s", CheckAnswer, h.Replica, view)})
}
