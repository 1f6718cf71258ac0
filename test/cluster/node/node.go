// Package node is a stand-in for the kubelet. It registers a node, and runs the pods that are bound
// to it as processes of the machine, so that a test can have real Deployments, rollouts, drains and
// evictions without containers, images or root.
//
// It behaves like the kubelet in the following, on which Lameduck depends:
//
//   - it is user system:node:NAME in group system:nodes, keeps a Node object with a Ready
//     condition, and a Lease;
//   - each pod has its own IP address, from the node's part of the pod range;
//   - init containers, native sidecars, restart policies with back-off, postStart and preStop
//     hooks;
//   - startup, readiness and liveness probes by HTTP, TCP and exec, and the conditions and
//     container statuses that follow from them, written within milliseconds;
//   - termination: preStop hooks of all containers in parallel and within the grace period, stop
//     signal, native sidecars after the rest and in reverse order, at least 2 s before SIGKILL, the
//     last status, and only then the last DELETE with grace period 0 and the pod's UID as
//     precondition;
//   - environment variables, $(VAR) in command and args, and volumes of type emptyDir, configMap,
//     secret, projected and downwardAPI, replaced atomically when their source changes;
//     ServiceAccount tokens bound to the pod, renewed.
//
// It differs from the kubelet in the following:
//
//   - Images. A container's command is a program of this machine. [Options.Images] can give an
//     image's entry point; otherwise the image is ignored, and a container without a command does
//     not start.
//   - Isolation. All pods share the network namespace, the files and the processes of the caller,
//     so a program has to listen on its pod's address alone (status.podIP by fieldRef): one that
//     listens on all addresses answers for all pods. Users, capabilities, limits and other security
//     settings are ignored. A program that leaves its process group survives its container, though
//     not the caller.
//   - Mounts. Each volume of a pod is a folder that its processes find in the variable
//     VOLUME_<NAME>, in capitals with _ for anything but letters and digits: write
//     $(VOLUME_SHARED)/x for /shared/x. mountPath, subPath and readOnly are ignored. The pod's
//     ServiceAccount is reached by the variable KUBECONFIG, which is absent if its token is not
//     mounted.
//   - Volumes of other types, except hostPath, which is the path itself: such a pod does not start.
//   - kubectl logs, exec, attach and port-forward; [Node.Log] has the output. Ephemeral containers,
//     resize in place, gRPC probes, static pods, activeDeadlineSeconds, node-pressure eviction,
//     graceful node shutdown, garbage collection, the environment variables of Services,
//     termination messages.
//   - Grace period 0 and the vanished pod: the kubelet grants a second or two; here the processes
//     are killed at once.
//   - Survival. The processes die with the caller; a node that is run again starts its pods again,
//     with new addresses.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// callTimeout bounds every call to the API server: one DELETE may take 34 s there.
const callTimeout = 40 * time.Second

// Options of a node. Name and PodRange are required.
type Options struct {
	Name string

	// PodRange is where the addresses of pods come from. The first address is the node's own. Nodes
	// of one cluster must have ranges that do not meet.
	PodRange netip.Prefix

	// Rest is how long an address is not given to another pod after its pod has gone. 0 is 5
	// minutes, as long as addresses last: then a pod waits. Negative: the address that was freed
	// last is given first.
	Rest time.Duration

	// Address chooses the address of a pod, to force an address to be used again. For the zero
	// Addr, and if Address is nil, the node chooses.
	Address func(*v1.Pod) netip.Addr

	// Images are the entry points of images: the command of containers that have none.
	Images map[string][]string

	// Env is added to the environment of each process, as KEY=value. Nothing is inherited from the
	// caller but PATH.
	Env []string

	// Labels are further labels of the Node, Taints its taints, when it is registered for the first
	// time.
	Labels map[string]string
	Taints []v1.Taint

	// Backoff is the delay before the second restart of a container (the first is immediate); it
	// doubles up to MaxBackoff. 0 is what the kubelet has: 10 s and 5 min.
	Backoff, MaxBackoff time.Duration

	// FirstProbe is when a container is first probed, counted from its start. 0 is 100 ms. The
	// kubelet begins at once, but its container has been starting for longer than that.
	FirstProbe time.Duration

	// Dir is where volumes and logs are. If empty it is a temporary folder, which is removed when
	// Run returns. Keep it short: some programs want to put unix sockets there.
	Dir string

	// Observe is called with each event, in order, one at a time: a slow Observe delays all pods.
	Observe func(Event)

	// Ignore reports whether the caller does the node's work for a pod itself. Nil: for none.
	Ignore func(*v1.Pod) bool

	// Logger logs errors. If nil, they are dropped.
	Logger *slog.Logger
}

// Node is one node. Make it with [New], then call Run once.
type Node struct {
	options   Options
	client    kubernetes.Interface
	logger    *slog.Logger
	address   netip.Addr
	addresses *addresses
	server    string // URL of the API server
	caData    []byte
	http      *httpClient
	ready     chan struct{}
	reports   chan *v1.Event // Kubernetes' events, on their way out
	work      sync.WaitGroup // what Run waits for

	// Set by Run before anything reads them.
	secrets    listers.SecretLister
	configMaps listers.ConfigMapLister

	mu   sync.Mutex
	pods map[types.UID]*pod
	next int // number of the next pod's folder
	dir  string

	timeline timeline
}

// New returns a node that will use a client of config, impersonating user system:node:NAME in group
// system:nodes.
func New(config *rest.Config, options Options) (*Node, error) {
	if options.Name == "" || !options.PodRange.IsValid() {
		return nil, errors.New("a node needs a name and a pod range")
	}
	if options.Rest == 0 {
		options.Rest = 5 * time.Minute
	}
	if options.Backoff == 0 {
		options.Backoff = 10 * time.Second
	}
	if options.MaxBackoff == 0 {
		options.MaxBackoff = 5 * time.Minute
	}
	if options.FirstProbe == 0 {
		options.FirstProbe = 100 * time.Millisecond
	}
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	config = rest.CopyConfig(config)
	config.QPS = -1
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:node:" + options.Name,
		Groups: []string{"system:nodes"}}
	config.UserAgent = "lameduck-test-node"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make a client for node %q: %w", options.Name, err)
	}
	if err := rest.LoadTLSFiles(config); err != nil {
		return nil, fmt.Errorf("read the authority of the API server: %w", err)
	}
	options.PodRange = options.PodRange.Masked()
	n := &Node{
		options:   options,
		client:    client,
		logger:    options.Logger.With("node", options.Name),
		address:   options.PodRange.Addr().Next(),
		addresses: newAddresses(options.PodRange, options.Rest),
		server:    config.Host,
		caData:    config.CAData,
		ready:     make(chan struct{}),
		reports:   make(chan *v1.Event, 256),
		pods:      map[types.UID]*pod{},
	}
	n.http = newHTTPClient(n.address)
	n.timeline.observe = options.Observe
	n.timeline.changed = make(chan struct{})
	return n, nil
}

// Run registers the node and runs its pods until ctx ends. Then it kills all processes, as if the
// node had lost its power: no hook is run and no status written. It returns when they are gone, nil
// unless the node could not be set up.
func (n *Node) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer n.work.Wait()
	defer cancel()

	n.dir = n.options.Dir
	if n.dir == "" {
		dir, err := os.MkdirTemp("", "node-")
		if err != nil {
			return fmt.Errorf("make a folder for node %q: %w", n.options.Name, err)
		}
		n.dir = dir
		defer func() { // after the processes
			cancel()
			n.work.Wait()
			os.RemoveAll(dir)
		}()
	}
	if err := os.MkdirAll(n.logDir(), 0o755); err != nil {
		return fmt.Errorf("make a folder for logs: %w", err)
	}
	if err := n.register(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("register node %q: %w", n.options.Name, err)
	}
	n.work.Go(func() { n.heartbeat(ctx) })
	n.work.Go(func() { n.sendReports(ctx) })

	config := informers.NewSharedInformerFactory(n.client, 0)
	secrets, configMaps := config.Core().V1().Secrets(), config.Core().V1().ConfigMaps()
	n.secrets, n.configMaps = secrets.Lister(), configMaps.Lister()
	wake := cache.ResourceEventHandlerFuncs{
		AddFunc:    n.configChanged,
		UpdateFunc: func(_, object any) { n.configChanged(object) },
		DeleteFunc: n.configChanged,
	}
	pods := informers.NewSharedInformerFactoryWithOptions(n.client, 0,
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", n.options.Name).String()
		}))
	informer := pods.Core().V1().Pods().Informer()
	registrations := []func() (cache.ResourceEventHandlerRegistration, error){
		func() (cache.ResourceEventHandlerRegistration, error) {
			return secrets.Informer().AddEventHandler(wake)
		},
		func() (cache.ResourceEventHandlerRegistration, error) {
			return configMaps.Informer().AddEventHandler(wake)
		},
		func() (cache.ResourceEventHandlerRegistration, error) {
			return informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
				AddFunc:    func(object any) { n.podSeen(ctx, object.(*v1.Pod)) },
				UpdateFunc: func(_, object any) { n.podSeen(ctx, object.(*v1.Pod)) },
				DeleteFunc: n.podGone,
			})
		},
	}
	for _, register := range registrations {
		if _, err := register(); err != nil {
			return fmt.Errorf("watch for node %q: %w", n.options.Name, err)
		}
	}
	config.Start(ctx.Done())
	defer config.Shutdown()
	defer cancel() // before the Shutdowns, which wait
	config.WaitForCacheSync(ctx.Done())
	pods.Start(ctx.Done())
	defer pods.Shutdown()
	defer cancel()
	pods.WaitForCacheSync(ctx.Done())
	if ctx.Err() == nil {
		close(n.ready)
	}
	<-ctx.Done()
	return nil
}

// Ready is closed when the node is registered, Ready, and watches its pods.
func (n *Node) Ready() <-chan struct{} { return n.ready }

// Address is the address of the node itself, status.hostIP of its pods.
func (n *Node) Address() netip.Addr { return n.address }

// Log returns what a container has written so far, all its runs one after the other, also after the
// pod is gone. It is empty for a container that this node has never run.
func (n *Node) Log(uid types.UID, container string) string {
	content, err := os.ReadFile(n.logPath(uid, container))
	if err != nil {
		return ""
	}
	return string(content)
}

func (n *Node) logDir() string { return filepath.Join(n.dir, "logs") }

func (n *Node) logPath(uid types.UID, container string) string {
	return filepath.Join(n.logDir(), string(uid)+"_"+container+".log")
}

// register creates the Node, or takes over the one of an earlier run, and makes it Ready and free
// of the taint that the API server gives to new nodes.
func (n *Node) register(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := n.renewLease(ctx); err != nil {
		return err
	}
	nodes := n.client.CoreV1().Nodes()
	fresh := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.options.Name, Labels: map[string]string{
		v1.LabelHostname: n.options.Name, v1.LabelOSStable: "linux",
	}}}
	for key, value := range n.options.Labels {
		fresh.Labels[key] = value
	}
	fresh.Spec.Taints = n.options.Taints
	fresh.Spec.PodCIDR = n.options.PodRange.String()
	fresh.Spec.PodCIDRs = []string{fresh.Spec.PodCIDR}
	if _, err := nodes.Create(ctx, fresh, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	err := retryConflict(func() error {
		node, err := nodes.Get(ctx, n.options.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		n.setStatus(&node.Status)
		_, err = nodes.UpdateStatus(ctx, node, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		return err
	}
	return retryConflict(func() error {
		node, err := nodes.Get(ctx, n.options.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		taints := slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(t v1.Taint) bool {
			return t.Key == v1.TaintNodeNotReady || t.Key == v1.TaintNodeUnreachable
		})
		if len(taints) == len(node.Spec.Taints) {
			return nil
		}
		node.Spec.Taints = taints
		_, err = nodes.Update(ctx, node, metav1.UpdateOptions{})
		return err
	})
}

// retryConflict repeats what others keep changing under it.
func retryConflict(do func() error) error {
	var err error
	for range 10 {
		if err = do(); !apierrors.IsConflict(err) {
			return err
		}
	}
	return err
}

func (n *Node) setStatus(status *v1.NodeStatus) {
	now := metav1.Now()
	plenty := v1.ResourceList{
		v1.ResourceCPU: resource.MustParse("1000"), v1.ResourceMemory: resource.MustParse("1Ti"),
		v1.ResourcePods: resource.MustParse("1000"), v1.ResourceEphemeralStorage: resource.MustParse("1Ti"),
	}
	status.Capacity, status.Allocatable = plenty, plenty
	status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: n.address.String()},
		{Type: v1.NodeHostName, Address: n.options.Name}}
	status.NodeInfo.KubeletVersion = "v0.0.0-stand-in"
	status.NodeInfo.OperatingSystem = "linux"
	status.Conditions = slices.DeleteFunc(status.Conditions, func(c v1.NodeCondition) bool {
		return c.Type == v1.NodeReady
	})
	status.Conditions = append(status.Conditions, v1.NodeCondition{
		Type: v1.NodeReady, Status: v1.ConditionTrue,
		Reason: "KubeletReady", Message: "a stand-in for the kubelet runs",
		LastHeartbeatTime: now, LastTransitionTime: now,
	})
}

// heartbeat renews the lease until ctx ends.
func (n *Node) heartbeat(ctx context.Context) {
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := n.renewLease(ctx); err != nil && ctx.Err() == nil {
				n.logger.Warn("lease not renewed", "err", err)
			}
		}
	}
}

func (n *Node) renewLease(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 8*time.Second)
	defer cancel()
	leases := n.client.CoordinationV1().Leases(v1.NamespaceNodeLease)
	duration, now := int32(40), metav1.NowMicro()
	spec := coordinationv1.LeaseSpec{HolderIdentity: &n.options.Name, LeaseDurationSeconds: &duration, RenewTime: &now}
	lease, err := leases.Get(ctx, n.options.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err = leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: n.options.Name},
			Spec: spec}, metav1.CreateOptions{})
		return err
	}
	if err != nil {
		return err
	}
	lease.Spec = spec
	_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
	return err
}

// podSeen tells the pod's worker what the API server has, and starts one if there is none.
func (n *Node) podSeen(ctx context.Context, object *v1.Pod) {
	if n.options.Ignore != nil && n.options.Ignore(object) {
		return
	}
	n.mu.Lock()
	worker := n.pods[object.UID]
	var replaced *pod
	if worker == nil {
		for _, other := range n.pods { // a watch that was interrupted may show the successor first
			if other.name.Name == object.Name && other.name.Namespace == object.Namespace {
				replaced = other
			}
		}
		n.next++
		worker = newPod(n, object, filepath.Join(n.dir, fmt.Sprint(n.next)))
		n.pods[object.UID] = worker
		n.work.Go(func() { worker.run(ctx) })
	}
	n.mu.Unlock()
	if replaced != nil {
		n.vanished(replaced)
	}
	worker.update(object)
}

// podGone tells the pod's worker that the pod is no more.
func (n *Node) podGone(object any) {
	if exclusion, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = exclusion.Obj
	}
	gone, ok := object.(*v1.Pod)
	if !ok {
		return
	}
	n.mu.Lock()
	worker := n.pods[gone.UID]
	n.mu.Unlock()
	if worker != nil {
		n.vanished(worker)
	}
}

func (n *Node) vanished(worker *pod) {
	n.mu.Lock()
	delete(n.pods, worker.uid)
	n.mu.Unlock()
	worker.vanish()
}

// configChanged wakes the pods that may have a changed Secret or ConfigMap in a volume.
func (n *Node) configChanged(object any) {
	if exclusion, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = exclusion.Obj
	}
	changed, ok := object.(metav1.Object)
	if !ok {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, worker := range n.pods {
		if worker.name.Namespace == changed.GetNamespace() {
			poke(worker.sources)
		}
	}
}

// poke wakes the reader of a channel of size 1.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// report queues an event about a pod for people to see. With too many of them it is dropped.
func (n *Node) report(p *v1.Pod, kind, reason, message string) {
	now := metav1.Now()
	event := &v1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: fmt.Sprintf("%s.%x", p.Name, now.UnixNano())},
		InvolvedObject: v1.ObjectReference{
			APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID,
			ResourceVersion: p.ResourceVersion,
		},
		Type: kind, Reason: reason, Message: message, Count: 1, FirstTimestamp: now, LastTimestamp: now,
		Source:              v1.EventSource{Component: "kubelet", Host: n.options.Name},
		ReportingController: "kubelet", ReportingInstance: n.options.Name,
	}
	select {
	case n.reports <- event:
	default:
		n.logger.Warn("event dropped", "reason", reason, "pod", p.Name)
	}
}

func (n *Node) sendReports(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-n.reports:
			call, cancel := context.WithTimeout(ctx, 5*time.Second)
			_, err := n.client.CoreV1().Events(event.Namespace).Create(call, event, metav1.CreateOptions{})
			cancel()
			// Nothing can be added to a namespace that is being deleted.
			if err != nil && ctx.Err() == nil && !apierrors.IsForbidden(err) && !apierrors.IsNotFound(err) {
				n.logger.Warn("event not sent", "reason", event.Reason, "pod", event.InvolvedObject.Name, "err", err)
			}
		}
	}
}

// serverHostPort is the API server's address as pods are told.
func (n *Node) serverHostPort() (host, port string) {
	u, err := url.Parse(n.server)
	if err != nil {
		return "", ""
	}
	host, port, err = net.SplitHostPort(u.Host)
	if err != nil {
		return u.Host, "443"
	}
	return host, port
}
