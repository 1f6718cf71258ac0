//go:build long

package scale

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// deletions deletes pods, so many a second, whether or not earlier ones have ended, and returns how
// long each call took: that of kubectl, which asks again when it is told to.
func deletions(t *testing.T, kube kubernetes.Interface, pods []*corev1.Pod, rate int) []time.Duration {
	t.Helper()
	took := make([]time.Duration, len(pods))
	var all sync.WaitGroup
	ticker := time.NewTicker(time.Second / time.Duration(rate))
	defer ticker.Stop()
	for i, pod := range pods {
		all.Go(func() {
			began := time.Now()
			err := kube.CoreV1().Pods(pod.Namespace).Delete(t.Context(), pod.Name, metav1.DeleteOptions{})
			if err != nil {
				t.Errorf("deletion of %s after %s: %v", pod.Name, time.Since(began), err)
			}
			took[i] = time.Since(began)
		})
		<-ticker.C
	}
	all.Wait()
	return took
}

// storm is EndpointSlices of Services that no agent routes, without a selector.
type storm struct {
	kube   kubernetes.Interface
	slices []*discoveryv1.EndpointSlice
}

const (
	stormSlices    = 200
	stormEndpoints = 20
)

func newStorm(t *testing.T, s *stage.Stage) *storm {
	t.Helper()
	ns := harness.Namespace(t, s.Kube, "storm", nil)
	of := &storm{s.Kube, make([]*discoveryv1.EndpointSlice, stormSlices)}
	each(t, stormSlices, func(i int) (err error) {
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("storm-", i),
				Labels: map[string]string{discoveryv1.LabelServiceName: fmt.Sprint("storm-", i)}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](80)}},
		}
		for j := range stormEndpoints {
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
				Addresses:  []string{fmt.Sprintf("10.248.%d.%d", i, j+1)},
				Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)},
				TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: ns, Name: fmt.Sprint("none-", i, "-", j),
					UID: types.UID(fmt.Sprint("none-", i, "-", j))},
			})
		}
		of.slices[i], err = s.Kube.DiscoveryV1().EndpointSlices(ns).Create(t.Context(), slice, metav1.CreateOptions{})
		return err
	})
	return of
}

// run changes an endpoint of one slice after the other, so many a second, until ctx is done, and
// returns how many changes that were.
func (s *storm) run(ctx context.Context, rate int) (changes int64) {
	var next, done atomic.Int64
	began := time.Now()
	var all sync.WaitGroup
	const workers = 20 // each has slices of its own
	for w := range workers {
		all.Go(func() {
			for i := w; ctx.Err() == nil; i += workers {
				due := began.Add(time.Duration(next.Add(1)) * time.Second / time.Duration(rate))
				select {
				case <-time.After(time.Until(due)):
				case <-ctx.Done():
					return
				}
				slice := s.slices[i%stormSlices]
				ready := slice.Endpoints[i%stormEndpoints].Conditions.Ready
				*ready = !*ready
				is, err := s.kube.DiscoveryV1().EndpointSlices(slice.Namespace).Update(ctx, slice,
					metav1.UpdateOptions{})
				if err == nil {
					s.slices[i%stormSlices] = is
					done.Add(1)
				}
			}
		})
	}
	all.Wait()
	return done.Load()
}

// floor is how long it takes to connect n times at once with TLS, and to get one line back, where
// the server does nothing else.
func floor(t *testing.T, s *stage.Stage, n int) time.Duration {
	t.Helper()
	certs := t.TempDir()
	must(t, s.Cluster.CA().IssueFiles(certs, "floor"))
	pair, err := tls.LoadX509KeyPair(filepath.Join(certs, "tls.crt"), filepath.Join(certs, "tls.key"))
	must(t, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(s.Cluster.CA().PEM())
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair},
		MinVersion: tls.VersionTLS12})
	must(t, err)
	defer listener.Close()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(conn, conn); conn.Close() }()
		}
	}()
	began := time.Now()
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			raw, err := net.Dial("tcp", listener.Addr().String())
			if err != nil {
				t.Error(err)
				return
			}
			conn := tls.Client(raw, &tls.Config{RootCAs: roots, ServerName: "floor", MinVersion: tls.VersionTLS12})
			defer conn.Close()
			line := []byte("hello\n")
			if _, err := conn.Write(line); err != nil {
				t.Error(err)
			} else if _, err := io.ReadFull(conn, line); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	return time.Since(began)
}
