//go:build e2e

package nodes

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
)

func TestMain(m *testing.M) { cluster.MainAsRoot(m) }

const (
	system  = "lameduck-system" // of the coordinator
	agents  = "lameduck-node"   // of the node agents
	gateway = "gateway"         // of HAProxy
)

const (
	appImage     = "lameduck.test/app:1"
	haproxyImage = "lameduck.test/haproxy:1"
)

// lab is a cluster of three nodes with Lameduck.
type lab struct {
	*cluster.Cluster
	set  *machine.Set
	kube *kubernetes.Clientset
	// sources are where clients come from.
	sources []netip.Addr
}

// newLab starts n nodes and installs the coordinator and the node agents, but no webhook yet.
func newLab(t *testing.T, n int, options machine.Options) *lab {
	t.Helper()
	cluster.Entered(t)
	haproxy := haproxyProgram(t)
	bin := programs(t)
	libraries, err := machine.Libraries(t.Context(), haproxy)
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{"webhook", "agent", "lameduck-wait"} {
		// By its name in the manifests.
		image := machine.Image{Name: "docker.io/lameduck/" + program + ":dev", Program: filepath.Join(bin, program)}
		// What users get, if make images has made it of this tree.
		if dist := os.Getenv("LAMEDUCK_DIST"); dist != "" {
			image.Program, image.Archive = "", filepath.Join(dist, program+"-dev.oci.tar")
		}
		options.Images = append(options.Images, image)
	}
	options.Images = append(options.Images,
		machine.Image{Name: appImage, Program: filepath.Join(bin, "app")},
		machine.Image{Name: haproxyImage, Program: haproxy, Libraries: libraries},
	)
	l := &lab{Cluster: cluster.New(t, machine.ControlPlane())}
	began := time.Now()
	l.set = machine.New(t, l.Cluster, n, options)
	if l.kube, err = kubernetes.NewForConfig(l.Config()); err != nil {
		t.Fatal(err)
	}
	t.Logf("nodes after %s", time.Since(began).Round(time.Second/10))
	l.addClients(t)
	l.install(t)
	t.Logf("Lameduck after %s", time.Since(began).Round(time.Second/10))
	return l
}

// programs returns the folder with what is tested: that of make build, if LAMEDUCK_BIN names it.
func programs(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("LAMEDUCK_BIN"); dir != "" {
		return dir
	}
	dir := t.TempDir()
	for _, of := range []struct{ dir, pkg string }{{"../../..", "./cmd/..."}, {"..", "./app"}} {
		cmd := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", dir+"/", of.pkg)
		cmd.Dir = of.dir
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v: %s", of.pkg, err, out)
		}
	}
	return dir
}

func haproxyProgram(t *testing.T) string {
	t.Helper()
	for _, path := range []string{"haproxy", "/usr/sbin/haproxy", "/usr/local/sbin/haproxy"} {
		if found, err := exec.LookPath(path); err == nil {
			return found
		}
	}
	cluster.Missing(t, "haproxy", "apt-get install haproxy")
	return ""
}

// addClients gives clients addresses beside the nodes, and a way to ClusterIPs. One address alone
// would come round to the ports of connections that conntrack still remembers.
func (l *lab) addClients(t *testing.T) {
	t.Helper()
	bridge, err := netlink.LinkByName("machines")
	if err != nil {
		t.Fatal(err)
	}
	for i := range 6 {
		a := netip.AddrFrom4([4]byte{10, 245, 0, byte(11 + i)})
		if err := netlink.AddrAdd(bridge, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(),
			Mask: net.CIDRMask(24, 32)}}); err != nil {
			t.Fatal(err)
		}
		l.sources = append(l.sources, a)
	}
	_, services, err := net.ParseCIDR(cluster.ServiceRange)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.RouteAdd(&netlink.Route{Dst: services, Gw: l.set.Machines[0].Address.AsSlice()}); err != nil {
		t.Fatal(err)
	}
}

// object is what is known of any manifest.
type object = map[string]any

// manifests are the objects of manifests/base and manifests/barrier.
func (l *lab) manifests(t *testing.T) []object {
	t.Helper()
	var all []object
	for _, folder := range []string{"base", "barrier"} {
		out, err := l.Kubectl(t.Context(), "kustomize", "../../../manifests/"+folder)
		if err != nil {
			t.Fatal(err)
		}
		for _, document := range strings.Split(out, "\n---\n") {
			var o object
			if err := yaml.Unmarshal([]byte(document), &o); err != nil {
				t.Fatal(err)
			}
			all = append(all, o)
		}
	}
	return all
}

// apply applies objects.
func (l *lab) apply(t *testing.T, objects ...object) {
	t.Helper()
	var documents []string
	for _, o := range objects {
		y, err := yaml.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		documents = append(documents, string(y))
	}
	l.applyText(t, strings.Join(documents, "---\n"))
}

func (l *lab) applyText(t *testing.T, text string) {
	t.Helper()
	if _, err := l.KubectlInput(t.Context(), text, "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
}

// isWebhook reports whether o makes the API server ask.
func isWebhook(o object) bool {
	kind, _ := o["kind"].(string)
	return strings.HasSuffix(kind, "WebhookConfiguration")
}

// install installs everything of the manifests but what makes the API server ask, and waits until
// it is there.
func (l *lab) install(t *testing.T) {
	t.Helper()
	var objects, workloads []object
	for _, o := range l.manifests(t) {
		switch {
		case isWebhook(o):
		case o["kind"] == "Deployment":
			// Not on node-3, which is drained and cut off.
			pod := o["spec"].(object)["template"].(object)["spec"].(object)
			maps.Copy(pod["affinity"].(object), notOn("node-3"))
			entitle(pod)
			if timed() {
				container := pod["containers"].([]any)[0].(object)
				container["args"] = append(container["args"].([]any), "--log-level=debug")
			}
			workloads = append(workloads, o)
		case o["kind"] == "DaemonSet":
			entitle(o["spec"].(object)["template"].(object)["spec"].(object))
			workloads = append(workloads, o)
		default:
			objects = append(objects, o)
		}
	}
	l.apply(t, objects...)
	l.namespace(t, gateway, map[string]string{"lameduck.io/drain": "disabled"})
	l.apply(t, workloads...)
	l.kubectl(t, "rollout", "status", "-n", system, "deployment", "-l", "app.kubernetes.io/component=webhook",
		"--timeout=60s")
	l.kubectl(t, "rollout", "status", "-n", agents, "daemonset/lameduck-node", "--timeout=60s")
}

// entitle gives containers a right to the CPU as on a node of their own: here clients, control
// plane and three nodes share one computer.
func entitle(pod object) {
	for _, c := range pod["containers"].([]any) {
		c.(object)["resources"].(object)["requests"].(object)["cpu"] = "200m"
	}
}

// notOn keeps pods from a node.
func notOn(node string) object {
	return object{"nodeAffinity": object{"requiredDuringSchedulingIgnoredDuringExecution": object{
		"nodeSelectorTerms": []any{
			object{"matchExpressions": []any{object{"key": "kubernetes.io/hostname",
				"operator": "NotIn", "values": []any{node}}}},
		}}}}
}

// addWebhooks makes the API server ask. Where, and whom to trust, the coordinators write.
func (l *lab) addWebhooks(t *testing.T) {
	t.Helper()
	var configurations []object
	for _, o := range l.manifests(t) {
		if !isWebhook(o) {
			continue
		}
		configurations = append(configurations, o)
	}
	l.apply(t, configurations...)
	// Only after a while does the API server know them: until a pod comes back with the hook,
	// nothing is measured.
	l.namespace(t, "probe", map[string]string{"lameduck.io/barrier": "enabled"})
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "probe"},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Image: appImage}}},
	}
	l.until(t, "the API server asks", func() error {
		made, err := l.kube.CoreV1().Pods("probe").Create(t.Context(), pod,
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil && made.Annotations["lameduck.io/barrier-id"] == "" {
			err = fmt.Errorf("pods get no hook: %v", made.Annotations)
		}
		return err
	})
}

// namespace makes one, if it is not there, in which pods can be made.
func (l *lab) namespace(t *testing.T, name string, labels map[string]string) {
	t.Helper()
	_, err := l.kube.CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	l.until(t, "the ServiceAccount of namespace "+name, func() error {
		_, err := l.kube.CoreV1().ServiceAccounts(name).Get(t.Context(), "default", metav1.GetOptions{})
		return err
	})
}

// kubectl runs kubectl. What is wrong with the cluster is said if it fails.
func (l *lab) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := l.Kubectl(t.Context(), args...)
	if err != nil {
		l.explain(t)
		t.Fatal(err)
	}
	return out
}

// explain logs what pods there are and what happened, and what Lameduck wrote.
func (l *lab) explain(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for _, args := range [][]string{
		{"get", "pods", "-A", "-o", "wide"},
		{"get", "events", "-A", "--sort-by=.lastTimestamp"},
		{"logs", "-n", system, "-l", "app.kubernetes.io/component=webhook", "--tail=20"},
		{"logs", "-n", agents, "-l", "app.kubernetes.io/component=node", "--tail=20"},
		{"logs", "-n", gateway, "-l", "app=gateway", "--all-containers", "--tail=20"},
	} {
		out, _ := l.Kubectl(ctx, args...)
		lines := strings.Split(out, "\n")
		if len(lines) > 60 {
			lines = lines[len(lines)-60:]
		}
		t.Logf("kubectl %s\n%s", strings.Join(args, " "), strings.Join(lines, "\n"))
	}
}

// said logs what the coordinators and the gateway's agent have written since.
func (l *lab) said(t *testing.T, since time.Time) {
	t.Helper()
	for _, of := range [][]string{{system, "app.kubernetes.io/component=webhook"}, {gateway, "app=gateway"}} {
		out, err := l.Kubectl(t.Context(), "logs", "-n", of[0], "-l", of[1], "--all-containers", "--prefix",
			"--tail=-1", "--since-time="+since.Format(time.RFC3339))
		t.Logf("%s (%v):\n%s", of[0], err, out)
	}
}

// until asks again and again until ask returns nil, for a minute.
func (l *lab) until(t *testing.T, what string, ask func() error) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		err := ask()
		if err == nil {
			return
		}
		if time.Now().After(end) || t.Context().Err() != nil {
			l.explain(t)
			t.Fatalf("in vain: %s: %v", what, err)
		}
	}
}
