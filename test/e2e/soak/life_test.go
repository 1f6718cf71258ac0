//go:build long

package soak

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

const (
	// ages is how long a pod is ready before it is deleted: longer than coordinators call it young.
	ages = 12 * time.Second
	// churnEvery is how many lives a further Service lasts, which lists the pods of another one.
	churnEvery = 50
)

// lives are pods without processes, to which this test is the kubelet.
type lives struct {
	kube, kubelet kubernetes.Interface
	// waiting is how many pods are held or wait at the barrier at the moment.
	waiting atomic.Int64

	mu sync.Mutex
	// listed has a channel for each pod that is not listed as ready yet.
	listed map[types.UID]chan struct{}
	// holds and waits are how long deletions and hooks took.
	holds, waits []time.Duration
	errs         []error
}

// watch has EndpointSlices close the channels of listed.
func (l *lives) watch(ctx context.Context) error {
	factory := informers.NewSharedInformerFactoryWithOptions(l.kube, 0, informers.WithNamespace(namespace))
	see := func(object any) {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, e := range object.(*discovery.EndpointSlice).Endpoints {
			if e.TargetRef == nil || !ptr.Deref(e.Conditions.Ready, false) {
				continue
			}
			if c := l.listed[e.TargetRef.UID]; c != nil {
				close(c)
				delete(l.listed, e.TargetRef.UID)
			}
		}
	}
	if _, err := factory.Discovery().V1().EndpointSlices().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: see, UpdateFunc: func(_, object any) { see(object) },
	}); err != nil {
		return err
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	return nil
}

// live is one life, from creation to the end.
func (l *lives) live(ctx context.Context, n int) error {
	pods := l.kube.CoreV1().Pods(namespace)
	node := n%nodes + 1
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("life-", n),
			Labels: map[string]string{"app": fmt.Sprint("web-", n/nodes%services), lifeLabel: ""}},
		Spec: corev1.PodSpec{
			NodeName: fmt.Sprint("node-", node), AutomountServiceAccountToken: ptr.To(false),
			Containers:  []corev1.Container{{Name: "app", Image: "none"}},
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
		},
	}
	pod, err := pods.Create(ctx, pod, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	uid, listed := pod.UID, make(chan struct{})
	l.mu.Lock()
	l.listed[uid] = listed
	l.mu.Unlock()
	now := metav1.Now()
	ip := fmt.Sprintf("10.244.%d.%d", 128+n/250%64, n%250+1)
	pod.Status = corev1.PodStatus{
		Phase: corev1.PodRunning, StartTime: &now, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue,
			LastTransitionTime: now}},
	}
	if pod, err = l.kubelet.CoreV1().Pods(namespace).UpdateStatus(ctx, pod, metav1.UpdateOptions{}); err != nil {
		return err
	}
	hook := pod.Spec.Containers[0].Lifecycle
	if hook == nil || hook.PreStop == nil || hook.PreStop.HTTPGet == nil {
		return errors.New("the pod has no hook")
	}
	select {
	case <-listed:
	case <-time.After(time.Minute):
		return errors.New("the pod is not listed as ready within a minute")
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case <-time.After(ages): // the age is what is waited for
	case <-ctx.Done():
		return ctx.Err()
	}
	l.waiting.Add(1)
	defer l.waiting.Add(-1)
	began := time.Now()
	if err := pods.Delete(ctx, pod.Name, metav1.DeleteOptions{
		Preconditions: metav1.NewUIDPreconditions(string(uid))}); err != nil {
		return fmt.Errorf("delete: %w", err)
	}
	held := time.Since(began)
	began = time.Now()
	if err := ask(ctx, fmt.Sprintf("http://127.0.0.%d:%d/%s", node, hook.PreStop.HTTPGet.Port.IntValue(),
		strings.TrimPrefix(hook.PreStop.HTTPGet.Path, "/"))); err != nil {
		return fmt.Errorf("hook: %w", err)
	}
	waited := time.Since(began)
	if err := l.kubelet.CoreV1().Pods(namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: ptr.To[int64](0), Preconditions: metav1.NewUIDPreconditions(string(uid)),
	}); err != nil {
		return fmt.Errorf("end: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holds, l.waits = append(l.holds, held), append(l.waits, waited)
	return nil
}

// ask is the kubelet's request of a hook.
func ask(ctx context.Context, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := hooks.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", response.Status, text)
	}
	return nil
}

// hooks makes a connection for each request, as the kubelet does.
var hooks = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 2 * time.Minute}

// churn makes a further Service of the pods of another one, and deletes the one before the last.
func (l *lives) churn(ctx context.Context, n int) error {
	all := l.kube.CoreV1().Services(namespace)
	_, err := all.Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("churn-", n)},
		Spec: corev1.ServiceSpec{Selector: map[string]string{"app": fmt.Sprint("web-", n%services)},
			Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
	}, metav1.CreateOptions{})
	if n >= 2 {
		err = errors.Join(err, all.Delete(ctx, fmt.Sprint("churn-", n-2), metav1.DeleteOptions{}))
	}
	return err
}

// atOnce bounds the pods that live at one time, if the machine is slower than the rate.
const atOnce = 400

// run has n lives begin, so many a second, with the numbers from first on.
func (l *lives) run(ctx context.Context, first, n, rate int, ended func()) {
	var all sync.WaitGroup
	defer all.Wait()
	ticker := time.NewTicker(time.Second / time.Duration(rate))
	defer ticker.Stop()
	turns := make(chan struct{}, atOnce)
	for i := first; i < first+n; i++ {
		if i%churnEvery == 0 {
			all.Go(func() { l.failed(l.churn(ctx, i/churnEvery)) })
		}
		turns <- struct{}{}
		all.Go(func() {
			defer func() { <-turns }()
			if err := l.live(ctx, i); err != nil {
				l.failed(fmt.Errorf("life %d: %w", i, err))
			}
			ended()
		})
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

func (l *lives) failed(err error) {
	if err == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.errs = append(l.errs, err)
}
