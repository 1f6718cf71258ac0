package nodepods

import (
	"log/slog"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/internal/keys"
)

// A tenant copies the id of a pod that it can read into its own namespace, and keeps the copy
// terminating with a finalizer. The hook of the first pod must not wait for it.
func TestAnIDIsOfOneNamespace(t *testing.T) {
	pod := func(namespace, uid string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: uid, UID: types.UID(uid),
			Annotations: map[string]string{keys.BarrierID: "shop.text", keys.BarrierBound: "0s"}}}
	}
	n := New(func(Pod) {}, slog.New(slog.DiscardHandler))
	copied := pod("tenant", "a")
	now, grace := metav1.Now(), int64(30)
	copied.DeletionTimestamp, copied.DeletionGracePeriodSeconds = &now, &grace
	n.Set(copied, false)
	if p, ok, _ := n.Find("shop.text"); ok {
		t.Errorf("the hook waits for %s", p.Pod)
	}
	n.Set(pod("shop", "b"), false)
	if p, ok, _ := n.Find("shop.text"); !ok || p.Pod.Namespace != "shop" {
		t.Errorf("the hook waits for %s", p.Pod)
	}
}
