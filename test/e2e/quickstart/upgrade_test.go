//go:build e2e

package quickstart

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// previous is the commit that is upgraded from: UPGRADE_FROM, or the one before this.
func previous() string {
	if from := os.Getenv("UPGRADE_FROM"); from != "" {
		return from
	}
	return "HEAD~1"
}

// archive unpacks a commit of the repository. Where it is not to be had the test fails by its name:
// a shallow clone has no history.
func archive(t *testing.T, commit string) string {
	t.Helper()
	dir := t.TempDir()
	git := exec.CommandContext(t.Context(), "git", "archive", "--format=tar", commit)
	git.Dir = harness.Repository
	tar := exec.CommandContext(t.Context(), "tar", "-x", "-C", dir)
	var said strings.Builder
	git.Stderr, tar.Stderr = &said, &said
	pipe, err := git.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	tar.Stdin = pipe
	if err := tar.Start(); err != nil {
		t.Fatal(err)
	}
	gitErr := git.Run()
	tarErr := tar.Wait()
	if gitErr != nil || tarErr != nil {
		t.Fatalf("commit %s, to upgrade from, is not to be had: %v, %v: %s: git fetch --unshallow, or name another: "+
			"UPGRADE_FROM=COMMIT", commit, gitErr, tarErr, said.String())
	}
	return dir
}

// retagged writes kustomizations of the folders of a tree's manifests which have other tags, as
// operators do whose images are in a registry of theirs.
func retagged(t *testing.T, tree, tag string) string {
	t.Helper()
	dir := t.TempDir()
	for _, folder := range []string{"base", "barrier", "haproxy", "check"} {
		// kustomize takes no absolute paths.
		path, err := filepath.Rel(filepath.Join(dir, folder), filepath.Join(tree, "manifests", folder))
		if err == nil {
			err = os.Mkdir(filepath.Join(dir, folder), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, folder, "kustomization.yaml"),
				fmt.Appendf(nil, `apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [%q]
images: [{name: lameduck/webhook, newTag: %s}, {name: lameduck/agent, newTag: %s}]
`, path, tag, tag), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// An upgrade from the previous commit to this, and the way back, while clients send requests and
// rolling updates of the application follow one another. Agents and coordinators of both commits
// speak with each other all the while.
func (l *lab) testUpgrade(t *testing.T) {
	tree := archive(t, previous())
	bin := t.TempDir()
	began := time.Now()
	harness.Build(t, tree, "./cmd/...", bin)
	if err := l.Set.Load(t.Context(), harness.Images(bin, "previous")...); err != nil {
		t.Fatal(err)
	}
	t.Logf("the programs of %s are there after %s", previous(), time.Since(began).Round(time.Second/10))
	old := retagged(t, tree, "previous")

	// The commands of operations.md, on the folders of one commit or the other.
	steps := find(t, "operations.md", "Upgrade").blocks
	if len(steps) == 0 {
		t.Fatal("operations.md does not say how to upgrade")
	}
	from := func(folder string) []string {
		var all []string
		for _, step := range steps {
			all = append(all, strings.ReplaceAll(step, "-k manifests/", "-k "+folder+"/"))
		}
		return all
	}
	upgrade, rollback, coordinators := from("manifests"), from(old), entries
	// One entry stood in front of all replicas before each replica became its own.
	if has(t, tree, "base/webhook-configuration.yaml", "\n  - name: pods.lameduck.io\n") {
		coordinators = 3
		blocks := find(t, "operations.md", "Upgrade from one entry").blocks
		if len(blocks) != 3 {
			t.Fatalf("the page has %d blocks: want the copy of the old entry, the new ones, and the end of the old",
				len(blocks))
		}
		upgrade = slices.Concat(blocks, upgrade[1:])
		rollback = slices.Concat(blocks[:1], []string{
			"kubectl apply -k " + old + "/base\nkubectl -n lameduck-system rollout status " +
				"deployment/lameduck-webhook --timeout=180s\nsleep 5",
			"kubectl delete validatingwebhookconfiguration lameduck-former\nkubectl -n lameduck-system delete " +
				"deployment,service lameduck-webhook-0 lameduck-webhook-1",
		}, rollback[1:])
	}
	l.sh(t, "kubectl apply -k manifests/quickstart && kubectl label namespace shop lameduck.io/mode=enforce")
	if has(t, tree, "barrier/barrier-webhook.yaml", "key: lameduck.io/barrier\n") {
		// The label before lameduck.io/mode: an upgrade keeps both.
		l.sh(t, "kubectl label namespace shop lameduck.io/barrier=enabled")
	}
	for _, step := range from(old) {
		l.sh(t, step)
	}
	l.run(t, "previous", coordinators)
	l.sh(t, "kubectl -n shop rollout restart deployment/web && kubectl -n shop rollout status deployment/web "+
		"--timeout=120s")
	l.Await(t, time.Minute, "every pod has its hook", l.hooked)
	// No barrier waited for the pods without a hook.
	time.Sleep(3 * time.Second) // kernels learn up to a second late that they are gone

	for _, way := range []struct {
		name, tag    string
		steps        []string
		coordinators int
	}{{"upgrade", "dev", upgrade, entries}, {"rollback", "previous", rollback, coordinators}} {
		if way.name == "rollback" && !has(t, tree, "barrier/node.yaml", "\n      maxSurge: ") {
			t.Logf("%s stops a node agent before it starts the next one: the way back to it cannot be without loss, "+
				"and is not tried", previous())
			break
		}
		load := l.startClients(t, "web", "gateway")
		before := l.failedHooks(t)
		asked := l.startAsking(t)
		time.Sleep(time.Second) // clients ask for a while before
		stop, updated := make(chan struct{}), make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() { updated <- l.updates(ctx, t, stop) }()
		for _, step := range way.steps {
			l.sh(t, step)
		}
		l.run(t, way.tag, way.coordinators)
		asked(way.name)
		close(stop)
		err := <-updated
		cancel()
		if err != nil {
			l.Explain(t)
			t.Fatalf("%s: %v", way.name, err)
		}
		time.Sleep(2 * time.Second) // stale routes fail late
		load.stop(t, way.name)
		if after := l.failedHooks(t); after != before {
			t.Errorf("%s: hooks failed: %s", way.name, after)
		}
		l.connected(t, stage.System, 5, way.coordinators)
		if t.Failed() {
			l.Explain(t)
			t.FailNow()
		}
	}
	// And other certificates, at leisure and at once: the API server is heard again after it.
	for _, block := range find(t, "operations.md", "Certificates").blocks {
		l.sh(t, block)
	}
	// The check is of what is installed now.
	l.sh(t, strings.ReplaceAll(find(t, "quickstart.md", "Install the coordinator").blocks[1], "manifests/check",
		old+"/check"))
}

// entries are those of the manifests.
const entries = 2

// startAsking evicts, as a dry run, a pod that does not exist, again and again: a coordinator that
// is asked refuses. What it returns stops that, and fails if at any moment none was asked.
func (l *lab) startAsking(t *testing.T) (stop func(when string)) {
	t.Helper()
	config := rest.CopyConfig(l.Config())
	config.QPS = -1
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	stalled := harness.Stalls(t)
	asked, done := 0, make(chan struct{})
	var unasked []string
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			began, before := time.Now(), stalled()
			err := kube.PolicyV1().Evictions(shop).Evict(ctx, &policyv1.Eviction{
				ObjectMeta:    metav1.ObjectMeta{Name: "lameduck-check", Namespace: shop},
				DeleteOptions: &metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}},
			})
			switch {
			case ctx.Err() != nil:
			case err != nil && strings.Contains(err.Error(), "Lameduck answers"):
				asked++
			case time.Since(began) >= 4*time.Second && stalled() > before: // no answer could be in time
			default:
				unasked = append(unasked, fmt.Sprintf("%s: %v", time.Now().Format("15:04:05.000"), err))
			}
			time.Sleep(20 * time.Millisecond)
		}
	}()
	return func(when string) {
		cancel()
		<-done
		t.Logf("%s: %d of %d evictions were asked about by no entry", when, len(unasked), asked+len(unasked))
		if len(unasked) > 0 || asked == 0 {
			t.Errorf("%s: no entry was asked: %q", when, unasked[:min(len(unasked), 20)])
		}
	}
}

// has reports whether a file below the manifests of a tree contains text.
func has(t *testing.T, tree, file, text string) bool {
	t.Helper()
	is, err := os.ReadFile(filepath.Join(tree, "manifests", file))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(is), text)
}

// updates makes rolling updates of the application, one after the other, until stop is closed, two
// at least.
func (l *lab) updates(ctx context.Context, t *testing.T, stop <-chan struct{}) error {
	for n := 1; ; n++ {
		began := time.Now()
		if _, err := l.trySh(ctx, "kubectl -n shop rollout restart deployment/web && kubectl -n shop rollout status "+
			"deployment/web --timeout=180s"); err != nil {
			return fmt.Errorf("rolling update %d, after %s: %w", n, time.Since(began).Round(time.Second), err)
		}
		// None hangs. Two waves of pods, none of which is kept for longer than a hook may last.
		for err := l.replicas(ctx, 4); err != nil; err = l.replicas(ctx, 4) {
			if time.Since(began) > 3*time.Minute {
				return fmt.Errorf("rolling update %d, after %s: %w", n, time.Since(began).Round(time.Second), err)
			}
			time.Sleep(50 * time.Millisecond)
		}
		t.Logf("rolling update %d took %.1f s", n, time.Since(began).Seconds())
		select {
		case <-stop:
			if n > 1 {
				return nil
			}
		default:
		}
	}
}

// run asserts that coordinators, so many, and agents are those of a tag.
func (l *lab) run(t *testing.T, tag string, coordinators int) {
	t.Helper()
	l.Await(t, 90*time.Second, "coordinators and agents with the tag "+tag, func() error {
		pods, err := l.Kube.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		n := map[string]int{}
		for _, p := range pods.Items {
			for _, c := range append(p.Spec.InitContainers, p.Spec.Containers...) {
				name, is, _ := strings.Cut(c.Image, ":")
				if !strings.HasPrefix(name, "lameduck/") {
					continue
				}
				if is != tag {
					return fmt.Errorf("pod %s runs %s", p.Name, c.Image)
				}
				n[name]++
			}
		}
		if n["lameduck/webhook"] != coordinators || n["lameduck/agent"] != 5 {
			return fmt.Errorf("%v", n)
		}
		return nil
	})
}

// hooked is nil if all pods of the application have the barrier's hook.
func (l *lab) hooked() error {
	pods, err := l.Kube.CoreV1().Pods(shop).List(context.Background(),
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=web"})
	if err != nil {
		return err
	}
	for _, p := range pods.Items {
		if p.DeletionTimestamp != nil || p.Annotations["lameduck.io/barrier-id"] == "" ||
			p.Status.Phase != corev1.PodRunning {
			return fmt.Errorf("pod %s: %v", p.Name, p.Annotations)
		}
	}
	return nil
}

// connected asserts by the plugin that so many agents speak with every coordinator, and all that
// are there.
func (l *lab) connected(t *testing.T, namespace string, agents, coordinators int) {
	t.Helper()
	l.Await(t, 30*time.Second, "every agent is connected to every coordinator", func() error {
		out, err := l.trySh(t.Context(), "kubectl lameduck status --lameduck-namespace="+namespace+" -o json")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		var status struct {
			Coordinators []struct{ Expected, Connected int }
		}
		if err := json.Unmarshal([]byte(out), &status); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		if len(status.Coordinators) != coordinators {
			return fmt.Errorf("%d coordinators: %s", len(status.Coordinators), out)
		}
		for _, c := range status.Coordinators {
			if c.Expected != agents || c.Connected != agents {
				return fmt.Errorf("%d of %d agents: %s", c.Connected, c.Expected, out)
			}
		}
		return nil
	})
}
