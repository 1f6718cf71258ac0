package identity

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Without keys, agents and strangers share a lane. When all come back at once, operators must still
// be let look. With tokens made up for the page, agents must still be let in, and so must operators
// whose tokens are of the API server.
func TestThePageAndAgentsDoNotKeepEachOtherOut(t *testing.T) {
	for name, keys := range map[string]bool{"agents": false, "page": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newAPIServer(t)
				s.token.User.Groups = []string{"people"}
				s.token.User.Extra["scope"] = []string{"a"}
				if !keys {
					s.keys.fetch = func(context.Context) ([]byte, error) { return nil, errors.New("away") }
				}
				var all sync.WaitGroup
				for i := range 500 {
					all.Go(func() {
						if name == "agents" {
							_, _ = s.Authenticate(t.Context(), fmt.Sprint("token of agent ", i))
						} else {
							_ = s.Kubernetes.Review(t.Context(), fmt.Sprint("token for the page ", i))
						}
					})
				}
				synctest.Wait()
				began := time.Now()
				err := s.Review(t.Context(), "token of jane")
				if err == nil && keys {
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
