// Package cluster runs a real Kubernetes control plane for tests and demonstrations: etcd,
// kube-apiserver, kube-controller-manager and kube-scheduler of one version. They run as processes
// of an ordinary user, without containers. Nothing remains after they end.
//
// [Build] downloads the programs or builds them from source, once. [Enter] moves the caller into a
// network and process namespace of its own. All addresses of the pod range exist there, and
// everything in the namespace ends with it. [Start] starts a control plane there, in about two
// seconds. Package node adds nodes that run pods as processes. Package machine, which needs root,
// adds real nodes with kubelet, containers and kube-proxy. [Listen] and [Expose] give programs on
// the machine access to the namespace. In tests all of this is two lines:
//
//	func TestMain(m *testing.M) { cluster.Main(m) }
//
//	func TestSomething(t *testing.T) { c := cluster.Shared(t) ... }
//
// The API server, the controllers and the scheduler are real, with admission webhooks, RBAC and
// ServiceAccount tokens. Without machines there is no kube-proxy, so ClusterIPs lead nowhere. There
// is no cluster DNS, no aggregated API, and no encryption or authentication between API server and
// etcd.
package cluster

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/lameduck-io/lameduck/test/cluster/internal/process"
)

// ServiceRange is where ClusterIPs come from. Nothing answers there.
const ServiceRange = "10.96.0.0/16"

// apiAddress is where pods find the API server: EndpointSlices refuse loopback.
const apiAddress = "10.244.0.1"

// Ports below firstEphemeral are never given to outgoing connections inside, so a port that was
// free a moment ago still is. Those of planes.FreeAddress are below it, too.
const firstEphemeral = 31000

var nextPort atomic.Int64

// Options of a control plane. The zero value is a complete one.
type Options struct {
	// APIServer, ControllerManager and Scheduler are further flags, which override those given by
	// Start: "--feature-gates=X=true".
	APIServer, ControllerManager, Scheduler []string

	// NoControllers leaves out kube-controller-manager, NoScheduler kube-scheduler. Without
	// controllers, the ServiceAccounts that pods need are missing.
	NoControllers, NoScheduler bool

	// LogDir is where the programs write their logs, NAME.log, and is created. If empty they go
	// into a temporary folder and disappear with the cluster.
	LogDir string
}

// Cluster is a running control plane.
type Cluster struct {
	binaries Binaries
	options  Options
	dir      string
	logDir   string
	server   string // the URL of the API server
	token    string
	ca       *CA

	mu       sync.Mutex
	programs map[string]*process.Process // the latest of each name
	stopped  bool
}

// Start starts a control plane and returns when pods can be created in it. Inside (see [Enter]) the
// API server is reachable by pods, outside on loopback only. On an error nothing is left running.
// The caller calls Stop.
func Start(ctx context.Context, options Options) (*Cluster, error) {
	binaries, err := BuildControlPlane(ctx, os.Stderr)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	dir, err := os.MkdirTemp("", "lameduck-cluster-")
	if err != nil {
		return nil, fmt.Errorf("make a folder for the cluster: %w", err)
	}
	c := &Cluster{binaries: binaries, options: options, dir: dir, logDir: options.LogDir,
		programs: map[string]*process.Process{}}
	if err := c.start(ctx); err != nil {
		c.Stop()
		return nil, err
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context) error {
	if c.logDir == "" {
		c.logDir = filepath.Join(c.dir, "logs")
	}
	if err := os.MkdirAll(c.logDir, 0o755); err != nil {
		return fmt.Errorf("make a folder for logs: %w", err)
	}
	ports, err := freePorts(3)
	if err != nil {
		return err
	}
	c.server = fmt.Sprintf("https://127.0.0.1:%d", ports[2])
	if Inside() {
		c.server = fmt.Sprintf("https://%s:%d", apiAddress, ports[2])
	}
	if err := c.writeCredentials(); err != nil {
		return err
	}

	client := fmt.Sprintf("http://127.0.0.1:%d", ports[0])
	peer := fmt.Sprintf("http://127.0.0.1:%d", ports[1])
	err = c.run("etcd",
		"--data-dir="+filepath.Join(c.dir, "etcd"), "--unsafe-no-fsync",
		"--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer,
		"--log-level=warn", "--quota-backend-bytes=1073741824")
	if err != nil {
		return err
	}
	if err := c.run("kube-apiserver", c.apiServerFlags(client, ports[2])...); err != nil {
		return err
	}
	if err := c.waitReady(ctx); err != nil {
		return err
	}
	if !c.options.NoControllers {
		if err := c.run("kube-controller-manager", append([]string{
			"--kubeconfig=" + c.Kubeconfig(), "--leader-elect=false", "--secure-port=0",
			"--service-account-private-key-file=" + c.path("sa.key"), "--root-ca-file=" + c.path("ca.crt"),
			"--use-service-account-credentials=true", "--allocate-node-cidrs=false",
			"--flex-volume-plugin-dir=" + c.path("volume-plugins"), // or root's makes one in /usr
			"--kube-api-qps=200", "--kube-api-burst=400", // it makes forty accounts first, at 20 a second by default
		}, c.options.ControllerManager...)...); err != nil {
			return err
		}
	}
	if !c.options.NoScheduler {
		if err := c.run("kube-scheduler", append([]string{
			"--kubeconfig=" + c.Kubeconfig(), "--leader-elect=false", "--secure-port=0",
		}, c.options.Scheduler...)...); err != nil {
			return err
		}
	}
	return c.prepare(ctx)
}

func (c *Cluster) apiServerFlags(etcd string, port int) []string {
	flags := []string{
		"--etcd-servers=" + etcd,
		fmt.Sprintf("--secure-port=%d", port),
		"--tls-cert-file=" + c.path("tls.crt"), "--tls-private-key-file=" + c.path("tls.key"),
		"--token-auth-file=" + c.path("tokens.csv"), "--client-ca-file=" + c.path("ca.crt"),
		"--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + c.path("sa.key"), "--service-account-signing-key-file=" + c.path("sa.key"),
		"--service-cluster-ip-range=" + ServiceRange,
		"--allow-privileged=true", "--profiling=false",
	}
	if Inside() {
		flags = append(flags, "--bind-address=0.0.0.0", "--advertise-address="+apiAddress)
	} else {
		flags = append(flags, "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
			"--endpoint-reconciler-type=none")
	}
	return append(flags, c.options.APIServer...)
}

// writeCredentials writes all that the programs and kubectl identify themselves with.
func (c *Cluster) writeCredentials() error {
	var err error
	if c.ca, err = NewCA(); err != nil {
		return err
	}
	if err := c.ca.IssueFiles(c.dir, "kubernetes", "kubernetes.default", "kubernetes.default.svc",
		"kubernetes.default.svc.cluster.local", "localhost", "127.0.0.1", apiAddress, "10.96.0.1"); err != nil {
		return err
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return fmt.Errorf("generate the key for service account tokens: %w", err)
	}
	c.token = rand.Text()
	if err := c.writeKubeconfig(c.Kubeconfig(), c.server, "admin", &clientcmdapi.AuthInfo{Token: c.token}); err != nil {
		return err
	}
	for name, content := range map[string][]byte{
		"sa.key":     encode("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(key)),
		"tokens.csv": []byte(c.token + `,admin,admin,"system:masters"` + "\n"),
	} {
		if err := os.WriteFile(c.path(name), content, 0o600); err != nil {
			return fmt.Errorf("write credentials: %w", err)
		}
	}
	return nil
}

// prepare waits for what the controllers must do before a pod can be created, and gives nodes their
// rights: the API server binds them only if it has the Node authorizer, which would need a user for
// each node.
func (c *Cluster) prepare(ctx context.Context) error {
	client, err := kubernetes.NewForConfig(c.Config())
	if err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "lameduck-test:nodes"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "system:nodes"}},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:node"},
	}
	if _, err := client.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("bind nodes to their role: %w", err)
	}
	if c.options.NoControllers {
		return nil
	}
	timeout := int64(60)
	accounts, err := client.CoreV1().ServiceAccounts("default").Watch(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("metadata.name", "default").String(), TimeoutSeconds: &timeout,
	})
	if err != nil {
		return fmt.Errorf("watch for the first ServiceAccount: %w", err)
	}
	defer accounts.Stop()
	manager := c.program("kube-controller-manager")
	for {
		select {
		case event, ok := <-accounts.ResultChan():
			if !ok {
				return c.failure("kube-controller-manager", errors.New("made no ServiceAccount"))
			}
			if event.Type == watch.Added {
				return nil
			}
		case <-manager.Done():
			return c.failure("kube-controller-manager", errors.New("exited"))
		case <-ctx.Done():
			return c.failure("kube-controller-manager", context.Cause(ctx))
		}
	}
}

// waitReady waits until the API server says that it is ready.
func (c *Cluster) waitReady(ctx context.Context) error {
	transport, err := rest.TransportFor(c.Config())
	if err != nil {
		return fmt.Errorf("make a client: %w", err)
	}
	if closer, ok := transport.(interface{ CloseIdleConnections() }); ok {
		defer closer.CloseIdleConnections()
	}
	client := &http.Client{Transport: transport, Timeout: 2 * time.Second}
	etcd, server := c.program("etcd"), c.program("kube-apiserver")
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.server+"/readyz", nil)
		if err != nil {
			return err
		}
		if response, err := client.Do(request); err == nil {
			io.Copy(io.Discard, io.LimitReader(response.Body, 1<<20))
			response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-tick.C:
		case <-etcd.Done():
			return c.failure("etcd", errors.New("exited"))
		case <-server.Done():
			return c.failure("kube-apiserver", errors.New("exited"))
		case <-ctx.Done():
			return c.failure("kube-apiserver", context.Cause(ctx))
		}
	}
}

// Config returns a configuration for clients of the administrator (group system:masters), without
// client-side throttling. It is the caller's to change.
func (c *Cluster) Config() *rest.Config {
	return &rest.Config{
		Host:            c.server,
		BearerToken:     c.token,
		TLSClientConfig: rest.TLSClientConfig{CAData: c.ca.PEM()},
		QPS:             -1,
	}
}

// ConfigFor is Config for anybody else, by impersonation: the API server sees user and groups, and
// system:authenticated.
func (c *Cluster) ConfigFor(user string, groups ...string) *rest.Config {
	config := c.Config()
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
	return config
}

// Kubeconfig is the path of a kubeconfig of the administrator.
func (c *Cluster) Kubeconfig() string { return c.path("kubeconfig") }

// WriteKubeconfig writes a kubeconfig of another user to path. The API server takes user and groups
// from a certificate of [Cluster.CA]; the user need not exist.
func (c *Cluster) WriteKubeconfig(path, user string, groups ...string) error {
	cert, key, err := c.ca.IssueClient(user, groups...)
	if err != nil {
		return err
	}
	return c.writeKubeconfig(path, c.server, user,
		&clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key})
}

// ExposeAPIServer makes the API server reachable on a loopback address of the machine until ctx
// ends, and writes a kubeconfig of the administrator for that address to path.
func (c *Cluster) ExposeAPIServer(ctx context.Context, path string) error {
	address, err := Expose(ctx, strings.TrimPrefix(c.server, "https://"), "")
	if err != nil {
		return err
	}
	return c.writeKubeconfig(path, "https://"+address, "admin", &clientcmdapi.AuthInfo{Token: c.token})
}

func (c *Cluster) writeKubeconfig(path, server, user string, credentials *clientcmdapi.AuthInfo) error {
	config := clientcmdapi.NewConfig()
	config.Clusters["test"] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: c.ca.PEM()}
	config.AuthInfos[user] = credentials
	config.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: user}
	config.CurrentContext = "test"
	text, err := clientcmd.Write(*config)
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write the kubeconfig of %s: %w", user, err)
	}
	return nil
}

// CA is the authority that signed the API server's certificate, and that pods find in
// kube-root-ca.crt.
func (c *Cluster) CA() *CA { return c.ca }

// Binaries are the programs that it runs.
func (c *Cluster) Binaries() Binaries { return c.binaries }

// Server is the URL of the API server.
func (c *Cluster) Server() string { return c.server }

// LogDir is where the programs write their logs, NAME.log.
func (c *Cluster) LogDir() string { return c.logDir }

// Kubectl runs kubectl as the administrator and returns all it wrote. It is killed when ctx ends,
// or after two minutes.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.KubectlInput(ctx, "", args...)
}

// KubectlInput is Kubectl with a standard input, for kubectl apply -f -.
func (c *Cluster) KubectlInput(ctx context.Context, input string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.binaries.Path("kubectl"), args...)
	// A home of its own: kubectl caches what the server offers, by address, and another cluster may
	// have the same.
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig(), "HOME="+c.dir, "KUBECACHEDIR="+c.path("kubectl-cache"))
	cmd.Stdin = strings.NewReader(input)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return string(out), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return string(out), nil
}

// Established waits until definitions, the manifests of CustomResourceDefinitions, are established.
// It tries again, because kubectl wait fails for an object that has no conditions yet.
func (c *Cluster) Established(ctx context.Context, definitions string) (err error) {
	_ = wait.PollUntilContextTimeout(ctx, 25*time.Millisecond, 30*time.Second, true,
		func(ctx context.Context) (bool, error) {
			_, err = c.KubectlInput(ctx, definitions, "wait", "--for=condition=Established", "--timeout=30s", "-f", "-")
			return err == nil, nil
		}) // err says more
	return err
}

// KillAPIServer kills the API server with SIGKILL and waits until it is gone. etcd and the others
// stay.
func (c *Cluster) KillAPIServer() { c.kill("kube-apiserver") }

// RestartAPIServer kills the API server, starts it again at the same address, and waits until it is
// ready. Its log is continued.
func (c *Cluster) RestartAPIServer(ctx context.Context) error {
	return c.restart(ctx, "kube-apiserver")
}

// KillEtcd kills etcd with SIGKILL and waits until it is gone. The others stay.
func (c *Cluster) KillEtcd() { c.kill("etcd") }

// RestartEtcd kills etcd, starts it again with its data, and waits until the API server is ready.
// Its log is continued.
func (c *Cluster) RestartEtcd(ctx context.Context) error {
	if err := c.restart(ctx, "etcd"); err != nil {
		return err
	}
	// The API server asks etcd once a second, and until then is as ready as before.
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(time.Second):
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return c.waitReady(ctx)
}

// KillScheduler kills kube-scheduler with SIGKILL and waits until it is gone.
func (c *Cluster) KillScheduler() { c.kill("kube-scheduler") }

func (c *Cluster) kill(name string) {
	if p := c.program(name); p != nil {
		p.Kill()
	}
}

func (c *Cluster) restart(ctx context.Context, name string) error {
	c.kill(name)
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := c.run(name, c.program(name).Args()...); err != nil {
		return err
	}
	return c.waitReady(ctx)
}

// Exited returns a channel that is closed when the program of that name (kube-scheduler) exits, of
// itself or by Stop. For a name that does not run it is nil.
func (c *Cluster) Exited(name string) <-chan struct{} {
	if p := c.program(name); p != nil {
		return p.Done()
	}
	return nil
}

// Keep starts kube-controller-manager and kube-scheduler again when they exit, as a kubelet does,
// until ctx is done or the cluster is stopped. A scheduler ends itself when it finds a pod on
// another node than it remembers, which can happen if the API server is killed while it places it.
func (c *Cluster) Keep(ctx context.Context) {
	var wg sync.WaitGroup
	for _, name := range []string{"kube-controller-manager", "kube-scheduler"} {
		wg.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-c.Exited(name):
				}
				if c.run(name, c.program(name).Args()...) != nil {
					return // stopped
				}
				select {
				case <-ctx.Done():
				case <-time.After(time.Second):
				}
			}
		})
	}
	wg.Wait()
}

// Stop kills everything and removes the data. It may be called again.
func (c *Cluster) Stop() {
	c.mu.Lock()
	c.stopped = true
	var running []*process.Process
	for _, p := range c.programs {
		running = append(running, p)
	}
	c.mu.Unlock()
	for _, p := range running {
		p.SignalGroup(syscall.SIGKILL)
	}
	for _, p := range running {
		<-p.Done()
	}
	os.RemoveAll(c.dir)
}

func (c *Cluster) path(name string) string { return filepath.Join(c.dir, name) }

func (c *Cluster) program(name string) *process.Process {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.programs[name]
}

// run starts a program that writes to its log.
func (c *Cluster) run(name string, args ...string) error {
	log, err := os.OpenFile(filepath.Join(c.logDir, name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("open the log of %s: %w", name, err)
	}
	defer log.Close()
	cmd := exec.Command(c.binaries.Path(name), args...)
	cmd.Dir = c.dir
	cmd.Stdout, cmd.Stderr = log, log
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return fmt.Errorf("start %s: the cluster is stopped", name)
	}
	p, err := process.Start(cmd)
	if err != nil {
		return err
	}
	c.programs[name] = p
	return nil
}

// failure is what a program died of, with the end of its log.
func (c *Cluster) failure(name string, err error) error {
	log, readErr := os.ReadFile(filepath.Join(c.logDir, name+".log"))
	if readErr != nil {
		return fmt.Errorf("%s: %w (%v)", name, err, readErr)
	}
	return fmt.Errorf("%s: %w; the end of its log:\n%s", name, err, tail(log, 15))
}

// freePorts returns ports on which no process listens and that no outgoing connection is given.
func freePorts(n int) ([]int, error) {
	var ports []int
	for range 2000 {
		if len(ports) == n {
			return ports, nil
		}
		// Two processes on one machine are unlikely to begin at the same port.
		nextPort.CompareAndSwap(0, int64(os.Getpid())%4000+1)
		port := 10500 + int(nextPort.Add(1))%4000
		listener, err := net.Listen("tcp", fmt.Sprintf(":%d", port))
		if err != nil {
			continue
		}
		listener.Close()
		ports = append(ports, port)
	}
	return nil, errors.New("no free ports between 10500 and 14500")
}
