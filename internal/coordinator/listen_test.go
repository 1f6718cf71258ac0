package coordinator

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Without this, an agent whose node has lost its power counts as connected for a quarter of an
// hour.
func TestConnectionsOfDeadNodesEnd(t *testing.T) {
	config := ListenConfig(5 * time.Second)
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	near, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	raw, err := far.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		for option, want := range map[int]int{unix.TCP_USER_TIMEOUT: 5000, unix.TCP_KEEPINTVL: 1,
			unix.TCP_KEEPCNT: 3} {
			if got, err := syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, option); err != nil || got != want {
				t.Errorf("option %d is %d, want %d: %v", option, got, want, err)
			}
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// unplugged is set in the child that has a network of its own.
const unplugged = "LAMEDUCK_TEST_UNPLUGGED"

// The network of the child is taken down while a connection is open: what is written gets no
// acknowledgement, as from a node that has lost its power.
func TestAnUnpluggedConnectionEndsInTime(t *testing.T) {
	if os.Getenv(unplugged) == "" {
		child := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestAnUnpluggedConnectionEndsInTime$",
			"-test.v")
		child.Env = append(os.Environ(), unplugged+"=1")
		child.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		}
		out, err := child.CombinedOutput()
		if err != nil {
			if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) && os.Getenv("CI") == "" &&
				os.Getenv("REQUIRE_REAL") == "" {
				t.Skipf("no network namespace: %v", err)
			}
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	loopback(t, true)
	config := ListenConfig(2 * time.Second)
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	near, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	far, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	loopback(t, false)
	began := time.Now()
	for time.Since(began) < 20*time.Second {
		if _, err = far.Write([]byte("heartbeat\n")); err != nil {
			break
		}
		time.Sleep(200 * time.Millisecond)
	}
	if took := time.Since(began); err == nil || took < time.Second || took > 8*time.Second {
		t.Errorf("ended after %s: %v", took, err)
	}
	t.Logf("ended after %s: %v", time.Since(began), err)
}

// loopback turns the loopback device on or off.
func loopback(t *testing.T, on bool) {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	var request [40]byte
	copy(request[:], "lo")
	if on {
		request[16] = syscall.IFF_UP
	}
	if err := ioctl(fd, syscall.SIOCSIFFLAGS, &request); err != nil {
		t.Fatal(err)
	}
}

func ioctl(fd int, what uintptr, request *[40]byte) error {
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), what,
		uintptr(unsafe.Pointer(request))); errno != 0 {
		return errno
	}
	return nil
}
