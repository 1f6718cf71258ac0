package kubeproxy

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// apart runs the test in a network namespace of its own, and reports whether this is there: the
// legacy table, once it is made, ends with the namespace only.
func apart(t *testing.T) bool {
	t.Helper()
	real(t)
	const key = "LAMEDUCK_KUBEPROXY_APART"
	if os.Getenv(key) == t.Name() {
		return true
	}
	if _, err := find("iptables-legacy-restore"); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=1m")
	cmd.Env = append(os.Environ(), key+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	return false
}

// The agent's manifests add NET_ADMIN and drop all other capabilities.
func TestLegacyNeedsNetAdminAlone(t *testing.T) {
	if !apart(t) {
		return
	}
	for _, family := range families {
		restore(t, "legacy", family == unix.NFPROTO_IPV6, iptablesSetUp...)
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // it ends with this goroutine
			header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			caps := [2]unix.CapUserData{{Effective: 1 << unix.CAP_NET_ADMIN, Permitted: 1 << unix.CAP_NET_ADMIN}}
			err := unix.Capset(&header, &caps[0])
			if err == nil {
				_, err = readLegacy(family)
			}
			done <- err
		}()
		if err := <-done; err != nil {
			t.Errorf("family %d: %v", family, err)
		}
	}
}

// The kernel does not notify of changes of the legacy iptables. They are read while there is a
// watch, and unknown before.
func TestLegacy(t *testing.T) {
	if !apart(t) {
		return
	}
	o := start(t, Options{})
	until(t, "no kube-proxy", o.Absent)
	for _, test := range []struct {
		service service
		a, b    string
	}{
		{service{"web", "10.96.0.1", true}, "10.244.0.1:8080", "10.244.0.2:8080"},
		{service{"six", "fd10::1", false}, "[fd00::1]:8080", "[fd00::2]:8080"},
	} {
		s, a, b := test.service, test.a, test.b
		restore(t, "legacy", s.v6(), iptablesSetUp...)
		restore(t, "legacy", s.v6(), s.iptables([]string{a, b}, false)...)
		until(t, "kube-proxy's rules are seen", func() bool { return !o.Absent() && o.Mode() == "iptables" })
		o.mu.Lock()
		if o.legacy[map[bool]uint8{false: unix.NFPROTO_IPV4, true: unix.NFPROTO_IPV6}[s.v6()]] == legacyRead {
			t.Fatal("the rules are read while no pod is watched")
		}
		o.mu.Unlock()
		wa := watch(t, o, a)
		wa.wait(health.Routing)
		// What follows is unseen without a watch.
		wa.Close()
		time.Sleep(2 * legacyPause) // nothing is read, which is the subject
		restore(t, "legacy", s.v6(), s.iptables([]string{b}, true, a)...)
		wa = watch(t, o, a)
		wa.wait(health.Removed)
		wb := watch(t, o, b)
		wb.wait(health.Kept)
		restore(t, "legacy", s.v6(), s.iptables([]string{a, b}, false)...)
		wa.wait(health.Kept)
		wb.Close()
		wa.wait(health.Routing)
		// What is not followed may send, too.
		now := time.Now()
		o.lose(now)
		wa.wait(health.Unknown)
		o.adopt(nil, nil, now)
		wa.wait(health.Routing)
		run(t, "", map[bool]string{false: "iptables-legacy", true: "ip6tables-legacy"}[s.v6()], "-t", "nat", "-F",
			"KUBE-SERVICES")
		wa.wait(health.Unknown)
		wa.Close()
	}
}

// What a kernel might say of legacy rules: it is read, or refused.
func FuzzLegacy(f *testing.F) {
	info := make([]byte, legacyInfoSize)
	binary.NativeEndian.PutUint32(info[32:], 1)
	rule := func(name string, data []byte) []byte {
		b := make([]byte, 112)
		binary.NativeEndian.PutUint16(b[88:], 112)
		binary.NativeEndian.PutUint16(b[90:], uint16(112+32+len(data)))
		target := make([]byte, 32)
		copy(target[2:], name)
		return append(append(b, target...), data...)
	}
	chain := make([]byte, 32)
	copy(chain, "KUBE-SERVICES")
	whole := bytes.Join([][]byte{
		rule("", binary.NativeEndian.AppendUint32(nil, uint32(112+32+4+112+32+32))), rule("ERROR", chain),
		rule("DNAT", []byte{1, 0, 0, 0, 3, 0, 0, 0, 10, 244, 0, 1, 10, 244, 0, 1, 31, 144, 31, 144, 0, 0, 0, 0}),
	}, nil)
	g, err := decodeLegacy(unix.NFPROTO_IPV4, info, whole)
	if err != nil || fmt.Sprint(g.dests) == "map[]" || !g.complete() {
		f.Fatalf("the seed is not read: %v %v", g.dests, err)
	}
	f.Add(true, info, whole)
	f.Add(false, info, []byte{})
	f.Fuzz(func(t *testing.T, four bool, info, b []byte) {
		family := uint8(unix.NFPROTO_IPV4)
		if !four {
			family = unix.NFPROTO_IPV6
		}
		if g, err := decodeLegacy(family, info, b); err == nil {
			g.complete()
		}
	})
}
