package identity

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Agents that may acknowledge in some namespaces only are no expected ones: they share a lane with
// strangers. When all come back at once, or a stranger makes up tokens, operators must still be let
// look, and with tokens made up for the page such agents must still be let in.
func TestThePageAndAgentsDoNotKeepEachOtherOut(t *testing.T) {
	for name, flood := range map[string]string{"agents": "token of agent ", "page": "token for the page "} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newAPIServer(t)
				s.token.User.Groups = []string{"people"}
				s.token.User.Extra["scope"] = []string{"a"}
				var all sync.WaitGroup
				for i := range strangersBurst + 20*strangersRate {
					all.Go(func() {
						if name == "agents" {
							_, _ = s.Authenticate(t.Context(), fmt.Sprint(flood, i))
						} else {
							_ = s.Review(t.Context(), fmt.Sprint(flood, i))
						}
					})
				}
				synctest.Wait()
				began := time.Now()
				var err error
				if name == "agents" {
					err = s.Review(t.Context(), "token of jane")
				} else {
					_, err = s.Authenticate(t.Context(), "token of an agent with a RoleBinding")
				}
				if took := time.Since(began); err != nil || took > time.Second {
					t.Errorf("after %s: %v", took, err)
				}
				all.Wait()
			})
		})
	}
}
