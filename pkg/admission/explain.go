package admission

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// ErrNoPod is returned by [Cluster.Explain] for a pod that is not known.
var ErrNoPod = errors.New("no such pod")

// ErrCold is returned by [Cluster.Explain] while the cluster is not known yet.
var ErrCold = errors.New("this replica does not know the cluster yet")

// Explanation is the answer that a deletion or eviction of a pod would get now, with the facts that
// it depends on.
type Explanation struct {
	// Pod belongs to the cache.
	Pod     *corev1.Pod
	Facts   Facts
	Verdict Verdict
	// Targets are the Services that list the pod, with their usable targets. Empty if none does.
	Targets []drain.Targets
	// Full is why the drain would be queued. Empty: it would not.
	Full string
	// Idle is why the hold would wait until gateways are Idle, and not leave that to the pod's
	// barrier. Empty: it would not, or the pod has no barrier.
	Idle string
}

// Explain returns the answer that a deletion or an eviction of the pod would get now. It opens no
// drain. The answer may differ when the pod is really deleted.
func (c *Cluster) Explain(ctx context.Context, now time.Time, operation Operation, namespace, name string) (Explanation,
	error) {
	if !c.Synced() {
		return Explanation{}, ErrCold
	}
	// Without Live: from the cache alone.
	aside := &Cluster{Reader: c.Reader, Slices: c.Slices, Ledger: c.Ledger, Synced: c.Synced, Excluded: c.Excluded,
		Mode: c.Mode, Started: c.Started, Services: c.Services}
	facts, s, err := aside.gather(ctx, now, &request{operation: operation, namespace: namespace, name: name})
	if err != nil {
		return Explanation{}, err
	}
	if s.pod == nil {
		return Explanation{}, fmt.Errorf("%w: %s/%s", ErrNoPod, namespace, name)
	}
	verdict, err := aside.judge(ctx, &facts, &s, false)
	if err != nil {
		return Explanation{}, err
	}
	e := Explanation{Pod: s.pod, Facts: facts, Verdict: verdict, Targets: s.targets}
	if e.Verdict.Reason == Draining && s.pod.Annotations[keys.BarrierID] != "" {
		_, e.Idle = barrierWillWait(facts)
	}
	if e.Targets == nil {
		e.Targets = Targets(c.Slices, Listings(now, c.Slices, s.pod))
	}
	// A pod that is being drained and not queued has its capacity already.
	if own := c.Ledger.Pod(s.drainPod().UID); e.Verdict.Action == Drain && (!own.Draining || own.Queued) {
		if is := c.fullService(s); is.service != "" && is.draining >= max(1, is.usable/2) {
			e.Full = is.String()
		}
	}
	return e, nil
}
