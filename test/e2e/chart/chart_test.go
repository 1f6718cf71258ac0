//go:build long

package chart

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

func TestMain(m *testing.M) { cluster.MainAsRoot(m) }

// lab is a real node with nothing but images on it, and a Helm.
type lab struct {
	*harness.Lab
	helm string
}

// With Helm 3 and with Helm 4: install, test, upgrade, rollback, uninstall, on one real node.
func TestHelm(t *testing.T) {
	cluster.Entered(t)
	bin := harness.StaticPrograms(t)
	of := harness.NewLab(t, machine.ControlPlane(), 1, machine.Options{Images: harness.Images(bin, "dev")}, 100,
		[2]string{"lameduck-system", "app.kubernetes.io/component=webhook"})
	for _, name := range []string{"helm3", "helm4"} {
		t.Run(name, func(t *testing.T) {
			l := &lab{of, gatewaytest.LookPath(t, name)}
			before := l.Everything(t)
			harness.Namespace(t, l.Kube, "lameduck-system",
				map[string]string{"pod-security.kubernetes.io/enforce": "restricted"})
			namespaced := l.Everything(t)
			l.refused(t)
			l.left(t, namespaced, "an install that was refused")
			l.failedInstall(t, namespaced)
			l.lifecycle(t)
			l.left(t, namespaced, "uninstall")
			l.interrupted(t)
			l.left(t, namespaced, "an uninstall that was interrupted, and another one")
			if err := l.Kube.CoreV1().Namespaces().Delete(t.Context(), "lameduck-system",
				metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			l.left(t, before, "everything")
		})
	}
}

// run runs Helm on the chart's release.
func (l *lab) run(t *testing.T, command string, args ...string) (string, error) {
	t.Helper()
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	args = append([]string{command, "lameduck", "--namespace=lameduck-system"}, args...)
	cmd := exec.CommandContext(ctx, l.helm, args...)
	home := t.TempDir()
	cmd.Env = append(os.Environ(), "KUBECONFIG="+l.Kubeconfig(), "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home,
		"HELM_DATA_HOME="+home)
	out, err := cmd.CombinedOutput()
	t.Logf("%s %s (%.1f s): %v", filepath.Base(l.helm), strings.Join(args, " "), time.Since(began).Seconds(), err)
	return string(out), err
}

// must is run without an error.
func (l *lab) must(t *testing.T, command string, args ...string) string {
	t.Helper()
	out, err := l.run(t, command, args...)
	if err != nil {
		l.Explain(t)
		t.Fatalf("%v: %s", err, out)
	}
	return out
}

// left fails the test unless the cluster has what it had before.
func (l *lab) left(t *testing.T, before map[string]bool, what string) {
	t.Helper()
	l.Await(t, 2*time.Minute, "the cluster is as before "+what, func() error {
		now := l.Everything(t)
		more := slices.DeleteFunc(slices.Sorted(maps.Keys(now)), func(o string) bool { return before[o] })
		less := slices.DeleteFunc(slices.Sorted(maps.Keys(before)), func(o string) bool { return now[o] })
		if len(more)+len(less) > 0 {
			return fmt.Errorf("more: %q, less: %q", more, less)
		}
		return nil
	})
}

// refused misspells a key in a value.
func (l *lab) refused(t *testing.T) {
	for _, wrong := range []string{"webhook.entry=3", "monitoring.podmonitor.enabled=true", "prority=x",
		"affinity.nodeAffinity.preferredx=x"} { // which Helm 3 would let pass
		if out, err := l.run(t, "install", harness.ChartDir, "--set="+wrong); err == nil ||
			!strings.Contains(out, "not allowed") {
			t.Errorf("%s: %v: %s", wrong, err, out)
		}
	}
}

// failedInstall installs with a selector that leaves out the check's namespace, so that the check
// alone fails, and then an image that is nowhere. Helm takes everything back if asked. Otherwise
// uninstall does, also where the glass was broken before.
func (l *lab) failedInstall(t *testing.T, before map[string]bool) {
	if out, err := l.run(t, "install", harness.ChartDir, "--set=barrier.enabled=true", "--set-json=namespaceSelector="+
		`{"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["lameduck-check"]}]}`,
		"--wait", "--timeout=20s", "--atomic"); err == nil || !strings.Contains(out, "post-install") {
		t.Fatalf("the check hears nothing: %v: %s", err, out)
	}
	l.left(t, before, "an install whose check failed")
	args := []string{harness.ChartDir, "--set=image.tag=none", "--set=image.pullPolicy=Never",
		"--set=barrier.enabled=true", "--wait", "--timeout=15s"}
	if out, err := l.run(t, "install", append(args, "--atomic")...); err == nil {
		t.Fatalf("an image that is not there: %s", out)
	}
	l.left(t, before, "an install that failed")
	if out, err := l.run(t, "install", args...); err == nil {
		t.Fatalf("an image that is not there: %s", out)
	}
	if err := l.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Delete(t.Context(), "lameduck",
		metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
	l.must(t, "uninstall", "--wait")
	l.left(t, before, "an install that failed, and uninstall")
}

// lifecycle installs, upgrades to three entries and back. Each entry is asked after each step: the
// chart's check is a part of install and upgrade, and helm test is it again.
func (l *lab) lifecycle(t *testing.T) {
	l.must(t, "install", harness.ChartDir, "--set=barrier.enabled=true", "--wait")
	l.entries(t, 2)
	if out := l.must(t, "test"); !strings.Contains(out, "Succeeded") {
		t.Errorf("helm test: %s", out)
	}
	l.must(t, "upgrade", harness.ChartDir, "--set=barrier.enabled=true", "--set=webhook.entries=3", "--wait")
	l.entries(t, 3)
	if out, err := l.run(t, "upgrade", harness.ChartDir, "--set=image.tag=none", "--set=image.pullPolicy=Never",
		"--wait", "--timeout=15s"); err == nil {
		t.Errorf("an upgrade to an image that is not there: %s", out)
	}
	l.must(t, "rollback", "1", "--wait")
	l.entries(t, 2)
	l.must(t, "test")

	// What etcd says of when each of them went.
	changed := map[string]watch.Interface{}
	watching := func(kind string, w watch.Interface, err error) {
		if err != nil {
			t.Fatal(err)
		}
		changed[kind] = w
	}
	list := metav1.ListOptions{}
	ctx := t.Context()
	admission := l.Kube.AdmissionregistrationV1()
	w, err := admission.ValidatingWebhookConfigurations().Watch(ctx, list)
	watching("validating", w, err)
	w, err = admission.MutatingWebhookConfigurations().Watch(ctx, list)
	watching("mutating", w, err)
	w, err = l.Kube.AppsV1().Deployments("lameduck-system").Watch(ctx, list)
	watching("deployment", w, err)
	w, err = l.Kube.CoreV1().Services("lameduck-system").Watch(ctx, list)
	watching("service", w, err)
	l.must(t, "uninstall", "--wait")
	at := map[string]uint64{}
	for kind, w := range changed {
		var err error
		if at[kind], err = firstDeleted(ctx, w); err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
	}
	t.Logf("deleted at %v", at)
	for _, first := range []string{"validating", "mutating"} {
		for _, then := range []string{"deployment", "service"} {
			if at[first] > at[then] {
				t.Errorf("a %s went at %d, and the %s webhook configuration after it, at %d", then, at[then], first,
					at[first])
			}
		}
	}
}

// entries fails the test unless so many entries are there, with a ready replica each.
func (l *lab) entries(t *testing.T, n int) {
	t.Helper()
	l.Await(t, time.Minute, fmt.Sprintf("there are %d entries and replicas", n), func() error {
		config, err := l.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(t.Context(), "lameduck",
			metav1.GetOptions{})
		if err != nil {
			return err
		}
		deployments, err := l.Kube.AppsV1().Deployments("lameduck-system").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		ready := 0
		for _, d := range deployments.Items {
			ready += int(d.Status.ReadyReplicas)
		}
		if len(config.Webhooks) != n || len(deployments.Items) != n || ready != n {
			return fmt.Errorf("%d entries, %d Deployments, %d ready", len(config.Webhooks), len(deployments.Items),
				ready)
		}
		return nil
	})
}

// interrupted has left what an uninstall leaves that ends between its hooks: a configuration
// without entries, and everything else.
func (l *lab) interrupted(t *testing.T) {
	l.must(t, "install", harness.ChartDir, "--wait")
	configurations := l.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	config, err := configurations.Get(t.Context(), "lameduck", metav1.GetOptions{})
	if err == nil {
		err = configurations.Delete(t.Context(), "lameduck", metav1.DeleteOptions{})
	}
	config.ResourceVersion, config.UID, config.Webhooks = "", "", nil
	if err == nil {
		_, err = configurations.Create(t.Context(), config, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
	l.must(t, "uninstall", "--wait")
}

// firstDeleted returns the revision of the first deletion that a watch saw.
func firstDeleted(ctx context.Context, w watch.Interface) (uint64, error) {
	defer w.Stop()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case e, ok := <-w.ResultChan():
			if !ok {
				return 0, errors.New("the watch has ended")
			}
			if o, is := e.Object.(metav1.Object); is && (e.Type == watch.Deleted || o.GetDeletionTimestamp() != nil) {
				return strconv.ParseUint(o.GetResourceVersion(), 10, 64)
			}
		}
	}
}
