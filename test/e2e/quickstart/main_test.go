//go:build e2e

package quickstart

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/load"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

func TestMain(m *testing.M) { cluster.MainAsRoot(m) }

// shop is the namespace of the quick start's application.
const shop = "shop"

// auditPolicy has the API server write down what the ServiceAccounts of Lameduck and its agents ask
// for.
const auditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    userGroups: ["system:serviceaccounts:lameduck-system", "system:serviceaccounts:lameduck-node", "system:serviceaccounts:shop"]
  - level: None
`

// lab is three nodes with nothing but images on them.
type lab struct {
	*cluster.Cluster
	set  *machine.Set
	kube *kubernetes.Clientset
	// bin has the programs, audit is the audit log.
	bin, audit string
	// sources are where clients come from.
	sources []netip.Addr
}

// names of images of the repository, by the program in them.
var names = map[string]string{"webhook": "docker.io/lameduck/webhook", "agent": "docker.io/lameduck/agent",
	"lameduck-wait": "docker.io/lameduck/lameduck-wait"}

// images are those of the programs in a folder, with a tag.
func images(bin, tag string) []machine.Image {
	var all []machine.Image
	for program, name := range names {
		all = append(all, machine.Image{Name: name + ":" + tag, Program: filepath.Join(bin, program)})
	}
	return all
}

func newLab(t *testing.T) *lab {
	t.Helper()
	cluster.Entered(t)
	haproxy, err := stage.HAProxy()
	if err != nil {
		cluster.Missing(t, "haproxy", "apt-get install haproxy")
	}
	libraries, err := machine.Libraries(t.Context(), haproxy)
	if err != nil {
		t.Fatal(err)
	}
	l := &lab{bin: programs(t), audit: filepath.Join(os.TempDir(), "audit.log")}
	policy := filepath.Join(t.TempDir(), "audit.yaml")
	if err := os.WriteFile(policy, []byte(auditPolicy), 0o600); err != nil {
		t.Fatal(err)
	}
	options := machine.ControlPlane()
	options.APIServer = append(options.APIServer, "--audit-policy-file="+policy, "--audit-log-path="+l.audit)
	began := time.Now()
	l.Cluster = cluster.New(t, options)
	// As the image of that name has it, the program is in a folder of the PATH.
	proxy := machine.Image{Name: "docker.io/library/haproxy:2.6", Program: haproxy,
		Libraries: append(libraries, haproxy)}
	l.set = machine.New(t, l.Cluster, 3, machine.Options{Images: append(images(l.bin, "dev"), proxy)})
	if l.kube, err = kubernetes.NewForConfig(l.Config()); err != nil {
		t.Fatal(err)
	}
	t.Logf("nodes after %s", time.Since(began).Round(time.Second/10))
	l.addClients(t)
	return l
}

// programs returns the folder with what is tested: that of make build, if LAMEDUCK_BIN names it.
func programs(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("LAMEDUCK_BIN"); dir != "" {
		return dir
	}
	dir := t.TempDir()
	build(t, repository, dir)
	return dir
}

// build compiles the programs of a tree.
func build(t *testing.T, tree, into string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-o", into+"/", "./cmd/...")
	cmd.Dir = tree
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the programs of %s: %v: %s", tree, err, out)
	}
}

// addClients gives clients addresses beside the nodes, and a way to ClusterIPs, by node-1.
func (l *lab) addClients(t *testing.T) {
	t.Helper()
	bridge, err := netlink.LinkByName("machines")
	if err != nil {
		t.Fatal(err)
	}
	// One address alone would come round to the ports of connections that conntrack still
	// remembers.
	for i := range 6 {
		a := netip.AddrFrom4([4]byte{10, 245, 0, byte(11 + i)})
		if err := netlink.AddrAdd(bridge, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(),
			Mask: net.CIDRMask(24, 32)}}); err != nil {
			t.Fatal(err)
		}
		l.sources = append(l.sources, a)
	}
	_, services, err := net.ParseCIDR(cluster.ServiceRange)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.RouteAdd(&netlink.Route{Dst: services, Gw: l.set.Machines[0].Address.AsSlice()}); err != nil {
		t.Fatal(err)
	}
}

// sh runs a block of commands in the repository, as operators do, and returns what it printed.
func (l *lab) sh(t *testing.T, script string, env ...string) string {
	t.Helper()
	began := time.Now()
	out, err := l.trySh(t.Context(), script, env...)
	t.Logf("$ %s%s(%.1f s)", strings.ReplaceAll(strings.TrimRight(script, "\n")+"\n", "\n", "\n  "), "\n"+out,
		time.Since(began).Seconds())
	if err != nil {
		l.explain(t)
		t.Fatal(err)
	}
	return out
}

func (l *lab) trySh(ctx context.Context, script string, env ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 4*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir = repository
	cmd.Env = append(os.Environ(), "KUBECONFIG="+l.Kubeconfig(),
		"PATH="+l.bin+":"+l.Binaries().Dir+":"+os.Getenv("PATH"))
	cmd.Env = append(cmd.Env, env...)
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: in %q", err, script)
	}
	return string(out), err
}

// explain logs what pods there are and what happened, and what Lameduck wrote.
func (l *lab) explain(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for _, args := range [][]string{
		{"get", "pods", "-A", "-o", "wide"},
		{"get", "events", "-A", "--sort-by=.lastTimestamp"},
		{"logs", "-n", "lameduck-system", "-l", "app.kubernetes.io/component=webhook", "--prefix", "--tail=400"},
		{"logs", "-n", "lameduck-node", "-l", "app.kubernetes.io/component=node", "--prefix", "--tail=400"},
		{"logs", "-n", shop, "-l", "app.kubernetes.io/name=gateway", "--all-containers", "--prefix", "--tail=400"},
	} {
		out, _ := l.Kubectl(ctx, args...)
		lines := strings.Split(out, "\n")
		if len(lines) > 1000 {
			lines = lines[len(lines)-1000:]
		}
		t.Logf("kubectl %s\n%s", strings.Join(args, " "), strings.Join(lines, "\n"))
	}
}

// until asks again and again until ask returns nil.
func (l *lab) until(t *testing.T, what string, most time.Duration, ask func() error) {
	t.Helper()
	for end := time.Now().Add(most); ; time.Sleep(50 * time.Millisecond) {
		err := ask()
		if err == nil {
			return
		}
		if time.Now().After(end) || t.Context().Err() != nil {
			l.explain(t)
			t.Fatalf("not within %s: %s: %v", most, what, err)
		}
	}
}

// clients send requests to Services, each on a connection of its own.
type clients struct {
	names []string
	loads []*load.Load
}

// startClients sends requests to Services of the shop, by ClusterIP.
func (l *lab) startClients(t *testing.T, services ...string) *clients {
	t.Helper()
	all := &clients{names: services}
	for i, name := range services {
		service, err := l.kube.CoreV1().Services(shop).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		one, err := load.Run(t.Context(), load.Options{
			Target: fmt.Sprintf("http://%s:80/", service.Spec.ClusterIP), Rate: 80, Timeout: 5 * time.Second,
			WantBody:    []byte("ok\n"),
			SourceAddrs: slices.Concat(l.sources[3*i%6:], l.sources[:3*i%6]),
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { one.Stop() })
		all.loads = append(all.loads, one)
	}
	return all
}

// stop asserts that no request was lost.
func (c *clients) stop(t *testing.T, when string) {
	t.Helper()
	for i, one := range c.loads {
		r := one.Stop()
		t.Logf("%s: %d of %d requests to %s failed", when, r.Failed, r.Total, c.names[i])
		if r.Failed > 0 || r.Skipped > 0 || r.Total == 0 {
			t.Errorf("%s: %d of %d requests to %s failed, %d were never sent: want 0", when, r.Failed, r.Total,
				c.names[i], r.Skipped)
		}
		for _, f := range r.Failures {
			t.Logf("  %s after %.0f ms, at %s, from %s: %s", f.Kind, f.TookMillis, f.Due.Format("15:04:05.000"),
				f.Source, f.Error)
		}
	}
}

// waited is how many hooks the agents of all nodes have answered, by outcome.
func (l *lab) waited(t *testing.T) map[string]float64 {
	t.Helper()
	sum := map[string]float64{}
	for _, m := range l.set.Machines {
		l.until(t, "the metrics of the agent of "+m.Name, time.Minute, func() error {
			client := &http.Client{Transport: &http.Transport{DialContext: m.Dial, DisableKeepAlives: true},
				Timeout: 10 * time.Second}
			response, err := client.Get(fmt.Sprintf("http://%s:9101/metrics", m.Address))
			if err != nil {
				return err
			}
			defer response.Body.Close()
			text, err := io.ReadAll(response.Body)
			if err != nil {
				return err
			}
			found := false
			for line := range strings.Lines(string(text)) {
				name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
				outcome, ok := strings.CutPrefix(name, "lameduck_barrier_waits_total{outcome=\"")
				if !ok {
					continue
				}
				n, err := strconv.ParseFloat(value, 64)
				if err != nil {
					return err
				}
				sum[strings.TrimSuffix(outcome, "\"}")] += n
				found = true
			}
			if !found {
				return errors.New("no lameduck_barrier_waits_total")
			}
			return nil
		})
	}
	return sum
}

// failedHooks are the Events of hooks that found no agent.
func (l *lab) failedHooks(t *testing.T) string {
	t.Helper()
	out, err := l.Kubectl(t.Context(), "get", "events", "-A", "--field-selector=reason=FailedPreStopHook",
		"--no-headers", "--ignore-not-found",
		// no ages: what there is is compared with what there was
		"-o", "custom-columns=:metadata.namespace,:involvedObject.name,:metadata.name,:message")
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(strings.ReplaceAll(out, "No resources found", ""))
}
