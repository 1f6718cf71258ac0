package admission

import (
	"fmt"
	"net/http"

	"github.com/lameduck-io/lameduck/internal/entry"
)

// isCheck reports whether a review is the dry run of [entry.Ask], for which nothing is looked up.
func (q *request) isCheck() bool { return q.operation == Evict && q.dryRun && q.name == entry.Pod }

// answerCheck refuses it.
func (h *Handler) answerCheck(w http.ResponseWriter, q *request) {
	view := "its view of the cluster is complete"
	if !h.Cluster.Synced() {
		view = "its view of the cluster is not complete yet"
	}
	h.write(w, q, Outcome{Reason: "Check", Message: fmt.Sprintf("%s: replica %s, %s", entry.Answer, h.Replica, view)})
}
