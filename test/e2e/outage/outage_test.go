// Package outage checks how soon an agent hears of changes after the API server was away.
package outage

import (
	"context"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/lameduck-io/lameduck/internal/kubeclient"
	"github.com/lameduck-io/lameduck/internal/watch"
	"github.com/lameduck-io/lameduck/test/cluster"
)

func TestMain(m *testing.M) { cluster.Main(m) }

// Twice the API server is away for a while. With client-go's own pauses, some watches then hear of
// nothing for up to a minute.
func TestWatchesAreThereAgainSoon(t *testing.T) {
	const watches, away, most = 8, 20 * time.Second, 10 * time.Second
	c, err := cluster.Start(t.Context(), cluster.Options{NoControllers: true, NoScheduler: true})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Stop()
	kube, _, err := kubeclient.New(c.Kubeconfig(), "test")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	heard := make(chan struct{}, watches)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	for range watches {
		w, err := watch.New(kube, watch.Options[*corev1.ConfigMap]{
			Informer: func(f informers.SharedInformerFactory) cache.SharedIndexInformer {
				return f.Core().V1().ConfigMaps().Informer()
			},
			Changed: func(_, is *corev1.ConfigMap) {
				if is != nil && is.Name == "new" {
					heard <- struct{}{}
				}
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		running.Go(func() {
			if err := w.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		w.Synced(ctx)
	}
	for range 2 {
		c.KillAPIServer()
		time.Sleep(away) // client-go tries again and again, with longer and longer pauses
		if err := c.RestartAPIServer(ctx); err != nil {
			t.Fatal(err)
		}
	}
	back := time.Now()
	if _, err := kube.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "new"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	over := time.After(most)
	for i := range watches {
		select {
		case <-heard:
		case <-over:
			t.Fatalf("%s after the API server is back, %d of %d watches have heard of a new object", most, i, watches)
		}
	}
	t.Logf("all heard of it %.1f s after the API server was back", time.Since(back).Seconds())
}
