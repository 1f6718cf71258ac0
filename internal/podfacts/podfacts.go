// Package podfacts has what several programs read from a pod's object.
package podfacts

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/keys"
)

// MaxBound is the longest bound that a pod's barrier may have.
const MaxBound = 10 * time.Minute

// Barrier is what the annotations of a pod state about its barrier.
type Barrier struct {
	// ID is the random id that its hooks name.
	ID string
	// Bound is how long its hooks may last. Grace is the time that its application has after them.
	Bound, Grace time.Duration
}

// BarrierOf reads the barrier of a pod. ok is false if it has none.
func BarrierOf(p *corev1.Pod) (b Barrier, ok bool) {
	b = Barrier{ID: p.Annotations[keys.BarrierID], Bound: keys.DefaultBound}
	if d, err := time.ParseDuration(p.Annotations[keys.BarrierBound]); err == nil && d >= 0 {
		b.Bound = min(d, MaxBound)
	}
	if s, err := strconv.Atoi(p.Annotations[keys.BarrierGrace]); err == nil && s >= 0 {
		b.Grace = time.Duration(s) * time.Second
	}
	// Who can read a pod can copy its id, into another namespace too. An id without a dot names no
	// namespace.
	of, _, names := strings.Cut(b.ID, ".")
	return b, b.ID != "" && (!names || of == p.Namespace)
}

// Kinds of hooks, as they are shown.
const (
	HookHTTP = "httpGet"
	HookExec = "exec"
	HookNone = "none"
)

// Hook returns the kind of the preStop hook by which a container waits at the barrier.
func (b Barrier) Hook(c *corev1.Container) string {
	if b.ID == "" || c.Lifecycle == nil || c.Lifecycle.PreStop == nil {
		return HookNone
	}
	switch stop := c.Lifecycle.PreStop; {
	case stop.HTTPGet != nil && strings.HasPrefix(stop.HTTPGet.Path+"?", keys.WaitPath+b.ID+"?"):
		return HookHTTP
	case stop.Exec != nil && slices.Contains(stop.Exec.Command, "--id="+b.ID):
		return HookExec
	}
	return HookNone
}

// Workload returns a hash of a pod's controller: of its Deployment, after which its ReplicaSets are
// named. It is empty if the pod has none.
func Workload(p *corev1.Pod) string {
	owner := metav1.GetControllerOf(p)
	if owner == nil {
		return ""
	}
	name := owner.Name
	if hash := p.Labels["pod-template-hash"]; hash != "" {
		name = strings.TrimSuffix(name, "-"+hash)
	}
	hash := fnv.New64a()
	fmt.Fprint(hash, p.Namespace, "/", owner.Kind, "/", name)
	return strconv.FormatUint(hash.Sum64(), 36)
}

// Ready reports whether a pod is ready and not terminating.
func Ready(pod *corev1.Pod) bool {
	_, ready := ReadySince(pod)
	return ready && pod.DeletionTimestamp == nil
}

// ReadySince returns when a pod's Ready condition last changed, and whether the condition is true.
func ReadySince(pod *corev1.Pod) (at time.Time, ready bool) {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.LastTransitionTime.Time, c.Status == corev1.ConditionTrue
		}
	}
	return time.Time{}, false
}

// BackSince returns since when a ready pod can serve, by the clock of its node: since its Ready
// condition became true or, if that is later, since its newest container was started. Without a
// readiness probe the condition stays true while a container is started again. Of a start only the
// second is known, and at is the end of it: the stop before it is often in the same second.
func BackSince(pod *corev1.Pod) (at time.Time, ready bool) {
	at, ready = ReadySince(pod)
	for _, c := range pod.Status.ContainerStatuses {
		if c.State.Running == nil {
			continue
		}
		if end := c.State.Running.StartedAt.Add(time.Second - 1); end.After(at) {
			at = end
		}
	}
	return at, ready
}

// Addresses returns the addresses of a pod, with port 0: all of their ports. A pod that uses its
// node's network has none of its own.
func Addresses(pod *corev1.Pod) (all []netip.AddrPort) {
	if pod.Spec.HostNetwork {
		return nil
	}
	for _, ip := range pod.Status.PodIPs {
		if addr, err := netip.ParseAddr(ip.IP); err == nil {
			all = append(all, netip.AddrPortFrom(addr, 0))
		}
	}
	return all
}
