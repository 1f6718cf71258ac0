package identity

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/lameduck-io/lameduck/internal/coordinator"
)

// claimsFor are the claims of a token for the pod with a UID, the n-th one.
func claimsFor(uid string, n int) string {
	return fmt.Sprintf(`{"aud":["lameduck.io"],"exp":4000000000,"jti":"%d",`+
		`"kubernetes.io":{"namespace":"edge","pod":{"name":"p","uid":%q}}}`, n, uid)
}

// tokenOf is claimsFor for goodToken.
func tokenOf(uid string, n int) string {
	return fmt.Sprintf("token%d.%s.x", n, base64.RawURLEncoding.EncodeToString([]byte(claimsFor(uid, n))))
}

func base64Claims(text string) ([]byte, error) { return base64.RawURLEncoding.DecodeString(text) }

// everySecond calls f so often a second until the function that it returns is called.
func everySecond(n int, f func(i int)) (stop func()) {
	done := make(chan struct{})
	go func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			case <-time.After(time.Second / time.Duration(n)):
			}
			go f(i)
		}
	}()
	return func() {
		close(done)
		time.Sleep(2 * askTimeout) // in a bubble: until no question is left
	}
}

// letIn tries about once a second, as agents do, and returns how long it takes until authenticate
// returns no error.
func letIn(authenticate func() error) time.Duration {
	began := time.Now()
	for authenticate() != nil && time.Since(began) < time.Minute {
		time.Sleep(500*time.Millisecond + rand.N(time.Second))
	}
	return time.Since(began)
}

// A pod sends made-up tokens to the agents' port, which the NetworkPolicy leaves open to all. Many
// users may read the UIDs of agents and coordinators, and each pod the keys. Agents whose tokens
// are new, because they, the replica or the tokens have just begun, must be let in all the same,
// and so must the other replica.
func TestMadeUpTokensDoNotKeepNewTokensOut(t *testing.T) {
	const agents = 50
	stranger := newSigner("a stranger's", jose.ES256)
	// Of each kind a few, because signing takes time.
	var wrong, unknown []string
	for i := range 2 * agents {
		uid := fmt.Sprint("uid-", i/2)
		if i%2 == 0 {
			uid = "uid-replica"
		}
		wrong = append(wrong, forged(ours().sign(claimsFor(uid, 1000+i))))
		unknown = append(unknown, stranger.sign(claimsFor(uid, 1000+i)))
	}
	for name, c := range map[string]struct {
		madeUp func(i int) string
		asked  bool // the API server is asked about some
	}{
		"nothing":             {func(i int) string { return fmt.Sprint("token made up ", i) }, false},
		"a wrong signature":   {func(i int) string { return wrong[i%len(wrong)] }, false},
		"a key not ours":      {func(i int) string { return unknown[i%len(unknown)] }, true},
		"no signature at all": {func(i int) string { return tokenOf("uid-replica", i) }, false},
	} {
		for _, perSecond := range []int{500, 2000} {
			t.Run(fmt.Sprint(name, " ", perSecond), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newAPIServer(t)
					s.refuse = unknown
					stop := everySecond(perSecond, func(i int) {
						if _, err := s.Kubernetes.Authenticate(t.Context(), c.madeUp(i)); err == nil {
							t.Error("a made-up token is let in")
						}
					})
					time.Sleep(10 * time.Second)
					s.mu.Lock()
					asked := s.tokens
					s.mu.Unlock()
					if asked > 0 != c.asked || asked > 11*strangersRate {
						t.Errorf("asked about %d made-up tokens in 10 s", asked)
					}
					var all sync.WaitGroup
					for n := range agents + 1 {
						all.Go(func() {
							uid := fmt.Sprint("uid-", n)
							if n == agents {
								uid = "uid-replica"
							}
							took := letIn(func() error {
								_, err := s.Authenticate(t.Context(), tokenOf(uid, n))
								return err
							})
							if took > time.Second {
								t.Errorf("%s is let in after %s", uid, took)
							}
						})
					}
					all.Wait()
					stop()
				})
			})
		}
	}
}

// A replica has started, and all agents come at once. Each gives its request up after 4 s, and
// tries again after a pause of 2 s at most.
func TestAThousandAgentsAtOnce(t *testing.T) {
	for n := range 1000 {
		goodToken(tokenOf(fmt.Sprint("uid-", n), n)) // signing takes real time
	}
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		began := time.Now()
		var all sync.WaitGroup
		for n := range 1000 {
			all.Go(func() {
				letIn(func() error {
					ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
					defer cancel()
					_, err := s.Authenticate(ctx, tokenOf(fmt.Sprint("uid-", n), n))
					return err
				})
			})
		}
		all.Wait()
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("the last one is let in after %s", took)
		}
	})
}

// from is where a request comes from in a test.
type from struct{}

// Without keys, all tokens look alike. A stranger delays those from its own address only.
func TestWithoutKeysAddressesAreFair(t *testing.T) {
	for name, err := range map[string]error{
		"refused":   apierrors.NewForbidden(schema.GroupResource{}, keysPath, errors.New("no right")),
		"not there": apierrors.NewNotFound(schema.GroupResource{}, keysPath),
		"away":      errors.New("away"),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newAPIServer(t)
				s.source = func(ctx context.Context) netip.Addr { return ctx.Value(from{}).(netip.Addr) }
				s.keys.fetch = func(context.Context) ([]byte, error) { return nil, err }
				s.refuse = []string{forged(goodToken("token"))}
				at := func(host byte) context.Context {
					return context.WithValue(t.Context(), from{}, netip.AddrFrom4([4]byte{10, 0, 0, host}))
				}
				var madeUp []string
				for i := range 1000 {
					madeUp = append(madeUp, forged(goodToken(tokenOf("uid-1", i))))
				}
				s.refuse = madeUp
				stop := everySecond(500, func(i int) {
					if _, err := s.Kubernetes.Authenticate(at(1), madeUp[i%len(madeUp)]); err == nil {
						t.Error("a made-up token is let in")
					}
				})
				time.Sleep(10 * time.Second)
				s.mu.Lock()
				asked := s.tokens
				s.mu.Unlock()
				if asked == 0 || asked > addressBurst+11*addressRate {
					t.Errorf("asked about %d made-up tokens in 10 s", asked)
				}
				if s.Keys() != 0 {
					t.Errorf("%d keys", s.Keys())
				}
				for n := range byte(50) {
					took := letIn(func() error {
						_, err := s.Authenticate(at(2+n), tokenOf(fmt.Sprint("uid-", n), 0))
						return err
					})
					if took > time.Second {
						t.Errorf("agent %d is let in after %s", n, took)
					}
				}
				stop()
			})
		})
	}
}

// The API server decides; what it would refuse is not asked about. A replica whose clock is wrong
// by hours asks.
func TestWhatIsNotWorthAQuestion(t *testing.T) {
	rsa := newSigner("rsa", jose.RS256)
	confused := signer{jose.JSONWebKey{Key: []byte(strings.Repeat("k", 32)), KeyID: "ours"}, jose.HS256}
	for name, c := range map[string]struct {
		token func(now time.Time) string
		asked bool
	}{
		"ES256": {func(time.Time) string { return goodToken("token") }, true},
		"RS256": {func(time.Time) string { return rsa.sign(claimsFor("uid-1", 1)) }, true},
		"HS256": {func(time.Time) string { return confused.sign(claimsFor("uid-1", 1)) }, false},
		"no signature": {func(time.Time) string {
			return "eyJhbGciOiJub25lIiwia2lkIjoib3VycyJ9.e30."
		}, false},
		"another audience": {func(time.Time) string {
			return ours().sign(`{"aud":["https://kubernetes.default.svc"]}`)
		}, false},
		"no audience": {func(time.Time) string { return ours().sign(`{}`) }, false},
		"ended two days ago": {func(now time.Time) string {
			return ours().sign(fmt.Sprintf(`{"aud":["lameduck.io"],"exp":%d}`, now.Add(-48*time.Hour).Unix()))
		}, false},
		"ended by this clock": {func(now time.Time) string {
			return ours().sign(fmt.Sprintf(`{"aud":["lameduck.io"],"exp":%d}`, now.Add(-9*time.Hour).Unix()))
		}, true},
		"another one's claims": {func(time.Time) string { return forged(goodToken("token")) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newAPIServer(t)
				s.keys.fetch = func(context.Context) ([]byte, error) { return jwks(ours(), rsa), nil }
				_, err := s.Kubernetes.Authenticate(t.Context(), c.token(time.Now()))
				if s.tokens > 0 != c.asked || errors.Is(err, coordinator.ErrUnauthenticated) == c.asked {
					t.Errorf("asked %d times, %v", s.tokens, err)
				}
				if n := len(s.Kubernetes.tokens.answers); n > s.tokens {
					t.Errorf("%d tokens are remembered", n)
				}
			})
		})
	}
}

// The API server has a new key. Its first token asks for it, and tokens of unknown keys do not have
// the keys asked for all the time.
func TestKeysAreReplaced(t *testing.T) {
	next, stranger := newSigner("next", jose.ES256), newSigner("a stranger's", jose.ES256)
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		fetched, keys := 0, jwks(ours())
		var down error
		s.keys.fetch = func(context.Context) ([]byte, error) { fetched++; return keys, down }
		check := func(what string, of signer, signed bool) {
			t.Helper()
			if _, got, err := s.signedClaims(t.Context(), of.sign(claimsFor("uid-1", 1))); err != nil || got != signed {
				t.Errorf("%s: signed %t, %v", what, got, err)
			}
		}
		check("at first", ours(), true)
		for range 600 {
			check("a stranger's", stranger, false)
			time.Sleep(100 * time.Millisecond)
		}
		if fetched < 11 || fetched > 13 {
			t.Errorf("the keys are asked for %d times in a minute", fetched)
		}
		keys = jwks(next, ours())
		time.Sleep(keysAgain)
		check("the next one", next, true)
		check("the former one", ours(), true)
		down = errors.New("away")
		time.Sleep(keysAgain)
		check("a stranger's, while the API server is away", stranger, false)
		check("the next one, while the API server is away", next, true)
	})
}

// A right that is taken ends within a minute, also for a token that was looked at a moment before.
func TestARightThatIsTakenIsNotRememberedByItsTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		if _, err := s.Authenticate(t.Context(), "token"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(rememberRight - time.Second)
		if _, err := s.Authenticate(t.Context(), "token of another pod"); err != nil {
			t.Fatal(err)
		}
		s.allowed = false
		time.Sleep(time.Second)
		if _, err := s.Authenticate(t.Context(), "token of another pod"); err == nil {
			t.Error("the token still acknowledges")
		}
	})
}

// The stream of an agent ends with its token. A replica whose clock is ahead must not end all of
// them at once.
func TestUntilIsTheEndOfTheToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newAPIServer(t)
		now := time.Now().Truncate(time.Second)
		for name, c := range map[string]struct{ issued, end, want time.Time }{
			"as it says":         {now.Add(-time.Hour), now.Add(time.Hour), now.Add(time.Hour)},
			"our clock is ahead": {now.Add(-10 * time.Hour), now.Add(-9 * time.Hour), now.Add(time.Hour)},
		} {
			claims := fmt.Sprintf(`{"exp":%d,"iat":%d}`, c.end.Unix(), c.issued.Unix())
			who, err := s.Authenticate(t.Context(), "token."+base64.RawURLEncoding.EncodeToString([]byte(claims))+".x")
			if err != nil || !who.Until.Truncate(time.Second).Equal(c.want) {
				t.Errorf("%s: until %s, want %s, %v", name, who.Until, c.want, err)
			}
		}
	})
}
