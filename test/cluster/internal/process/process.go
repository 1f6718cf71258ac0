// Package process runs programs that cannot outlive the program that started them.
//
// Each program gets its own process group. When it exits, the rest of its group is killed before
// its process ID can be reused. When the starting program dies, for whatever reason, the kernel
// kills it.
package process

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a started program. Its methods may be called by several goroutines at once.
type Process struct {
	done chan struct{}
	args []string

	mu     sync.Mutex // guards reaped, so that a signal never goes to a stranger with a recycled id
	pid    int
	reaped bool
	state  *os.ProcessState // set before done is closed
	ended  time.Time
}

// Start starts cmd, which must not have been started, in a process group of its own. Output must go
// to files: a copying goroutine would hold the process open for as long as any grandchild holds the
// pipe.
func Start(cmd *exec.Cmd) (*Process, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL

	p := &Process{done: make(chan struct{}), args: cmd.Args[1:]}
	started := make(chan error)
	go func() {
		// The kernel takes the death of the starting *thread* for the death of the parent, so the
		// thread has to live for as long as the process does.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		if err := cmd.Start(); err != nil {
			started <- err
			return
		}
		p.pid = cmd.Process.Pid
		started <- nil
		p.reap(cmd)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %q: %w", cmd.Path, err)
	}
	return p, nil
}

// reap waits for the process, kills the rest of its group while the dead leader still keeps the id,
// and collects it.
func (p *Process) reap(cmd *exec.Cmd) {
	for {
		err := unix.Waitid(unix.P_PID, p.pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if err != unix.EINTR {
			break
		}
	}
	ended := time.Now()
	p.mu.Lock()
	syscall.Kill(-p.pid, syscall.SIGKILL) // ESRCH when the leader was alone
	cmd.Wait()                            // the verdict is in ProcessState
	p.reaped, p.state, p.ended = true, cmd.ProcessState, ended
	p.mu.Unlock()
	close(p.done)
}

// Pid is the process id, which is the id of its group as well.
func (p *Process) Pid() int { return p.pid }

// Args are the arguments that it was started with.
func (p *Process) Args() []string { return p.args }

// Done is closed once the process has exited, its group was killed and its state can be read.
func (p *Process) Done() <-chan struct{} { return p.done }

// Signal sends sig to the process alone, as a container runtime does to stop a container. After the
// exit it does nothing.
func (p *Process) Signal(sig syscall.Signal) { p.signal(p.pid, sig) }

// SignalGroup sends sig to the process and all that it started and that did not leave its group.
func (p *Process) SignalGroup(sig syscall.Signal) { p.signal(-p.pid, sig) }

func (p *Process) signal(whom int, sig syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.reaped {
		syscall.Kill(whom, sig)
	}
}

// Kill kills the group and waits until the process is gone.
func (p *Process) Kill() {
	p.SignalGroup(syscall.SIGKILL)
	<-p.done
}

// KillChild is Kill for a process that only waits for its child, as nsenter does. It kills the
// child and waits until the process has seen it go, so that the child's ports are free. Kill waits
// for the process alone.
func (p *Process) KillChild() {
	p.mu.Lock()
	if !p.reaped {
		children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", p.pid))
		for _, field := range strings.Fields(string(children)) {
			if pid, err := strconv.Atoi(field); err == nil {
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		syscall.Kill(p.pid, syscall.SIGCONT) // nsenter stops when its child is stopped
	}
	p.mu.Unlock()
	select {
	case <-p.done:
	case <-time.After(10 * time.Second): // it had none yet, or does not wait for it
		p.Kill()
	}
}

// Exit returns the exit code as a shell reports it, 128 plus the number for a signal, the signal or
// 0, and the time of the exit. It waits for the exit.
func (p *Process) Exit() (code int, signal syscall.Signal, at time.Time) {
	<-p.done
	status := p.state.Sys().(syscall.WaitStatus)
	if status.Signaled() {
		return 128 + int(status.Signal()), status.Signal(), p.ended
	}
	return status.ExitStatus(), 0, p.ended
}
