package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

const (
	// benchDrains are open where the coordinator is busy, benchHolds calls are held.
	benchDrains = 1000
	benchHolds  = 32
	// benchReviews are asked for one p99.
	benchReviews = 1000
)

// runAdmission measures what the webhook adds to the deletion of a pod that no gateway routes to:
// most pods of a cluster.
func runAdmission() ([]Result, error) {
	free, err := newBenchWebhook(false)
	if err != nil {
		return nil, err
	}
	defer free.close()
	busy, err := newBenchWebhook(true)
	if err != nil {
		return nil, err
	}
	defer busy.close()
	constant := []byte(`{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1","response":{"uid":"x","allowed":true}}`)
	floor, err := newBenchServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(constant)
	}))
	if err != nil {
		return nil, err
	}
	defer floor.close()
	var failed error
	p99 := func(s *benchServer) func() time.Duration {
		return func() time.Duration {
			d, err := s.p99()
			if err != nil {
				failed = err
				return 1
			}
			return d
		}
	}
	results := []Result{
		{Name: "admission/fast-path", Ratio: ratio(p99(free.benchServer), p99(floor)), Goal: 2.5,
			Note: "p99 of a review of a pod that no gateway routes to, over a handler that discards it, TLS"},
		{Name: "admission/fast-path-busy", Ratio: ratio(p99(busy.benchServer), p99(free.benchServer)), Goal: 2,
			Note: fmt.Sprintf("the same with %d drains open and %d calls held, over none", benchDrains, benchHolds)},
	}
	if holds := busy.holding(); failed == nil && holds < benchHolds/2 {
		failed = fmt.Errorf("%v calls are held at the end, want about %d", holds, benchHolds)
	}
	return results, failed
}

// benchServer is a handler behind TLS, and a client with one connection to it, as the API server
// keeps them.
type benchServer struct {
	url    string
	client *http.Client
	body   []byte
	close  func()
}

func newBenchServer(handler http.Handler) (*benchServer, error) {
	certified := httptest.NewUnstartedServer(nil)
	certified.StartTLS()
	defer certified.Close()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	task := serve.Server{
		Name: "bench", Listener: listener, Handler: handler, TLS: &tls.Config{Certificates: certified.TLS.Certificates},
		Conns:    1000,
		ReadTime: 5 * time.Second, WriteTime: 10 * time.Second,
	}.Task()
	go func() { done <- task.Run(ctx) }()
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{ServerName: "example.com",
			RootCAs: certified.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs},
		MaxIdleConnsPerHost: 25,
	}}
	pod := benchPod("job", "batch-1")
	body, err := benchReview(pod)
	if err != nil {
		cancel()
		return nil, err
	}
	return &benchServer{url: "https://" + listener.Addr().String() + "/?timeout=5s", client: client, body: body,
		close: func() {
			cancel()
			client.CloseIdleConnections()
			<-done
		}}, nil
}

// ask sends a review and returns the answer.
func (s *benchServer) ask(body []byte) (*admissionv1.AdmissionReview, error) {
	response, err := s.client.Post(s.url, "application/json", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	var answer admissionv1.AdmissionReview
	if err := json.Unmarshal(text, &answer); err != nil || answer.Response == nil {
		return nil, fmt.Errorf("%s: %s", response.Status, text)
	}
	return &answer, nil
}

// p99 asks about the pod again and again, one after the other.
func (s *benchServer) p99() (time.Duration, error) {
	took := make([]time.Duration, benchReviews)
	for i := range took {
		began := time.Now()
		response, err := s.client.Post(s.url, "application/json", bytes.NewReader(s.body))
		if err != nil {
			return 0, err
		}
		text, err := io.ReadAll(response.Body)
		response.Body.Close()
		took[i] = time.Since(began)
		if err != nil || !bytes.Contains(text, []byte(`"allowed":true`)) {
			return 0, fmt.Errorf("%s: %s (%v)", response.Status, text, err)
		}
	}
	slices.Sort(took)
	return took[benchReviews*99/100], nil
}

// benchWebhook is the webhook with a coordinator of its own. What it reads is a Service of many
// pods, an agent that never answers, and a pod that no Service selects.
type benchWebhook struct {
	*benchServer
	holding func() float64
}

func newBenchWebhook(busy bool) (*benchWebhook, error) {
	registry := prometheus.NewRegistry()
	log := slog.New(slog.DiscardHandler)
	times := drain.DefaultTimes()
	times.Deadline = 10 * time.Hour
	times.Abandon = 10 * time.Hour
	coord := coordinator.New(drain.Holder{Replica: "bench", Epoch: "1"}, times,
		coordinator.Options{MaxHolds: benchHolds, Log: log, Metrics: coordinator.NewMetrics(registry)})
	coord.Expect([]drain.Expected{{ID: "silent", Name: "edge/silent", Ready: true, Label: drain.LabelDirected}})
	world := &benchCluster{pods: map[types.NamespacedName]*corev1.Pod{}}
	index := endpoints.NewIndex()
	slice := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-1",
			Labels: map[string]string{discovery.LabelServiceName: "web"}},
		AddressType: discovery.AddressTypeIPv4,
	}
	world.add(benchPod("job", "batch-1"))
	for i := range benchDrains {
		pod := benchPod("shop", fmt.Sprintf("web-%d", i))
		world.add(pod)
		slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
			Addresses: []string{fmt.Sprintf("10.1.%d.%d", i/250, i%250+1)},
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Name: pod.Name, UID: pod.UID},
		})
	}
	index.Apply(time.Now(), slice)
	handler := &admission.Handler{
		Cluster: &admission.Cluster{
			Reader: world, Slices: index, Ledger: coord, Synced: func() bool { return true },
			Excluded: []string{"kube-system"}, Started: time.Now().Add(-time.Hour), Coverage: world,
		},
		Times: times, Events: world, Log: log, Metrics: admission.NewMetrics(registry), Others: world,
	}
	server, err := newBenchServer(handler)
	if err != nil {
		return nil, err
	}
	w := &benchWebhook{benchServer: server, holding: func() float64 { return gauge(registry, "lameduck_holds") }}
	if !busy {
		return w, nil
	}
	for i := range benchDrains {
		pod := world.pods[types.NamespacedName{Namespace: "shop", Name: fmt.Sprintf("web-%d", i)}]
		of := drain.Pod{Namespace: pod.Namespace, Name: pod.Name, UID: drain.UID(pod.UID)}
		coord.Unroute(request(of, drain.Service{Namespace: "shop", Name: "web"}))
	}
	// Callers that come back at once, so that the cap is reached all the time.
	ctx, cancel := context.WithCancel(context.Background())
	var callers sync.WaitGroup
	for i := range benchHolds {
		body, err := benchReview(world.pods[types.NamespacedName{Namespace: "shop", Name: fmt.Sprintf("web-%d", i)}])
		if err != nil {
			cancel()
			server.close()
			return nil, err
		}
		callers.Go(func() {
			for ctx.Err() == nil {
				if _, err := server.ask(body); err != nil {
					return
				}
			}
		})
	}
	end := server.close
	server.close = func() {
		cancel()
		callers.Wait()
		end()
	}
	for began := time.Now(); w.holding() < benchHolds; time.Sleep(time.Millisecond) {
		if time.Since(began) > 5*time.Second {
			server.close()
			return nil, fmt.Errorf("%v calls are held, want %d", w.holding(), benchHolds)
		}
	}
	return w, nil
}

func gauge(registry *prometheus.Registry, name string) float64 {
	families, err := registry.Gather()
	if err != nil {
		return -1
	}
	for _, f := range families {
		if f.GetName() == name {
			return f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	return -1
}

// benchPod is a ready pod of about 10 KB as JSON, as an operator's template and a service mesh make
// them.
func benchPod(namespace, name string) *corev1.Pod {
	pod := &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{"app": "web"},
			Annotations: map[string]string{"checksum/config": strings.Repeat("0123456789abcdef", 4)},
		},
		Spec: corev1.PodSpec{NodeName: "node-1"},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue,
				LastTransitionTime: metav1.NewTime(time.Now().Add(-time.Hour).Truncate(time.Second))},
		}},
	}
	for i := range 4 {
		c := corev1.Container{Name: fmt.Sprintf("app-%d", i),
			Image: "registry.example.com/team/app@sha256:" + strings.Repeat("0", 64)}
		for j := range 20 {
			c.Env = append(c.Env, corev1.EnvVar{Name: fmt.Sprintf("SETTING_NUMBER_%d", j),
				Value: strings.Repeat("value ", 10)})
		}
		pod.Spec.Containers = append(pod.Spec.Containers, c)
	}
	return pod
}

// benchReview is the review of a pod's deletion, as the API server writes it.
func benchReview(pod *corev1.Pod) ([]byte, error) {
	raw, err := json.Marshal(pod)
	if err != nil {
		return nil, err
	}
	review := admissionv1.AdmissionReview{Request: &admissionv1.AdmissionRequest{
		UID: "review-1", Operation: admissionv1.Delete, Namespace: pod.Namespace, Name: pod.Name,
		Resource:  metav1.GroupVersionResource{Version: "v1", Resource: "pods"},
		OldObject: runtime.RawExtension{Raw: raw},
		Options:   runtime.RawExtension{Raw: []byte(`{"kind":"DeleteOptions","apiVersion":"meta.k8s.io/v1"}`)},
	}}
	review.SetGroupVersionKind(admissionv1.SchemeGroupVersion.WithKind("AdmissionReview"))
	return json.Marshal(review)
}

// benchCluster is a cache of pods, one node and no budgets.
type benchCluster struct {
	pods map[types.NamespacedName]*corev1.Pod
}

func (c *benchCluster) add(pod *corev1.Pod) {
	c.pods[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}] = pod
}

// Event implements admission.Events.
func (c *benchCluster) Event(*corev1.Pod, bool, string, string) {}

// Uncovered implements admission.Coverage: each gateway has an agent.
func (c *benchCluster) Uncovered(context.Context, []drain.Service, bool) ([]string, error) {
	return nil, nil
}

// Opener implements admission.Others: there is no other replica.
func (c *benchCluster) Opener() bool { return true }

// Claim implements admission.Others.
func (c *benchCluster) Claim(context.Context, wire.Claim) (claimed wire.Claimed, ok bool) {
	return claimed, false
}

// Asked implements admission.Others.
func (c *benchCluster) Asked(context.Context, drain.Pod, time.Duration) bool { return false }

// Get implements client.Reader. Like the webhook's cache it copies no more than the outermost
// struct.
func (c *benchCluster) Get(_ context.Context, key types.NamespacedName, into client.Object,
	_ ...client.GetOption) error {
	switch into := into.(type) {
	case *corev1.Pod:
		if pod := c.pods[key]; pod != nil {
			*into = *pod
			return nil
		}
	case *corev1.Node:
		into.Name = key.Name
		return nil
	case *corev1.Namespace:
		into.Name = key.Name
		return nil
	}
	return apierrors.NewNotFound(schema.GroupResource{Resource: fmt.Sprintf("%T", into)}, key.Name)
}

// List implements client.Reader.
func (c *benchCluster) List(context.Context, client.ObjectList, ...client.ListOption) error {
	return nil
}
