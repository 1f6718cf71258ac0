package kernel

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/test/gatewaytest"
	"github.com/lameduck-io/lameduck/test/planes"
)

// inside is set in the environment of the program that runs in namespaces of its own, to the folder
// of its bpffs.
const inside = "LAMEDUCK_KERNEL_INSIDE"

// role is set in the environment of this program where it is started as something else.
const role = "LAMEDUCK_KERNEL_ROLE"

// TestMain runs the tests again in a network namespace, whose sockets are those of the tests, and
// in a mount namespace with a bpffs.
func TestMain(m *testing.M) {
	switch os.Getenv(role) {
	case "dial":
		dialer()
		os.Exit(0)
	case "backend":
		backend()
		os.Exit(0)
	case "agent":
		agent()
		os.Exit(0)
	case "keep":
		keeper()
		os.Exit(0)
	}
	if os.Getenv(inside) != "" || os.Geteuid() != 0 {
		os.Exit(m.Run())
	}
	dir, err := os.MkdirTemp("", "bpf")
	if err != nil {
		panic(err)
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"="+dir)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		Pdeathsig: syscall.SIGKILL}
	err = cmd.Run()
	os.Remove(dir)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(cmd.ProcessState.ExitCode())
}

// pod is a cgroup as the kubelet makes one for a pod, with two containers.
type pod struct {
	uid, root, dir string
	config         Config
}

// newPod makes a pod, by the layout of one of the kubelet's drivers.
func newPod(t testing.TB, systemd bool) *pod {
	t.Helper()
	pins := os.Getenv(inside)
	if pins == "" {
		gatewaytest.Missing(t, "right to load programs: run as root", os.ErrPermission)
	}
	setUp(t, pins)
	root := "/sys/fs/cgroup"
	if _, err := os.Stat(root + "/unified"); err == nil {
		root += "/unified"
	}
	top := filepath.Join(root, fmt.Sprintf("lameduck-test-%d-%08x", os.Getpid(), rand.Uint32()))
	if systemd {
		return newPodIn(t, root, top+"/kubepods.slice/kubepods-burstable.slice", "kubepods-burstable-pod%s.slice")
	}
	return newPodIn(t, root, top+"/kubepods/burstable", "pod%s")
}

var settingUp sync.Mutex

// setUp mounts a bpffs at pins and brings the loopback interface up, unless that is done.
func setUp(t testing.TB, pins string) {
	t.Helper()
	settingUp.Lock()
	defer settingUp.Unlock()
	var fsType unix.Statfs_t
	if err := unix.Statfs(pins, &fsType); err != nil {
		t.Fatal(err)
	}
	if fsType.Type != unix.BPF_FS_MAGIC {
		if err := unix.Mount("bpf", pins, "bpf", 0, ""); err != nil {
			gatewaytest.Missing(t, "bpffs", err)
		}
		if out, err := exec.Command("ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
}

// newPodIn makes a pod in a folder of cgroups, whose name there is as format says.
func newPodIn(t testing.TB, root, dir, format string) *pod {
	t.Helper()
	p := &pod{uid: fmt.Sprintf("%08x-0000-4000-8000-%012x", rand.Uint32(), os.Getpid()), root: root}
	uid, pins := p.uid, os.Getenv(inside)
	if strings.HasSuffix(format, ".slice") {
		uid = strings.ReplaceAll(uid, "-", "_")
	}
	p.dir = filepath.Join(dir, fmt.Sprintf(format, uid))
	for _, container := range []string{"gateway", "sidecar"} {
		if err := os.MkdirAll(filepath.Join(p.dir, container), 0o755); err != nil {
			gatewaytest.Missing(t, "cgroup2", err)
		}
	}
	t.Cleanup(func() {
		os.RemoveAll(filepath.Join(pins, p.uid))
		p.remove(t)
		for dir := p.dir; dir != root; dir = filepath.Dir(dir) {
			os.Remove(dir)
		}
	})
	p.config = Config{PodUID: p.uid, Cgroups: root, Pins: pins,
		Services: []Service{{Service: "shop/web", Port: "http"}}}
	return p
}

// remove removes the pod's cgroups, as the kubelet does when its processes have ended.
func (p *pod) remove(t testing.TB) {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) { // until its processes are gone
		left := false
		for _, dir := range []string{p.dir + "/gateway", p.dir + "/sidecar", p.dir} {
			err := os.Remove(dir)
			left = left || err != nil && !errors.Is(err, os.ErrNotExist)
		}
		if !left {
			return
		}
		if time.Now().After(end) {
			t.Errorf("processes are left in %s", p.dir)
			return
		}
	}
}

// start starts a program in a container of the pod.
func (p *pod) start(t testing.TB, container, listens, path string, args ...string) *planes.Program {
	t.Helper()
	script := `echo $$ > "$0/cgroup.procs" && exec "$@"`
	return planes.StartProgram(t, listens, "/bin/sh",
		append([]string{"-c", script, filepath.Join(p.dir, container), path}, args...)...)
}

// open returns the gateway, as an agent does that starts.
func (p *pod) open(t testing.TB) *Gateway {
	t.Helper()
	g, err := open(p.config, maxExclusions)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.close)
	return g
}
