package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/cluster/internal/process"
)

// minimumGrace is the least time between the stop signal and SIGKILL, in seconds, whatever the hook
// has left (kubelet, kuberuntime_container.go).
const minimumGrace = 2

type role int

const (
	initContainer role = iota + 1
	sidecar
	mainContainer
)

// container is one container of a pod, over all its restarts.
type container struct {
	pod  *pod
	spec *v1.Container
	role role

	up        chan struct{} // closed when it has started for the first time, as its startup probe sees it
	finished  chan struct{} // closed when it will not run again
	unhealthy chan *int64   // size 1: a probe asks for a restart; its own grace period, or nil

	// Guarded by pod.mu.
	state    v1.ContainerState
	last     v1.ContainerState
	id       string
	begun    bool // run was called
	started  bool
	probed   bool // the readiness probe has said yes
	restarts int32
}

func newContainer(p *pod, spec *v1.Container, r role, earlier []v1.ContainerStatus) *container {
	c := &container{
		pod: p, spec: spec, role: r,
		up: make(chan struct{}), finished: make(chan struct{}), unhealthy: make(chan *int64, 1),
	}
	c.state.Waiting = &v1.ContainerStateWaiting{Reason: "PodInitializing"}
	if r == mainContainer && len(p.spec.InitContainers) == 0 {
		c.state.Waiting.Reason = "ContainerCreating"
	}
	for _, status := range earlier {
		if status.Name == spec.Name && status.ContainerID != "" { // it ran in an earlier life of the node
			c.restarts = status.RestartCount + 1
			c.last = status.LastTerminationState
		}
	}
	return c
}

// change changes what the status says of the container.
func (c *container) change(f func()) {
	c.pod.mu.Lock()
	f()
	c.pod.mu.Unlock()
	poke(c.pod.dirty)
}

func (c *container) event(kind Kind, detail string) {
	c.pod.event(Event{Container: c.spec.Name, Kind: kind, Detail: detail})
}

// succeeded reports whether its last run ended with exit code 0.
func (c *container) succeeded() bool {
	c.pod.mu.Lock()
	defer c.pod.mu.Unlock()
	return c.state.Terminated != nil && c.state.Terminated.ExitCode == 0
}

// run runs the container again and again, as its restart policy has it, until it is finished or the
// pod stops.
func (c *container) run(ctx context.Context) {
	defer close(c.finished)
	p, options := c.pod, c.pod.node.options
	var delay time.Duration // the first restart is immediate
	for restart := false; ; restart = true {
		if p.isStopping() || ctx.Err() != nil {
			return
		}
		began := time.Now()
		code := c.once(ctx, restart)
		if p.isStopping() || ctx.Err() != nil || !c.restartsAfter(code) {
			return
		}
		if time.Since(began) > 2*options.MaxBackoff {
			delay = 0
		}
		if delay > 0 {
			c.change(func() {
				c.last, c.state = c.state, v1.ContainerState{Waiting: &v1.ContainerStateWaiting{
					Reason: "CrashLoopBackOff", Message: fmt.Sprintf("back-off %s restarting failed container", delay),
				}}
			})
			p.warn("BackOff", fmt.Sprintf("Back-off %s restarting failed container %s", delay, c.spec.Name))
			select {
			case <-time.After(delay):
			case <-p.stopping:
				c.change(func() { c.state = c.last }) // the kubelet shows how it ended
				return
			case <-ctx.Done():
				return
			}
		}
		delay = min(max(2*delay, options.Backoff), options.MaxBackoff)
	}
}

// restartsAfter is the restart policy.
func (c *container) restartsAfter(code int) bool {
	switch policy := c.pod.spec.RestartPolicy; {
	case c.role == sidecar:
		return true
	case c.role == initContainer && code == 0:
		return false
	case policy == v1.RestartPolicyNever:
		return false
	case policy == v1.RestartPolicyOnFailure:
		return code != 0
	default:
		return true
	}
}

// begin changes the state to that of a new run.
func (c *container) begin(restart bool, state v1.ContainerState) {
	c.change(func() {
		if c.state.Terminated != nil {
			c.last = c.state
		}
		if restart {
			c.restarts++
		}
		c.id = fmt.Sprintf("process://%s-%s-%d", c.pod.uid, c.spec.Name, c.restarts)
		c.started, c.probed = false, false
		if state.Terminated != nil {
			state.Terminated.ContainerID = c.id
		}
		c.state = state
	})
}

// once runs the container one time and returns its exit code.
func (c *container) once(ctx context.Context, restart bool) int {
	p := c.pod
	cmd, log, ok := c.waitCommand(ctx)
	if !ok {
		return 0
	}
	began := metav1.Now()
	proc, err := process.Start(cmd)
	log.Close()
	if err != nil {
		p.warn("Failed", "Error: "+err.Error())
		c.begin(restart, v1.ContainerState{Terminated: &v1.ContainerStateTerminated{
			ExitCode: 128, Reason: "StartError", Message: err.Error(), StartedAt: began, FinishedAt: metav1.Now(),
		}})
		return 128
	}
	c.event(Started, fmt.Sprintf("pid %d", proc.Pid()))
	select {
	case <-c.unhealthy: // about an earlier run
	default:
	}
	if c.spec.Lifecycle != nil && c.spec.Lifecycle.PostStart != nil {
		// until it has returned
		c.begin(restart, v1.ContainerState{Waiting: &v1.ContainerStateWaiting{Reason: "ContainerCreating"}})
	} else {
		c.begin(restart, v1.ContainerState{Running: &v1.ContainerStateRunning{StartedAt: began}})
	}

	// Probes and hooks end with the process.
	running, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	work.Go(func() {
		if c.postStart(running, began.Time) {
			c.probe(running, began.Time)
		}
	})
	var grace *int64
	select {
	case <-proc.Done():
	case grace = <-c.unhealthy:
		seconds := p.gracePeriod()
		if grace != nil {
			seconds = *grace
		}
		c.terminate(ctx, proc, seconds)
	case <-p.stopping:
		p.mu.Lock()
		seconds := p.grace
		p.mu.Unlock()
		c.terminate(ctx, proc, seconds)
	case <-ctx.Done():
		c.kill(proc, context.Cause(ctx).Error())
	}
	<-proc.Done()
	cancel()
	work.Wait()

	code, signal, at := proc.Exit()
	p.event(Event{Time: at, Container: c.spec.Name, Kind: Exited, Code: code})
	reason := "Completed"
	if code != 0 {
		reason = "Error"
	}
	c.change(func() {
		c.started, c.probed = false, false
		c.state = v1.ContainerState{Terminated: &v1.ContainerStateTerminated{
			ExitCode: int32(code), Signal: int32(signal), Reason: reason,
			StartedAt: began, FinishedAt: metav1.NewTime(at), ContainerID: c.id,
		}}
	})
	return code
}

// waitCommand prepares the process, waiting for the Secrets and ConfigMaps that its environment
// needs. It reports false if the pod has to stop before.
func (c *container) waitCommand(ctx context.Context) (*exec.Cmd, *os.File, bool) {
	said := ""
	for {
		cmd, log, reason, err := c.command()
		if err == nil {
			return cmd, log, true
		}
		if err.Error() != said {
			said = err.Error()
			c.pod.warn("Failed", "Error: "+said)
			c.change(func() {
				c.state = v1.ContainerState{Waiting: &v1.ContainerStateWaiting{Reason: reason,
					Message: said}}
			})
		}
		select {
		case <-time.After(time.Second): // the channel below is shared with the volumes
		case <-c.pod.stopping:
			return nil, nil, false
		case <-ctx.Done():
			return nil, nil, false
		}
	}
}

// command makes the process of the container out of its spec. The reason is for a status that
// waits.
func (c *container) command() (cmd *exec.Cmd, log *os.File, reason string, err error) {
	n := c.pod.node
	env, err := c.environment()
	if err != nil {
		return nil, nil, "CreateContainerConfigError", err
	}
	argv := c.spec.Command
	args := c.spec.Args
	if len(argv) == 0 {
		entry, ok := n.options.Images[c.spec.Image]
		if !ok || len(entry) == 0 {
			return nil, nil, "ErrImagePull", fmt.Errorf("this node runs no images: give container %q a command, or "+
				"image %q an entry point", c.spec.Name, c.spec.Image)
		}
		argv = entry
	} else {
		argv = expandAll(argv, env.values)
	}
	argv = append(append([]string(nil), argv...), expandAll(args, env.values)...)
	cmd, err = c.exec(argv, env)
	if err != nil {
		return nil, nil, "CreateContainerError", err
	}
	log, err = os.OpenFile(n.logPath(c.pod.uid, c.spec.Name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, nil, "CreateContainerError", err
	}
	cmd.Stdout, cmd.Stderr = log, log
	return cmd, log, "", nil
}

// exec makes a process in the environment and the working directory of the container.
func (c *container) exec(argv []string, env *environment) (*exec.Cmd, error) {
	if len(argv) == 0 {
		return nil, errors.New("empty command")
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = env.list()
	cmd.Dir = c.spec.WorkingDir
	if cmd.Dir == "" {
		cmd.Dir = filepath.Join(c.pod.dir, "_"+c.spec.Name) // no volume has such a name
		if err := os.MkdirAll(cmd.Dir, 0o755); err != nil {
			return nil, err
		}
	}
	return cmd, nil
}

// terminate stops the process as the kubelet does, in seconds from now or, if the pod is stopping,
// before its grace ends: the preStop hook, then for sidecars their turn, then the signal, then
// SIGKILL. As in the kubelet, what hook and turn have used is counted in whole seconds, rounded
// down.
func (c *container) terminate(ctx context.Context, proc *process.Process, seconds int64) {
	given, _ := c.pod.deadline()
	if c.spec.Lifecycle != nil && c.spec.Lifecycle.PreStop != nil && seconds > 0 {
		seconds -= c.preStop(ctx, seconds, given)
	}
	if c.role == sidecar && seconds > 0 && c.pod.isStopping() {
		seconds -= c.waitTurn(ctx, seconds, given)
	}
	seconds = max(seconds, minimumGrace)
	select {
	case <-proc.Done():
		return
	default:
	}
	if ctx.Err() != nil {
		c.kill(proc, context.Cause(ctx).Error())
		return
	}
	signal := syscall.SIGTERM
	if c.spec.Lifecycle != nil && c.spec.Lifecycle.StopSignal != nil {
		if number := unix.SignalNum(string(*c.spec.Lifecycle.StopSignal)); number != 0 {
			signal = number
		}
	}
	c.event(Term, signal.String())
	proc.Signal(signal)
	end := time.Now().Add(time.Duration(seconds) * time.Second)
	least := time.Now().Add(minimumGrace * time.Second)
	c.wait(ctx, end, given, least, proc.Done())
	select {
	case <-proc.Done():
		return
	default:
	}
	c.kill(proc, "grace period is over")
}

func (c *container) kill(proc *process.Process, why string) {
	c.event(Kill, why)
	proc.Kill()
}

// preStop runs the hook for as long as the grace allows and returns the whole seconds that it took.
// A hook that takes longer continues, as the kubelet's does, until the pod is deleted, but is not
// waited for.
func (c *container) preStop(ctx context.Context, seconds int64, given time.Time) int64 {
	c.event(PreStopBegins, "")
	began := time.Now()
	done := make(chan struct{})
	c.pod.node.work.Go(func() {
		defer close(done)
		detail := ""
		if err := c.hook(ctx, c.spec.Lifecycle.PreStop); err != nil {
			detail = err.Error()
			c.pod.warn("FailedPreStopHook", "PreStopHook failed")
		}
		c.event(PreStopEnds, detail)
	})
	c.wait(ctx, began.Add(time.Duration(seconds)*time.Second), given, time.Time{}, done)
	return int64(time.Since(began).Seconds())
}

// waitTurn waits until the main containers, and the sidecars after this one, have finished.
func (c *container) waitTurn(ctx context.Context, seconds int64, given time.Time) int64 {
	began := time.Now()
	end := began.Add(time.Duration(seconds) * time.Second)
	before := append([]*container(nil), c.pod.mains...)
	for i := len(c.pod.inits) - 1; c.pod.inits[i] != c; i-- {
		if c.pod.inits[i].role == sidecar {
			before = append(before, c.pod.inits[i])
		}
	}
	for _, other := range before {
		if other.hasBegun() {
			c.wait(ctx, end, given, time.Time{}, other.finished)
		}
	}
	return int64(time.Since(began).Seconds())
}

// hasBegun reports whether run was called, which closes finished at its end. If it is called later
// while the pod stops, it starts no process.
func (c *container) hasBegun() bool {
	c.pod.mu.Lock()
	defer c.pod.mu.Unlock()
	return c.begun
}

// wait waits for done, until end or, if the pod's deadline is no longer the given one, until that,
// but for that not before least.
func (c *container) wait(ctx context.Context, end, given, least time.Time, done <-chan struct{}) {
	for {
		until := end
		deadline, sooner := c.pod.deadline()
		if !deadline.Equal(given) && deadline.Before(until) {
			until = deadline
			if until.Before(least) {
				until = least
			}
		}
		timer := time.NewTimer(time.Until(until))
		select {
		case <-done:
		case <-ctx.Done():
		case <-timer.C:
		case <-sooner:
			timer.Stop()
			continue
		}
		timer.Stop()
		return
	}
}
