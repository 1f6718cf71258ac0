package dashboard

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

var kubeletOnce sync.Once

// serveKubelet is [stage.ServeKubelet], until the program ends.
func serveKubelet(t *testing.T, kube kubernetes.Interface) {
	t.Helper()
	kubeletOnce.Do(func() {
		if err := stage.ServeKubelet(context.Background(), kube); err != nil {
			t.Fatal(err)
		}
	})
}

// plugin runs kubectl-lameduck with a kubeconfig, and returns its output.
func plugin(t *testing.T, kubeconfig string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(harness.Programs(t), "kubectl-lameduck"),
		append(args, "--kubeconfig", kubeconfig)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// code is how a program ended.
func code(err error) int {
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	return 0
}

// kubectl lameduck, by the real API server and the kubelet's own port forwarding, while pods are
// drained.
func TestKubectl(t *testing.T) {
	s := open(t)
	serveKubelet(t, s.Kube)
	const ns = "kubectl"
	harness.Namespace(t, s.Kube, ns, nil)
	shop(t, s, ns, 1500*time.Millisecond, 0)
	admin := s.Cluster.Kubeconfig()
	say := func(args ...string) string {
		t.Helper()
		stdout, stderr, err := plugin(t, admin, args...)
		if err != nil {
			t.Fatalf("kubectl lameduck %s: %v: %s%s", strings.Join(args, " "), err, stdout, stderr)
		}
		t.Logf("kubectl lameduck %s\n%s%s", strings.Join(args, " "), stdout, stderr)
		return stdout
	}
	contains := func(text string, all ...string) {
		t.Helper()
		for _, want := range all {
			if !strings.Contains(text, want) {
				t.Errorf("no %q in\n%s", want, text)
			}
		}
	}
	gateways, err := s.Pods(t.Context(), ns, "app=gateway")
	if err != nil {
		t.Fatal(err)
	}
	gateway := ns + "/" + gateways[0].Name
	contains(say("status"), "COORDINATOR", "lameduck-webhook-", "ready", gateway, "haproxy", "connected", "1/1")
	contains(say("status", "-o", "wide"), "NODE", "node-1", "directed")
	pods, err := s.Pods(t.Context(), ns, "app=web")
	if err != nil {
		t.Fatal(err)
	}
	contains(say("explain", pods[0].Name, "-n", ns),
		"It would be deleted when 1 gateway that routes to it has acknowledged.",
		gateway+" (haproxy on node-1), at the hold", "Not covered:", "kube-proxy")
	contains(say("explain", "pod/"+pods[0].Name, "-n", ns, "--evict", "-o", "yaml"), "operation: evict",
		"answer: drain", "kind: Explanation")
	var drains struct {
		APIVersion, Kind string
		Items            []any
	}
	if err := json.Unmarshal([]byte(say("drains", "-n", ns, "-o", "json")), &drains); err != nil ||
		drains.APIVersion != "lameduck.io/v1" || drains.Kind != "DrainList" || drains.Items == nil ||
		len(drains.Items) > 0 {
		t.Errorf("before: %+v, %v", drains, err)
	}
	contains(say("status", "-A", "-o", "yaml"), "apiVersion: lameduck.io/v1", "kind: Status",
		"version: dev, commit unknown")

	// Other tests have agents, too.
	versions := regexp.MustCompile(`(?m)^kubectl-lameduck +1 +dev, commit unknown\n` +
		`coordinator +1 +dev, commit unknown\nagent +[1-9] +dev, commit unknown$`)
	if out := say("version"); !versions.MatchString(out) {
		t.Errorf("version: %s", out)
	}
	contains(say("version", "-o", "yaml"), "apiVersion: lameduck.io/v1", "kind: VersionList", "component: coordinator")

	// As kubectl finds it: on the PATH.
	t.Setenv("PATH", harness.Programs(t)+string(os.PathListSeparator)+os.Getenv("PATH"))
	if out, err := s.Cluster.Kubectl(t.Context(), "lameduck", "status"); err != nil || !strings.Contains(out, gateway) {
		t.Errorf("as a plugin: %v: %s", err, out)
	}
	completes(t, s)

	// --watch tells how the drain of every pod of a rolling update ends, and how it goes if it is
	// long enough to be seen.
	ctx, cancel := context.WithCancel(t.Context())
	watch := exec.CommandContext(ctx, filepath.Join(harness.Programs(t), "kubectl-lameduck"), "drains", "--watch", "-n",
		ns, "-o", "json", "--kubeconfig", admin)
	watch.Cancel = func() error { return watch.Process.Signal(os.Interrupt) }
	out, err := os.Create(filepath.Join(t.TempDir(), "watched"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	watched := func() string {
		text, err := os.ReadFile(out.Name())
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	var complaints bytes.Buffer
	watch.Stdout, watch.Stderr = out, &complaints
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	// Of what ended before it was there it tells nothing: it is there once it tells of a deletion.
	for end := time.Now().Add(2 * time.Minute); watched() == ""; {
		if time.Now().After(end) {
			t.Fatalf("--watch tells of no deletion: %s", &complaints)
		}
		if err := s.Kube.CoreV1().Pods(ns).Delete(t.Context(), pods[0].Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := s.Await(t.Context(), ns, "web"); err != nil {
			t.Fatal(err)
		}
		if pods, err = s.Pods(t.Context(), ns, "app=web"); err != nil {
			t.Fatal(err)
		}
	}
	seen := make(chan string, 1)
	var looking sync.WaitGroup
	looking.Go(func() {
		for ctx.Err() == nil {
			out, _, err := plugin(t, admin, "drains", "-o", "wide")
			if err == nil && strings.Contains(out, gateway+" (removed)") {
				seen <- out
				return
			}
		}
	})
	defer looking.Wait()
	defer cancel()
	// A drain is in this phase for as long as a request runs. A busy machine may take longer to ask
	// about it.
	drained := ""
	for end := time.Now().Add(3 * time.Minute); drained == "" && time.Now().Before(end); {
		if _, err := s.Restart(t.Context(), ns, "web"); err != nil {
			t.Fatal(err)
		}
		select {
		case drained = <-seen:
		default:
		}
	}
	contains(drained, "NAMESPACE", "WAITS-FOR", ns, "Quiescing", gateway+" (removed)", "lameduck-webhook-")
	types := func(pod corev1.Pod) (all []string) {
		for line := range strings.Lines(watched()) {
			var e struct {
				Type   string
				Object struct{ Pod, Phase, Reason string }
			}
			if err := json.Unmarshal([]byte(line), &e); err != nil && strings.HasSuffix(line, "\n") {
				t.Fatalf("%s: %v", line, err)
			}
			if e.Object.Pod == pod.Name {
				all = append(all, e.Type+" "+e.Object.Phase+e.Object.Reason)
			}
		}
		return all
	}
	incomplete := func(pod corev1.Pod) bool {
		all := types(pod)
		return len(all) == 0 || all[len(all)-1] != "outcome Acknowledged"
	}
	for end := time.Now().Add(most); slices.ContainsFunc(pods, incomplete) && time.Now().Before(end); {
		time.Sleep(50 * time.Millisecond)
	}
	cancel()
	if err := watch.Wait(); code(err) != 0 {
		t.Errorf("--watch ends with %v", err)
	}
	t.Logf("--watch said\n%s%s", watched(), &complaints)
	for _, pod := range pods {
		if incomplete(pod) {
			t.Errorf("--watch says of %s: %q", pod.Name, types(pod))
		}
	}
	namesGaps(t, s, ns, say)
}

// completes shows that kubectl's own completion finds the plugin's, by the script that it prints.
func completes(t *testing.T, s *stage.Stage) {
	t.Helper()
	script, _, err := plugin(t, "/nowhere", "completion", "zsh")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "kubectl_complete-lameduck"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
	// While this process starts others, the script may still be open for writing in one of them.
	harness.Await(t, 20*time.Second, "completion", func() error {
		out, err := s.Cluster.Kubectl(t.Context(), "__complete", "lameduck", "c")
		if err == nil && !strings.Contains("\n"+out, "\ncheck\ncompletion\n:4\n") { // with kubectl's own remarks
			err = errors.New(out)
		}
		return err
	})
}

// namesGaps shows that status counts the Services that are waited for, and names what routes the
// others.
func namesGaps(t *testing.T, s *stage.Stage, ns string, say func(...string) string) {
	t.Helper()
	if err := s.Apply(t.Context(), fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: outside, namespace: %[1]s}
spec: {type: NodePort, selector: {app: web}, ports: [{port: 80}]}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: front, namespace: %[1]s}
spec:
  ingressClassName: nginx
  defaultBackend: {service: {name: web, port: {number: 80}}}
`, ns)); err != nil {
		t.Fatal(err)
	}
	var is struct {
		Coverage struct {
			Services, Whole, Possible, Uncovered int
			Items                                []struct{ Service, Name, Why string }
		}
	}
	harness.Await(t, 30*time.Second, "status names both", func() error { // a summary is given again for 10 s
		if err := json.Unmarshal([]byte(say("status", "-o", "json")), &is); err != nil {
			return err
		}
		var got []string
		for _, i := range is.Coverage.Items {
			got = append(got, i.Service+" "+i.Name)
		}
		for _, want := range []string{"%s/outside kube-proxy", "%[1]s/web Ingress %[1]s/front"} {
			if want = fmt.Sprintf(want, ns); !slices.Contains(got, want) {
				return fmt.Errorf("no %s in %q", want, got)
			}
		}
		return nil
	})
	c, text := is.Coverage, say("status")
	wanted := []string{
		fmt.Sprintf("Services with pods: %d. Waited for whole: %d; not known: %d; not waited for: %d.", c.Services,
			c.Whole, c.Possible, c.Services-c.Whole-c.Possible),
		"NOT-WAITED-FOR-BECAUSE", `no gateway of its class "nginx" is declared`,
	}
	for _, i := range c.Items { // that of kube-proxy depends on whether another test has put an agent on the node
		if i.Why == "" {
			t.Errorf("no reason for %s", i.Service)
		}
		wanted = append(wanted, i.Why)
	}
	for _, want := range wanted {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
}

// Who may not, or asks a cluster without Lameduck, must hear what is missing.
func TestKubectlSaysWhatIsMissing(t *testing.T) {
	s := open(t)
	serveKubelet(t, s.Kube)
	config := func(user string, rules ...rbacv1.PolicyRule) string {
		t.Helper()
		path := filepath.Join(t.TempDir(), "kubeconfig")
		if err := s.Cluster.WriteKubeconfig(path, user); err != nil {
			t.Fatal(err)
		}
		if len(rules) > 0 {
			role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: user, Namespace: stage.System}, Rules: rules}
			if _, err := s.Kube.RbacV1().Roles(stage.System).Create(t.Context(), role,
				metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			binding := &rbacv1.RoleBinding{
				ObjectMeta: role.ObjectMeta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName,
					Kind: "Role", Name: user},
				Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}},
			}
			if _, err := s.Kube.RbacV1().RoleBindings(stage.System).Create(t.Context(), binding,
				metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			// The API server learns of rights by a watch.
			for _, rule := range rules {
				for _, verb := range rule.Verbs {
					resource, sub, _ := strings.Cut(rule.Resources[0], "/")
					harness.Await(t, 20*time.Second, user+" may "+verb+" "+rule.Resources[0], func() error {
						review, err := s.Kube.AuthorizationV1().SubjectAccessReviews().Create(t.Context(),
							&authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
								User: user,
								ResourceAttributes: &authorizationv1.ResourceAttributes{
									Namespace: stage.System, Verb: verb, Resource: resource, Subresource: sub},
							}}, metav1.CreateOptions{})
						if err == nil && !review.Status.Allowed {
							err = errors.New("it may not: " + review.Status.Reason)
						}
						return err
					})
				}
			}
		}
		return path
	}
	list := rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"list"}}
	forward := rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"pods/portforward"},
		Verbs: []string{"create", "get"}}
	admin := s.Cluster.Kubeconfig()
	for name, c := range map[string]struct {
		kubeconfig string
		args       []string
		code       int
		says       string
	}{
		"no right to list": {config("stranger"), []string{"status"}, 1,
			"you may not list pods in namespace lameduck-system"},
		"no right to forward": {config("lister", list), []string{"status"}, 1,
			"you may not forward ports to the coordinators' pods (create and get pods/portforward)"},
		"exactly the rights": {config("reader", list, forward), []string{"status"}, 0, ""},
		"as another user": {admin, []string{"status", "--as", "jane"}, 1,
			`User "jane" cannot list resource "pods"`},
		"as one of a group": {admin, []string{"status", "--as", "jane", "--as-group", "system:masters"}, 0, ""},
		"not installed": {admin, []string{"status", "--lameduck-namespace", "default"}, 1,
			"Lameduck is not installed in namespace default"},
		"another port": {admin, []string{"status", "--lameduck-port", "9446"}, 1,
			"serves nothing on its loopback address"},
		"watch, another port": {admin, []string{"drains", "-w", "--lameduck-port", "9446"}, 1,
			"serves nothing on its loopback address"},
		"no such pod": {admin, []string{"explain", "missing", "-n", "default"}, 1,
			"no pod missing in namespace default"},
		"an unknown command": {admin, []string{"drain"}, 2, `unknown command "drain"`},
		"an unknown context": {admin, []string{"status", "--context", "nowhere"}, 2,
			`context "nowhere" does not exist`},
		"no kubeconfig": {"/nowhere", []string{"status"}, 2, "/nowhere"},
	} {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, err := plugin(t, c.kubeconfig, c.args...)
			if code(err) != c.code || !strings.Contains(stderr, c.says) || c.code != 0 && stdout != "" {
				t.Errorf("exit code %d, want %d and %q: %s%s", code(err), c.code, c.says, stdout, stderr)
			}
		})
	}
}
