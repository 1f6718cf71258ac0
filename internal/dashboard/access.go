package dashboard

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// Audience is what readers' tokens must be made for: such a token is good for nothing but Lameduck,
// so that a page which is given one cannot do anything else with it.
const Audience = "lameduck.io"

// ErrUnauthenticated and ErrForbidden are why a [Reviewer] lets nobody look.
var (
	ErrUnauthenticated = errors.New("the token is not valid here")
	ErrForbidden       = errors.New("not allowed to look")
)

const (
	// rememberYes is how long a yes of the API server is used again, rememberNo how long a no,
	// maxRemembered how many answers.
	rememberYes   = time.Minute
	rememberNo    = 5 * time.Second
	maxRemembered = 1000
	// askTimeout bounds one question, askRate and askBurst all of them, in a second and at once.
	askTimeout = 5 * time.Second
	askRate    = 5
	askBurst   = 20
	// maxToken bounds a token, in bytes.
	maxToken = 16 << 10
)

// Kubernetes asks the API server who has a token (TokenReview) and whether he may "get"
// drains.lameduck.io (SubjectAccessReview), and remembers the answer for a minute, a no for five
// seconds. Safe for concurrent use.
type Kubernetes struct {
	client kubernetes.Interface
	asks   *rate.Limiter

	mu    sync.Mutex
	known map[[sha256.Size]byte]verdict
}

type verdict struct {
	err   error
	until time.Time
}

// NewKubernetes returns a Reviewer that asks with client.
func NewKubernetes(client kubernetes.Interface) *Kubernetes {
	return &Kubernetes{client: client, asks: rate.NewLimiter(askRate, askBurst), known: map[[sha256.Size]byte]verdict{}}
}

// Review implements [Reviewer].
func (k *Kubernetes) Review(ctx context.Context, token string) error {
	if len(token) > maxToken {
		return fmt.Errorf("%w: longer than %d bytes", ErrUnauthenticated, maxToken)
	}
	key := sha256.Sum256([]byte(token))
	now := time.Now()
	k.mu.Lock()
	was, ok := k.known[key]
	k.mu.Unlock()
	if ok && now.Before(was.until) {
		return was.err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if err := k.asks.Wait(ctx); err != nil {
		return fmt.Errorf("too many tokens to ask about: %v", err)
	}
	err := k.ask(ctx, token)
	remember := rememberYes
	switch {
	case err == nil:
	case errors.Is(err, ErrUnauthenticated), errors.Is(err, ErrForbidden):
		remember = rememberNo
	default:
		return err // nothing was found out
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.known) >= maxRemembered {
		clear(k.known)
	}
	k.known[key] = verdict{err, now.Add(remember)}
	return err
}

func (k *Kubernetes) ask(ctx context.Context, token string) error {
	review, err := k.client.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token, Audiences: []string{Audience}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("review the token: %v", err)
	}
	// An API server whose authenticator does not know audiences answers without, and means its own.
	if !review.Status.Authenticated || !slices.Contains(review.Status.Audiences, Audience) {
		return fmt.Errorf("%w: its audience must be %q: %s", ErrUnauthenticated, Audience, review.Status.Error)
	}
	user := review.Status.User
	extra := map[string]authorizationv1.ExtraValue{}
	for key, values := range user.Extra {
		extra[key] = authorizationv1.ExtraValue(values)
	}
	access, err := k.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user.Username, UID: user.UID, Groups: user.Groups, Extra: extra,
			ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "get", Group: "lameduck.io",
				Resource: "drains"},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("ask whether %s may look: %v", user.Username, err)
	}
	if !access.Status.Allowed {
		return fmt.Errorf("%w: %s needs the verb get on drains.lameduck.io in all namespaces", ErrForbidden,
			user.Username)
	}
	return nil
}
