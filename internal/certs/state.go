// Package certs makes the certificate and the admission secret of the coordinators, and rotates
// them without a failed call.
//
// All replicas are equal. They share one [State] in one Secret. Each replica writes the CA bundle
// and the path into the webhook configurations, and the bundle into a ConfigMap for agents. A write
// carries the resourceVersion that was read, so that of two simultaneous writes one is refused, and
// its replica reads again.
//
// A set is a CA, a serving certificate that it has signed, and a secret. The CA signs one
// certificate, then its key is deleted. So no other certificate can be made, and the set is always
// renewed as a whole. A set goes through three steps. A step lasts until its changes have been in
// the API server for [Times.Overlap], as read back from it:
//
//	next     all replicas and agents accept its CA and its secret; neither is used yet
//	current  its certificate is served, and its secret is in the path
//	former   neither is used any more, and both are still accepted
//
// During a rotation callers may have the old or the new bundle and path, and replicas the old or
// the new state. Every combination works.
package certs

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Times of the rotation.
type Times struct {
	// RotateEvery is the age at which a set is replaced, and a third of the validity of the next
	// one. A set is replaced at a third of its own validity if that is earlier.
	RotateEvery time.Duration
	// Overlap is how long a step lasts at least, from when its effects were read back.
	Overlap time.Duration
}

// Set is a CA, the certificate that it has signed with its key, and a secret. CA, Cert and Key are
// PEM.
type Set struct {
	CA     string `json:"ca"`
	Cert   string `json:"cert"`
	Key    string `json:"key,omitempty"`
	Secret string `json:"secret"`
	// Made is when the set was made, by the clock of the replica that made it.
	Made time.Time `json:"made"`
	// Known is since when this replica knows that the API server has the changes of the set's
	// present step. Zero: it does not know it. It is not stored, because the clocks of replicas
	// differ, see recall.
	Known time.Time `json:"-"`
}

// State is the content of the Secret. The zero value has no sets.
type State struct {
	Current *Set `json:"current,omitempty"`
	Next    *Set `json:"next,omitempty"`
	Former  *Set `json:"former,omitempty"`
	// Asked is the value of [RotateAnnotation] when a set was last made.
	Asked string `json:"asked,omitempty"`
}

// Trusted returns the CAs of all sets, as one PEM bundle.
func (s State) Trusted() []byte {
	var bundle []byte
	for _, set := range s.sets() {
		bundle = append(bundle, set.CA...)
	}
	return bundle
}

// Secrets returns the secrets to accept. The first one belongs into the path.
func (s State) Secrets() []string {
	var secrets []string
	for _, set := range s.sets() {
		secrets = append(secrets, set.Secret)
	}
	return secrets
}

// sets returns the sets that are not nil, the current one first.
func (s State) sets() []*Set {
	return slices.DeleteFunc([]*Set{s.Current, s.Next, s.Former}, func(set *Set) bool { return set == nil })
}

// recall takes over from earlier, what this replica had at its last step, since when it has known
// the sets of s. A replica measures an overlap from its own first look, so that a clock that is
// ahead does not delay a step, and one that is behind does not end an overlap early.
func (s *State) recall(earlier State) {
	for _, pair := range [][2]*Set{{s.Next, earlier.Next}, {s.Former, earlier.Former}} {
		if is, was := pair[0], pair[1]; is != nil && was != nil && is.Secret == was.Secret {
			is.Known = was.Known
		}
	}
}

// step returns the state that follows s at now, and whether it has to be stored. known: the API
// server had all changes of s when it was read. asked is the present value of [RotateAnnotation].
// names are the names that the certificate must have: one that is missing is a reason for the next
// set.
func (s State) step(now time.Time, known bool, asked string, names []string, t Times) (State, bool, error) {
	if s.Current == nil || !s.Current.usable(now) {
		set, err := newSet(now, names, t)
		if err != nil {
			return s, false, err
		}
		return State{Current: set, Asked: asked}, true, nil
	}
	changed := false
	stamp := func(set *Set) *Set {
		if set == nil || !known || !set.Known.IsZero() {
			return set
		}
		stamped := *set
		stamped.Known = now
		return &stamped
	}
	s.Next, s.Former = stamp(s.Next), stamp(s.Former)
	over := func(set *Set) bool { return set != nil && !set.Known.IsZero() && !now.Before(set.Known.Add(t.Overlap)) }
	switch {
	case over(s.Former):
		s.Former, changed = nil, true
	case over(s.Next):
		former := *s.Current
		// No replica serves it again.
		former.Key, former.Known = "", time.Time{}
		next := *s.Next
		next.Known = time.Time{}
		s.Current, s.Next, s.Former, changed = &next, nil, &former, true
	case s.Next == nil && s.Former == nil && (asked != s.Asked || !now.Before(s.Current.due(t)) ||
		!s.Current.has(names)):
		next, err := newSet(now, names, t)
		if err != nil {
			return s, false, err
		}
		s.Next, s.Asked, changed = next, asked, true
	}
	return s, changed, nil
}

// wait returns the time from now until the next step is due, if nothing changes before.
func (s State) wait(now time.Time, t Times) time.Duration {
	switch {
	case s.Former != nil && !s.Former.Known.IsZero():
		return s.Former.Known.Add(t.Overlap).Sub(now)
	case s.Next != nil && !s.Next.Known.IsZero():
		return s.Next.Known.Add(t.Overlap).Sub(now)
	case s.Current != nil:
		return s.Current.due(t).Sub(now)
	default:
		return 0
	}
}

// due returns when the set is to be replaced: at the age RotateEvery, or when a third of its time
// is over, because it may have been made with a shorter RotateEvery.
func (s *Set) due(t Times) time.Time {
	at := s.Made.Add(t.RotateEvery)
	if pair, err := s.pair(); err == nil {
		third := s.Made.Add(pair.Leaf.NotAfter.Sub(s.Made) / 3)
		if third.Before(at.Add(-time.Second)) { // a certificate's times have no fractions
			return third
		}
	}
	return at
}

// usable reports whether the set can be served now.
func (s *Set) usable(now time.Time) bool {
	pair, err := s.pair()
	return err == nil && s.Secret != "" && !now.Before(pair.Leaf.NotBefore) && now.Before(pair.Leaf.NotAfter)
}

func (s *Set) has(names []string) bool {
	pair, err := s.pair()
	return err == nil && !slices.ContainsFunc(names, func(name string) bool {
		return pair.Leaf.VerifyHostname(name) != nil
	})
}

func (s *Set) pair() (*tls.Certificate, error) {
	pair, err := tls.X509KeyPair([]byte(s.Cert), []byte(s.Key))
	if err != nil {
		return nil, err
	}
	if pair.Leaf == nil {
		return nil, errors.New("no certificate")
	}
	return &pair, nil
}

// validFrom is in the distant past, because a replica whose clock is ahead must not make a
// certificate that is not valid yet by its callers' clocks. This permits no further signatures,
// because the CA's key is deleted.
var validFrom = time.Unix(0, 0)

func newSet(now time.Time, names []string, t Times) (*Set, error) {
	until := now.Add(3 * t.RotateEvery)
	authority := &x509.Certificate{
		Subject: pkix.Name{CommonName: "lameduck"}, NotBefore: validFrom, NotAfter: until,
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	leaf := &x509.Certificate{
		Subject: pkix.Name{CommonName: names[0]}, NotBefore: validFrom, NotAfter: until,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, name := range names {
		if address, err := netip.ParseAddr(name); err == nil {
			leaf.IPAddresses = append(leaf.IPAddresses, net.IP(address.AsSlice()))
		} else {
			leaf.DNSNames = append(leaf.DNSNames, name)
		}
	}
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the key of a CA: %w", err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	caDER, err := x509.CreateCertificate(rand.Reader, authority, authority, caKey.Public(), caKey)
	if err != nil {
		return nil, fmt.Errorf("make a CA: %w", err)
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, authority, key.Public(), caKey)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate: %w", err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a key: %w", err)
	}
	set := &Set{
		// The API server accepts only lower case in a Service's path (validation of
		// webhooks[].clientConfig.service.path).
		CA: encode("CERTIFICATE", caDER), Cert: encode("CERTIFICATE", der), Key: encode("PRIVATE KEY", keyDER),
		Secret: strings.ToLower(rand.Text()), Made: now,
	}
	// Another one would be as useless, and writing it would call for the next.
	if !set.usable(now) {
		return nil, fmt.Errorf("a certificate made now is valid until %s: rotateEvery %s is wrong, or the clock",
			until.UTC().Format(time.RFC3339), t.RotateEvery)
	}
	return set, nil
}

func encode(kind string, der []byte) string {
	return string(bytes.TrimLeft(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), "\n"))
}
