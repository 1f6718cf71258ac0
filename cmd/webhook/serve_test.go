package main

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
)

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
