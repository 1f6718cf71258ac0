// Package pid1 is the first process of a test machine: it sets up the machine's namespaces, reports
// when they are ready, and reaps orphaned processes. When it is killed, the kernel kills all
// processes of the machine and removes its mounts and network.
package pid1

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// StageKey is the environment variable that tells a program of these tests, when it has started
	// itself again, what it is for.
	StageKey = "LAMEDUCK_CLUSTER_STAGE"
	// Stage is its value for the first process of a machine.
	Stage = "machine"

	nameKey = "LAMEDUCK_MACHINE_NAME"
	dirKey  = "LAMEDUCK_MACHINE_DIR"

	// Dir is where a machine finds its folder.
	Dir = "/run/node"

	reportFD = 3
)

// Command returns a command that runs this program as the first process of a machine called name,
// whose folder is dir. It writes "ready" to report once programs can be started there, or why it
// ends.
func Command(name, dir string, report *os.File) (*exec.Cmd, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self)
	cmd.Args = []string{"lameduck-machine", name}
	cmd.Env = append(os.Environ(), StageKey+"="+Stage, nameKey+"="+name, dirKey+"="+dir)
	cmd.ExtraFiles = []*os.File{report}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS |
			syscall.CLONE_NEWIPC,
	}
	return cmd, nil
}

// Run is that process. It returns only on an error, with the exit code.
func Run() int {
	syscall.CloseOnExec(reportFD)
	report := os.NewFile(reportFD, "report")
	orphaned := make(chan os.Signal, 1)
	signal.Notify(orphaned, syscall.SIGCHLD)
	if err := setUp(os.Getenv(nameKey), os.Getenv(dirKey)); err != nil {
		report.WriteString(err.Error())
		return 1
	}
	report.WriteString("ready")
	report.Close()
	for {
		var status syscall.WaitStatus
		switch _, err := syscall.Wait4(-1, &status, 0, nil); err {
		case nil, syscall.EINTR:
		case syscall.ECHILD:
			<-orphaned // it had none, and has now or will have
		default:
			return 1
		}
	}
}

// kernel is what the kubelet wants of settings that are not the machine's own but the whole
// system's, and would change. It is shown files instead.
var kernel = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

func setUp(name, dir string) error {
	// Nothing mounted here reaches the others; among the machine's own programs and pods mounts are
	// shared, as kubelets want it.
	for _, flag := range []uintptr{unix.MS_SLAVE, unix.MS_SHARED} {
		if err := unix.Mount("", "/", "", flag|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("keep mounts to itself: %w", err)
		}
	}
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("set the name of the host: %w", err)
	}

	// /run is new, /var that of the system under a layer of its own: programs have paths in them
	// that cannot be configured. The folder is taken hold of before either can hide it.
	tree, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("open %s: %w", dir, err)
	}
	defer unix.Close(tree)
	if err := unix.Mount("run", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	const upper, work = "/run/.var/upper", "/run/.var/work"
	for _, dir := range []string{Dir, upper, work, "/run/lock"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, Dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount %s: %w", Dir, err)
	}
	if err := unix.Mount("", Dir, "", unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share %s: %w", Dir, err)
	}
	if err := unix.Mount("var", "/var", "overlay", 0, "lowerdir=/var,upperdir="+upper+",workdir="+work); err != nil {
		return fmt.Errorf("lay a layer over /var: %w", err)
	}

	for name, value := range kernel {
		path := filepath.Join("/run/.kernel", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		if err := unix.Mount(path, filepath.Join("/proc/sys", name), "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("hide /proc/sys/%s: %w", name, err)
		}
	}
	// The network's own settings are those of the namespace.
	for name, value := range map[string]string{
		"ipv4/ip_forward":              "1",
		"ipv6/conf/all/forwarding":     "1",
		"ipv6/conf/default/accept_dad": "0",
	} {
		path := filepath.Join("/proc/sys/net", name)
		if err := os.WriteFile(path, []byte(value), 0o644); err != nil && !os.IsNotExist(err) {
			return fmt.Errorf("set %s: %w", path, err)
		}
	}
	return nil
}
