package identity

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lameduck-io/lameduck/internal/coordinator"
)

// apiServer answers reviews, and checks what it is asked.
type apiServer struct {
	*Kubernetes
	// token is the status of every TokenReview. allowed is the answer to every SubjectAccessReview.
	token   authenticationv1.TokenReviewStatus
	allowed bool
	// allowedIn are the namespaces for which the answer is yes all the same; asked are those that
	// were asked about.
	allowedIn, asked []string
	// noBarriers has the answer be no about barriers.
	noBarriers bool
	// down is what both answer instead, if not nil.
	downTokens, downAccess error
	tokens, accesses       int
}

func newAPIServer(t *testing.T) *apiServer {
	client := fake.NewClientset()
	s := &apiServer{Kubernetes: New(client), allowed: true, token: authenticationv1.TokenReviewStatus{
		Authenticated: true, Audiences: []string{Audience},
		User: authenticationv1.UserInfo{
			Username: "system:serviceaccount:edge:haproxy", Groups: groups("edge"),
			Extra: map[string]authenticationv1.ExtraValue{extraPodUID: {"uid-1"}, extraPodName: {"haproxy-1"}},
		},
	}}
	client.PrependReactor("create", "tokenreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		s.tokens++
		review := action.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview).DeepCopy()
		if !strings.HasPrefix(review.Spec.Token, "token") || len(review.Spec.Audiences) != 1 ||
			review.Spec.Audiences[0] != "lameduck.io" {
			t.Errorf("asked about token %q for %q", review.Spec.Token, review.Spec.Audiences)
		}
		review.Status = s.token
		return true, review, s.downTokens
	})
	client.PrependReactor("create", "subjectaccessreviews",
		func(action clienttesting.Action) (bool, runtime.Object, error) {
			s.accesses++
			review := action.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview).DeepCopy()
			a := review.Spec.ResourceAttributes
			switch what := a.Verb + " " + a.Resource; {
			case a.Group != "lameduck.io" || review.Spec.User != s.token.User.Username:
				t.Errorf("asked about %+v", review.Spec)
			case what == "get drains" && review.Spec.Groups[0] == "people" && review.Spec.Extra["scope"][0] == "a":
			case (what == "acknowledge drains" || what == "create barriers") &&
				review.Spec.User == "system:serviceaccount:edge:haproxy":
			default:
				t.Errorf("asked about %+v", review.Spec)
			}
			s.asked = append(s.asked, a.Namespace)
			review.Status.Allowed = s.allowed || slices.Contains(s.allowedIn, a.Namespace)
			if a.Resource == "barriers" {
				review.Status.Allowed = !s.noBarriers && a.Namespace == ""
			}
			return true, review, s.downAccess
		})
	return s
}

func TestAuthenticate(t *testing.T) {
	for name, c := range map[string]struct {
		set  func(s *apiServer)
		kind error
		want string
	}{
		"good": {func(*apiServer) {}, nil, ""},
		"not authenticated": {func(s *apiServer) { s.token = authenticationv1.TokenReviewStatus{Error: "expired"} },
			coordinator.ErrUnauthenticated, `(audience must be "lameduck.io"): expired`},
		"another audience": {func(s *apiServer) { s.token.Audiences = []string{"https://kubernetes.default.svc"} },
			coordinator.ErrUnauthenticated,
			`is for the audience ["https://kubernetes.default.svc"], not for "lameduck.io"`},
		// An API server that does not know audiences calls every token good. Without this, each
		// pod's own token proves an agent.
		"an authenticator without audiences": {func(s *apiServer) { s.token.Audiences = nil },
			coordinator.ErrUnauthenticated, "is for the audience []"},
		"no pod": {func(s *apiServer) { s.token.User.Extra = nil }, coordinator.ErrUnauthenticated,
			"names no pod: use a projected token"},
		"an empty pod": {func(s *apiServer) { s.token.User.Extra[extraPodUID] = nil }, coordinator.ErrUnauthenticated,
			"names no pod"},
		"not allowed": {func(s *apiServer) { s.allowed = false }, coordinator.ErrForbidden,
			"grant the verb acknowledge on drains.lameduck.io"},
		"no answer": {func(s *apiServer) { s.downTokens = errors.New("timed out") }, nil,
			"review the token: timed out"},
		"no right known": {func(s *apiServer) { s.downAccess = errors.New("timed out") }, nil,
			"ask whether system:serviceaccount:edge:haproxy may acknowledge drains: timed out"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newAPIServer(t)
			c.set(s)
			who, err := s.Authenticate(t.Context(), "token")
			if c.want == "" {
				if err != nil || who != (coordinator.Identity{Agent: "uid-1", Name: "edge/haproxy-1",
					Username: "system:serviceaccount:edge:haproxy", Everywhere: true}) {
					t.Errorf("%+v, %v", who, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.want) || who.Agent != "" {
				t.Errorf("%+v, %v, want %q", who, err, c.want)
			}
			for _, kind := range []error{coordinator.ErrUnauthenticated, coordinator.ErrForbidden} {
				if errors.Is(err, kind) != errors.Is(c.kind, kind) {
					t.Errorf("%v is %v: %t", err, kind, errors.Is(err, kind))
				}
			}
		})
	}
}

// An operator's token names no pod: it may look, and is no agent's.
func TestReview(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		s.token.User = authenticationv1.UserInfo{Username: "jane", Groups: []string{"people"},
			Extra: map[string]authenticationv1.ExtraValue{"scope": {"a"}}}
		for range 2 {
			if err := s.Review(t.Context(), "token"); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := s.Authenticate(t.Context(), "token"); !errors.Is(err, coordinator.ErrUnauthenticated) {
			t.Errorf("as an agent: %v", err)
		}
		s.allowed = false
		if err := s.Review(t.Context(), "token of joe"); !errors.Is(err, coordinator.ErrForbidden) {
			t.Errorf("without the right: %v", err)
		}
		if err := s.Review(t.Context(), strings.Repeat("x", maxToken+1)); !errors.Is(err,
			coordinator.ErrUnauthenticated) {
			t.Errorf("a token as long as a book: %v", err)
		}
		if s.tokens != 2 || s.accesses != 2 {
			t.Errorf("asked about %d tokens and %d rights, want 2 and 2", s.tokens, s.accesses)
		}
		time.Sleep(rememberRight)
		if err := s.Review(t.Context(), "token"); !errors.Is(err, coordinator.ErrForbidden) {
			t.Errorf("a right that was taken: %v", err)
		}
		s.downTokens = errors.New("away")
		if err := s.Review(t.Context(), "token of jim"); err == nil || errors.Is(err, coordinator.ErrForbidden) ||
			errors.Is(err, coordinator.ErrUnauthenticated) {
			t.Errorf("away: %v", err)
		}
	})
}

func TestAnswersAreRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		for range 3 {
			if _, err := s.Authenticate(t.Context(), "token"); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := s.Authenticate(t.Context(), "token of another pod"); err != nil {
			t.Fatal(err)
		}
		if s.tokens != 2 || s.accesses != 1 {
			t.Errorf("asked about %d tokens and %d rights, want 2 and 1", s.tokens, s.accesses)
		}
		s.token.Authenticated = false
		time.Sleep(time.Minute - 1)
		if _, err := s.Authenticate(t.Context(), "token"); err != nil {
			t.Errorf("forgotten early: %v", err)
		}
		time.Sleep(1)
		for range 2 {
			if _, err := s.Authenticate(t.Context(), "token"); !errors.Is(err, coordinator.ErrUnauthenticated) {
				t.Errorf("remembered for more than a minute: %v", err)
			}
		}
		if s.tokens != 3 {
			t.Errorf("asked about %d tokens: a refusal is not remembered", s.tokens)
		}
		s.token.Authenticated = true
		time.Sleep(rememberNo)
		if _, err := s.Authenticate(t.Context(), "token"); err != nil {
			t.Errorf("a refusal is remembered for more than %s: %v", rememberNo, err)
		}
	})
}

// Without this, an API server that is away for a moment keeps agents out for a minute.
func TestErrorsAreNotRemembered(t *testing.T) {
	s := newAPIServer(t)
	s.downTokens = errors.New("away")
	if _, err := s.Authenticate(t.Context(), "token"); err == nil {
		t.Fatal("no error")
	}
	s.downTokens, s.downAccess = nil, errors.New("away")
	if _, err := s.Authenticate(t.Context(), "token"); err == nil {
		t.Fatal("no error")
	}
	if _, err := s.Allowed(t.Context(), "system:serviceaccount:edge:haproxy"); err == nil {
		t.Fatal("no error")
	}
	s.downAccess = nil
	if _, err := s.Authenticate(t.Context(), "token"); err != nil {
		t.Errorf("an error was remembered: %v", err)
	}
}

// Without this, an API server that has no time keeps the agents out whose streams it has approved,
// when most pods are deleted.
func TestAnEarlierAnswerStandsInForTheAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		claims := fmt.Sprintf(`{"exp":%d}`, time.Now().Add(4*time.Minute).Unix())
		ends := "token." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".signature"
		for _, token := range []string{"token", ends} {
			if _, err := s.Authenticate(t.Context(), token); err != nil {
				t.Fatal(err)
			}
		}
		s.downTokens, s.downAccess = errors.New("away"), errors.New("away")
		time.Sleep(remember + standIn - 2*time.Second - (remember - rememberRight))
		if _, err := s.Authenticate(t.Context(), "token"); err != nil {
			t.Errorf("the API server is away: %v", err)
		}
		if _, err := s.Authenticate(t.Context(), ends); err == nil {
			t.Error("a token is good beyond its own end")
		}
		if _, err := s.Authenticate(t.Context(), "token of another pod"); err == nil {
			t.Error("a token is good that was never reviewed")
		}
		time.Sleep(20 * time.Second)
		if _, err := s.Authenticate(t.Context(), "token"); err == nil {
			t.Errorf("an answer stands in for more than %s", standIn)
		}
	})
}

// Replicas that do not answer each other within a second decide alone. Without this, all claims and
// polls waited once a minute for the API server, and one that needed 1.5 s let a burst of deletions
// take 15 of 20 pods of a Service out of routing at one time.
func TestNoCallOfAReplicaWaitsForTheAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		s.Replicas = s.token.User.Username
		good := s.token
		var reviews atomic.Int64
		var slow atomic.Int64
		var refuses, away atomic.Bool
		s.Client.(*fake.Clientset).PrependReactor("create", "tokenreviews",
			func(action clienttesting.Action) (bool, runtime.Object, error) {
				reviews.Add(1)
				time.Sleep(time.Duration(slow.Load()))
				if away.Load() {
					return true, nil, errors.New("away")
				}
				review := action.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview).DeepCopy()
				if review.Status = good; refuses.Load() {
					review.Status = authenticationv1.TokenReviewStatus{Error: "revoked"}
				}
				return true, review, nil
			})
		// calls calls each second, and returns how many reviews there were.
		calls := func(seconds time.Duration) int {
			before := reviews.Load()
			for range int(seconds / time.Second) {
				began := time.Now()
				if _, err := s.Authenticate(t.Context(), "token"); err != nil || time.Since(began) > 0 {
					t.Fatalf("after %s: %v", time.Since(began), err)
				}
				time.Sleep(time.Second)
			}
			return int(reviews.Load() - before)
		}
		calls(time.Second)
		slow.Store(int64(4 * time.Second))
		if n, most := calls(10*time.Minute), int(10*time.Minute/(remember-ahead)); n < most/2 || n > most {
			t.Errorf("%d reviews in ten minutes, want at most %d", n, most)
		}
		// While it has no answer, it is asked again soon, and not at each call.
		for before := reviews.Load(); reviews.Load() == before; {
			calls(time.Second)
		}
		calls(4 * time.Second)
		away.Store(true)
		if n, want := calls(remember-5*time.Second), int(ahead/askTimeout); n < want-1 || n > want {
			t.Errorf("%d reviews without an answer, want %d", n, want)
		}
		// A token that is taken back is used for a minute at most.
		slow.Store(0)
		away.Store(false)
		refuses.Store(true)
		time.Sleep(remember)
		if _, err := s.Authenticate(t.Context(), "token"); err == nil {
			t.Error("a token that is not valid any more is used for longer than a minute")
		}
	})
}

func TestWhatIsRememberedIsBounded(t *testing.T) {
	s := newAPIServer(t)
	s.strangers.SetLimit(rate.Inf)
	for i := range maxRemembered + 1 {
		if _, err := s.Authenticate(context.Background(), fmt.Sprint("token ", i)); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(s.Kubernetes.tokens); n > maxRemembered {
		t.Errorf("%d tokens are remembered", n)
	}
}

func TestUsername(t *testing.T) {
	if got := Username("edge", "haproxy"); got != "system:serviceaccount:edge:haproxy" || namespaceOf(got) != "edge" {
		t.Errorf("%q of namespace %q", got, namespaceOf(got))
	}
	if got := namespaceOf("jane"); got != "" {
		t.Errorf("jane is of namespace %q", got)
	}
}

func TestARightInSomeNamespaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		s.allowed, s.allowedIn = false, []string{"edge", "shop"}
		who, err := s.Authenticate(t.Context(), "token")
		if err != nil || who.Everywhere || who.Username != "system:serviceaccount:edge:haproxy" {
			t.Fatalf("%+v, %v", who, err)
		}
		for range 2 {
			for namespace, want := range map[string]bool{"shop": true, "edge": true, "bank": false, "": false} {
				if got, err := s.MayAcknowledge(t.Context(), who, namespace); got != want || err != nil {
					t.Errorf("in %q: %t, %v", namespace, got, err)
				}
			}
		}
		if slices.Sort(s.asked); !slices.Equal(s.asked, []string{"", "bank", "edge", "shop"}) {
			t.Errorf("asked about %q", s.asked)
		}
		// Such an agent is not expected before it connects: its label delays no deletion.
		if allowed, err := s.Allowed(t.Context(), who.Username); allowed || err != nil {
			t.Errorf("everywhere: %t, %v", allowed, err)
		}
		s.asked, s.allowedIn = nil, []string{"edge", "bank"}
		time.Sleep(rememberNo)
		if got, _ := s.MayAcknowledge(t.Context(), who, "bank"); !got {
			t.Error("a no is remembered too long")
		}
		if got, _ := s.MayAcknowledge(t.Context(), who, "shop"); !got || len(s.asked) != 1 {
			t.Errorf("a yes is not remembered: %t, asked %q", got, s.asked)
		}
		time.Sleep(remember)
		if got, _ := s.MayAcknowledge(t.Context(), who, "shop"); got {
			t.Error("a yes is remembered too long")
		}
	})
}

// Without this, an answer about the one right is taken for one about the other.
func TestTheRightToAskBarriersIsItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		check := func(when string, barriers, acknowledge bool, accesses int) {
			t.Helper()
			who := coordinator.Identity{Username: s.token.User.Username}
			for range 2 {
				if got, err := s.MayAskBarriers(t.Context(), who); got != barriers || err != nil {
					t.Errorf("%s: barriers %t, %v", when, got, err)
				}
				if got, err := s.MayAcknowledge(t.Context(), who, ""); got != acknowledge || err != nil {
					t.Errorf("%s: acknowledge %t, %v", when, got, err)
				}
			}
			if s.accesses != accesses {
				t.Errorf("%s: asked %d times, want %d", when, s.accesses, accesses)
			}
		}
		s.noBarriers = true
		check("acknowledges only", false, true, 2)
		s.noBarriers, s.allowed = false, false
		time.Sleep(rememberNo)
		check("the right is given", true, true, 3)
		time.Sleep(rememberRight)
		check("the other one is taken", true, false, 5)
		s.downAccess = errors.New("timed out")
		time.Sleep(rememberRight + standIn)
		if _, err := s.MayAskBarriers(t.Context(), coordinator.Identity{Username: s.token.User.Username}); err == nil ||
			!strings.Contains(err.Error(), "may create barriers: timed out") {
			t.Errorf("%v", err)
		}
	})
}

// A token is good no longer than it says itself.
func TestAnExpiredTokenIsNotRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		claims := fmt.Sprintf(`{"exp":%d}`, time.Now().Add(20*time.Second).Unix())
		token := "token." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".signature"
		if _, err := s.Authenticate(t.Context(), token); err != nil {
			t.Fatal(err)
		}
		s.token = authenticationv1.TokenReviewStatus{Error: "expired"}
		time.Sleep(19 * time.Second)
		if _, err := s.Authenticate(t.Context(), token); err != nil {
			t.Errorf("forgotten early: %v", err)
		}
		time.Sleep(time.Second)
		if _, err := s.Authenticate(t.Context(), token); !errors.Is(err, coordinator.ErrUnauthenticated) {
			t.Errorf("good beyond its own end: %v", err)
		}
	})
	for _, token := range []string{"token", "a.b.c", "a." + base64.RawURLEncoding.EncodeToString([]byte("{}")) + ".c",
		"..", "a.e30.c.d"} {
		if _, ok := claimsOf(token); ok {
			t.Errorf("%q names an end", token)
		}
	}
}

// Without this, made-up tokens use up what may be asked of the API server, and agents whose tokens
// have to be looked at again are out.
func TestStrangersDoNotKeepAgentsOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		if _, err := s.Authenticate(t.Context(), "token"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(remember)
		began := time.Now()
		for i := range strangersBurst + 10*strangersRate {
			if _, err := s.Authenticate(t.Context(), fmt.Sprint("token ", i)); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(began); took < 9*time.Second {
			t.Errorf("%d strangers are asked about within %s", strangersBurst+10*strangersRate, took)
		}
		// More than can be asked about in time.
		var refused atomic.Int32
		var all sync.WaitGroup
		for i := range 10 * strangersRate {
			all.Go(func() {
				_, err := s.Authenticate(t.Context(), fmt.Sprint("token of another ", i))
				if err != nil && strings.Contains(err.Error(), "too many unknown tokens") &&
					!errors.Is(err, coordinator.ErrUnauthenticated) {
					refused.Add(1)
				}
			})
		}
		synctest.Wait()
		began = time.Now()
		if _, err := s.Authenticate(t.Context(), "token"); err != nil || time.Since(began) != 0 {
			t.Errorf("an agent is answered after %s: %v", time.Since(began), err)
		}
		all.Wait()
		if refused.Load() == 0 {
			t.Error("no call is refused")
		}
		if _, err := s.Authenticate(t.Context(), strings.Repeat("x", maxToken+1)); !errors.Is(err,
			coordinator.ErrUnauthenticated) {
			t.Errorf("a token as long as a book: %v", err)
		}
	})
}

// Strangers choose what is in a token before anybody has verified it.
func FuzzClaims(f *testing.F) {
	for _, claims := range []string{`{"exp":1700000000}`, `{"exp":1700003600,"iat":1700000000}`,
		`{"exp":1,"kubernetes.io":{"pod":{"uid":7}}}`, `{"exp":-1}`, `{"exp":1e400}`, `{"exp":"soon"}`, `{}`, `[`} {
		f.Add("e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".x")
	}
	f.Add("")
	f.Fuzz(func(t *testing.T, token string) {
		now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		if c, ok := claimsOf(token); ok && c.Issued > 0 && c.Issued < c.Expires && c.Expires < 1<<40 &&
			!c.end(now).After(now) {
			t.Fatalf("%q ends at %s", token, c.end(now))
		}
	})
}
