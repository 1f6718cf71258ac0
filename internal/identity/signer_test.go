package identity

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"strings"
	"sync"

	"github.com/go-jose/go-jose/v4"
)

// signer is a key that the API server signs tokens with.
type signer struct {
	jose.JSONWebKey
	algorithm jose.SignatureAlgorithm
}

func newSigner(id string, algorithm jose.SignatureAlgorithm) signer {
	var key crypto.PrivateKey
	var err error
	if algorithm == jose.RS256 {
		key, err = rsa.GenerateKey(rand.Reader, 2048)
	} else {
		key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	}
	if err != nil {
		panic(err)
	}
	return signer{jose.JSONWebKey{Key: key, KeyID: id}, algorithm}
}

// ours is the key of the fake API servers.
var ours = sync.OnceValue(func() signer { return newSigner("ours", jose.ES256) })

// jwks is what an API server answers that has these keys.
func jwks(all ...signer) []byte {
	set := jose.JSONWebKeySet{}
	for _, s := range all {
		set.Keys = append(set.Keys, s.Public())
	}
	text, err := json.Marshal(set)
	if err != nil {
		panic(err)
	}
	// An API server may have keys of a kind that is not known here.
	return []byte(strings.Replace(string(text), "[", `[{"kty":"XYZ","kid":"another"},`, 1))
}

// sign returns a token with claims.
func (s signer) sign(claims string) string {
	maker, err := jose.NewSigner(jose.SigningKey{Algorithm: s.algorithm, Key: s.JSONWebKey}, nil)
	if err != nil {
		panic(err)
	}
	signed, err := maker.Sign([]byte(claims))
	if err != nil {
		panic(err)
	}
	token, err := signed.CompactSerialize()
	if err != nil {
		panic(err)
	}
	return token
}

// forged returns a token whose header and claims are those of token, and not its signature.
func forged(token string) string {
	other := ours().sign("{}")
	return token[:strings.LastIndexByte(token, '.')] + other[strings.LastIndexByte(other, '.'):]
}

// good are the tokens of goodToken.
var good sync.Map

// goodToken returns a token that the API server has signed: with the claims of text, if that is one
// of tokenOf, or for a pod of its own. It is always the same for the same text.
func goodToken(text string) string {
	if token, ok := good.Load(text); ok {
		return token.(string)
	}
	all := map[string]any{"aud": []string{Audience},
		"kubernetes.io": map[string]any{"pod": map[string]any{"uid": text}}}
	if parts := strings.Split(text, "."); len(parts) == 3 {
		claims, err := base64Claims(parts[1])
		if err != nil {
			panic(err)
		}
		if err := json.Unmarshal(claims, &all); err != nil {
			panic(err)
		}
	}
	claims, err := json.Marshal(all)
	if err != nil {
		panic(err)
	}
	token, _ := good.LoadOrStore(text, ours().sign(string(claims)))
	return token.(string)
}
