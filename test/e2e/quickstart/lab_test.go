//go:build e2e

package quickstart

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/load"
)

// sh runs a block of commands in the repository, as operators do, and returns what it printed.
func (l *lab) sh(t *testing.T, script string, env ...string) string {
	t.Helper()
	began := time.Now()
	out, err := l.trySh(t.Context(), script, env...)
	t.Logf("$ %s%s(%.1f s)", strings.ReplaceAll(strings.TrimRight(script, "\n")+"\n", "\n", "\n  "), "\n"+out,
		time.Since(began).Seconds())
	if err != nil {
		l.Explain(t)
		t.Fatal(err)
	}
	return out
}

func (l *lab) trySh(ctx context.Context, script string, env ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 4*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", script)
	cmd.Dir = harness.Repository
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

// clients send requests to Services, each on a connection of its own.
type clients struct {
	lab   *lab
	names []string
	loads []*load.Load
}

// startClients sends requests to Services of the shop, by ClusterIP.
func (l *lab) startClients(t *testing.T, services ...string) *clients {
	t.Helper()
	all := &clients{lab: l, names: services}
	for i, name := range services {
		service, err := l.Kube.CoreV1().Services(shop).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		one, err := load.Run(t.Context(), load.Options{
			Target: fmt.Sprintf("http://%s:80/", service.Spec.ClusterIP), Rate: 80, Timeout: 15 * time.Second,
			WantBody:    []byte("ok\n"),
			SourceAddrs: slices.Concat(l.Sources[3*i%6:], l.Sources[:3*i%6]),
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
		if r.Failed > 0 { // whose kernel sent the clients where
			out, err := c.lab.Set.Machines[0].Run(t.Context(), "conntrack", "-L", "-p", "tcp", "--state", "CLOSE")
			t.Logf("connections that were reset: %v\n%s", err, out)
		}
	}
}

// waited is how many hooks the agents of all nodes have answered, by outcome.
func (l *lab) waited(t *testing.T) map[string]float64 {
	t.Helper()
	sum := map[string]float64{}
	for _, m := range l.Set.Machines {
		l.Await(t, time.Minute, "the metrics of the agent of "+m.Name, func() error {
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
