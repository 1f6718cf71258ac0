package cluster

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/test/cluster/internal/cgroup"
	"github.com/lameduck-io/lameduck/test/cluster/internal/pid1"
)

// PodRange is the addresses that any program inside can listen on and connect to, as on the nodes
// of a cluster. Nodes take parts of it that do not meet. 10.244.0.0/24 is this package's own: the
// API server is at 10.244.0.1.
var PodRange = netip.MustParsePrefix("10.244.0.0/16")

const (
	stageKey  = pid1.StageKey             // what the process started by Enter is for, until it has read it
	insideKey = "LAMEDUCK_CLUSTER_INSIDE" // set for everything inside
	runKey    = "LAMEDUCK_CLUSTER_RUN"    // RunName, for everything inside

	controlFD = 3 // in init and program: the socket to the process outside
	reportFD  = 4 // in init: where it says that the place is set up, or why not
)

// outside is the socket to the process outside, in the program that Enter was called in. The
// channel holds it while it is not in use.
var outside chan *net.UnixConn

// Inside reports whether this process is in a namespace made by [Enter].
func Inside() bool { return os.Getenv(insideKey) != "" }

// Enter moves the program into user, mount, network and process namespaces of its own. It must be
// called before anything else: Enter starts the program again, with the same arguments, environment
// and files, and returns nil in that one. In the process that called it first it does not return:
// it passes signals on, and exits as the inner program does.
//
// Inside, loopback is up, [PodRange] can be listened on, and there is no other network. /proc shows
// the inner processes where the system allows it; where not, /proc/self works and /proc/<pid> shows
// strangers. Whatever runs inside is killed when the outer process or the inner program ends, even
// by SIGKILL. Files are those of the machine, but $TMPDIR is a folder that is removed at the end.
// The user is 0: for root with all of its other ids, for anybody else this one only. Orphans are
// reaped by a process between the two, so children of the inner program are its own to wait for.
//
// An error, in one line that says what to do, means that the system forbids this to the user; the
// program may go on outside. Root needs no user namespaces.
func Enter() error { return enter(true) }

// EnterAsRoot is Enter for programs that run machines (package machine) inside: it takes root, and
// leaves the user namespace out, because container runtimes and kubelets need the real root's
// rights over mounts, devices and control groups. Control groups are the machine's own even so.
// Those whose name begins with [RunName] are removed at the end, and those of programs that died
// before they could by the next Enter.
func EnterAsRoot() error { return enter(false) }

var errNotRoot = errors.New("real nodes take root: run as root")

// RunName is a name that no other program that called [Enter] and is alive has: for what the kernel
// does not remove with the namespaces. It is empty outside.
func RunName() string {
	if !Inside() {
		return ""
	}
	return os.Getenv(runKey)
}

func enter(userNamespace bool) error {
	switch stage := os.Getenv(stageKey); stage {
	case "":
		if Inside() {
			return nil // a child of the inner program
		}
		return enterOutside(userNamespace)
	case pid1.Stage:
		syscall.Exit(pid1.Run())
		return nil
	case "init":
		syscall.Exit(runInit())
		return nil
	case "program":
		os.Unsetenv(stageKey)
		os.Setenv(insideKey, "1")
		syscall.CloseOnExec(controlFD)
		file := os.NewFile(controlFD, "outside")
		conn, err := net.FileConn(file)
		file.Close()
		if err != nil {
			return fmt.Errorf("take over the socket to the outside: %w", err)
		}
		outside = make(chan *net.UnixConn, 1)
		outside <- conn.(*net.UnixConn)
		return nil
	default:
		return fmt.Errorf("%s=%s is not for people to set", stageKey, stage)
	}
}

// enterOutside is Enter in the process that stays outside. It returns only if the namespaces cannot
// be had.
func enterOutside(userNamespace bool) error {
	root := os.Geteuid() == 0
	if !root && !userNamespace {
		return errNotRoot
	}
	temp, err := scratch()
	if err != nil {
		return err
	}
	code, err := 0, error(nil)
	if userNamespace {
		code, err = stay(temp, true)
	}
	if root && (err != nil || !userNamespace) {
		code, err = stay(temp, false)
	}
	sweep(temp)
	if err == nil {
		// Not os.Exit: the race detector's second, and a profile of nothing, are not wanted.
		syscall.Exit(code)
	}
	if root {
		return fmt.Errorf("enter a network of our own: %w: root is not allowed to make namespaces here: in a "+
			"container, run it privileged", err)
	}
	return fmt.Errorf("enter a network of our own: %w: run as root, or allow user namespaces: sysctl -w "+
		"user.max_user_namespaces=10000, and on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0", err)
}

// stay starts the init process in new namespaces and stays with it until it ends.
func stay(temp string, userNamespace bool) (code int, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	control, controlInit, err := socketPair()
	if err != nil {
		return 0, err
	}
	defer control.Close()
	report, reportInit, err := os.Pipe()
	if err != nil {
		controlInit.Close()
		return 0, err
	}
	defer report.Close()

	cmd := exec.Command(self)
	cmd.Args = os.Args
	cmd.Env = append(os.Environ(), stageKey+"=init", "TMPDIR="+temp, runKey+"="+filepath.Base(temp))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{controlInit, reportInit}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		// Out of the reach of the terminal's Ctrl-C, which would arrive twice: once from there,
		// once from here.
		Setsid:    true,
		Pdeathsig: syscall.SIGKILL,
	}
	if userNamespace {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings, err = idMap("/proc/self/uid_map", os.Geteuid())
		if err == nil {
			cmd.SysProcAttr.GidMappings, err = idMap("/proc/self/gid_map", os.Getegid())
		}
		setgroups, _ := os.ReadFile("/proc/self/setgroups")
		cmd.SysProcAttr.GidMappingsEnableSetgroups = os.Geteuid() == 0 &&
			strings.TrimSpace(string(setgroups)) == "allow"
	}

	// From here on signals are for the program, even if it is not there yet.
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded...)
	defer signal.Stop(signals)

	// Pdeathsig is about the thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err == nil {
		err = cmd.Start()
	}
	controlInit.Close()
	reportInit.Close()
	if err != nil {
		var start *os.PathError // of which the path, this program's, tells nothing
		if errors.As(err, &start) {
			err = start.Err
		}
		return 0, fmt.Errorf("make namespaces: %w", err)
	}
	said, _ := io.ReadAll(report) // ends when init has closed its end, or died
	if string(said) != "ready" {
		cmd.Wait()
		if len(said) == 0 {
			said = []byte(cmd.ProcessState.String())
		}
		return 0, errors.New(string(said))
	}

	go serveOutside(control)
	go func() {
		for s := range signals {
			cmd.Process.Signal(s)
		}
	}()
	cmd.Wait()
	return exitCode(cmd.ProcessState.Sys().(syscall.WaitStatus)), nil
}

// forwarded are the signals that are passed on. Init would not notice them otherwise: the kernel
// spares the first process of a namespace every signal that it does not handle.
var forwarded = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGHUP, syscall.SIGUSR1,
	syscall.SIGUSR2}

func exitCode(status syscall.WaitStatus) int {
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}

// runInit is the first process inside: it sets the place up, starts the program and reaps what is
// orphaned. When it returns, the kernel kills the rest.
func runInit() int {
	syscall.CloseOnExec(reportFD) // its end is what is waited for
	report := os.NewFile(reportFD, "report")
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded...)
	if err := setUp(); err != nil {
		report.WriteString(err.Error())
		return 1
	}
	self, err := os.Executable()
	if err != nil {
		report.WriteString(err.Error())
		return 1
	}
	os.Setenv(stageKey, "program")
	program, err := os.StartProcess(self, os.Args, &os.ProcAttr{
		Env:   os.Environ(),
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr, os.NewFile(controlFD, "outside")},
	})
	if err != nil {
		report.WriteString(err.Error())
		return 1
	}
	report.WriteString("ready")
	report.Close()
	go func() {
		for s := range signals {
			syscall.Kill(program.Pid, s.(syscall.Signal))
		}
	}()
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			fmt.Fprintln(os.Stderr, "wait for the program:", err)
			return 1
		case pid == program.Pid && !status.Stopped() && !status.Continued():
			return exitCode(status)
		}
	}
}

// setUp makes the namespaces fit to live in. Only the network is indispensable.
func setUp() error {
	// Nothing mounted here may reach the machine; then show the processes that are here.
	if unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, "") == nil {
		// Forbidden where parts of the present /proc are hidden, as in a container.
		_ = unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	}

	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set loopback up: %w", err)
	}
	// A route of type local makes the whole range this machine's own, without an address for each.
	_, pods, err := net.ParseCIDR(PodRange.String())
	if err != nil {
		return err
	}
	route := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: pods, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
		Table: unix.RT_TABLE_LOCAL}
	if err := netlink.RouteAdd(route); err != nil {
		return fmt.Errorf("route %s to loopback: %w", PodRange, err)
	}

	// All of a test's clients share few addresses: give them more ports, and ports back sooner. A
	// matter of speed only.
	for name, value := range map[string]string{
		"ip_local_port_range": strconv.Itoa(firstEphemeral) + " 65000",
		"tcp_tw_reuse":        "1",
	} {
		_ = os.WriteFile("/proc/sys/net/ipv4/"+name, []byte(value), 0o644)
	}
	return nil
}

// idMap maps all that root has to itself, and one id of anybody else to 0.
func idMap(file string, id int) ([]syscall.SysProcIDMap, error) {
	if os.Geteuid() != 0 {
		return []syscall.SysProcIDMap{{ContainerID: 0, HostID: id, Size: 1}}, nil
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var result []syscall.SysProcIDMap
	for line := range strings.Lines(string(text)) {
		var here, parent, size int
		if _, err := fmt.Sscan(line, &here, &parent, &size); err != nil {
			return nil, fmt.Errorf("parse %s: %w", file, err)
		}
		result = append(result, syscall.SysProcIDMap{ContainerID: here, HostID: here, Size: size})
	}
	return result, nil
}

// scratch makes the folder for what the inner program leaves in $TMPDIR, and removes those of
// programs that died before they could. A folder in use is locked by its owner.
func scratch() (string, error) {
	const prefix = "lameduck-run-"
	old, _ := filepath.Glob(filepath.Join(os.TempDir(), prefix+"*"))
	for _, dir := range old {
		file, err := os.Open(dir)
		if err != nil {
			continue // of another user
		}
		if syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			sweep(dir)
		}
		file.Close()
	}
	for {
		dir, err := os.MkdirTemp("", prefix)
		if err != nil {
			return "", fmt.Errorf("make a folder for temporary files: %w", err)
		}
		// Held to the end of the process.
		fd, err := syscall.Open(dir, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
		if errors.Is(err, syscall.ENOENT) {
			continue // swept by another Enter before it was locked
		}
		if err == nil {
			err = syscall.Flock(fd, syscall.LOCK_EX)
		}
		if err != nil {
			return "", fmt.Errorf("lock the folder for temporary files: %w", err)
		}
		var stat syscall.Stat_t
		if syscall.Fstat(fd, &stat) == nil && stat.Nlink > 0 {
			return dir, nil
		}
		syscall.Close(fd)
	}
}

// sweep removes what a program that has ended left: its control groups and then, because that is
// how they are found, its folder. What cannot be removed is left for the next.
func sweep(dir string) {
	if os.Geteuid() == 0 {
		if err := cgroup.Remove(filepath.Base(dir)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return
		}
	}
	os.RemoveAll(dir)
}

// socketPair returns a connected pair of sockets that keep the bounds of messages: one for here,
// one to give away.
func socketPair() (*net.UnixConn, *os.File, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	here, there := os.NewFile(uintptr(fds[0]), "inside"), os.NewFile(uintptr(fds[1]), "outside")
	defer here.Close()
	conn, err := net.FileConn(here)
	if err != nil {
		there.Close()
		return nil, nil, fmt.Errorf("make a socket pair: %w", err)
	}
	return conn.(*net.UnixConn), there, nil
}
