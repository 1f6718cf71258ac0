// Package agenttest has the fixtures that the tests of the packages below internal/agent share.
// Only tests import it.
package agenttest

import (
	"bytes"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Hooked returns a pod with the barrier, as the webhook adds it.
func Hooked(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: name, UID: types.UID("uid-" + name),
			Annotations: map[string]string{"lameduck.io/barrier-id": "id-" + name, "lameduck.io/barrier-bound": "30s",
				"lameduck.io/barrier-grace": "5"},
		},
		Status: corev1.PodStatus{PodIPs: []corev1.PodIP{{IP: "10.1.0.7"}}},
	}
}

// Deleted returns the pod after a deletion with a grace period.
func Deleted(p *corev1.Pod, grace time.Duration) *corev1.Pod {
	p = p.DeepCopy()
	seconds := int64(grace.Seconds())
	at := metav1.NewTime(time.Now().Add(grace).Truncate(time.Second))
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &at, &seconds
	return p
}

// Slice makes a slice of namespace/service with port 80 and ready endpoints, written "10.0.0.1@a",
// or "10.0.0.1" without a pod.
func Slice(name, namespace, service string, list ...string) *discovery.EndpointSlice {
	port, portName := int32(80), "http"
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
			Labels: map[string]string{discovery.LabelServiceName: service}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: &portName, Port: &port}},
	}
	for _, text := range list {
		addr, uid, ok := strings.Cut(text, "@")
		e := discovery.Endpoint{Addresses: []string{addr}}
		if ok {
			e.TargetRef = &corev1.ObjectReference{Kind: "Pod", UID: types.UID(uid)}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

// Until fails the test unless is returns true within 30 s.
func Until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not so after 30 s: %s", what)
		}
	}
}

// Log collects what is written to it, and may be read meanwhile.
type Log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// String returns all that was written.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
