//go:build e2e && long

package quickstart

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

// shared is a namespace that had an application before it got the chart's release.
const shared = "shared"

// bystander is the application of the shared namespace, and of one beside it.
const bystander = `
apiVersion: v1
kind: Pod
metadata: {name: bystander, namespace: %s}
spec:
  automountServiceAccountToken: false
  containers:
    - name: app
      image: docker.io/lameduck/app:dev
      imagePullPolicy: Never
      args: ["--addr=[::]:8080"]
      readinessProbe: {httpGet: {path: /readyz, port: 8080}, periodSeconds: 1}
`

// The chart's network policies where they are enforced, by kube-router on each node, as in k3s: the
// API server and all agents reach the coordinators, pods reach their metrics and nothing else, and
// pods of others in the same namespace stay reachable.
func TestNetworkPolicy(t *testing.T) {
	kubeRouter := gatewaytest.LookPath(t, "kube-router")
	harness.Program(t, "ipset", "apt-get install ipset")
	l := newLab(t)
	if err := l.Set.Load(t.Context(), machine.Image{Name: "docker.io/lameduck/app:dev",
		Program: filepath.Join(l.bin, "app")}); err != nil {
		t.Fatal(err)
	}
	for _, m := range l.Set.Machines {
		l.enforce(t, m, kubeRouter)
	}
	dir := t.TempDir()
	objects, hooks, err := harness.ChartIn(t, harness.ChartDir, shared,
		map[string]any{"barrier": map[string]any{"enabled": true}})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"lameduck.yaml": objects, "check.yaml": hooks,
		"bystander.yaml": fmt.Sprintf(bystander, shared) + "---" + fmt.Sprintf(bystander, "beside")} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	l.sh(t, "cd "+dir+`
kubectl create namespace shared
kubectl create namespace beside
kubectl apply --validate=strict -f bystander.yaml
kubectl wait -n shared --for=condition=Ready --timeout=60s pod/bystander
kubectl wait -n beside --for=condition=Ready --timeout=60s pod/bystander
kubectl apply --validate=strict -f lameduck.yaml
kubectl -n shared rollout status deployment -l app.kubernetes.io/component=webhook --timeout=120s
kubectl -n lameduck-node rollout status daemonset/lameduck-node --timeout=120s
kubectl apply -f check.yaml
kubectl -n shared wait --for=condition=Complete --timeout=150s job/lameduck-check`)
	l.connected(t, shared, 3, entries)
	all, err := l.Kube.CoreV1().Pods("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var coordinator, web, beside *corev1.Pod
	for i := range all.Items {
		switch p := &all.Items[i]; {
		case p.Labels["app.kubernetes.io/component"] == "webhook" && p.Status.PodIP != "":
			coordinator = p
		case p.Name == "bystander" && p.Namespace == shared:
			web = p
		case p.Name == "bystander":
			beside = p
		}
	}
	reach := func(from *corev1.Pod, to *corev1.Pod, port int) error {
		return l.reach(t.Context(), from, fmt.Sprintf("/dev/tcp/%s/%d", to.Status.PodIP, port))
	}
	// A policy takes effect some time after the object.
	for _, c := range []struct {
		what  string
		to    *corev1.Pod
		port  int
		opens bool
	}{
		{"the admission port", coordinator, 9443, true},
		{"the agents' port", coordinator, 9444, true},
		{"the port of metrics", coordinator, 8080, true},
		{"the health port", coordinator, 8081, false},
		{"another pod of the namespace", web, 8080, true},
	} {
		l.Await(t, time.Minute, fmt.Sprintf("%s is open for pods: %t", c.what, c.opens), func() error {
			err := reach(beside, c.to, c.port)
			if (err == nil) == c.opens {
				t.Logf("%s is open for pods: %t", c.what, c.opens)
				return nil
			}
			return fmt.Errorf("the answer is %v", err)
		})
	}
	l.sh(t, "kubectl delete networkpolicy -n shared --all")
	l.Await(t, time.Minute, "without the policies the health port is open", func() error {
		return reach(beside, coordinator, 8081)
	})
}

// enforce runs kube-router's firewall on a node.
func (l *lab) enforce(t *testing.T, m *machine.Machine, program string) {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "kube-router.log"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cmd := m.Command(ctx, program, "--run-firewall", "--run-router=false", "--run-service-proxy=false",
		"--kubeconfig="+l.Kubeconfig(), "--hostname-override="+m.Name, "--service-cluster-ip-range=10.96.0.0/12",
		"--health-port=0", "--metrics-port=0")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		select {
		case err := <-ended:
			t.Errorf("kube-router of %s has ended: %v", m.Name, err)
		default:
			cancel()
			<-ended
		}
		if text, err := os.ReadFile(log.Name()); err == nil && t.Failed() {
			t.Logf("kube-router of %s:\n%s", m.Name, text)
		}
	})
}

// reach connects from a pod's network.
func (l *lab) reach(ctx context.Context, from *corev1.Pod, to string) error {
	for _, m := range l.Set.Machines {
		if m.Name != from.Spec.NodeName {
			continue
		}
		_, err := m.Run(ctx, "bash", "-c", `for pod in /run/netns/*; do
	[[ $(nsenter --net=$pod ip -o addr) == *" `+from.Status.PodIP+`/"* ]] || continue
	exec nsenter --net=$pod timeout 3 bash -c 'exec 3<>`+to+`'
done
echo no network has the address; exit 3`)
		return err
	}
	return fmt.Errorf("pod %s is on no node", from.Name)
}
