package dashboard

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// server is an API server that knows the tokens "jane" (who may), "joe" (who may not) and "other"
// (for another audience).
type server struct {
	reviews, accesses int
	away              bool
}

func newServer(t *testing.T) (*server, *Kubernetes) {
	s, client := &server{}, fake.NewClientset()
	client.PrependReactor("create", "tokenreviews", func(action clienttesting.Action) (bool, runtime.Object, error) {
		s.reviews++
		if s.away {
			return true, nil, errors.New("away")
		}
		review := action.(clienttesting.CreateAction).GetObject().(*authenticationv1.TokenReview).DeepCopy()
		if len(review.Spec.Audiences) != 1 || review.Spec.Audiences[0] != Audience {
			t.Errorf("asked for audiences %q", review.Spec.Audiences)
		}
		switch name, _, _ := strings.Cut(review.Spec.Token, "-"); name {
		case "jane", "joe":
			review.Status.Authenticated, review.Status.Audiences = true, []string{Audience}
			review.Status.User = authenticationv1.UserInfo{Username: name, Groups: []string{"people"},
				Extra: map[string]authenticationv1.ExtraValue{"scope": {"a"}}}
		case "other":
			review.Status.Authenticated, review.Status.Audiences = true, []string{"https://kubernetes.default.svc"}
		}
		return true, review, nil
	})
	client.PrependReactor("create", "subjectaccessreviews",
		func(action clienttesting.Action) (bool, runtime.Object, error) {
			s.accesses++
			review := action.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview).DeepCopy()
			r := review.Spec.ResourceAttributes
			if r == nil || r.Verb != "get" || r.Group != "lameduck.io" || r.Resource != "drains" || r.Namespace != "" ||
				review.Spec.Groups[0] != "people" || review.Spec.Extra["scope"][0] != "a" {
				t.Errorf("asked %+v", review.Spec)
			}
			review.Status.Allowed = review.Spec.User == "jane"
			return true, review, nil
		})
	return s, NewKubernetes(client)
}

func TestReview(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, k := newServer(t)
		for token, want := range map[string]error{"jane": nil, "joe": ErrForbidden, "other": ErrUnauthenticated,
			"nobody": ErrUnauthenticated, strings.Repeat("x", maxToken+1): ErrUnauthenticated} {
			if err := k.Review(t.Context(), token); !errors.Is(err, want) || want == nil && err != nil {
				t.Errorf("%.20s: %v, want %v", token, err, want)
			}
		}
		if s.reviews != 4 || s.accesses != 2 {
			t.Errorf("%d tokens and %d rights were asked about", s.reviews, s.accesses)
		}
		// What is known is not asked again, a no for a shorter time.
		time.Sleep(rememberNo + time.Second)
		_, _ = k.Review(t.Context(), "jane"), k.Review(t.Context(), "joe")
		if s.reviews != 5 {
			t.Errorf("%d questions, want one more, about joe", s.reviews)
		}
		time.Sleep(rememberYes)
		_ = k.Review(t.Context(), "jane")
		if s.reviews != 6 {
			t.Errorf("%d questions: a yes is remembered for ever", s.reviews)
		}
		// Nothing is found out and nothing remembered while the API server is away.
		s.away = true
		if err := k.Review(t.Context(), "jane-2"); err == nil || errors.Is(err, ErrForbidden) ||
			errors.Is(err, ErrUnauthenticated) {
			t.Errorf("away: %v", err)
		}
		s.away = false
		if err := k.Review(t.Context(), "jane-2"); err != nil {
			t.Errorf("when it is back: %v", err)
		}
	})
}

// Whoever makes up tokens must not keep the API server busy, nor fill the memory.
func TestReviewIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, k := newServer(t)
		began := time.Now()
		for i := range 200 {
			_ = k.Review(t.Context(), fmt.Sprint("made-up-", i))
		}
		if most := askBurst + int(askRate*time.Since(began).Seconds()) + 1; s.reviews > most ||
			time.Since(began) < 30*time.Second {
			t.Errorf("%d questions in %s", s.reviews, time.Since(began))
		}
		for i := range 2 * maxRemembered {
			k.known[[32]byte{byte(i), byte(i >> 8)}] = verdict{}
		}
		_ = k.Review(t.Context(), "jane")
		if len(k.known) > maxRemembered {
			t.Errorf("%d answers are remembered", len(k.known))
		}
	})
}
