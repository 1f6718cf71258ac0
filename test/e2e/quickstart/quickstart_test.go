//go:build e2e

package quickstart

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// One start of three nodes for everything.
func TestInstalled(t *testing.T) {
	l := newLab(t)
	t.Run("QuickStart", l.testQuickStart)
	t.Run("OwnCertificates", l.testOwnCertificates)
	t.Run("Upgrade", l.testUpgrade)
}

// The quick start, from its first command to its last. What a rolling update must not lose, and
// uninstalling not leave, is looked at in between.
func (l *lab) testQuickStart(t *testing.T) {
	before := l.Everything(t)
	var load *clients
	var hooksBefore map[string]float64
	began := map[string]func(){
		"Run a rolling update that loses no request": func() {
			load = l.startClients(t, "web", "gateway")
			hooksBefore = l.waited(t)
			time.Sleep(time.Second) // clients ask for a while before
		},
		"Uninstall": func() { l.testRights(t) },
	}
	ended := map[string]func(out []string){
		"Install the coordinator": func(out []string) {
			for _, entry := range []string{"0", "1"} {
				want := "pods-" + entry + ".lameduck.io: Lameduck answers: replica lameduck-webhook-" + entry
				if !strings.Contains(strings.Join(out, ""), want) {
					t.Errorf("the check does not say %q", want)
				}
			}
		},
		"Let pods wait for kube-proxy": func(out []string) {
			if hooks := strings.Count(out[0], "/v1/wait/"); hooks != 4 {
				t.Errorf("%d pods have a hook, want 4", hooks)
			}
		},
		"Look at the state": func(out []string) {
			for _, want := range []string{"haproxy", "kube-proxy", "Would have to acknowledge"} {
				if !strings.Contains(out[0], want) {
					t.Errorf("no word of %q", want)
				}
			}
		},
		"Run a rolling update that loses no request": func(out []string) {
			l.Await(t, time.Minute, "the old pods are gone", func() error { return l.replicas(t.Context(), 4) })
			time.Sleep(2 * time.Second) // stale routes fail late
			load.stop(t, "rolling update")
			hooks := l.waited(t)
			t.Logf("hooks before %v, after %v", hooksBefore, hooks)
			if n := hooks["Acknowledged"] - hooksBefore["Acknowledged"]; n < 4 {
				t.Errorf("%v hooks were answered because everybody had let go, want one for each of the 4 old pods: %v",
					n, hooks)
			}
			if failed := l.failedHooks(t); failed != "" {
				t.Errorf("hooks failed: %s", failed)
			}
		},
	}
	// Each section of the page is known here, so that none can be renamed and lose what is asserted
	// of it.
	var known []string
	for _, s := range sections(t, "quickstart.md") {
		known = append(known, s.title)
		if do := began[s.title]; do != nil {
			do()
		}
		delete(began, s.title)
		var out []string
		for i, block := range s.blocks {
			if s.title == "Uninstall" && i == len(s.blocks)-1 {
				l.deletionsAreAsBefore(t)
			}
			out = append(out, l.sh(t, block))
		}
		if do := ended[s.title]; do != nil {
			do(out)
		}
		delete(ended, s.title)
		if t.Failed() {
			l.Explain(t)
			t.FailNow()
		}
	}
	if len(began) > 0 || len(ended) > 0 {
		t.Errorf("the page has the sections %q, and none of %q, %q", known, slices.Collect(maps.Keys(began)),
			slices.Collect(maps.Keys(ended)))
	}
	l.Await(t, time.Minute, "nothing is left", func() error {
		var left []string
		for name := range l.Everything(t) {
			if !before[name] {
				left = append(left, name)
			}
		}
		if slices.Sort(left); len(left) > 0 {
			return fmt.Errorf("%q", left)
		}
		return nil
	})
}

// replicas is nil if the application has so many pods, those that are going included.
func (l *lab) replicas(ctx context.Context, n int) error {
	pods, err := l.Kube.CoreV1().Pods(shop).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=web"})
	if err == nil && len(pods.Items) != n {
		err = fmt.Errorf("%d pods, want %d", len(pods.Items), n)
	}
	return err
}

// deletionsAreAsBefore deletes a pod whose hook has no agent any more.
func (l *lab) deletionsAreAsBefore(t *testing.T) {
	t.Helper()
	for _, kind := range []string{"validatingwebhookconfigurations", "mutatingwebhookconfigurations"} {
		out, err := l.Kubectl(t.Context(), "get", kind, "-o", "name")
		if err != nil || strings.Contains(out, "lameduck") {
			t.Errorf("%s: %q, %v", kind, out, err)
		}
	}
	pods, err := l.Kube.CoreV1().Pods(shop).List(t.Context(),
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=web"})
	if err != nil || len(pods.Items) == 0 {
		t.Fatalf("pods: %v, %v", pods, err)
	}
	victim := pods.Items[0]
	began := time.Now()
	if err := l.Kube.CoreV1().Pods(shop).Delete(t.Context(), victim.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	// A webhook that is asked and does not answer takes its timeoutSeconds, 5 s, and a hook that
	// waits 30 s.
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("the deletion was answered after %s", took)
	}
	l.Await(t, 25*time.Second, "a pod is gone whose hook finds no agent", func() error {
		got, err := l.Kube.CoreV1().Pods(shop).Get(t.Context(), victim.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) || err == nil && got.UID != victim.UID {
			return nil
		}
		return fmt.Errorf("it is still there: %v", err)
	})
	t.Logf("without Lameduck a pod with a hook was gone after %.1f s", time.Since(began).Seconds())
	// HAProxy that is told to stop while it starts is not told at all.
	if out, err := l.trySh(t.Context(), "kubectl -n shop rollout status deployment/web --timeout=60s"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}
