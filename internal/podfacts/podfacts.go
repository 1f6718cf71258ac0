// Package podfacts has what several programs read from a pod's object.
package podfacts

import (
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
)

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
