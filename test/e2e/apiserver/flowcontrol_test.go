package apiserver_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// F5. A deletion that is held occupies a seat of its priority level in the API server. With
// manifests/base/flow-control.yaml that is a level of its own for all callers; otherwise 30 held
// deletions of a controller take the seats of all that it and its kind ask for.
func TestHeldDeletionsHaveTheirOwnSeats(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	file := filepath.Join("..", "..", "..", "manifests", "base", "flow-control.yaml")
	for _, args := range [][]string{
		{"apply", "--dry-run=server", "--validate=strict", "-f", file},
		{"apply", "--validate=strict", "-f", file},
	} {
		out, err := s.cluster.Kubectl(s.ctx, args...)
		if err != nil || strings.Contains(out, "Warning") {
			t.Fatalf("%v: %s", err, out)
		}
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if out, err := s.cluster.Kubectl(ctx, "delete", "-f", file); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	flows := s.client.FlowcontrolV1()
	level, err := flows.PriorityLevelConfigurations().Get(s.ctx, "lameduck", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}

	release := make(chan struct{})
	h := s.hook(func(ctx context.Context, r *review) *admissionv1.AdmissionResponse {
		select {
		case <-release:
		case <-ctx.Done():
		}
		return allow(ctx, r)
	})
	const user = "jane"
	if _, err := s.client.RbacV1().RoleBindings(s.namespace).Create(s.ctx, &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: user},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "admin"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// The API server learns of rights and of levels by watches.
	config := s.cluster.ConfigFor(user, "system:authenticated")
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		t.Fatal(err)
	}
	// do asks as jane and returns which level it was accounted to.
	do := func(method, path, body string) (level string, code int) {
		t.Helper()
		request, err := http.NewRequestWithContext(s.ctx, method, s.cluster.Server()+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Content-Type", "application/json")
		response, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		_, _ = io.Copy(io.Discard, response.Body)
		return response.Header.Get("X-Kubernetes-Pf-Prioritylevel-Uid"), response.StatusCode
	}
	harness.Until(t, time.Minute, "the flow schema takes deletions", func() bool {
		got, code := do(http.MethodDelete, s.path("missing"), "")
		return got == string(level.UID) && code == http.StatusNotFound
	})
	for what, ask := range map[string]func() (string, int){
		"reading pods": func() (string, int) { return do(http.MethodGet, s.path("missing"), "") },
		"deleting a Secret": func() (string, int) {
			return do(http.MethodDelete, strings.ReplaceAll(s.path("missing"), "/pods/", "/secrets/"), "")
		},
		"creating a pod": func() (string, int) {
			return do(http.MethodPost, strings.TrimSuffix(s.path(""), "/"), "{}")
		},
		"a pod's other parts": func() (string, int) { return do(http.MethodPost, s.path("missing/binding"), "{}") },
	} {
		if got, _ := ask(); got == string(level.UID) {
			t.Errorf("%s is accounted to Lameduck's level", what)
		}
	}
	if got, code := do(http.MethodDelete, strings.TrimSuffix(s.path(""), "/")+"?labelSelector=app=missing",
		""); got != string(level.UID) || code != http.StatusOK {
		t.Errorf("deleting a collection: %d, level %q", code, got)
	}

	// One deletion and one eviction are held.
	s.pod("a")
	s.pod("b")
	done := make(chan error, 2)
	go func() {
		if got, code := do(http.MethodDelete, s.path("a"), ""); code != http.StatusOK || got != string(level.UID) {
			done <- fmt.Errorf("deletion: %d, level %q", code, got)
		}
		done <- nil
	}()
	go func() {
		if got, code := do(http.MethodPost, s.path("b/eviction"),
			`{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"b"}}`); code != http.StatusCreated ||
			got != string(level.UID) {
			done <- fmt.Errorf("eviction: %d, level %q", code, got)
		}
		done <- nil
	}()
	h.wait(s, 2)
	if got := ofLevel(t, s.ctx, s.client, "nominal_limit_seats"); got != 85 {
		t.Errorf("Lameduck's level has %v seats, the manifest says 85", got)
	}
	// A former request may be counted a moment after its answer.
	harness.Until(t, time.Minute, "only the two that are held are executing at Lameduck's level", func() bool {
		return ofLevel(t, s.ctx, s.client, "current_executing_requests") == 2
	})
	close(release)
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// ofLevel returns a metric of Lameduck's level.
func ofLevel(t *testing.T, ctx context.Context, client kubernetes.Interface, name string) (n float64) {
	t.Helper()
	text, err := client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "apiserver_flowcontrol_"+name+"{") &&
			strings.Contains(line, `priority_level="lameduck"`) {
			var one float64
			if _, err := fmt.Sscan(line[strings.LastIndex(line, " ")+1:], &one); err != nil {
				t.Fatal(err)
			}
			n += one
		}
	}
	return n
}
