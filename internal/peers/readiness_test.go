package peers

import (
	"errors"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// A replica that is unready gets no reviews, and where it is the only one, deletions go on unasked
// meanwhile.
func TestReadiness(t *testing.T) {
	var synced bool
	var missing int
	cert := errors.New("there is no certificate yet")
	others := &Table{Able: func() error { return nil }}
	r := Readiness{
		Certificate: func() error { return cert }, Synced: func() bool { return synced }, Others: others,
		Expecting: func() (int, int) { return 5, missing },
	}
	check := func(when, want string) {
		t.Helper()
		got := ""
		if err := r.Check(); err != nil {
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
	synced, missing = true, 2
	check("before it knows what is open", "the open drains of the other replicas are not known yet")
	// Caches may be cold for long. The time for agents begins after that.
	knows := time.Now().Add(time.Hour)
	heed := func(after time.Duration) { others.Heed(knows.Add(after), func([]wire.Replica, bool) {}) }
	heed(0)
	check("agents missing", "2 of 5 agents are not connected yet")
	heed(Settle - 1)
	check("agents missing still", "2 of 5 agents are not connected yet")
	heed(Settle)
	check("agents missing for long", "")
	others.settled = false
	check("it was ready", "")

	r.settled.Store(false)
	missing = 0
	check("all there", "")
	missing = 1
	check("an agent that comes later", "")
	missing = 3
	check("most streams lost, and no other replica has them", "")
	of := Peer{Name: "webhook-1", Ready: true}
	others.Set(of)
	others.Heard(of, true, &wire.Replica{Ready: true, Expected: 5, Missing: 2})
	elsewhere := func(when string, want bool) {
		t.Helper()
		if got := r.Elsewhere(); got != want {
			t.Errorf("%s: elsewhere %t, want %t", when, got, want)
		}
	}
	check("most streams lost", "3 of 5 agents are not connected here, and replica webhook-1 has most of them")
	elsewhere("most streams lost", true)
	missing = 2
	check("most streams are back", "")
	elsewhere("most streams are back", false)
	r.Stop()
	check("at its end", "this replica is shutting down")
}
