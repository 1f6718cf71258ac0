// Package keys names the labels and annotations of pods and namespaces that several programs read
// or write, and the path of the preStop hook.
package keys

const (
	// Barrier is the label that opts a namespace or a pod in to the preStop barrier.
	Barrier = "lameduck.io/barrier"
	// BarrierID is the annotation by which the hook names its pod.
	BarrierID = "lameduck.io/barrier-id"
	// BarrierBound is the annotation with the longest wait of the hook, a duration.
	BarrierBound = "lameduck.io/barrier-bound"
	// BarrierGrace is the annotation with the grace period that the pod had before the bound was
	// added, in seconds.
	BarrierGrace = "lameduck.io/barrier-grace"
	// BarrierUncovered is the annotation that names the containers without a hook.
	BarrierUncovered = "lameduck.io/barrier-uncovered"

	// WaitPath is where node agents answer hooks. The pod's BarrierID follows.
	WaitPath = "/v1/wait/"
)
