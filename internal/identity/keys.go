package identity

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"golang.org/x/sync/singleflight"
	"golang.org/x/time/rate"

	"github.com/lameduck-io/lameduck/internal/coordinator"
)

const (
	// keysPath is where the API server serves the public keys of its tokens, and keysAgain how long
	// they are not read again.
	keysPath  = "/openid/v1/jwks"
	keysAgain = 5 * time.Second
	// maxSkew is how wrong the clock of a replica may be: the API server decides whether a token
	// has ended, and one that ended long ago is not worth a question.
	maxSkew = 24 * time.Hour
)

// algorithms are those of the API server.
var algorithms = []jose.SignatureAlgorithm{jose.RS256, jose.ES256, jose.ES384, jose.ES512}

// keys are the public keys of the API server's tokens. They are read when a token names a key that
// is not known, because the API server may have a new one. Safe for concurrent use.
type keys struct {
	fetch   func(ctx context.Context) ([]byte, error)
	reading singleflight.Group
	failed  rate.Sometimes

	// verifying is held while a signature is verified: all strangers together use one CPU at most.
	verifying sync.Mutex

	mu   sync.Mutex
	of   map[string]jose.JSONWebKey
	next time.Time
}

// key returns the key with an ID, after it has read the keys if it is not known. err is that of
// ctx.
func (k *Kubernetes) key(ctx context.Context, id string) (key jose.JSONWebKey, known bool, err error) {
	for again := true; ; again = false {
		k.keys.mu.Lock()
		key, known = k.keys.of[id]
		due := again && !known && !time.Now().Before(k.keys.next)
		k.keys.mu.Unlock()
		if !due {
			return key, known, nil
		}
		select {
		case <-k.keys.reading.DoChan("", func() (any, error) {
			k.readKeys(context.WithoutCancel(ctx))
			return nil, nil
		}):
		case <-ctx.Done():
			return key, false, ctx.Err()
		}
	}
}

// readKeys replaces the keys. Without an answer it keeps those that are known.
func (k *Kubernetes) readKeys(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	var set struct{ Keys []json.RawMessage }
	text, err := k.keys.fetch(ctx)
	if err == nil {
		err = json.Unmarshal(text, &set)
	}
	k.keys.mu.Lock()
	defer k.keys.mu.Unlock()
	k.keys.next = time.Now().Add(keysAgain)
	if err != nil {
		k.keys.failed.Do(func() {
			k.Log.Warn("read the keys of the API server's tokens: tokens of unknown keys are limited by address",
				"path", keysPath, "known", len(k.keys.of), "error", err)
		})
		return
	}
	k.keys.of = map[string]jose.JSONWebKey{}
	for _, text := range set.Keys {
		var key jose.JSONWebKey
		if json.Unmarshal(text, &key) == nil && key.IsPublic() { // one of an unknown kind does not hide the others
			k.keys.of[key.KeyID] = key
		}
	}
}

// Keys returns how many public keys of the API server are known. While it is 0, tokens cannot be
// verified before the API server is asked.
func (k *Kubernetes) Keys() int {
	k.keys.mu.Lock()
	defer k.keys.mu.Unlock()
	return len(k.keys.of)
}

// signedClaims returns the claims of a token that the API server has signed. signed is false if the
// key that the token names is not known. err is that of ctx, or a refusal: the token is of another
// kind, is for another audience or ended long ago, or its signature is wrong.
func (k *Kubernetes) signedClaims(ctx context.Context, token string) (c claims, signed bool, err error) {
	parsed, err := jwt.ParseSigned(token, algorithms)
	if err == nil {
		key, known, ended := k.key(ctx, parsed.Headers[0].KeyID)
		if !known {
			return claims{}, false, ended
		}
		var all jwt.Claims
		k.keys.verifying.Lock()
		err = parsed.Claims(key.Key, &all, &c)
		k.keys.verifying.Unlock()
		if err == nil {
			err = all.ValidateWithLeeway(jwt.Expected{AnyAudience: jwt.Audience{Audience}, Time: time.Now()}, maxSkew)
		}
	}
	if err != nil {
		return claims{}, false, refusal{coordinator.ErrUnauthenticated,
			fmt.Sprintf("%v (audience must be %q): %v", coordinator.ErrUnauthenticated, Audience, err)}
	}
	return c, true, nil
}
