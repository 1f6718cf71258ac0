package node

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// Kind is what happened.
type Kind string

// What happens to a pod, in the order in which it usually does. Those marked with a star are about
// one container.
const (
	Seen     Kind = "Seen"     // the node has learnt of the pod
	Started  Kind = "Started"  // * its process runs
	Ready    Kind = "Ready"    // the pod became ready, and the API server knows
	NotReady Kind = "NotReady" // the pod is no longer ready, and the API server knows
	// Unhealthy (*): a liveness or startup probe has failed permanently: the container is restarted
	Unhealthy     Kind = "Unhealthy"
	Deleted       Kind = "Deleted"       // deletionTimestamp was observed
	PreStopBegins Kind = "PreStopBegins" // *
	PreStopEnds   Kind = "PreStopEnds"   // * Detail has the error, if any
	Term          Kind = "Term"          // * the stop signal was sent
	Kill          Kind = "Kill"          // * SIGKILL was sent
	Exited        Kind = "Exited"        // * the process is gone; Code has its exit code
	Removed       Kind = "Removed"       // the API server has accepted the last DELETE
	Vanished      Kind = "Vanished"      // the pod is gone, from the API server and from the node
)

// Event is one thing that happened to a pod.
type Event struct {
	Time      time.Time
	Pod       types.NamespacedName
	UID       types.UID
	Container string // empty if it is about the pod
	Kind      Kind
	Code      int    // of Exited: as a shell has it, 128 plus the signal
	Detail    string // for people
}

func (e Event) String() string {
	text := fmt.Sprintf("%s %s", e.Time.Format("15:04:05.000"), e.Pod.Name)
	if e.Container != "" {
		text += "/" + e.Container
	}
	text += " " + string(e.Kind)
	if e.Kind == Exited {
		text += fmt.Sprint(" ", e.Code)
	}
	if e.Detail != "" {
		text += ": " + e.Detail
	}
	return text
}

// timeline keeps all events of a node.
type timeline struct {
	observe func(Event)

	mu      sync.Mutex
	events  map[types.UID][]Event
	changed chan struct{} // closed and replaced with each event

	telling sync.Mutex // held over append and observe, so that the order is the same for all
}

func (t *timeline) add(e Event) {
	t.telling.Lock()
	defer t.telling.Unlock()
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	t.mu.Lock()
	if t.events == nil {
		t.events = map[types.UID][]Event{}
	}
	t.events[e.UID] = append(t.events[e.UID], e)
	close(t.changed)
	t.changed = make(chan struct{})
	t.mu.Unlock()
	if t.observe != nil {
		t.observe(e)
	}
}

// Timeline returns what has happened to a pod so far, also after it is gone.
func (n *Node) Timeline(uid types.UID) []Event {
	n.timeline.mu.Lock()
	defer n.timeline.mu.Unlock()
	return append([]Event(nil), n.timeline.events[uid]...)
}

// Wait returns the first event of a kind in the timeline of a pod, as soon as there is one. The
// error is that of ctx.
func (n *Node) Wait(ctx context.Context, uid types.UID, kind Kind) (Event, error) {
	for {
		n.timeline.mu.Lock()
		events, changed := n.timeline.events[uid], n.timeline.changed
		n.timeline.mu.Unlock()
		for _, e := range events {
			if e.Kind == kind {
				return e, nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return Event{}, fmt.Errorf("wait for %s of pod %s: %w", kind, uid, context.Cause(ctx))
		}
	}
}
