package install

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/load"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// sets is what is in the Secret.
type sets struct {
	Current *struct{ Secret, CA string }
	Next    *struct{ Secret string }
	Former  *struct{ Secret string }
}

func kept(t *testing.T, s *stage.Stage) (got sets) {
	t.Helper()
	secret, err := s.Kube.CoreV1().Secrets(stage.System).Get(t.Context(), "lameduck-certificates", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(secret.Data["state"], &got); err != nil {
		t.Fatal(err)
	}
	return got
}

// calls returns how many calls of the webhook the API server has made, and how many of these
// failed, so that the deletion went on unasked.
func calls(t *testing.T, s *stage.Stage) (all, failed int) {
	t.Helper()
	text, err := s.Kube.RESTClient().Get().AbsPath("/metrics").DoRaw(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sum := func(metric string) (n int) {
		for _, line := range regexp.MustCompile(
			`(?m)^`+metric+`\{[^}]*name="pods-\d+\.lameduck\.io"[^}]*\} (\S+)$`).FindAllStringSubmatch(string(text),
			-1) {
			value, err := strconv.ParseFloat(line[1], 64)
			if err != nil {
				t.Fatal(err)
			}
			n += int(value)
		}
		return n
	}
	return sum("apiserver_admission_webhook_admission_duration_seconds_count"),
		sum("apiserver_admission_webhook_fail_open_count")
}

// slowCaller calls the webhook as an API server does that hears of a changed webhook configuration
// a second late and keeps no connection, until stopped. It counts its calls, and returns why some
// failed.
func slowCaller(t *testing.T, s *stage.Stage, stopped *atomic.Bool, all *atomic.Int64) (failures []string) {
	const late = time.Second
	type heard struct {
		at      time.Time
		url, ca string
	}
	var news []heard
	for !stopped.Load() {
		config, err := s.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(t.Context(),
			"lameduck", metav1.GetOptions{})
		if err != nil {
			return append(failures, err.Error())
		}
		c := config.Webhooks[0].ClientConfig
		news = append(news, heard{time.Now(), *c.URL, string(c.CABundle)})
		for len(news) > 1 && time.Since(news[1].at) > late {
			news = news[1:]
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM([]byte(news[0].ca))
		client := http.Client{Timeout: 5 * time.Second,
			Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots}}}
		all.Add(1)
		response, err := client.Post(news[0].url, "application/json", strings.NewReader("{}"))
		if err == nil {
			response.Body.Close()
			// It is no review, and that is said to those alone who know the secret.
			if response.StatusCode != http.StatusBadRequest {
				err = errors.New(response.Status)
			}
		}
		// It may have been later than it should be.
		if err != nil && (len(news) == 1 || time.Since(news[1].at) < late+time.Second/2) {
			failures = append(failures, err.Error())
		}
		time.Sleep(10 * time.Millisecond)
	}
	return failures
}

// Certificate, CA and secret are replaced three times by two replicas, while pods are deleted and
// coordinators come and go. Were there a moment at which a caller and a replica do not fit
// together, a deletion would go on unasked.
func TestRotationFailsNoCall(t *testing.T) {
	s := open(t)
	ns := harness.Namespace(t, s.Kube, "rotation", nil)
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 4, StartDelay: 200 * time.Millisecond,
		Work: 20 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns, Lag: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	before, failedBefore := calls(t, s)
	stalled := harness.Stalls(t)
	l, err := load.Run(t.Context(), load.Options{
		Target: "http://" + address + "/", Rate: 100, Timeout: 10 * time.Second, DropClosed: true,
		WantBody: []byte("ok\n"), MaxInFlight: 1000,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Stop() })
	var stopped atomic.Bool
	var running sync.WaitGroup
	defer running.Wait()
	defer stopped.Store(true)
	for range 4 {
		running.Go(func() {
			for !stopped.Load() {
				pods, err := s.Pods(t.Context(), ns, "app=web")
				if err != nil {
					t.Error(err)
					return
				}
				for _, p := range pods {
					// It asks the webhook and deletes nothing.
					_ = s.Kube.CoreV1().Pods(ns).Delete(t.Context(), p.Name,
						metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
				}
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
	var slow atomic.Int64
	var failures []string
	running.Go(func() { failures = slowCaller(t, s, &stopped, &slow) })
	running.Go(func() {
		for !stopped.Load() {
			if _, err := s.Restart(t.Context(), ns, "web"); err != nil {
				t.Error(err)
				return
			}
		}
	})
	began := kept(t, s)
	seen := map[string]bool{began.Current.Secret: true}
	// On a busy machine fewer calls meet a rotation, and more rotations are needed for as many.
	const enough, enoughSlow = 500, 200
	few := func() bool {
		all, _ := calls(t, s)
		return all-before < enough || slow.Load() < enoughSlow
	}
	for n := 0; n < 3 || n < 12 && few(); n++ {
		patch := fmt.Sprintf(`{"metadata":{"annotations":{"lameduck.io/rotate":"%d"}}}`, n+1)
		if _, err := s.Kube.CoreV1().Secrets(stage.System).Patch(t.Context(), "lameduck-certificates",
			types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		asked := time.Now()
		harness.Until(t, time.Minute, "another set is in use, and the former is forgotten", func() bool {
			now := kept(t, s)
			return !seen[now.Current.Secret] && now.Next == nil && now.Former == nil
		})
		now := kept(t, s)
		seen[now.Current.Secret] = true
		t.Logf("rotation %d took %s", n+1, time.Since(asked).Round(100*time.Millisecond))
		if n == 1 {
			// A new replica reads what the others have made.
			if err := s.RestartCoordinators(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		harness.Until(t, 30*time.Second, "path and CA are those of the set, and no other", func() bool {
			config, err := s.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(t.Context(),
				"lameduck", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			bundle, err := s.Kube.CoreV1().ConfigMaps(stage.System).Get(t.Context(), "lameduck-ca", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			same := bundle.Data["ca.crt"] == now.Current.CA
			for _, w := range config.Webhooks {
				same = same && strings.HasSuffix(*w.ClientConfig.URL, "/v1/admit/"+now.Current.Secret) &&
					string(w.ClientConfig.CABundle) == now.Current.CA
			}
			return same
		})
	}
	stopped.Store(true)
	running.Wait()
	all, failed := calls(t, s)
	if failed != failedBefore && stalled() == 0 || all-before < enough {
		t.Errorf("%d of %d calls failed", failed-failedBefore, all-before)
	}
	if len(failures) > 0 || slow.Load() < enoughSlow {
		t.Errorf("%d of %d calls on new connections failed: %q", len(failures), slow.Load(),
			failures[:min(5, len(failures))])
	}
	got := l.Stop()
	if got.Failed > 0 && stalled() == 0 || got.Total == 0 {
		t.Errorf("%d of %d requests failed: %v", got.Failed, got.Total, got.FailedBy)
	}
	t.Logf("%d calls on new connections", slow.Load())
	t.Logf("%d calls, %d failed; %d requests, %d failed", all-before, failed-failedBefore, got.Total, got.Failed)
	log, err := s.Logs(t.Context(), stage.System, "app.kubernetes.io/component=webhook", "webhook")
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"DATA RACE", "refused a call", "renew certificates:"} {
		if i := strings.Index(log, bad); i >= 0 {
			t.Errorf("a coordinator says: %s", log[max(0, i-300):min(len(log), i+2000)])
		}
	}
	// Agents have followed: what the new coordinators ask is acknowledged.
	if !strings.Contains(log, `"reason":"Acknowledged"`) {
		t.Error("no agent has acknowledged anything to a coordinator that started after the second rotation")
	}
}

// A secret that has leaked is replaced at once, as docs/operations.md says. It is still good when
// the webhook configuration has the next one, since another API server may learn of that later, and
// both coordinators refuse it soon after, although the thief never stops.
func TestALeakedSecretIsRefusedSoon(t *testing.T) {
	s := open(t)
	ns := harness.Namespace(t, s.Kube, "leaked", nil)
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 1}); err != nil {
		t.Fatal(err)
	}
	pods, err := s.Pods(t.Context(), ns, "app=web")
	if err != nil {
		t.Fatal(err)
	}
	leaked := kept(t, s).Current.Secret
	thief := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} //nolint:gosec // the CA changes meanwhile
	// tries returns how each coordinator answers the thief, and whether the API server has another
	// path.
	tries := func() (codes []int, replaced bool) {
		t.Helper()
		config, err := s.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(t.Context(),
			"lameduck", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		replaced = true
		for _, w := range config.Webhooks {
			base, secret, _ := strings.Cut(*w.ClientConfig.URL, "/v1/admit/")
			replaced = replaced && secret != leaked
			response, err := thief.Post(base+"/v1/admit/"+leaked, "application/json", strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			response.Body.Close()
			codes = append(codes, response.StatusCode)
		}
		return codes, replaced
	}
	in, out := []int{http.StatusBadRequest, http.StatusBadRequest}, []int{http.StatusNotFound, http.StatusNotFound}
	if codes, _ := tries(); !slices.Equal(codes, in) {
		t.Fatalf("before the rotation: %v", codes)
	}
	if _, err := s.Kube.CoreV1().Secrets(stage.System).Patch(t.Context(), "lameduck-certificates",
		types.MergePatchType, []byte(`{"data":null}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	began, handedOver := time.Now(), false
	harness.Until(t, time.Minute, "both coordinators refuse the leaked secret", func() bool {
		// It asks the webhook and deletes nothing. Whatever the coordinators answer the API server,
		// the deletion goes on.
		if err := s.Kube.CoreV1().Pods(ns).Delete(t.Context(), pods[0].Name,
			metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
			t.Errorf("a deletion is refused: %v", err)
		}
		codes, replaced := tries()
		handedOver = handedOver || replaced && slices.Equal(codes, in)
		return slices.Equal(codes, out)
	})
	t.Logf("after %s", time.Since(began).Round(100*time.Millisecond))
	if !handedOver {
		t.Error("it was refused before another API server could learn of the next one")
	}
}

// Manifests applied by force remove path and CA: they come back at once.
func TestLostPathAndCAComeBack(t *testing.T) {
	s := open(t)
	// Of the second entry: each is looked at.
	patch := `[{"op":"remove","path":"/webhooks/1/clientConfig/caBundle"},` +
		`{"op":"replace","path":"/webhooks/1/clientConfig/url","value":"https://10.244.250.2:9443"}]`
	if _, err := s.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Patch(t.Context(),
		"lameduck", types.JSONPatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	harness.Until(t, 30*time.Second, "the path and the CA are back", func() bool {
		got, err := s.Kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(t.Context(),
			"lameduck", metav1.GetOptions{})
		return err == nil && len(got.Webhooks[1].ClientConfig.CABundle) > 0 &&
			strings.Contains(*got.Webhooks[1].ClientConfig.URL, "/v1/admit/")
	})
	t.Logf("after %s", time.Since(began).Round(time.Millisecond))
}
