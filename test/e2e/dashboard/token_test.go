package dashboard

import (
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/identity"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// The real API server shows its keys, and the token of an agent is verified with them before it is
// asked about. One with another signature is refused by the coordinator itself.
func TestTokensOfTheAPIServerAreVerified(t *testing.T) {
	s := open(t)
	ns := harness.Namespace(t, s.Kube, "signed", nil)
	if _, err := s.Kube.CoreV1().ServiceAccounts(ns).Create(t.Context(),
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "gateway"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	pod, err := s.Kube.CoreV1().Pods(ns).Create(t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "gateway"},
		Spec: corev1.PodSpec{ServiceAccountName: "gateway",
			Containers: []corev1.Container{{Name: "gateway", Image: "gateway"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	made, err := s.Kube.CoreV1().ServiceAccounts(ns).CreateToken(t.Context(), "gateway",
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: []string{identity.Audience},
			BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: "gateway",
				UID: pod.UID}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	who := identity.New(s.Kube)
	// It has no right, which the API server is asked about only when the token is valid.
	token := made.Status.Token
	if _, err := who.Authenticate(t.Context(), token); !errors.Is(err, coordinator.ErrForbidden) || who.Keys() == 0 {
		t.Errorf("%d keys, %v", who.Keys(), err)
	}
	at := strings.LastIndexByte(token, '.') + 1
	other := token[:at] + strings.Repeat("A", len(token)-at)
	if _, err := who.Authenticate(t.Context(), other); !errors.Is(err, coordinator.ErrUnauthenticated) ||
		!strings.Contains(err.Error(), "go-jose") {
		t.Errorf("another signature: %v", err)
	}
}

// What docs/dashboard.md tells operators to do for a token, by the real API server: it lets the
// page be looked at, and is good for nothing else.
func TestTokensOfTheDocuments(t *testing.T) {
	s := open(t)
	text, err := os.ReadFile("../../../docs/dashboard.md")
	if err != nil {
		t.Fatal(err)
	}
	role := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindSubmatch(text)
	commands := regexp.MustCompile(`(?m)^ {6}kubectl (create .*)$`).FindAllSubmatch(text, -1)
	if role == nil || len(commands) != 3 {
		t.Fatalf("the document has changed: %d commands", len(commands))
	}
	reviewer := func() *identity.Kubernetes { return identity.New(s.Kube) } // which remembers nothing yet
	run := func(args string) string {
		t.Helper()
		out, err := s.Cluster.Kubectl(t.Context(), append([]string{"-n", "default"}, strings.Fields(args)...)...)
		if err != nil {
			t.Fatalf("kubectl %s: %v: %s", args, err, out)
		}
		return strings.TrimSpace(out)
	}
	run(string(commands[0][1]))
	token := run(string(commands[2][1]))
	if err := reviewer().Review(t.Context(), token); !errors.Is(err, coordinator.ErrForbidden) ||
		!strings.Contains(err.Error(), "system:serviceaccount:default:viewer") {
		t.Errorf("without the right: %v", err)
	}
	if err := s.Apply(t.Context(), string(role[1])); err != nil {
		t.Fatal(err)
	}
	run(string(commands[1][1]))
	// The API server learns of rights by a watch.
	harness.Await(t, 20*time.Second, "with the right", func() error { return reviewer().Review(t.Context(), token) })
	if err := reviewer().Review(t.Context(), run("create token viewer")); !errors.Is(err,
		coordinator.ErrUnauthenticated) {
		t.Errorf("a token for the API server: %v", err)
	}
	if out, err := s.Cluster.Kubectl(t.Context(), "get", "pods", "--token="+token, "--kubeconfig=/dev/null",
		"--server="+s.Cluster.Server(), "--insecure-skip-tls-verify"); err == nil ||
		!strings.Contains(out+err.Error(), "Unauthorized") {
		t.Errorf("the API server takes it too: %v: %s", err, out)
	}
}
