package serve

import (
	"fmt"
	"io"
	"net/http"
	"testing"
)

func TestRatesAreByKey(t *testing.T) {
	r := NewRates[int](1, 2)
	for key := range maxRates + 2 {
		if l := r.Of(key); !l.Allow() || !r.Of(key).Allow() || l.Allow() {
			t.Fatalf("%d has another burst than 2", key)
		}
	}
	if len(r.of) > maxRates {
		t.Errorf("%d limiters are kept", len(r.of))
	}
}

// Without it, all clients whose tokens cannot be verified share the limit of one address.
func TestSource(t *testing.T) {
	secure, trust := certified(t)
	address, _ := start(t, Server{TLS: secure, Conns: 10,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, Source(r.Context())) })})
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: trust.Clone()}}
	defer client.CloseIdleConnections()
	response, err := client.Get("https://" + address)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if text, err := io.ReadAll(response.Body); err != nil || string(text) != "127.0.0.1" {
		t.Errorf("%q, %v", text, err)
	}
	if got := Source(t.Context()); got.IsValid() {
		t.Errorf("without a server: %s", got)
	}
}
