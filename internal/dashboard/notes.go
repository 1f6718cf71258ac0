package dashboard

import (
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

const maxNotes = 200

// Notes remembers the last warnings on their way to Next: each is of a deletion that went on
// without every gateway's word, often without a drain. Safe for concurrent use.
type Notes struct {
	Next admission.Events

	mu   sync.Mutex
	kept []note // the oldest first
}

type note struct {
	at              time.Time
	pod             drain.Pod
	reason, message string
}

// Event implements [admission.Events].
func (n *Notes) Event(pod *corev1.Pod, warning bool, reason, message string) {
	if warning {
		of := note{time.Now(), drain.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: drain.UID(pod.UID)},
			strings.TrimPrefix(reason, "Lameduck"), message}
		n.mu.Lock()
		if len(n.kept) == maxNotes {
			n.kept = slices.Delete(n.kept, 0, 1)
		}
		n.kept = append(n.kept, of)
		n.mu.Unlock()
	}
	n.Next.Event(pod, warning, reason, message)
}

func (n *Notes) newest() []note {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := slices.Clone(n.kept)
	slices.Reverse(all)
	return all
}
