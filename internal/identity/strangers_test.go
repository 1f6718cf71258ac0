package identity

import (
	"context"
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// tokenOf is a token for the pod with a UID. The fake API server calls each token valid that begins
// so.
func tokenOf(uid string, n int) string {
	claims := fmt.Sprintf(`{"exp":4000000000,"kubernetes.io":{"namespace":"edge","pod":{"name":"p","uid":%q}}}`, uid)
	return fmt.Sprintf("token%d.%s.x", n, base64.RawURLEncoding.EncodeToString([]byte(claims)))
}

// One pod of the cluster sends made-up tokens to the agents' port, which the NetworkPolicy leaves
// open to all; they name no pod, a pod that does not exist, or one that does. An agent whose token
// is new, because it, the replica or the token has just begun, tries about once a second, and is
// let in within 5 s.
func TestMadeUpTokensDoNotKeepNewTokensOut(t *testing.T) {
	const agents = 5
	for name, madeUp := range map[string]func(i int) string{
		"nothing":       func(i int) string { return fmt.Sprint("token made up ", i) },
		"unknown pods":  func(i int) string { return tokenOf(fmt.Sprint("uid-made-up-", i), i) },
		"one agent":     func(i int) string { return tokenOf("uid-of-another-agent", i) },
		"a known agent": func(i int) string { return tokenOf("uid-0", i+1000) },
	} {
		for _, perSecond := range []int{500, 2000} {
			t.Run(fmt.Sprint(name, " ", perSecond), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newAPIServer(t)
					var expected []drain.Expected
					s.ExpectReplica("uid-1", true) // a replica of the coordinator has a lane as an agent has
					for _, n := range []int{0, 2, 3, 4} {
						expected = append(expected, drain.Expected{ID: drain.AgentID(fmt.Sprint("uid-", n))})
					}
					s.Expect(append(expected, drain.Expected{ID: "uid-of-another-agent"}))
					stop := make(chan struct{})
					go func() {
						for i := 0; ; i++ {
							select {
							case <-stop:
								return
							case <-time.After(time.Second / time.Duration(perSecond)):
							}
							go func() { _, _ = s.Authenticate(t.Context(), madeUp(i)) }()
						}
					}()
					time.Sleep(10 * time.Second)
					for n := range agents {
						if n == 0 && name == "a known agent" {
							continue // callers that know its UID delay this one
						}
						began, last := time.Now(), error(nil)
						for time.Since(began) < time.Minute {
							if _, last = s.Authenticate(t.Context(), tokenOf(fmt.Sprint("uid-", n), n)); last == nil {
								break
							}
							time.Sleep(500*time.Millisecond + rand.N(time.Second))
						}
						if took := time.Since(began); took > 5*time.Second {
							t.Errorf("agent %d is let in after %s: %v", n, took, last)
						}
					}
					close(stop)
					time.Sleep(6 * time.Second)
				})
			})
		}
	}
}

// A replica has started, and all agents come at once. Each gives its request up after 5 s, of which
// the TLS handshake takes 1 s here, and tries again after a pause of 2 s at most. All are let in at
// the rate of the lane, and are not kept in a line that is longer than they wait.
func TestAThousandAgentsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const agents = 1000
		s := newAPIServer(t)
		var expected []drain.Expected
		for n := range agents {
			expected = append(expected, drain.Expected{ID: drain.AgentID(fmt.Sprint("uid-", n))})
		}
		s.Expect(expected)
		began := time.Now()
		var all sync.WaitGroup
		for n := range agents {
			all.Go(func() {
				for time.Since(began) < 2*time.Minute {
					ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
					_, err := s.Authenticate(ctx, tokenOf(fmt.Sprint("uid-", n), n))
					cancel()
					if err == nil {
						return
					}
					time.Sleep(time.Second + rand.N(time.Second))
				}
				t.Errorf("agent %d is not let in", n)
			})
		}
		all.Wait()
		if took := time.Since(began); took > 15*time.Second {
			t.Errorf("the last one is let in after %s", took)
		}
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
