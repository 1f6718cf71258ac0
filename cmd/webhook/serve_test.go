package main

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// A replica that is unready gets no reviews, and where it is the only one, deletions go on unasked
// meanwhile.
func TestReadiness(t *testing.T) {
	var synced bool
	var missing int
	var up time.Duration
	cert := errors.New("there is no certificate yet")
	var known error
	other := ""
	r := readiness{
		certificate: func() error { return cert }, synced: func() bool { return synced }, known: func() error {
			return known
		},
		sees:      func() (string, bool) { return other, other != "" },
		expecting: func() (int, int) { return 5, missing }, up: func() time.Duration { return up },
	}
	check := func(when, want string) {
		t.Helper()
		got := ""
		if err := r.check(); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", when, got, want)
		}
	}
	const cold = "the view of the cluster is not complete yet"
	check("at first", "there is no certificate yet")
	cert = nil
	check("with a certificate", cold)
	up = time.Hour
	check("caches that are cold for long", cold)
	synced, missing, up = true, 2, settle-1
	check("agents missing", "2 of 5 agents are not connected yet")
	up = settle
	check("agents missing for long", "")
	up = settle - 1
	check("it was ready", "")

	r.settled.Store(false)
	missing = 0
	check("all there", "")
	missing = 1
	check("an agent that comes later", "")
	missing = 3
	check("most streams lost, and no other replica has them", "")
	other = "webhook-1"
	check("most streams lost", "3 of 5 agents are not connected here, and replica webhook-1 has most of them")
	missing = 2
	check("most streams are back", "")
	known = errors.New("the open drains of the other replicas are not known yet")
	check("before it knows what is open", known.Error())
	known = nil
	r.stopping.Store(true)
	check("at its end", "this replica is shutting down")
}

// Each probe says what its own check says, and closes its connection: the port has few.
func TestProbes(t *testing.T) {
	var live, ready error
	handler := probes(func() error { return live }, func() error { return ready })
	ask := func(path string) int {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		if w.Code != http.StatusNotFound && w.Header().Get("Connection") != "close" {
			t.Errorf("%s keeps its connection", path)
		}
		return w.Code
	}
	for _, c := range []struct {
		live, ready error
		want        [3]int
	}{
		{nil, nil, [3]int{200, 200, 404}},
		{errors.New("stuck"), nil, [3]int{503, 200, 404}},
		{nil, errors.New("cold"), [3]int{200, 503, 404}},
	} {
		live, ready = c.live, c.ready
		if got := [3]int{ask("/livez"), ask("/readyz"), ask("/metrics")}; got != c.want {
			t.Errorf("live %v, ready %v: %v, want %v", live, ready, got, c.want)
		}
	}
}
