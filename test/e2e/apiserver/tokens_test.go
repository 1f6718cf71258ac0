package apiserver_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/internal/identity"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// F13. The API server signs a token with a key that the token names, and shows that key to service
// accounts. So a coordinator verifies by itself which tokens are worth a question. While 500
// made-up ones come each second, some of them for pods of agents and of the other replica, it lets
// in all agents and that replica, whose tokens it has not seen before. AGENTS is how many come at
// once.
func TestMadeUpTokens(t *testing.T) {
	s := newScene(t)
	agents := harness.Number(t, "AGENTS", 50)
	user := "system:serviceaccount:" + s.namespace + ":"
	s.grant("system:auth-delegator", user+"coordinator")
	if _, err := s.client.RbacV1().ClusterRoles().Create(s.ctx, &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: s.namespace},
		Rules: []rbacv1.PolicyRule{{Verbs: []string{"acknowledge"}, APIGroups: []string{"lameduck.io"},
			Resources: []string{"drains"}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.grant(s.namespace, user+"agent")
	for _, name := range []string{"agent", "replica"} {
		if _, err := s.client.CoreV1().ServiceAccounts(s.namespace).Create(s.ctx,
			&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	tokens := []string{s.token("replica", "replica-0")}
	for i := range agents {
		tokens = append(tokens, s.token("agent", fmt.Sprint("agent-", i)))
	}

	client, err := kubernetes.NewForConfig(s.cluster.ConfigFor(user+"coordinator", "system:serviceaccounts"))
	if err != nil {
		t.Fatal(err)
	}
	coordinator := identity.New(client)
	coordinator.Replicas = user + "replica"
	ctx, stop := context.WithCancel(s.ctx)
	var strangers sync.WaitGroup
	defer strangers.Wait()
	defer stop()
	strangers.Go(func() {
		tick := time.NewTicker(time.Second / 500)
		defer tick.Stop()
		for i := 0; ctx.Err() == nil; i++ {
			strangers.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, 4*time.Second)
				defer cancel()
				if _, err := coordinator.Authenticate(ctx, madeUp(tokens, i)); err == nil {
					t.Error("a made-up token is let in")
				}
			})
			<-tick.C
		}
	})
	time.Sleep(3 * time.Second) // the limits for strangers are used up by then

	// Agents give a request up after 4 s, and try again about each second.
	began, took := time.Now(), make([]time.Duration, len(tokens))
	var all sync.WaitGroup
	for i, token := range tokens {
		all.Go(func() {
			for s.ctx.Err() == nil {
				ctx, cancel := context.WithTimeout(s.ctx, 4*time.Second)
				is, err := coordinator.Authenticate(ctx, token)
				cancel()
				if took[i] = time.Since(began); err == nil && is.Replica == (i == 0) {
					return
				}
				time.Sleep(500*time.Millisecond + rand.N(time.Second))
			}
			t.Errorf("token %d is not let in", i)
		})
	}
	all.Wait()
	t.Logf("beside 500 made-up tokens a second, the other replica is let in after %s, the last of %d agents after %s",
		took[0], agents, slices.Max(took))
	harness.Goal(t, "let in, seconds", slices.Max(took).Seconds(), 2, "")
	if most := 10 * time.Second; slices.Max(took) > most {
		t.Errorf("want all let in within %s", most)
	}
}

// grant binds a ClusterRole to a user.
func (s *scene) grant(role, user string) {
	s.t.Helper()
	if _, err := s.client.RbacV1().ClusterRoleBindings().Create(s.ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: strings.NewReplacer(":", "-").Replace(user)},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: user}},
	}, metav1.CreateOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

// token returns a token of a new pod of a service account.
func (s *scene) token(account, name string) string {
	s.t.Helper()
	pod := s.create(name, podSpec("no-node-for-"+s.namespace), func(p *corev1.Pod) {
		p.Spec.ServiceAccountName = account
	})
	request, err := s.client.CoreV1().ServiceAccounts(s.namespace).CreateToken(s.ctx, account,
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: []string{identity.Audience},
			BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: pod.Name,
				UID: pod.UID}}}, metav1.CreateOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return request.Status.Token
}

// madeUp returns the i-th made-up token: a text, or the claims of one of tokens with a wrong
// signature, an unknown key or no signature. Half of these have the claims of the first, which is
// the replica's.
func madeUp(tokens []string, i int) string {
	of := tokens[0]
	if i%8 < 4 {
		of = tokens[i%len(tokens)]
	}
	parts := strings.Split(of, ".")
	header := func(format string) string {
		return base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, format, i))
	}
	signature := base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "%0256d", i))
	switch i % 4 {
	case 0:
		return fmt.Sprint("token made up ", i)
	case 1:
		return parts[0] + "." + parts[1] + "." + signature
	case 2:
		return header(`{"alg":"RS256","kid":"a stranger's %d"}`) + "." + parts[1] + "." + signature
	default:
		return header(`{"alg":"none","kid":"%d"}`) + "." + parts[1] + "."
	}
}
