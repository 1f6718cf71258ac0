// Package keys has the names of labels, annotations and paths that several programs share: those of
// pods and namespaces, and the path of the preStop hook.
package keys

import (
	"slices"
	"time"
)

// Mode is the label of a namespace, or of a pod, that says what Lameduck does with its deletions.
const Mode = "lameduck.io/mode"

// The values of [Mode].
const (
	// Enforce: a deletion waits, and new pods get the preStop hook.
	Enforce = "enforce"
	// Observe: nothing waits, and no exclusion is sent. What a deletion would have waited for is
	// measured.
	Observe = "observe"
	// Off: nothing waits, and nothing is measured.
	Off = "off"
)

// ModeOf returns the mode of a pod by its own labels, else by those of its namespace, else by the
// default of the cluster. Only in a namespace that is Off does the pod's own label not count,
// because the API server does not ask there. Another value than the three says nothing.
func ModeOf(pod, namespace map[string]string, byDefault string) string {
	if namespace[Mode] == Off {
		return Off
	}
	for _, mode := range []string{pod[Mode], namespace[Mode], byDefault} {
		if IsMode(mode) {
			return mode
		}
	}
	return Enforce
}

// IsMode reports whether a value of the label is one of the three.
func IsMode(value string) bool { return slices.Contains([]string{Enforce, Observe, Off}, value) }

const (
	// BarrierID is the annotation by which the hook names its pod. At its creation a pod has no UID
	// and, with generateName, no name, so the id is its namespace, a dot and a random text.
	BarrierID = "lameduck.io/barrier-id"
	// BarrierBound is the annotation with the longest wait of the hook, a duration. The grace
	// period was extended by it. On a namespace or a Service it sets the bound of pods that are
	// created there.
	BarrierBound = "lameduck.io/barrier-bound"
	// DefaultBound is the bound where neither a file nor an annotation states one.
	DefaultBound = 30 * time.Second
	// BarrierGrace is the annotation with the grace period that the pod had before the bound was
	// added, in seconds.
	BarrierGrace = "lameduck.io/barrier-grace"
	// BarrierUncovered is the annotation that names the containers that could not be given the
	// hook, separated by commas: they stop without waiting.
	BarrierUncovered = "lameduck.io/barrier-uncovered"

	// WaitContainer is the name of the init container that brings the program lameduck-wait.
	WaitContainer = "lameduck-wait"
	// WaitPath is where node agents answer hooks. The pod's BarrierID follows.
	WaitPath = "/v1/wait/"
)

// Barred reports whether every container of a pod with these annotations has the hook.
func Barred(pod map[string]string) bool { return pod[BarrierID] != "" && pod[BarrierUncovered] == "" }
