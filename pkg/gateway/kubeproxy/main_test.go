package kubeproxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// inside is set in the environment of the program that runs in a network namespace of its own.
const inside = "LAMEDUCK_KUBEPROXY_INSIDE"

// TestMain runs the tests again in a network namespace of their own, where no other program writes
// rules. Where the system forbids that, or nft is not there, the tests of the real kernel are
// skipped, or fail: see missing.
func TestMain(m *testing.M) {
	if os.Getenv(inside) == "" {
		code, err := enter()
		if err == nil {
			os.Exit(code)
		}
		os.Setenv(inside, err.Error())
	}
	goleak.VerifyTestMain(m)
}

// enter runs this program in a network namespace and returns its exit code.
func enter() (int, error) {
	for _, program := range []string{"nft", "ip", "iptables-nft"} {
		if _, err := find(program); err != nil {
			return 0, fmt.Errorf("%s is missing: apt-get install nftables iptables iproute2", program)
		}
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"=yes")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}}
	}
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode(), nil
	}
	if err != nil {
		return 0, fmt.Errorf("make a network namespace: %w: run as root", err)
	}
	return 0, nil
}

// find looks for a program where the path of an ordinary user does not.
func find(program string) (string, error) {
	for _, dir := range []string{"/usr/sbin/", "/sbin/", "/usr/bin/", "/bin/"} {
		if _, err := os.Stat(dir + program); err == nil {
			return dir + program, nil
		}
	}
	return exec.LookPath(program)
}

// real ends a test that needs the kernel's rules and does not have them for itself.
func real(t testing.TB) {
	t.Helper()
	if why := os.Getenv(inside); why != "yes" {
		missing(t, why)
	}
}

// missing ends a test for want of something real: it fails in CI, and is skipped on a laptop.
func missing(t testing.TB, why any) {
	t.Helper()
	if os.Getenv("REQUIRE_REAL") == "1" || os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// run runs a program with some input.
func run(t testing.TB, input, program string, args ...string) string {
	t.Helper()
	path, err := find(program)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, args...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s\n%.2000s", program, strings.Join(args, " "), err, out, input)
	}
	return string(out)
}

// nft makes one transaction.
func nft(t testing.TB, lines ...string) {
	t.Helper()
	run(t, strings.Join(lines, "\n")+"\n", "nft", "-f", "-")
}

// empty begins and ends a test without rules.
func empty(t testing.TB) {
	t.Helper()
	real(t)
	nft(t, "flush ruleset")
	t.Cleanup(func() { nft(t, "flush ruleset") })
}

// start runs an Observer until the test ends.
func start(t *testing.T, options Options) *Observer { return startWith(t, options, func(*Observer) {}) }

// startWith is start of an Observer that set has changed.
func startWith(t *testing.T, options Options, set func(*Observer)) *Observer {
	t.Helper()
	if options.Log == nil {
		options.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	o := New(options)
	set(o)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- o.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error("run:", err)
		}
	})
	return o
}

// follow is a watch that tells its changes.
type follower struct {
	*Watch
	t    testing.TB
	news chan struct{}
}

func watch(t testing.TB, o *Observer, targets ...string) *follower {
	t.Helper()
	f := &follower{t: t, news: make(chan struct{}, 1)}
	var all []netip.AddrPort
	for _, target := range targets {
		all = append(all, netip.MustParseAddrPort(target))
	}
	f.Watch = o.watch(all, func() {
		select {
		case f.news <- struct{}{}:
		default:
		}
	}, false)
	t.Cleanup(f.Close)
	return f
}

// wait waits for a state, of whose changes it is told. What is Idle is Removed.
func (f *follower) wait(state health.State) gateway.Reading {
	f.t.Helper()
	timeout := time.After(30 * time.Second)
	for {
		r := f.Reading()
		if r.State == state || r.State == health.Idle && state == health.Removed {
			return r
		}
		select {
		case <-f.news:
		case <-timeout:
			f.t.Fatalf("state of %v is %s, want %s", f.targets, r.State, state)
		}
	}
}

// stays checks that a state does not change for a while.
func (f *follower) stays(state health.State) {
	f.t.Helper()
	time.Sleep(50 * time.Millisecond) // nothing follows that could be awaited
	if r := f.Reading(); r.State != state {
		f.t.Fatalf("state of %v is %s, want %s", f.targets, r.State, state)
	}
}

// until waits for something that is not told.
func until(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("waited in vain for " + what)
		}
	}
}
