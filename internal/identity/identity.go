// Package identity asks Kubernetes who an agent is and whether it may acknowledge drains.
//
// A token proves who: a projected service account token for our audience names the pod it was made
// for, and that pod's UID is the agent's identity. RBAC says what: the service account needs the
// verb "acknowledge" on the virtual resource "drains" in the API group "lameduck.io", either
// everywhere (ClusterRoleBinding) or in the namespaces whose Services its gateway routes and in its
// own (RoleBinding). The right everywhere decides also which pods with the agent's label are
// expected to answer before they were ever heard ([Kubernetes.Allowed]), so that nobody can delay
// deletions by putting a label on a pod.
//
// Answers are remembered: that a token is valid for a minute and never beyond the token's own end,
// that somebody has the right for [rememberRight], no for [rememberNo], so that somebody who was
// just given the right, or a token that the API server did not know yet, waits no longer. A token
// whose pod is deleted may be valid for the minute.
//
// Questions are asked in lanes, each with a rate of its own, so that made-up tokens neither keep
// the API server busy nor keep agents out. A token that was valid before waits in none. A new one
// waits in the lane of the pod that its claims name, if that pod is an expected agent
// ([Kubernetes.Expect]): the claims are not verified yet, but a stranger has to know the pod's UID,
// and delays that one agent alone. All other tokens share the lane of strangers.
package identity

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
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

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// Audience is what agents' tokens must be made for.
const Audience = "lameduck.io"

const (
	// remember is how long a token is valid without another question, rememberRight how long a
	// right, rememberNo how long a no, and rememberNoLabel that of the account of a pod with the
	// agent's label; maxRemembered is how many answers are remembered.
	remember        = time.Minute
	rememberRight   = 45 * time.Second
	rememberNo      = 5 * time.Second
	rememberNoLabel = 30 * time.Second
	maxRemembered   = 20_000
	askTimeout      = 5 * time.Second
	// strangersRate and strangersBurst bound the questions of the lane of strangers, in a second
	// and at once; agentsRate and agentsBurst those of all agents, and those about rights; oneBurst
	// those of one agent, with one a second. With the webhook's own limit of 50 requests a second
	// strangers leave room for all others.
	strangersRate  = 20
	strangersBurst = 50
	agentsRate     = 40
	agentsBurst    = 100
	oneBurst       = 5
	// replicaRate and replicaBurst bound those of another replica of the coordinator: as many calls
	// as the API server has seats may be the first to use a new token.
	replicaRate  = 10
	replicaBurst = 100

	extraPodUID  = "authentication.kubernetes.io/pod-uid"
	extraPodName = "authentication.kubernetes.io/pod-name"
)

// Kubernetes asks the API server, and remembers its answers. Safe for concurrent use.
type Kubernetes struct {
	Client kubernetes.Interface
	// Replicas is the user name of the coordinator's own service account. Who has it needs no
	// right: it is a replica.
	Replicas string

	// strangers, agents and rights are how often the API server may be asked about tokens of
	// strangers, about those of agents, and about rights of accounts and of agents that it knows.
	strangers, agents, rights *rate.Limiter

	mu sync.Mutex
	// expected holds the lane of each expected agent, replicas that of each other replica.
	expected, replicas map[drain.AgentID]*rate.Limiter
	tokens             map[[sha256.Size]byte]answer[coordinator.Identity]
	allowed            map[right]answer[bool]
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
		Client: client, replicas: map[drain.AgentID]*rate.Limiter{},
		tokens: map[[sha256.Size]byte]answer[coordinator.Identity]{}, allowed: map[right]answer[bool]{},
		strangers: rate.NewLimiter(strangersRate, strangersBurst), agents: rate.NewLimiter(agentsRate, agentsBurst),
		rights: rate.NewLimiter(agentsRate, agentsBurst),
	}
}

// Expect sets which agents have a lane of their own: all that the API says exist.
func (k *Kubernetes) Expect(agents []drain.Expected) {
	k.mu.Lock()
	defer k.mu.Unlock()
	former := k.expected
	k.expected = make(map[drain.AgentID]*rate.Limiter, len(agents))
	for _, a := range agents {
		if k.expected[a.ID] = former[a.ID]; k.expected[a.ID] == nil {
			k.expected[a.ID] = rate.NewLimiter(1, oneBurst)
		}
	}
}

// ExpectReplica gives another replica of the coordinator, by its pod's UID, a lane of its own, or
// takes it away.
func (k *Kubernetes) ExpectReplica(id drain.AgentID, expected bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch {
	case !expected:
		delete(k.replicas, id)
	case k.replicas[id] == nil:
		k.replicas[id] = rate.NewLimiter(replicaRate, replicaBurst)
	}
}

// lane is where questions wait, one limiter after the other.
type lane []*rate.Limiter

// laneOf returns the lane of a token that nobody has verified.
func (k *Kubernetes) laneOf(token string) lane {
	claims, _ := claimsOf(token)
	k.mu.Lock()
	defer k.mu.Unlock()
	// A replica does not queue with agents: after a restart all of them come at once, and without
	// the other replicas there is no common order.
	if own := k.replicas[claims.Kubernetes.Pod.UID]; own != nil {
		return lane{own}
	}
	if own := k.expected[claims.Kubernetes.Pod.UID]; own != nil {
		return lane{own, k.agents}
	}
	return lane{k.strangers}
}

func (l lane) wait(ctx context.Context) error {
	for _, limiter := range l {
		if err := limiter.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Authenticate implements [coordinator.Authenticator].
func (k *Kubernetes) Authenticate(ctx context.Context, token string) (coordinator.Identity, error) {
	if len(token) > maxToken {
		return coordinator.Identity{}, refusal{coordinator.ErrUnauthenticated,
			fmt.Sprintf("%v: longer than %d bytes", coordinator.ErrUnauthenticated, maxToken)}
	}
	l := k.laneOf(token)
	who, err := k.review(ctx, token, l)
	if err != nil {
		return coordinator.Identity{}, err
	}
	if who.Username == k.Replicas {
		who.Replica = true
		return who, nil
	}
	who.Everywhere, err = k.ask(ctx, right{who.Username, ""}, rememberNo, l)
	allowed := who.Everywhere
	if namespace := namespaceOf(who.Username); err == nil && !allowed && namespace != "" {
		allowed, err = k.ask(ctx, right{who.Username, namespace}, rememberNo, l)
	}
	switch {
	case err != nil:
		return coordinator.Identity{}, err
	case !allowed:
		return coordinator.Identity{}, refusal{coordinator.ErrForbidden,
			fmt.Sprintf("%s may not acknowledge drains: grant the verb acknowledge on drains.lameduck.io",
				who.Username)}
	}
	return who, nil
}

// review returns whom a token proves.
func (k *Kubernetes) review(ctx context.Context, token string, l lane) (coordinator.Identity, error) {
	key := sha256.Sum256([]byte(token))
	k.mu.Lock()
	known, ok := k.tokens[key]
	k.mu.Unlock()
	if ok && time.Now().Before(known.until) {
		return known.value, known.err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if !ok || known.err != nil {
		if err := l.wait(ctx); err != nil {
			return coordinator.Identity{}, fmt.Errorf("too many unknown tokens to ask about: %v", err)
		}
	}
	review, err := k.Client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{Audience}},
	}, metav1.CreateOptions{})
	if err != nil {
		return coordinator.Identity{}, fmt.Errorf("review the agent's token: %w", err)
	}
	who, err := identify(review.Status)
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	until := now.Add(remember)
	if err != nil {
		until = now.Add(rememberNo)
	} else if claims, ok := claimsOf(token); ok {
		who.Until = claims.end(now)
		if who.Until.Before(until) {
			until = who.Until
		}
	}
	makeRoom(k.tokens, now)
	k.tokens[key] = answer[coordinator.Identity]{who, err, until}
	return who, err
}

// makeRoom forgets, when as many answers are remembered as may be, first those that are old and
// then, if these are not half, any: strangers must not make us forget all agents at once.
func makeRoom[K comparable, V any](answers map[K]answer[V], now time.Time) {
	if len(answers) < maxRemembered {
		return
	}
	for _, stale := range []bool{true, false} {
		for key, a := range answers {
			if !stale && len(answers) <= maxRemembered/2 {
				return
			}
			if !stale || a.err != nil || now.After(a.until.Add(remember)) {
				delete(answers, key)
			}
		}
	}
}

// maxToken bounds a token that is asked about, in bytes.
const maxToken = 16 << 10

// claims are what a JSON Web Token says of itself.
type claims struct {
	Expires    int64 `json:"exp"`
	Issued     int64 `json:"iat"`
	Kubernetes struct {
		Pod struct {
			UID drain.AgentID `json:"uid"`
		} `json:"pod"`
	} `json:"kubernetes.io"`
}

// claimsOf reads the claims of a token, and verifies nothing. ok is false if they name no end.
func claimsOf(token string) (c claims, ok bool) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return claims{}, false
	}
	text, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil || json.Unmarshal(text, &c) != nil {
		return claims{}, false
	}
	return c, c.Expires != 0
}

// end is when a token ends that the API server has just called valid. If that time is over, this
// replica's clock is ahead: the token is then taken to last from now for as long as it was made
// for.
func (c claims) end(now time.Time) time.Time {
	end := time.Unix(c.Expires, 0)
	if !end.After(now) && c.Issued > 0 && c.Issued < c.Expires {
		return now.Add(end.Sub(time.Unix(c.Issued, 0)))
	}
	return end
}

// identify reads what a review says of an agent's token.
func identify(status authenticationv1.TokenReviewStatus) (coordinator.Identity, error) {
	if !status.Authenticated {
		return coordinator.Identity{}, refusal{coordinator.ErrUnauthenticated,
			fmt.Sprintf("%v (audience must be %q): %s", coordinator.ErrUnauthenticated, Audience, status.Error)}
	}
	if !slices.Contains(status.Audiences, Audience) {
		// An API server whose authenticator does not know audiences answers without, and means its
		// own.
		return coordinator.Identity{}, refusal{coordinator.ErrUnauthenticated,
			fmt.Sprintf("the token of %s is for the audience %q, not for %q", status.User.Username, status.Audiences,
				Audience)}
	}
	user := status.User
	uid, name := first(user.Extra[extraPodUID]), first(user.Extra[extraPodName])
	if uid == "" {
		return coordinator.Identity{}, refusal{coordinator.ErrUnauthenticated,
			fmt.Sprintf("the token of %s names no pod: use a projected token, not a secret", user.Username)}
	}
	return coordinator.Identity{Agent: drain.AgentID(uid), Name: namespaceOf(user.Username) + "/" + name,
		Username: user.Username}, nil
}

// MayAcknowledge implements [coordinator.Authorizer].
func (k *Kubernetes) MayAcknowledge(ctx context.Context, who coordinator.Identity, namespace string) (bool, error) {
	return k.ask(ctx, right{who.Username, namespace}, rememberNo, lane{k.rights})
}

// Allowed reports whether username may acknowledge drains everywhere. A no may be older than one
// for an agent that presents its token, and stays while there is hardly room to ask: accounts
// without the right must not delay a new one.
func (k *Kubernetes) Allowed(ctx context.Context, username string) (bool, error) {
	no := rememberNoLabel
	if k.rights.Tokens() < agentsBurst/2 {
		no = time.Hour
	}
	return k.ask(ctx, right{username, ""}, no, lane{k.rights})
}

// ask returns an answer that is remembered, or asks the API server. A no is used again for as long
// as no.
func (k *Kubernetes) ask(ctx context.Context, what right, no time.Duration, l lane) (bool, error) {
	k.mu.Lock()
	known, ok := k.allowed[what]
	k.mu.Unlock()
	until := known.until
	if !known.value {
		until = until.Add(no)
	}
	if ok && time.Now().Before(until) {
		return known.value, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if !ok || !known.value {
		if err := l.wait(ctx); err != nil {
			return false, fmt.Errorf("too many unknown rights to ask about: %v", err)
		}
	}
	review, err := k.Client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: what.username, Groups: groups(namespaceOf(what.username)),
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
	until = now
	if review.Status.Allowed {
		until = now.Add(rememberRight)
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

// Username is how a service account is called in reviews.
func Username(namespace, serviceAccount string) string {
	return "system:serviceaccount:" + namespace + ":" + serviceAccount
}

// groups are those that every service account of namespace is in.
func groups(namespace string) []string {
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
