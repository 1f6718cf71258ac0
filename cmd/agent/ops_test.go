package main

import (
	"net/http/httptest"
	"testing"

	"github.com/lameduck-io/lameduck/internal/agent/serving"
)

// Probes of the agent have three paths, for three questions.
func TestAddressesOfAnswers(t *testing.T) {
	following := serving.New(healthTimeout)
	following.SetEligible(false)
	h := opsRouter(newRegistry(), following, func() string { return "not yet" })
	for _, c := range []struct {
		method, path string
		want         int
	}{
		{"GET", "/livez", 200}, {"HEAD", "/livez", 200}, {"POST", "/livez", 405},
		{"GET", "/healthz", 503}, {"HEAD", "/healthz", 503}, {"POST", "/healthz", 405},
		{"GET", "/readyz", 503}, {"GET", "/", 404},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(c.method, c.path, nil))
		if w.Code != c.want {
			t.Errorf("%s %s: %d, want %d", c.method, c.path, w.Code, c.want)
		}
	}
}
