package cluster_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/test/cluster"
)

func TestMain(m *testing.M) {
	if os.Getenv("TEST_PROGRAM") != "" {
		if err := cluster.Enter(); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(program(os.Getenv("TEST_PROGRAM")))
	}
	// Most of a test is waiting. Set before the command line is read, which may say otherwise.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	cluster.Main(m)
}

// program is a program that has entered, in a namespace within that of the tests.
func program(name string) int {
	fail := func(err error) int {
		fmt.Println("failed:", err)
		return 1
	}
	switch name {
	case "exit":
		return 7
	case "signal": // says which signal came
		signals := make(chan os.Signal, 4)
		signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
		fmt.Println("ready")
		fmt.Println(<-signals)
		return 0
	case "sleep": // with a child, and an orphan that has left the process group
		if err := exec.Command("sh", "-c", "setsid sleep 1234 & sleep 0.1").Run(); err != nil {
			return fail(err)
		}
		if err := exec.Command("sleep", "1234").Start(); err != nil {
			return fail(err)
		}
		fmt.Println("ready")
		select {}
	case "cluster":
		c, err := cluster.Start(context.Background(), cluster.Options{})
		if err != nil {
			return fail(err)
		}
		out, err := c.Kubectl(context.Background(), "get", "namespaces")
		if err != nil {
			return fail(err)
		}
		fmt.Println("ready", strings.Contains(out, "kube-system"))
		select {}
	case "serve": // serves inside, reachable outside
		listener, err := net.Listen("tcp", "10.244.9.9:80")
		if err != nil {
			return fail(err)
		}
		go http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, "from inside")
		}))
		address, err := cluster.Expose(context.Background(), "10.244.9.9:80", "127.0.0.1:0")
		if err != nil {
			return fail(err)
		}
		if _, err := cluster.Listen("192.0.2.1:1"); err == nil {
			return fail(errors.New("listens on an address the machine does not have"))
		}
		fmt.Println("ready", address)
		select {}
	case "proc": // /proc is that of the namespace, or at least works for oneself
		link, err := os.Readlink("/proc/self/exe")
		if err != nil {
			return fail(err)
		}
		fmt.Println("ready", os.Getpid(), link != "", os.Getenv("TMPDIR"))
		return 0
	}
	return fail(fmt.Errorf("no program %q", name))
}

// outer starts this program, or argv, so that it enters by itself, with a folder for temporary
// files, and returns its first line without "ready".
func outer(t *testing.T, name, temp string, argv ...string) (*exec.Cmd, *bufio.Reader, string) {
	t.Helper()
	if !cluster.Inside() {
		cluster.Shared(t) // says why
	}
	if argv == nil {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		argv = []string{self}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	for _, pair := range os.Environ() {
		if !strings.HasPrefix(pair, "LAMEDUCK_CLUSTER_") && !strings.HasPrefix(pair, "TMPDIR=") {
			cmd.Env = append(cmd.Env, pair)
		}
	}
	cmd.Env = append(cmd.Env, "TEST_PROGRAM="+name, "TMPDIR="+temp, "GORACE=atexit_sleep_ms=0")
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if name != "sleep" { // which dumps its goroutines when told to
		cmd.Stderr = os.Stderr
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	reader := bufio.NewReader(pipe)
	line, err := reader.ReadString('\n')
	if name != "exit" && (err != nil || !strings.HasPrefix(line, "ready")) {
		t.Fatalf("program %s: %q, %v", name, line, err)
	}
	return cmd, reader, strings.TrimSpace(strings.TrimPrefix(line, "ready"))
}

// descendants are the processes below pid, by their command lines.
func descendants(pid int) map[int]string {
	parents, commands := map[int]int{}, map[int]string{}
	entries, _ := os.ReadDir("/proc")
	for _, entry := range entries {
		id, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "stat"))
		if err != nil {
			continue
		}
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		parents[id], _ = strconv.Atoi(fields[1])
		command, _ := os.ReadFile(filepath.Join("/proc", entry.Name(), "cmdline"))
		commands[id] = strings.ReplaceAll(string(command), "\x00", " ")
	}
	found := map[int]string{}
	for id := range parents {
		for up := parents[id]; up != 0; up = parents[up] {
			if up == pid {
				found[id] = commands[id]
			}
		}
	}
	return found
}

func alive(pid int) bool { return syscall.Kill(pid, 0) == nil }

// waitGone polls until none of the processes is left: they are not children of this one, so it
// cannot wait for them.
func waitGone(t *testing.T, processes map[int]string) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for id, command := range processes {
		for alive(id) {
			if time.Now().After(deadline) {
				t.Fatalf("still running: %d %s", id, command)
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
}

func TestEnterExitCode(t *testing.T) {
	t.Parallel()
	cmd, _, _ := outer(t, "exit", t.TempDir())
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 7 {
		t.Errorf("got %v, want exit code 7", err)
	}
}

// The signal must arrive, and once.
func TestEnterForwardsSignals(t *testing.T) {
	t.Parallel()
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		cmd, out, _ := outer(t, "signal", t.TempDir())
		cmd.Process.Signal(s)
		line, err := out.ReadString('\n')
		if err != nil || strings.TrimSpace(line) != s.String() {
			t.Errorf("%s: %q, %v", s, line, err)
		}
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	}
}

// go test sends SIGQUIT when it runs out of time, to see where the test hangs.
func TestEnterForwardsSIGQUIT(t *testing.T) {
	t.Parallel()
	cmd, _, _ := outer(t, "sleep", t.TempDir())
	cmd.Process.Signal(syscall.SIGQUIT)
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 2 {
		t.Errorf("got %v, want exit code 2", err)
	}
}

// Whatever happens to the outer process, nothing may stay behind: here it has no chance to clean
// up.
func TestEnterKilled(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"sleep", "cluster"} {
		cmd, _, line := outer(t, name, t.TempDir())
		processes := descendants(cmd.Process.Pid)
		want := map[string]int{"sleep": 4, "cluster": 6}[name] // init and the program, and what it started
		if len(processes) != want {
			t.Errorf("%s %s: %d processes, want %d: %v", name, line, len(processes), want, processes)
		}
		cmd.Process.Kill()
		cmd.Wait()
		waitGone(t, processes)
	}
}

func TestExpose(t *testing.T) {
	t.Parallel()
	_, _, address := outer(t, "serve", t.TempDir())
	client := &http.Client{Timeout: 5 * time.Second}
	response, err := client.Get("http://" + address)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if body, err := io.ReadAll(response.Body); err != nil || string(body) != "from inside" {
		t.Errorf("%q, %v", body, err)
	}
}

// Anybody may enter where the system allows it, and what it leaves in $TMPDIR is removed.
func TestEnterAsNobody(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("not root")
	}
	setpriv, err := exec.LookPath("setpriv")
	if err != nil {
		cluster.Missing(t, "setpriv", "install util-linux")
	}
	if err := exec.Command(setpriv, "--reuid=65534", "--regid=65534", "--clear-groups", "true").Run(); err != nil {
		t.Skip("started by an ordinary user, which has no other")
	}
	// The test's own program and folder are for root only.
	dir, err := os.MkdirTemp("/tmp", "lameduck-user-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "program")
	// By another process: a program that this one forks while it writes would keep the file open,
	// and what is open for writing cannot be executed.
	if out, err := exec.Command("cp", self, program).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	cmd, _, line := outer(t, "proc", dir, setpriv, "--reuid=65534", "--regid=65534", "--clear-groups", program)
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(line)
	if _, err := os.Stat(fields[2]); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left: %v", fields[2], err)
	}
}

func TestStartAndStop(t *testing.T) {
	t.Parallel()
	cluster.Shared(t)
	c, err := cluster.Start(t.Context(), cluster.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Stop()
	client, err := kubernetes.NewForConfig(c.ConfigFor("jane", "testers"))
	if err != nil {
		t.Fatal(err)
	}
	review, err := client.AuthenticationV1().SelfSubjectReviews().Create(t.Context(),
		&authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil || review.Status.UserInfo.Username != "jane" || review.Status.UserInfo.Groups[0] != "testers" {
		t.Errorf("got %v, %v", review, err)
	}

	// The API server forgets nothing by being killed, and nor does etcd.
	if _, err := c.Kubectl(t.Context(), "create", "namespace", "kept"); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.RestartAPIServer(t.Context()), c.RestartEtcd(t.Context())); err != nil {
		t.Fatal(err)
	}
	if out, err := c.Kubectl(t.Context(), "get", "namespace", "kept"); err != nil {
		t.Error(out, err)
	}
	out, err := c.Kubectl(t.Context(), "version", "-o", "yaml")
	if err != nil || strings.Count(out, "gitVersion: "+c.Binaries().Version) != 2 {
		t.Errorf("version: %s, %v", out, err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	kept := make(chan struct{})
	go func() {
		defer close(kept)
		c.Keep(ctx)
	}()
	before := c.Exited("kube-scheduler")
	c.KillScheduler()
	for c.Exited("kube-scheduler") == before { // the test's own timeout bounds this
		time.Sleep(10 * time.Millisecond)
	}
	cancel()
	<-kept

	var running []string
	for _, name := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
		running = append(running, name)
		select {
		case <-c.Exited(name):
			t.Errorf("%s has exited", name)
		default:
		}
	}
	c.Stop()
	for _, name := range running {
		select {
		case <-c.Exited(name):
		default:
			t.Errorf("%s still runs", name)
		}
	}
	for _, command := range descendants(os.Getpid()) {
		if strings.Contains(command, filepath.Dir(c.Kubeconfig())) {
			t.Errorf("left: %s", command)
		}
	}
	if _, err := os.Stat(filepath.Dir(c.Kubeconfig())); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the data is left: %v", err)
	}
}

// A program that does not start must say why.
func TestStartFails(t *testing.T) {
	t.Parallel()
	cluster.Shared(t)
	_, err := cluster.Start(t.Context(), cluster.Options{APIServer: []string{"--no-such-flag"}})
	if err == nil || !strings.Contains(err.Error(), "unknown flag: --no-such-flag") {
		t.Errorf("got %v", err)
	}
}

func TestCA(t *testing.T) {
	t.Parallel()
	ca, err := cluster.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := ca.IssueFiles(dir, "hook.test", "127.0.0.1"); err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca.PEM()) {
		t.Fatal("no certificate in PEM")
	}
	for _, name := range []string{"hook.test", "127.0.0.1"} {
		if _, err := pair.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
