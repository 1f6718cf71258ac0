// Package identity asks Kubernetes who an agent is and whether it may acknowledge drains.
//
// A token proves who: a projected service account token for our audience names the pod it was made for, and that pod's UID is
// the agent's identity. RBAC says what: the service account needs the verb "acknowledge" on the virtual resource "drains" in the
// API group "lameduck.io", either everywhere (ClusterRoleBinding) or in the namespaces whose Services its gateway routes and in its own
// (RoleBinding). The right everywhere decides also which pods with the agent's label are expected to answer before they were
// ever heard ([Kubernetes.Allowed]), so that nobody can delay deletions by putting a label on a pod.
//
// Answers are remembered: yes for a minute and never beyond the token's own end, no for [rememberNo], so that somebody who was just given
// the right, or a token that the API server did not know yet, waits no longer. What is not remembered is asked about at a bounded
// rate, so that whoever presents made-up tokens does not keep the API server busy; a token that was good before has a rate of its own,
// which strangers cannot use up. A token whose pod is deleted may be good for the minute. It proves what it always did, of an agent that
// the API no longer lists.
package identity

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
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
	// remember is how long a yes of the API server is used again, rememberNo how long a no, rememberMost how many of them.
	remember     = time.Minute
	rememberNo   = 5 * time.Second
	rememberMost = 20_000
	askTimeout   = 5 * time.Second
	// strangersRate and strangersBurst bound the questions about what is not remembered, in a second and at once. With the webhook's own
	// limit of 50 requests a second they leave room for its live reads and for what is known to be good.
	strangersRate  = 40
	strangersBurst = 100

	extraPodUID  = "authentication.kubernetes.io/pod-uid"
	extraPodName = "authentication.kubernetes.io/pod-name"
)

// Kubernetes asks the API server, and remembers its answers. Safe for concurrent use.
type Kubernetes struct {
	Client kubernetes.Interface
	// Replicas is the user name of the coordinator's own service account. Who has it needs no right: it is a replica.
	Replicas string

	// strangers is how often the API server may be asked about what it has not said yes to lately.
	strangers *rate.Limiter

	mu      sync.Mutex
	tokens  map[[sha256.Size]byte]answer[coordinator.Identity]
	allowed map[right]answer[bool]
}

// right is what is asked about: of username, in namespace, or everywhere if that is empty.
type right struct{ username, namespace string }

type answer[T any] struct {
	value T
	err   error
	until time.Time
}

// New returns a Kubernetes that asks with client.
func New(client kubernetes.Interface) *Kubernetes {
	return &Kubernetes{
		Client: client,
		tokens: map[[sha256.Size]byte]answer[coordinator.Identity]{}, allowed: map[right]answer[bool]{},
		strangers: rate.NewLimiter(strangersRate, strangersBurst),
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
	if len(token) > tokenMost {
		return coordinator.Identity{}, refusal{coordinator.ErrUnauthenticated, fmt.Sprintf("%v: longer than %d bytes", coordinator.ErrUnauthenticated, tokenMost)}
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	// A token that was good a minute ago and is to be looked at again does not queue with strangers.
	if !ok || known.err != nil {
		if err := k.strangers.Wait(ctx); err != nil {
			return coordinator.Identity{}, fmt.Errorf("too many unknown tokens to ask about: %v", err)
		}
	}
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
	now := time.Now()
	until := now.Add(remember)
	if err != nil {
		until = now.Add(rememberNo)
	} else if end, ok := expires(token); ok && end.Before(until) {
		until = end
	}
	makeRoom(k.tokens, now)
	k.tokens[key] = answer[coordinator.Identity]{who, err, until}
	return who, err
}

// makeRoom forgets, when as many answers are remembered as may be, first those that are old and then, if these are not half, any: strangers
// must not make us forget all agents at once.
func makeRoom[K comparable, V any](answers map[K]answer[V], now time.Time) {
	if len(answers) < rememberMost {
		return
	}
	for _, stale := range []bool{true, false} {
		for key, a := range answers {
			if !stale && len(answers) <= rememberMost/2 {
				return
			}
			if !stale || a.err != nil || now.After(a.until.Add(remember)) {
				delete(answers, key)
			}
		}
	}
}

// tokenMost bounds a token that is asked about, in bytes.
const tokenMost = 16 << 10

// expires returns the end that a JSON Web Token names. It is not verified: it is used only to forget a good answer sooner.
func expires(token string) (time.Time, bool) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}, false
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return time.Time{}, false
	}
	var claims struct {
		Expires int64 `json:"exp"`
	}
	if json.Unmarshal(text, &claims) != nil || claims.Expires == 0 {
		return time.Time{}, false
	}
	return time.Unix(claims.Expires, 0), true
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
	namespace := namespaceOf(user.Username)
	if user.Username == k.Replicas {
		return coordinator.Identity{Agent: drain.AgentID(uid), Name: namespace + "/" + name, Username: user.Username, Replica: true}, nil
	}
	everywhere, err := k.ask(ctx, right{user.Username, ""}, user.Groups)
	if err != nil {
		return coordinator.Identity{}, err
	}
	if !everywhere {
		allowed := false
		if namespace != "" {
			if allowed, err = k.ask(ctx, right{user.Username, namespace}, user.Groups); err != nil {
				return coordinator.Identity{}, err
			}
		}
		if !allowed {
			return coordinator.Identity{}, refusal{coordinator.ErrForbidden, fmt.Sprintf("%s may not acknowledge drains: grant the verb acknowledge on drains.lameduck.io", user.Username)}
		}
	}
	return coordinator.Identity{
		Agent: drain.AgentID(uid), Name: namespace + "/" + name, Username: user.Username, Everywhere: everywhere,
	}, nil
}

// MayAcknowledge implements [coordinator.Authorizer].
func (k *Kubernetes) MayAcknowledge(ctx context.Context, who coordinator.Identity, namespace string) (bool, error) {
	if who.Everywhere {
		return true, nil
	}
	if namespace == "" {
		return false, nil // that would be a question about every namespace
	}
	return k.ask(ctx, right{who.Username, namespace}, Groups(namespaceOf(who.Username)))
}

// Allowed reports whether username may acknowledge drains everywhere.
func (k *Kubernetes) Allowed(ctx context.Context, username string, groups []string) (bool, error) {
	return k.ask(ctx, right{username, ""}, groups)
}

func (k *Kubernetes) ask(ctx context.Context, what right, groups []string) (bool, error) {
	k.mu.Lock()
	known, ok := k.allowed[what]
	k.mu.Unlock()
	if ok && time.Now().Before(known.until) {
		return known.value, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if !ok || !known.value {
		if err := k.strangers.Wait(ctx); err != nil {
			return false, fmt.Errorf("too many unknown rights to ask about: %v", err)
		}
	}
	review, err := k.Client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: what.username, Groups: groups,
			ResourceAttributes: &authorizationv1.ResourceAttributes{
				Namespace: what.namespace, Verb: "acknowledge", Group: "lameduck.io", Resource: "drains",
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, fmt.Errorf("ask whether %s may acknowledge drains: %w", what.username, err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	until := now.Add(remember)
	if !review.Status.Allowed {
		until = now.Add(rememberNo)
	}
	makeRoom(k.allowed, now)
	k.allowed[what] = answer[bool]{review.Status.Allowed, nil, until}
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
