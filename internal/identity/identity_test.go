package identity

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
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
	// mu protects refuse and tokens in tests that ask from many goroutines.
	mu sync.Mutex
	// refuse are tokens that it has not signed.
	refuse           []string
	tokens, accesses int
}

// Authenticate authenticates the token that goodToken returns for text.
func (s *apiServer) Authenticate(ctx context.Context, text string) (coordinator.Identity, error) {
	return s.Kubernetes.Authenticate(ctx, goodToken(text))
}

// Review is Authenticate for operators.
func (s *apiServer) Review(ctx context.Context, text string) error {
	return s.Kubernetes.Review(ctx, goodToken(text))
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
	s.keys.fetch = func(context.Context) ([]byte, error) { return jwks(ours()), nil }
	client.PrependReactor("create", "tokenreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.tokens++
		review := action.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview).DeepCopy()
		if !strings.HasPrefix(review.Spec.Token, "token") && !strings.HasPrefix(review.Spec.Token, "ey") ||
			len(review.Spec.Audiences) != 1 || review.Spec.Audiences[0] != "lameduck.io" {
			t.Errorf("asked about token %q for %q", review.Spec.Token, review.Spec.Audiences)
		}
		if review.Status = s.token; slices.Contains(s.refuse, review.Spec.Token) {
			review.Status = authenticationv1.TokenReviewStatus{Error: "the signature is wrong"}
		}
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

// slowAPIServer answers reviews after a time, or not at all.
type slowAPIServer struct {
	// namespaced: the agent has its right in its own namespace alone.
	namespaced bool

	mu       sync.Mutex
	after    time.Duration
	away     bool
	refuses  bool
	reviews  int
	accesses int
}

func (s *slowAPIServer) kubernetes(t *testing.T) *Kubernetes {
	client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://api", Transport: s, QPS: -1,
		ContentConfig: rest.ContentConfig{ContentType: "application/json"}})
	if err != nil {
		t.Fatal(err)
	}
	return New(client)
}

func (s *slowAPIServer) set(after time.Duration, away, refuses bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.after, s.away, s.refuses, s.reviews, s.accesses = after, away, refuses, 0, 0
}

// asked returns how many questions there were since set, about the token and about rights.
func (s *slowAPIServer) asked() (reviews, accesses int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reviews, s.accesses
}

func (s *slowAPIServer) RoundTrip(r *http.Request) (*http.Response, error) {
	var asked []byte
	if r.Body != nil {
		var err error
		if asked, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	after, away, refuses := s.after, s.away, s.refuses
	if r.URL.Path == keysPath {
		s.mu.Unlock()
		return &http.Response{StatusCode: http.StatusOK, Request: r,
			Body: io.NopCloser(bytes.NewReader(jwks(ours())))}, nil
	}
	allowed := !refuses && (!s.namespaced || bytes.Contains(asked, []byte(`"namespace":"edge"`)))
	answer := `{"kind":"SubjectAccessReview","apiVersion":"authorization.k8s.io/v1","status":{"allowed":` +
		strconv.FormatBool(allowed) + `}}`
	if strings.HasSuffix(r.URL.Path, "/tokenreviews") {
		s.reviews++
		answer = fmt.Sprintf(`{"kind":"TokenReview","apiVersion":"authentication.k8s.io/v1","status":{`+
			`"authenticated":%t,"audiences":["lameduck.io"],"user":{"username":"system:serviceaccount:edge:haproxy",`+
			`"extra":{"authentication.kubernetes.io/pod-uid":["uid-1"]}}}}`, !refuses)
	} else {
		s.accesses++
	}
	s.mu.Unlock()
	if away {
		after = time.Hour
	}
	select {
	case <-time.After(after):
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	return &http.Response{StatusCode: http.StatusCreated, Request: r, Body: io.NopCloser(strings.NewReader(answer)),
		Header: http.Header{"Content-Type": {"application/json"}}}, nil
}

// Replicas that do not answer each other within a second decide alone. When all calls waited for
// the API server once a minute, one that needed 1.5 s let a burst of deletions take 15 of 20 pods
// of a Service out of routing at one time. One that was away kept all agents out.
func TestNoCallWaitsForASlowAPIServer(t *testing.T) {
	for name, c := range map[string]struct {
		replicas   string
		namespaced bool
		questions  int // of a call
	}{
		"a replica":               {"system:serviceaccount:edge:haproxy", false, 1},
		"an agent":                {"", false, 2},
		"an agent of a namespace": {"", true, 3},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server := &slowAPIServer{namespaced: c.namespaced}
				k := server.kubernetes(t)
				k.Replicas = c.replicas
				calls := func(what string, d time.Duration) {
					t.Helper()
					waited := 0
					end := time.Now().Add(d)
					for ; time.Now().Before(end) && !t.Failed(); time.Sleep(100 * time.Millisecond) {
						var all sync.WaitGroup
						began := time.Now()
						for range 5 {
							all.Go(func() {
								who, err := k.Authenticate(t.Context(), goodToken("token"))
								if err != nil || who.Agent != "uid-1" {
									t.Errorf("%s: %+v, %v", what, who, err)
								}
							})
						}
						all.Wait()
						if took := time.Since(began); took > time.Duration(c.questions)*patience {
							t.Fatalf("%s: answered after %s", what, took)
						} else if took > 0 {
							waited++
						}
					}
					// A call that has waited spares those of the next 5 s.
					if most := c.questions * (int(d/stood) + 1); waited > most {
						t.Errorf("%s: %d calls waited in %s, want at most %d", what, waited, d, most)
					}
				}
				calls("at first", 10*time.Second)
				server.set(4*time.Second, false, false)
				calls("slow", 10*time.Minute)
				refusals := 0 // is asked about again every 5 s
				if c.namespaced {
					refusals = int(10 * time.Minute / rememberNo)
				}
				if reviews, accesses := server.asked(); reviews > 11 || accesses > 20+refusals {
					t.Errorf("a slow API server is asked %d and %d times", reviews, accesses)
				}
				server.set(0, true, false)
				away := standIn - 10*time.Second // the last refusal is some seconds old
				calls("away", away)
				if reviews, _ := server.asked(); reviews < 10 || reviews > int(away/stood) {
					t.Errorf("an API server that is away is asked %d times in %s", reviews, away)
				}
				// What is taken back is used for a minute, and for as long as the API server takes.
				server.set(4*time.Second, false, true)
				time.Sleep(remember)
				_, _ = k.Authenticate(t.Context(), goodToken("token"))
				time.Sleep(4 * time.Second)
				_, err := k.Authenticate(t.Context(), goodToken("token"))
				if !errors.Is(err, coordinator.ErrUnauthenticated) {
					t.Errorf("a token that is not valid any more is used: %v", err)
				}
				time.Sleep(askTimeout) // no question is left
			})
		})
	}
}

// A question goes on when its caller gives up, and the next one has the answer.
func TestAQuestionOutlivesItsCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &slowAPIServer{after: 2 * time.Second}
		k := server.kubernetes(t)
		k.Replicas = "system:serviceaccount:edge:haproxy"
		var err error
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), 900*time.Millisecond)
			_, err = k.Authenticate(ctx, goodToken("token"))
			cancel()
		}
		if reviews, _ := server.asked(); err != nil || reviews != 1 {
			t.Errorf("after three calls, %d questions, %v", reviews, err)
		}
	})
}

// A refusal stands in no longer than a yes, however long its caller remembers one, and a right that
// was granted counts as soon as the API server has said so.
func TestARefusalStandsIn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &slowAPIServer{refuses: true}
		k := server.kubernetes(t)
		const username = "system:serviceaccount:edge:haproxy"
		who := coordinator.Identity{Username: username}
		k.rights.SetBurst(rightsBurst / 4) // a refusal is remembered for an hour
		if allowed, err := k.Allowed(t.Context(), username); allowed || err != nil {
			t.Fatal(allowed, err)
		}
		time.Sleep(rememberNo)
		server.set(time.Second, false, false)
		if allowed, err := k.MayAcknowledge(t.Context(), who, ""); allowed || err != nil {
			t.Errorf("the API server has not answered yet: %t, %v", allowed, err)
		}
		time.Sleep(time.Second)
		if allowed, err := k.MayAcknowledge(t.Context(), who, ""); !allowed || err != nil {
			t.Errorf("the API server has answered: %t, %v", allowed, err)
		}
		server.set(0, false, true)
		time.Sleep(rememberRight)
		if allowed, err := k.Allowed(t.Context(), username); allowed || err != nil {
			t.Fatal(allowed, err)
		}
		server.set(0, true, false)
		for end := time.Now().Add(rememberNo + standIn - time.Second); time.Now().Before(end); time.Sleep(time.Second) {
			if allowed, err := k.MayAcknowledge(t.Context(), who, ""); allowed || err != nil {
				t.Fatalf("away: %t, %v", allowed, err)
			}
		}
		time.Sleep(2 * time.Second)
		if _, err := k.MayAcknowledge(t.Context(), who, ""); err == nil {
			t.Errorf("a refusal stands in for more than %s", standIn)
		}
		time.Sleep(askTimeout)
	})
}

func TestWhatIsRememberedIsBounded(t *testing.T) {
	tokens := newMemory[hash, bearer]()
	for i := range maxRemembered + 1 {
		tokens.remember(sha256.Sum256([]byte(fmt.Sprint("token ", i))), answer[bearer]{})
	}
	if n := len(tokens.answers); n > maxRemembered {
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
		s.keys.fetch = func(context.Context) ([]byte, error) { return nil, errors.New("away") }
		s.keys.of = nil
		began := time.Now()
		for i := range addressBurst + 10*addressRate {
			if _, err := s.Authenticate(t.Context(), fmt.Sprint("token ", i)); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(began); took < 9*time.Second {
			t.Errorf("%d strangers are asked about within %s", addressBurst+10*addressRate, took)
		}
		// More than can be asked about in time.
		var refused atomic.Int32
		var all sync.WaitGroup
		for i := range 10 * addressRate {
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
		if _, err := s.Authenticate(t.Context(), "token"); err != nil || time.Since(began) != 0 { // good before
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
