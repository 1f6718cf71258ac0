// Package identity asks Kubernetes who an agent is and whether it may acknowledge drains, and
// whether an operator may look at them.
//
// A token proves the identity: a projected service account token for [Audience] names the pod that
// it was made for, and the UID of that pod is the agent's identity. RBAC grants the rights: the
// service account needs the verb "acknowledge" on the virtual resource "drains" of the API group
// "lameduck.io". It needs it either everywhere (ClusterRoleBinding), or in its own namespace and in
// the namespaces whose Services its gateway routes (RoleBinding). The right everywhere decides also
// which pods with the agent's label are expected to answer before they have connected
// ([Kubernetes.Allowed]), so that deletions cannot be delayed by putting a label on a pod. An
// operator needs the verb "get" there, everywhere. An agent that asks at the barrier also needs the
// verb "create" on the virtual resource "barriers", everywhere.
//
// Answers are remembered. A valid token is remembered for a minute but not beyond its expiry, even
// if its pod is deleted. A right is remembered for [rememberRight]. A refusal is remembered for
// [rememberNo], so that a right that was just granted, or a token that the API server did not know
// yet, waits no longer than that; [Kubernetes.Allowed] remembers one for [rememberNoLabel], or for
// an hour while its rate is nearly used up. While the API server is slow or away, the former answer
// stands in after [patience], for [standIn]: replicas that did not answer each other within a
// second would each decide alone, and agents would be out while pods are deleted.
//
// The signature of a token is verified first, with the API server's public keys, so that a token
// that is made up asks the API server nothing. Questions about a token wait for those about others
// of the same pod only. Where a token names a key that is not known, because the API server does
// not show its keys or has just made a new one, the question waits for others from the same
// address, and for all such. A token that was valid before does not wait. All operators share one
// lane, but those whose token is signed by a known key.
package identity

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// Audience is the audience that tokens must be made for. The API server does not accept such a
// token.
const Audience = "lameduck.io"

const (
	// remember, rememberRight and rememberNo are how long a valid token, a right and a refusal are
	// remembered. rememberNoLabel is for refusals of the service accounts of pods with the agent's
	// label. standIn is how long after that an answer stands in while the API server is slow or
	// cannot be asked: patience is how long a call waits for it then, and stood how long no other
	// does. maxRemembered bounds the number of answers of a kind. askTimeout bounds one question.
	remember        = time.Minute
	rememberRight   = 35 * time.Second
	rememberNo      = 5 * time.Second
	rememberNoLabel = 30 * time.Second
	standIn         = 5 * time.Minute
	patience        = 250 * time.Millisecond
	stood           = 5 * time.Second
	maxRemembered   = 20_000
	askTimeout      = 5 * time.Second
	// Rates are questions per second, bursts are questions at once: for tokens of unknown keys, in
	// all and from one address, operators, rights, the namespaces of one agent, and the tokens of
	// one pod (1 per second).
	strangersRate   = 100
	strangersBurst  = 100
	addressRate     = 5
	addressBurst    = 20
	operatorsRate   = 5
	rightsRate      = 40
	rightsBurst     = 100
	namespacesRate  = 10
	namespacesBurst = 100
	oneBurst        = 5

	// The virtual resources, of the API group lameduck.io.
	drains   = "drains"
	barriers = "barriers"

	extraPodUID  = "authentication.kubernetes.io/pod-uid"
	extraPodName = "authentication.kubernetes.io/pod-name"
)

// Kubernetes asks the API server, and remembers its answers. Safe for concurrent use.
type Kubernetes struct {
	Client kubernetes.Interface
	// Replicas is the user name of the coordinator's own service account. A token of that user is a
	// replica's, and needs no right. Empty: there are no other replicas.
	Replicas string
	Log      *slog.Logger

	keys keys
	// source returns the address from which a request comes.
	source func(ctx context.Context) netip.Addr
	// strangers and operators limit questions about tokens of unknown keys, and of operators,
	// rights those about rights. bearers limits questions about the tokens of one pod, addresses
	// those of unknown keys from one address, namespaces those about the namespaces that one agent
	// names.
	strangers, operators, rights *rate.Limiter
	bearers                      *serve.Rates[string]
	addresses                    *serve.Rates[netip.Addr]
	namespaces                   *serve.Rates[drain.AgentID]

	tokens   memory[hash, bearer]
	rightsOf memory[right, struct{}]
}

type hash [sha256.Size]byte

// bearer is the user of a token, and the token's expiry. The zero time: not known.
type bearer struct {
	authenticationv1.UserInfo
	until time.Time
}

// right is the subject of a question: whether username may acknowledge drains or create barriers,
// depending on resource. It is about namespace or, if that is empty, about all namespaces. If looks
// is set, the question is whether the user of that token may read drains.
type right struct {
	resource, username, namespace string
	looks                         hash
}

// New returns a Kubernetes that asks with client.
func New(client kubernetes.Interface) *Kubernetes {
	return &Kubernetes{
		Client: client, Log: slog.New(slog.DiscardHandler), source: serve.Source,
		keys: keys{
			failed: rate.Sometimes{First: 1, Interval: time.Minute},
			fetch: func(ctx context.Context) ([]byte, error) {
				return client.Discovery().RESTClient().Get().AbsPath(keysPath).DoRaw(ctx)
			},
		},
		tokens: newMemory[hash, bearer](), rightsOf: newMemory[right, struct{}](),
		strangers: rate.NewLimiter(strangersRate, strangersBurst),
		operators: rate.NewLimiter(operatorsRate, oneBurst), rights: rate.NewLimiter(rightsRate, rightsBurst),
		bearers:    serve.NewRates[string](1, oneBurst),
		addresses:  serve.NewRates[netip.Addr](addressRate, addressBurst),
		namespaces: serve.NewRates[drain.AgentID](namespacesRate, namespacesBurst),
	}
}

// lane is a list of limiters. A question waits for each, one after the other.
type lane []*rate.Limiter

// in returns a function that returns l.
func (l lane) in(context.Context) (lane, error) { return l, nil }

// laneOf returns the lane of a token that was not valid before, or why it is refused.
func (k *Kubernetes) laneOf(ctx context.Context, token string) (lane, error) {
	c, signed, err := k.signedClaims(ctx, token)
	switch {
	case err != nil:
		return nil, err
	case signed:
		return lane{k.bearers.Of(cmp.Or(string(c.Kubernetes.Pod.UID), c.Subject))}, nil
	default:
		return lane{k.addresses.Of(k.source(ctx)), k.strangers}, nil
	}
}

// operatorsLane is laneOf for operators, whose tokens may be of another kind.
func (k *Kubernetes) operatorsLane(ctx context.Context, token string) (lane, error) {
	if l, err := k.laneOf(ctx, token); err == nil && len(l) == 1 {
		return l, nil
	}
	return lane{k.operators}, nil
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
	of, err := k.review(ctx, token, k.laneOf)
	if err != nil {
		return coordinator.Identity{}, err
	}
	who, err := identify(of)
	if err != nil {
		return coordinator.Identity{}, err
	}
	if who.Username == k.Replicas {
		who.Replica = true
		return who, nil
	}
	l := lane{k.bearers.Of(string(who.Agent))}
	who.Everywhere, err = k.acknowledges(ctx, who.Username, "", rememberNo, l)
	allowed := who.Everywhere
	if namespace := namespaceOf(who.Username); err == nil && !allowed && namespace != "" {
		allowed, err = k.acknowledges(ctx, who.Username, namespace, rememberNo, l)
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

// Review implements [dashboard.Reviewer].
func (k *Kubernetes) Review(ctx context.Context, token string) error {
	of, err := k.review(ctx, token, k.operatorsLane)
	if err != nil {
		return err
	}
	spec := authorizationv1.SubjectAccessReviewSpec{User: of.Username, UID: of.UID, Groups: of.Groups,
		Extra:              map[string]authorizationv1.ExtraValue{},
		ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "get"}}
	for key, values := range of.Extra {
		spec.Extra[key] = authorizationv1.ExtraValue(values)
	}
	may, err := k.ask(ctx, right{resource: drains, looks: sha256.Sum256([]byte(token))}, spec, rememberNo,
		func(ctx context.Context) (lane, error) { return k.operatorsLane(ctx, token) })
	if err == nil && !may {
		err = refusal{coordinator.ErrForbidden,
			of.Username + " needs the verb get on drains.lameduck.io in all namespaces"}
	}
	return err
}

func (k *Kubernetes) review(ctx context.Context, token string,
	laneOf func(context.Context, string) (lane, error)) (bearer, error) {
	if len(token) > maxToken {
		return bearer{}, refusal{coordinator.ErrUnauthenticated,
			fmt.Sprintf("%v: longer than %d bytes", coordinator.ErrUnauthenticated, maxToken)}
	}
	return k.tokens.get(ctx, sha256.Sum256([]byte(token)), rememberNo,
		func(ctx context.Context) (lane, error) { return laneOf(ctx, token) },
		func(ctx context.Context) (answer[bearer], error) { return k.verify(ctx, token) })
}

// verify has the API server review a token.
func (k *Kubernetes) verify(ctx context.Context, token string) (answer[bearer], error) {
	review, err := k.Client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{Audience}},
	}, metav1.CreateOptions{})
	if err != nil {
		return answer[bearer]{}, fmt.Errorf("review the token: %w", err)
	}
	now := time.Now()
	if err := check(review.Status); err != nil {
		return answer[bearer]{refused: err, until: now}, nil
	}
	a := answer[bearer]{value: bearer{UserInfo: review.Status.User}, until: now.Add(remember)}
	a.stands = a.until.Add(standIn)
	if claims, ok := claimsOf(token); ok {
		end := claims.end(now)
		a.value.until = end
		for _, t := range []*time.Time{&a.until, &a.stands} {
			if end.Before(*t) {
				*t = end
			}
		}
	}
	return a, nil
}

// maxToken bounds a token that is asked about, in bytes.
const maxToken = 16 << 10

// claims are the claims of a JSON Web Token. They are not verified.
type claims struct {
	Subject    string `json:"sub"`
	Expires    int64  `json:"exp"`
	Issued     int64  `json:"iat"`
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

// Subject returns the user of this process's own token, without verifying it.
func Subject(token string) (string, error) {
	c, _ := claimsOf(token)
	if c.Subject == "" {
		return "", errors.New("not a JSON Web Token with a subject")
	}
	return c.Subject, nil
}

// end returns the expiry of a token that the API server has just found valid. If that time is in
// the past, this replica's clock is ahead. The token is then valid from now for its whole lifetime.
func (c claims) end(now time.Time) time.Time {
	end := time.Unix(c.Expires, 0)
	if !end.After(now) && c.Issued > 0 && c.Issued < c.Expires {
		return now.Add(end.Sub(time.Unix(c.Issued, 0)))
	}
	return end
}

// check returns an error if the API server did not accept the token, or not for [Audience].
func check(status authenticationv1.TokenReviewStatus) error {
	if !status.Authenticated {
		return refusal{coordinator.ErrUnauthenticated,
			fmt.Sprintf("%v (audience must be %q): %s", coordinator.ErrUnauthenticated, Audience, status.Error)}
	}
	if !slices.Contains(status.Audiences, Audience) {
		// An authenticator that does not support audiences returns none. The token is then for the
		// API server's own audience.
		return refusal{coordinator.ErrUnauthenticated,
			fmt.Sprintf("the token of %s is for the audience %q, not for %q", status.User.Username, status.Audiences,
				Audience)}
	}
	return nil
}

// identify returns the agent that a token was made for.
func identify(user bearer) (coordinator.Identity, error) {
	uid, name := first(user.Extra[extraPodUID]), first(user.Extra[extraPodName])
	if uid == "" {
		return coordinator.Identity{}, refusal{coordinator.ErrUnauthenticated,
			fmt.Sprintf("the token of %s names no pod: use a projected token, not a secret", user.Username)}
	}
	return coordinator.Identity{Agent: drain.AgentID(uid), Name: namespaceOf(user.Username) + "/" + name,
		Username: user.Username, Until: user.until}, nil
}

// MayAcknowledge implements [coordinator.Authenticator].
func (k *Kubernetes) MayAcknowledge(ctx context.Context, who coordinator.Identity, namespace string) (bool, error) {
	l := lane{k.rights}
	if namespace != "" {
		l = lane{k.namespaces.Of(who.Agent)} // the agent has chosen it
	}
	return k.acknowledges(ctx, who.Username, namespace, rememberNo, l)
}

// MayAskBarriers implements [coordinator.Authenticator].
func (k *Kubernetes) MayAskBarriers(ctx context.Context, who coordinator.Identity) (bool, error) {
	return k.may(ctx, "create", right{resource: barriers, username: who.Username}, rememberNo, lane{k.rights})
}

// Allowed reports whether username may acknowledge drains everywhere. It remembers a refusal longer
// than Authenticate does, and for an hour while the rate is nearly used up, so that accounts
// without the right do not delay a new account.
func (k *Kubernetes) Allowed(ctx context.Context, username string) (bool, error) {
	no := rememberNoLabel
	if k.rights.Tokens() < rightsBurst/2 {
		no = time.Hour
	}
	return k.acknowledges(ctx, username, "", no, lane{k.rights})
}

func (k *Kubernetes) acknowledges(ctx context.Context, username, namespace string, no time.Duration,
	l lane) (bool, error) {
	return k.may(ctx, "acknowledge", right{resource: drains, username: username, namespace: namespace}, no, l)
}

// may reports whether the service account what.username may use verb on what.resource.
func (k *Kubernetes) may(ctx context.Context, verb string, what right, no time.Duration, l lane) (bool, error) {
	return k.ask(ctx, what, authorizationv1.SubjectAccessReviewSpec{
		User: what.username, Groups: groups(namespaceOf(what.username)),
		ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: what.namespace, Verb: verb},
	}, no, l.in)
}

// ask reports whether the user of spec may use its verb on the resource of what. It remembers a
// refusal for no. A refusal stands in for the API server too: an agent with the right in some
// namespaces is refused the one everywhere first.
func (k *Kubernetes) ask(ctx context.Context, what right, spec authorizationv1.SubjectAccessReviewSpec,
	no time.Duration, laneOf func(context.Context) (lane, error)) (bool, error) {
	spec.ResourceAttributes.Group, spec.ResourceAttributes.Resource = "lameduck.io", what.resource
	_, err := k.rightsOf.get(ctx, what, no, laneOf, func(ctx context.Context) (answer[struct{}], error) {
		review, err := k.Client.AuthorizationV1().SubjectAccessReviews().Create(ctx,
			&authorizationv1.SubjectAccessReview{Spec: spec}, metav1.CreateOptions{})
		if err != nil {
			return answer[struct{}]{}, fmt.Errorf("ask whether %s may %s %s: %w", spec.User,
				spec.ResourceAttributes.Verb, what.resource, err)
		}
		now := time.Now()
		if !review.Status.Allowed {
			return answer[struct{}]{refused: errNo, until: now, stands: now.Add(rememberNo + standIn)}, nil
		}
		until := now.Add(rememberRight)
		return answer[struct{}]{until: until, stands: until.Add(standIn)}, nil
	})
	if errors.Is(err, errNo) {
		return false, nil
	}
	return err == nil, err
}

// errNo is the refusal of a right.
var errNo = errors.New("no")

// refusal is an error of a kind, with a text of its own.
type refusal struct {
	kind error
	text string
}

func (r refusal) Error() string { return r.text }
func (r refusal) Unwrap() error { return r.kind }

// Username returns the user name of a service account in the API server's reviews.
func Username(namespace, serviceAccount string) string {
	return "system:serviceaccount:" + namespace + ":" + serviceAccount
}

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
