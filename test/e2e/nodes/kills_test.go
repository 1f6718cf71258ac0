//go:build e2e

package nodes

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"github.com/godbus/dbus/v5/prop"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

const (
	logindName = "org.freedesktop.login1"
	logindPath = dbus.ObjectPath("/org/freedesktop/login1")
	manager    = logindName + ".Manager"
)

// logind is as much of systemd's login daemon as a kubelet asks of it, on a bus of its own.
type logind struct {
	conn *dbus.Conn

	mu sync.Mutex
	// inhibitors are the names of the clients that delay the shutdown.
	inhibitors []dbus.Sender
	held       []*os.File
}

// Inhibit is org.freedesktop.login1.Manager.Inhibit.
func (l *logind) Inhibit(sender dbus.Sender, _, _, _, _ string) (dbus.UnixFD, *dbus.Error) {
	r, w, err := os.Pipe()
	if err != nil {
		return 0, dbus.MakeFailedError(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inhibitors = append(l.inhibitors, sender)
	l.held = append(l.held, r, w)
	return dbus.UnixFD(w.Fd()), nil
}

// shutDown tells the kubelet of a node, and no other, that its computer is about to shut down.
func (l *logind) shutDown(node string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, name := range l.inhibitors {
		var pid uint32
		if err := l.conn.BusObject().Call("org.freedesktop.DBus.GetConnectionUnixProcessID", 0,
			string(name)).Store(&pid); err != nil {
			return err
		}
		command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil {
			return err
		}
		if strings.Contains(string(command), "--hostname-override="+node+"\x00") {
			return l.conn.Send(&dbus.Message{
				Type: dbus.TypeSignal,
				Headers: map[dbus.HeaderField]dbus.Variant{
					dbus.FieldDestination: dbus.MakeVariant(string(name)), dbus.FieldPath: dbus.MakeVariant(logindPath),
					dbus.FieldInterface: dbus.MakeVariant(manager),
					dbus.FieldMember:    dbus.MakeVariant("PrepareForShutdown"),
					dbus.FieldSignature: dbus.MakeVariant(dbus.SignatureOf(true)),
				},
				Body: []any{true},
			}, nil).Err
		}
	}
	return fmt.Errorf("the kubelet of %s is not among %v", node, l.inhibitors)
}

// startLogind starts a bus and a logind on it, which kubelets find that are started from now on.
func startLogind(t *testing.T) *logind {
	t.Helper()
	daemon, err := exec.LookPath("dbus-daemon")
	if err != nil {
		cluster.Missing(t, "dbus-daemon", "apt-get install dbus-daemon")
	}
	dir, err := os.MkdirTemp("", "bus") // a socket's path is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	address, config := "unix:path="+filepath.Join(dir, "s"), filepath.Join(dir, "config")
	err = os.WriteFile(config, []byte(`<busconfig><type>custom</type><listen>`+address+`</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*" eavesdrop="true"/>
<allow eavesdrop="true"/><allow own="*"/></policy></busconfig>`), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(daemon, "--config-file="+config, "--nofork", "--nopidfile")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	l := &logind{}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if l.conn, err = dbus.Connect(address); err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		l.conn.Close()
		for _, file := range l.held {
			file.Close()
		}
	})
	_, propErr := prop.Export(l.conn, logindPath,
		prop.Map{manager: {"InhibitDelayMaxUSec": {Value: uint64(time.Hour / time.Microsecond)}}})
	reply, nameErr := l.conn.RequestName(logindName, dbus.NameFlagDoNotQueue)
	if err := errors.Join(propErr, nameErr, l.conn.Export(l, logindPath, manager)); err != nil ||
		reply != dbus.RequestNameReplyPrimaryOwner {
		t.Fatalf("name on the bus: %v, %v", reply, err)
	}
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", address)
	return l
}

// A node that is shut down gracefully stops its pods without deleting them: the hook tells directed
// gateways, which lose nothing, and takes 2 s at most. What goes through kube-proxy is lost until
// the API server says that the pods are not ready.
func TestNodeShutdown(t *testing.T) {
	cluster.Entered(t)
	fake := startLogind(t)
	l := newLab(t, 3, machine.Options{Kubelet: []string{"shutdownGracePeriod: 60s",
		"shutdownGracePeriodCriticalPods: 10s"}})
	m := modes()[2]
	l.namespace(t, m.work.Namespace, m.labels)
	l.addGateway(t, []string{m.work.Namespace})
	l.addWebhooks(t)
	l.deploy(t, m.work)
	how, haproxy := perRequest, l.gatewayAddress(t)
	running := map[string]*clients{}
	for i, app := range apps {
		running[app] = l.startClients(t, m.work.Namespace, app, fmt.Sprintf("http://%s:%d/", haproxy, 8000+i), how)
	}
	time.Sleep(time.Second) // clients ask for a while before
	const node = "node-3"
	old := l.pods(t, m.work.Namespace, func(p *corev1.Pod) bool { return p.Spec.NodeName == node })
	if len(old) != len(apps) {
		t.Fatalf("pods on %s: %v", node, old)
	}
	addresses := l.addresses(t, m.work.Namespace, node)
	for _, c := range running {
		c.mark("shutdown")
	}
	before := l.metrics(t, node, `lameduck_barrier_waits_total{outcome="Restart"}`)
	if err := fake.shutDown(node); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	var after string
	l.Await(t, time.Minute, "the end of the pods on "+node, func() error {
		// Its agent is the last to go.
		if text := l.tryMetrics(node, `lameduck_barrier_waits_total{outcome="Restart"}`); text != "" {
			after = text
		}
		pods, err := l.Kube.CoreV1().Pods(m.work.Namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, p := range pods.Items {
			if p.Spec.NodeName == node && p.Status.Phase == corev1.PodRunning {
				return fmt.Errorf("pod %s is still running", p.Name)
			}
		}
		return nil
	})
	t.Logf("pods on the node that shuts down have ended after %.1f s; %s before, %s after", time.Since(began).Seconds(),
		strings.TrimSpace(before), strings.TrimSpace(after))
	// A hook that waits for its agents takes 30 s. What is between is for a busy machine.
	if took := time.Since(began); took > 25*time.Second {
		t.Errorf("the end of the pods took %s, want 2s for the hook and some", took)
	}
	if before == after {
		t.Error("the node's agent was not asked")
	}
	// kube-proxy has heard of nothing but readiness, from the API server: until then, and a sync
	// longer, it sends to pods that have ended.
	l.unlisted(t, m.work.Namespace, addresses...)
	t.Logf("EndpointSlices list none of them as ready after %.1f s", time.Since(began).Seconds())
	time.Sleep(proxySync) // every kernel knows by then
	for _, c := range running {
		c.mark("known")
	}
	time.Sleep(2 * time.Second) // clients ask for a while after
	for _, app := range apps {
		c := running[app].stop()
		t.Logf("%s: %s", app, c)
		for _, way := range ways {
			during, after := running[app].in(way, "shutdown"), running[app].in(way, "known")
			t.Logf("%s by %s: %s; once it is known %s", app, way, during, after)
			if way == byHAProxy && during.failed > 0 {
				t.Errorf("%s by %s: %s, want 0: it is told to let go before SIGTERM", app, way, during)
			}
			if after.failed > 0 || after.requests == 0 {
				t.Errorf("%s by %s: %s when every kernel must know, want 0", app, way, after)
			}
		}
	}
}

// proxySync is how long a kube-proxy may take for its next sync, once a second at most, with a
// margin.
const proxySync = 3 * time.Second

// addresses are those of the pods of a namespace on a node.
func (l *lab) addresses(t *testing.T, namespace, node string) []string {
	t.Helper()
	pods, err := l.Kube.CoreV1().Pods(namespace).List(t.Context(),
		metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, p := range pods.Items {
		for _, ip := range p.Status.PodIPs {
			all = append(all, ip.IP)
		}
	}
	return all
}

// Soft node-pressure eviction stops pods without deleting them, too.
func TestSoftEviction(t *testing.T) {
	cluster.Entered(t)
	l := newLab(t, 1, machine.Options{})
	l.namespace(t, "lameduck", map[string]string{"lameduck.io/mode": "enforce"})
	l.addWebhooks(t)
	// A kubelet that starts, as it does to read its configuration, may see the pressure before it
	// sees the pods. It refuses those then that have asked for no memory, and kills them without a
	// hook.
	l.start(t, "lameduck", pod("victim", "node-1", func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Mi")}
	}))
	before := l.metrics(t, "node-1", `lameduck_barrier_waits_total{outcome="Restart"}`)
	events, err := l.Kube.CoreV1().Events("lameduck").Watch(t.Context(),
		metav1.ListOptions{FieldSelector: "involvedObject.name=victim"})
	if err != nil {
		t.Fatal(err)
	}
	defer events.Stop()
	// All of the computer's memory is too little.
	if err := l.Set.Machines[0].Reconfigure("evictionSoft: {memory.available: 4Ti}",
		"evictionSoftGracePeriod: {memory.available: 2s}", "evictionMaxPodGracePeriod: 60"); err != nil {
		t.Fatal(err)
	}
	var killing time.Time
	// Only an Event tells: a pod whose app exits with 0 is shown as Completed, evicted or not.
	evicted := false
	for timeout := time.After(3 * time.Minute); killing.IsZero() || !evicted; {
		select {
		case event := <-events.ResultChan():
			e, ok := event.Object.(*corev1.Event)
			evicted = evicted || ok && e.Reason == "Evicted"
			if ok && e.Reason == "Killing" {
				killing = time.Now()
			}
		case <-timeout:
			l.Explain(t)
			t.Fatal("the pod is not evicted")
		}
	}
	l.Await(t, time.Minute, "the end of the pod", func() error {
		p, err := l.Kube.CoreV1().Pods("lameduck").Get(t.Context(), "victim", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if p.Status.Phase == corev1.PodRunning {
			return errors.New("still running")
		}
		return nil
	})
	after := l.metrics(t, "node-1", `lameduck_barrier_waits_total{outcome="Restart"}`)
	t.Logf("evicted %.1f s after the kubelet began; %s before, %s after", time.Since(killing).Seconds(),
		strings.TrimSpace(before), strings.TrimSpace(after))
	// A hook that waits for its agents takes 30 s. What is between is for a busy machine.
	if took := time.Since(killing); took > 25*time.Second {
		t.Errorf("the eviction took %s, want 2s for the hook and some", took)
	}
	if before == after {
		t.Error("the node's agent was not asked")
	}
}

// A container that takes more memory than it may have dies without a hook and without a word.
// Gateways hear of it from EndpointSlices, as soon as the kubelet has seen it; those that are
// directed let go then at once, kube-proxy a sync later. What comes until then is lost.
func (l *lab) testOOM(t *testing.T) {
	w := modes()[2].work.with("Deployment", 2)
	namespace := w.Namespace
	l.deploy(t, w)
	// It listens again only long after every gateway has stopped routing to it: 5 s after
	// EndpointSlices say so, which takes a busy kubelet seconds.
	const back = 25
	l.start(t, namespace, pod("hog", "node-2", func(p *corev1.Pod) {
		p.Labels["app"] = "exit"
		c := &p.Spec.Containers[0]
		c.Args = append(c.Args, "--hog", fmt.Sprintf("--start-delay=%ds", back))
		c.Ports = []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}
		c.Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Mi")}
	}))
	hog, err := l.Kube.CoreV1().Pods(namespace).Get(t.Context(), "hog", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(proxySync) // every kernel knows by then
	haproxy := fmt.Sprintf("http://%s:%d/", l.gatewayAddress(t), 8020)
	all := l.startClients(t, namespace, "exit", haproxy, perRequest)
	all.mark("before")
	time.Sleep(time.Second) // clients ask for a while before
	all.mark("dies")
	began := time.Now()
	direct := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	response, err := direct.Get("http://" + net.JoinHostPort(hog.Status.PodIP, "8080") + "/hog")
	if err == nil {
		response.Body.Close()
		t.Fatal("the container lives on")
	}
	died := time.Now()
	l.unlisted(t, namespace, hog.Status.PodIP)
	known := time.Now()
	time.Sleep(time.Second) // HAProxy's agent has a watch, and HAProxy is told at run time
	all.mark("directed")
	time.Sleep(proxySync - time.Second) // every kernel knows by then
	all.mark("all")
	time.Sleep(2 * time.Second) // clients ask for a while after
	if since := time.Since(died); since > (back-1)*time.Second {
		t.Errorf("it took %s until every gateway must know: the container is about to be back", since)
	}
	all.mark("returns")
	l.Await(t, time.Minute, "the restarted container", func() error {
		p, err := l.Kube.CoreV1().Pods(namespace).Get(t.Context(), "hog", metav1.GetOptions{})
		if err != nil {
			return err
		}
		is := p.Status.ContainerStatuses[0]
		if !harness.Ready(p) || is.RestartCount == 0 {
			return errors.New("is not ready")
		}
		if ended := is.LastTerminationState.Terminated; ended == nil || ended.Reason != "OOMKilled" {
			t.Fatalf("the container did not die for want of memory: %+v", ended)
		}
		return nil
	})
	time.Sleep(proxySync) // every kernel knows by then
	all.mark("back")
	time.Sleep(2 * time.Second) // clients ask for a while after
	all.stop()
	t.Logf("killed %.1f s after it was asked to take memory, known %.1f s later", died.Sub(began).Seconds(),
		known.Sub(died).Seconds())
	for _, way := range ways {
		dies, directed, later, back := all.in(way, "dies"), all.in(way, "directed"), all.in(way, "all"),
			all.in(way, "back")
		t.Logf("by %s: %s when it died; then %s; then %s", way, dies, directed, later)
		if way == byHAProxy && directed.failed > 0 {
			t.Errorf("by %s: %s a second after the slices knew, want 0: it is told at once", way, directed)
		}
		if later.failed > 0 || later.requests == 0 || later.pods["hog"] > 0 {
			t.Errorf("by %s: %s when every gateway must know, of which %d reached the pod, want 0", way, later,
				later.pods["hog"])
		}
		if back.failed > 0 || back.pods["hog"] == 0 {
			t.Errorf("by %s: %s once it was back, of which %d reached it", way, back, back.pods["hog"])
		}
	}
	l.kubectl(t, "delete", "pod", "-n", namespace, "hog", "--grace-period=1")
}
