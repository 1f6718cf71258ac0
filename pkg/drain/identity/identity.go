// Package identity asks Kubernetes who an agent is and whether it may acknowledge drains.
//
// A token proves who: a projected service account token for our audience names the pod it was made for, and that pod's UID is
// the agent's identity. RBAC says what: the service account needs the verb "acknowledge" on the virtual resource "drains" in the
// API group "lameduck.io". The same right decides which pods with the agent's label are expected to answer ([Kubernetes.Allowed]),
// so that nobody can delay deletions by putting a label on a pod.
package identity

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/coordinator"
)

// Audience is what agents' tokens must be made for.
const Audience = "lameduck.io"

const (
	// remember is how long an answer of the API server is used again, rememberMost how many of them.
	remember     = time.Minute
	rememberMost = 10_000
	askTimeout   = 5 * time.Second

	extraPodUID  = "authentication.kubernetes.io/pod-uid"
	extraPodName = "authentication.kubernetes.io/pod-name"
)

// Kubernetes asks the API server, and remembers its answers for a minute. Safe for concurrent use.
type Kubernetes struct {
	Client kubernetes.Interface

	mu      sync.Mutex
	tokens  map[[sha256.Size]byte]answer[coordinator.Identity]
	allowed map[string]answer[bool]
}

type answer[T any] struct {
	value T
	err   error
	until time.Time
}

// New returns a Kubernetes that asks with client.
func New(client kubernetes.Interface) *Kubernetes {
	return &Kubernetes{
		Client: client,
		tokens: map[[sha256.Size]byte]answer[coordinator.Identity]{}, allowed: map[string]answer[bool]{},
	}
}

// Authenticate implements [coordinator.Authenticator].
func (k *Kubernetes) Authenticate(ctx context.Context, token string) (coordinator.Identity, error) {
	key := sha256.Sum256([]byte(token))
	k.mu.Lock()
	known, ok := k.tokens[key]
	k.mu.Unlock()
	if ok && time.Now().Before(known.until) {
		return known.value, known.err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	review, err := k.Client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{Audience}},
	}, metav1.CreateOptions{})
	if err != nil {
		return coordinator.Identity{}, fmt.Errorf("review the agent's token: %w", err)
	}
	who, err := k.identify(ctx, review.Status)
	if err != nil && !final(err) {
		return who, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.tokens) >= rememberMost {
		clear(k.tokens)
	}
	k.tokens[key] = answer[coordinator.Identity]{who, err, time.Now().Add(remember)}
	return who, err
}

func (k *Kubernetes) identify(ctx context.Context, status authenticationv1.TokenReviewStatus) (coordinator.Identity, error) {
	if !status.Authenticated {
		return coordinator.Identity{}, refusal{coordinator.ErrUnauthenticated, fmt.Sprintf("%v (audience must be %q): %s", coordinator.ErrUnauthenticated, Audience, status.Error)}
	}
	if !slices.Contains(status.Audiences, Audience) {
		// An API server whose authenticator does not know audiences answers without, and means its own.
		return coordinator.Identity{}, refusal{coordinator.ErrUnauthenticated, fmt.Sprintf("the token of %s is for the audience %q, not for %q", status.User.Username, status.Audiences, Audience)}
	}
	user := status.User
	uid, name := first(user.Extra[extraPodUID]), first(user.Extra[extraPodName])
	if uid == "" {
		return coordinator.Identity{}, refusal{coordinator.ErrUnauthenticated, fmt.Sprintf("the token of %s names no pod: use a projected token, not a secret", user.Username)}
	}
	allowed, err := k.Allowed(ctx, user.Username, user.Groups)
	if err != nil {
		return coordinator.Identity{}, err
	}
	if !allowed {
		return coordinator.Identity{}, refusal{coordinator.ErrForbidden, fmt.Sprintf("%s may not acknowledge drains: grant the verb acknowledge on drains.lameduck.io", user.Username)}
	}
	return coordinator.Identity{Agent: drain.AgentID(uid), Name: namespaceOf(user.Username) + "/" + name}, nil
}

// Allowed reports whether username may acknowledge drains.
func (k *Kubernetes) Allowed(ctx context.Context, username string, groups []string) (bool, error) {
	k.mu.Lock()
	known, ok := k.allowed[username]
	k.mu.Unlock()
	if ok && time.Now().Before(known.until) {
		return known.value, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	review, err := k.Client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: username, Groups: groups,
			ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "acknowledge", Group: "lameduck.io", Resource: "drains"},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, fmt.Errorf("ask whether %s may acknowledge drains: %w", username, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.allowed) >= rememberMost {
		clear(k.allowed)
	}
	k.allowed[username] = answer[bool]{review.Status.Allowed, nil, time.Now().Add(remember)}
	return review.Status.Allowed, nil
}

// refusal is an error whose text says more than its kind.
type refusal struct {
	kind error
	text string
}

func (r refusal) Error() string { return r.text }
func (r refusal) Unwrap() error { return r.kind }

func final(err error) bool {
	var r refusal
	return errors.As(err, &r)
}

// Username is how a service account is called in reviews.
func Username(namespace, serviceAccount string) string {
	return "system:serviceaccount:" + namespace + ":" + serviceAccount
}

// Groups are the groups that every service account of namespace is in.
func Groups(namespace string) []string {
	return []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"}
}

func namespaceOf(username string) string {
	parts := strings.Split(username, ":")
	if len(parts) != 4 {
		return ""
	}
	return parts[2]
}

func first(values authenticationv1.ExtraValue) string {
	if len(values) == 0 {
		return ""
	}
	return values[0]
}
