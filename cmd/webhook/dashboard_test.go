package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/dashboard"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// refuseAll authenticates no caller.
type refuseAll struct{}

func (refuseAll) Review(context.Context, string) error { return coordinator.ErrUnauthenticated }

// Whatever listens on another address than loopback must speak TLS and ask who it is. Were this
// mixed up, everybody in the pod network could read the names of all pods.
func TestTheDashboardIsOpenOnLoopbackAlone(t *testing.T) {
	certified := httptest.NewUnstartedServer(nil)
	certified.StartTLS()
	defer certified.Close()
	secure := &tls.Config{Certificates: certified.TLS.Certificates}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		DisableKeepAlives: true}}
	for _, c := range []struct{ address, http, https string }{
		{"127.0.0.1:0", "200", "server gave HTTP response to HTTPS client"},
		{"0.0.0.0:0", "400", "401"},
	} {
		t.Run(c.address, func(t *testing.T) {
			listener, err := net.Listen("tcp", c.address)
			if err != nil {
				t.Fatal(err)
			}
			coord := coordinator.New(drain.Holder{Replica: "r"}, drain.DefaultTimes(),
				coordinator.Options{Log: slog.New(slog.DiscardHandler),
					Metrics: coordinator.NewMetrics(prometheus.NewRegistry())})
			d := dashboard.New(dashboard.Options{Coordinator: coord, Reviewer: refuseAll{},
				Log: slog.New(slog.DiscardHandler)})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- serve.All(ctx, dashboardTask(listener, secure, d, slog.New(slog.DiscardHandler))) }()
			_, port, _ := net.SplitHostPort(listener.Addr().String())
			for scheme, want := range map[string]string{"http": c.http, "https": c.https} {
				got := ""
				response, err := client.Get(scheme + "://127.0.0.1:" + port + "/v1/view")
				if err != nil {
					got = err.Error()
				} else {
					_, _ = io.Copy(io.Discard, response.Body)
					response.Body.Close()
					got = fmt.Sprint(response.StatusCode)
				}
				if !strings.Contains(got, want) {
					t.Errorf("%s: %s, want %s", scheme, got, want)
				}
			}
			cancel()
			select {
			case err := <-done:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(10 * time.Second):
				t.Error("it does not end")
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := dashboardTask(nil, secure, nil, nil).Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestPodOf(t *testing.T) {
	synced := false
	known := fake.NewClientBuilder().WithObjects(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "edge", Name: "a",
		UID: "uid-a"}, Spec: corev1.PodSpec{NodeName: "node-1"}}).Build()
	of := podOf(known, func() bool { return synced })
	if got := of(drain.Pod{Namespace: "edge", Name: "a", UID: "uid-a"}); got != nil {
		t.Errorf("a cache that has not synced says %v, after it has waited for it", got)
	}
	synced = true
	for name, want := range map[string]string{"edge/a uid-a": "node-1",
		"edge/a uid-older": "", "edge/b uid-b": "", "uid-c uid-c": ""} {
		pod, uid, _ := strings.Cut(name, " ")
		namespace, pod, _ := strings.Cut(pod, "/")
		got := of(drain.Pod{Namespace: namespace, Name: pod, UID: drain.UID(uid)})
		if (got != nil) != (want != "") || got != nil && got.Spec.NodeName != want {
			t.Errorf("%s: %v, want %q", name, got, want)
		}
	}
}

// All pods of the cache are read: readers and scrapes share what was found, and an unsynced cache
// is not asked.
func TestPodsWithoutTheBarrierAreLookedForSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		synced := false
		reader := fake.NewClientBuilder().WithObjects(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "a", Labels: map[string]string{keys.Mode: keys.Enforce},
		}}).Build()
		missing := missingOf(&admission.Mutator{Reader: reader}, func() bool { return synced })
		want := func(what string, n int) {
			t.Helper()
			if got := missing(); len(got) != n {
				t.Errorf("%s: %q", what, got)
			}
		}
		want("not synced", 0)
		synced = true
		want("synced", 1)
		if err := reader.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace("shop")); err != nil {
			t.Fatal(err)
		}
		want("at once again", 1)
		time.Sleep(missingEvery)
		want("later", 0)
	})
}
