package kubeclient

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

type transport func(*http.Request) (*http.Response, error)

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

// An API server that is away for some seconds does not show as a failed watch. Everything else
// fails at once.
func TestWatchesAreTriedAgain(t *testing.T) {
	for name, c := range map[string]struct {
		path        string
		away        time.Duration // how long the API server is
		patience    time.Duration // of the caller
		ok          bool
		least, most time.Duration
	}{
		"at once":    {"?watch=true", 0, time.Hour, true, 0, 0},
		"soon":       {"?watch=true", time.Minute, time.Hour, true, time.Minute, 65 * time.Second},
		"too late":   {"?watch=true", time.Hour, time.Hour, false, againMost, againMost + 5*time.Second},
		"not wanted": {"?watch=true", time.Hour, time.Second / 2, false, time.Second / 2, time.Second / 2},
		"a list":     {"", time.Second, time.Hour, false, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				next := transport(func(*http.Request) (*http.Response, error) {
					if time.Since(began) < c.away {
						return nil, &os.SyscallError{Syscall: "connect", Err: syscall.ECONNREFUSED}
					}
					return &http.Response{}, nil
				})
				ctx, cancel := context.WithTimeout(t.Context(), c.patience)
				defer cancel()
				r, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://api/api/v1/pods"+c.path, nil)
				if err != nil {
					t.Fatal(err)
				}
				_, err = patient{next}.RoundTrip(r)
				took := time.Since(began)
				if (err == nil) != c.ok || took < c.least || took > c.most {
					t.Errorf("after %s: %v", took, err)
				}
			})
		})
	}
}

func TestTheClientIsPatient(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, []byte(`
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
contexts: [{name: c, context: {cluster: c}}]
current-context: c
`), 0o600); err != nil {
		t.Fatal(err)
	}
	_, config, err := New(path, "test")
	if err != nil {
		t.Fatal(err)
	}
	if _, is := config.WrapTransport(http.DefaultTransport).(patient); !is {
		t.Error("watches are not tried again")
	}
}
