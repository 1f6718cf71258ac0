package node

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// errVanished is why a pod's context ends when the pod is gone, or has no grace left.
var errVanished = errors.New("pod vanished or was deleted by force")

// pod is one pod on the node: a goroutine that runs it, one for each of its containers, one that
// writes its status and one that keeps its volumes up to date.
//
// It goes: starting, in the order of the spec; running, until its containers have finally finished
// or it is deleted (stopping is closed); stopping, in which each container sees to its own end;
// stopped, when the last status is written; and, once it is deleted as well, the last DELETE. When
// its context ends, that is the end in any state.
type pod struct {
	node *Node
	uid  types.UID
	name types.NamespacedName
	spec *v1.PodSpec // does not change but for things that do not matter here
	dir  string      // volumes and working directories

	stopping chan struct{} // closed when the containers must stop
	deleted  chan struct{} // closed when a deletionTimestamp was seen
	gone     chan struct{} // closed when the pod is no more, or has no grace left
	sources  chan struct{} // size 1: something that volumes or variables are made of has changed
	dirty    chan struct{} // size 1: the status has changed

	inits, mains []*container

	mu         sync.Mutex
	latest     *v1.Pod
	address    netip.Addr
	startTime  metav1.Time
	failed     bool // an init container has finally failed
	terminated bool // all containers have finally finished
	conditions map[v1.PodConditionType]v1.PodCondition
	wasReady   bool
	grace      int64         // seconds that the containers have to stop, set before stopping is closed
	until      time.Time     // when that grace ends: zero before stopping is closed, then only ever brought forward
	sooner     chan struct{} // closed and replaced when until changes
	volumes    map[string]string
	tokens     map[string]token
}

func newPod(n *Node, object *v1.Pod, dir string) *pod {
	p := &pod{
		node:       n,
		uid:        object.UID,
		name:       types.NamespacedName{Namespace: object.Namespace, Name: object.Name},
		spec:       &object.Spec,
		dir:        dir,
		stopping:   make(chan struct{}),
		deleted:    make(chan struct{}),
		gone:       make(chan struct{}),
		sources:    make(chan struct{}, 1),
		dirty:      make(chan struct{}, 1),
		latest:     object,
		startTime:  metav1.Now(),
		conditions: map[v1.PodConditionType]v1.PodCondition{},
		sooner:     make(chan struct{}),
		volumes:    map[string]string{},
		tokens:     map[string]token{},
	}
	if object.Status.StartTime != nil {
		p.startTime = *object.Status.StartTime
	}
	for _, condition := range object.Status.Conditions {
		p.conditions[condition.Type] = condition
	}
	for i := range object.Spec.InitContainers {
		spec := &object.Spec.InitContainers[i]
		role := initContainer
		if spec.RestartPolicy != nil && *spec.RestartPolicy == v1.ContainerRestartPolicyAlways {
			role = sidecar
		}
		p.inits = append(p.inits, newContainer(p, spec, role, object.Status.InitContainerStatuses))
	}
	for i := range object.Spec.Containers {
		p.mains = append(p.mains, newContainer(p, &object.Spec.Containers[i], mainContainer,
			object.Status.ContainerStatuses))
	}
	return p
}

// event adds to the timeline.
func (p *pod) event(e Event) {
	e.Pod, e.UID = p.name, p.uid
	p.node.timeline.add(e)
}

// warn is for people who describe the pod.
func (p *pod) warn(reason, message string) {
	p.mu.Lock()
	object := p.latest
	p.mu.Unlock()
	p.node.report(object, v1.EventTypeWarning, reason, message)
}

// update is told each state of the pod that the API server shows, in order.
func (p *pod) update(object *v1.Pod) {
	now := time.Now()
	p.mu.Lock()
	p.latest = object
	p.mu.Unlock()
	poke(p.sources) // labels and annotations
	poke(p.dirty)   // readiness gates
	if object.DeletionTimestamp == nil {
		return
	}
	grace := int64(v1.DefaultTerminationGracePeriodSeconds)
	if object.DeletionGracePeriodSeconds != nil {
		grace = *object.DeletionGracePeriodSeconds
	}
	select {
	case <-p.deleted:
	default:
		p.event(Event{Time: now, Kind: Deleted})
		close(p.deleted) // only update does
	}
	if grace == 0 {
		p.vanish()
		return
	}
	p.stop(now, grace)
}

// vanish ends the pod at once. It may be called again.
func (p *pod) vanish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.gone:
	default:
		close(p.gone)
	}
}

// stop makes the containers stop within grace seconds from now, or earlier if an earlier stop said
// so.
func (p *pod) stop(now time.Time, grace int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	until := now.Add(time.Duration(grace) * time.Second)
	if p.until.IsZero() {
		p.grace = grace
		close(p.stopping)
	} else if !until.Before(p.until) {
		return
	}
	p.until = until
	close(p.sooner)
	p.sooner = make(chan struct{})
}

// deadline returns when the grace of a stopping pod ends, and a channel that is closed if that
// changes. While it does not stop the time is zero.
func (p *pod) deadline() (time.Time, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.until, p.sooner
}

func (p *pod) isStopping() bool {
	select {
	case <-p.stopping:
		return true
	default:
		return false
	}
}

// run runs the pod to its end, or until the node ends.
func (p *pod) run(ctx context.Context) {
	p.event(Event{Kind: Seen})
	phase := p.latestPod().Status.Phase
	if phase != v1.PodSucceeded && phase != v1.PodFailed {
		p.runUnlessGone(ctx)
	}
	select {
	case <-p.deleted:
		p.remove(ctx)
	case <-p.gone:
	case <-ctx.Done():
	}
	select {
	case <-p.gone: // held up by finalizers, perhaps
		p.event(Event{Kind: Vanished})
	case <-ctx.Done():
	}
}

// runUnlessGone is live, ended at once if the pod vanishes.
func (p *pod) runUnlessGone(ctx context.Context) {
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-p.gone:
			cancel(errVanished)
		case <-done:
		}
	})
	p.live(ctx)
	close(done)
	watch.Wait()
	cancel(nil)
}

// live is the life of a pod that has not ended, from its address to its last status.
func (p *pod) live(ctx context.Context) {
	defer os.RemoveAll(p.dir)
	statusDone := make(chan struct{})
	var status sync.WaitGroup
	status.Go(func() { p.writeStatuses(ctx, statusDone) })

	containers, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup // the containers', and what serves them
	if p.takeAddress(ctx) {
		defer func() { p.node.addresses.free(time.Now(), p.address) }()
		poke(p.dirty)
		if p.waitVolumes(ctx) {
			work.Go(func() { p.refreshVolumes(containers) })
			p.runContainers(ctx)
		}
	}
	cancel()
	work.Wait()

	p.mu.Lock()
	p.terminated = true
	p.mu.Unlock()
	close(statusDone)
	status.Wait()
}

// takeAddress waits for an address. It reports whether it got one before the pod had to stop.
func (p *pod) takeAddress(ctx context.Context) bool {
	if p.isStopping() {
		return false
	}
	n := p.node
	if p.spec.HostNetwork {
		p.setAddress(n.address)
		n.addresses.take(time.Now(), n.address) // several may have it; cannot fail
		return true
	}
	for delay := time.Duration(0); ; delay = time.Second {
		select {
		case <-time.After(delay):
		case <-p.stopping:
			return false
		case <-ctx.Done():
			return false
		}
		var forced netip.Addr
		if n.options.Address != nil {
			forced = n.options.Address(p.latestPod())
		}
		address, err := n.addresses.take(time.Now(), forced)
		if err == nil {
			p.setAddress(address)
			return true
		}
		if delay == 0 {
			p.warn("FailedCreatePodSandBox", err.Error())
		}
	}
}

func (p *pod) setAddress(address netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.address = address
}

func (p *pod) latestPod() *v1.Pod {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.latest
}

// runContainers starts the containers in order and returns when all have finally finished.
func (p *pod) runContainers(ctx context.Context) {
	var work sync.WaitGroup
	defer work.Wait()
	start := func(c *container) {
		p.mu.Lock()
		c.begun = true
		p.mu.Unlock()
		work.Go(func() { c.run(ctx) })
	}

	for _, c := range p.inits {
		if p.isStopping() || ctx.Err() != nil {
			return
		}
		start(c)
		done := c.finished
		if c.role == sidecar {
			select {
			case <-c.up:
				continue
			case <-done:
			}
		} else {
			<-done
		}
		if !c.succeeded() { // finally: the restart policy is Never, or the pod is stopping
			p.mu.Lock()
			p.failed = true
			p.mu.Unlock()
			p.stop(time.Now(), p.gracePeriod())
			return
		}
	}
	for _, c := range p.mains {
		start(c)
	}
	for _, c := range p.mains {
		<-c.finished
	}
	p.stop(time.Now(), p.gracePeriod()) // the sidecars of a finished pod
}

func (p *pod) gracePeriod() int64 {
	if p.spec.TerminationGracePeriodSeconds != nil {
		return *p.spec.TerminationGracePeriodSeconds
	}
	return v1.DefaultTerminationGracePeriodSeconds
}

// remove sends the last DELETE, until it is answered.
func (p *pod) remove(ctx context.Context) {
	zero := int64(0)
	options := metav1.DeleteOptions{GracePeriodSeconds: &zero, Preconditions: &metav1.Preconditions{UID: &p.uid}}
	for delay := 50 * time.Millisecond; ctx.Err() == nil; delay = min(2*delay, 5*time.Second) {
		select {
		case <-p.gone: // or it has no grace left, and another client sent the last DELETE
			return
		default:
		}
		call, cancel := context.WithTimeout(ctx, callTimeout)
		err := p.node.client.CoreV1().Pods(p.name.Namespace).Delete(call, p.name.Name, options)
		cancel()
		if err == nil {
			p.event(Event{Kind: Removed})
			return
		}
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // gone, or another pod has its name
			return
		}
		if ctx.Err() == nil {
			p.node.logger.Warn("last delete refused", "pod", p.name, "err", err)
		}
		select {
		case <-time.After(delay):
		case <-p.gone:
		case <-ctx.Done():
		}
	}
}
