package exclusion

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// A pod in mode observe leaves the gateway by its EndpointSlice, and nothing is asked of the
// gateway before.
func TestAWatchedPodIsNotExcluded(t *testing.T) {
	set := health.New(health.Options{})
	now := time.Now()
	key := health.Key{Pool: "web", Target: health.Target{UID: "a", Addr: netip.MustParseAddrPort("10.0.0.1:80")}}
	ready := health.Endpoint{Target: key.Target, Routable: true}
	set.Change(now, "web", []health.Change{{Endpoint: ready}})
	set.Synced()
	read := func(seen health.Seen) {
		now = now.Add(health.IdleGap)
		set.Observe(now, health.Observation{Generation: "g", At: now, Seen: map[health.Key]health.Seen{key: seen}})
	}
	read(health.Seen{Present: true, Routed: true})
	w := &Watches{Set: set}
	w.Watch(now, drain.Watch{Pod: drain.Pod{UID: "a"}, Since: now, Deadline: now.Add(time.Minute)}, "r/1")
	is := func(want string) {
		t.Helper()
		got := ""
		for _, r := range w.Reports(now) {
			got += fmt.Sprint(r.UID, " ", r.State, " ", r.InFlight)
		}
		if got != want {
			t.Errorf("reports %q, want %q", got, want)
		}
	}
	is("a routing false")
	if pending := set.Pending(); len(pending) != 0 || len(set.Exclusions()) != 0 {
		t.Errorf("pending %v", pending)
	}
	set.MarkTerminating(now, "a")
	is("a routing false")
	read(health.Seen{Present: true, Active: 2})
	is("a removed true")
	read(health.Seen{Present: true})
	is("a removed false")
	read(health.Seen{Present: true})
	is("a idle false")
	read(health.Seen{})
	is("a idle false")
	if got := w.Watched("r/1"); len(got) != 1 {
		t.Error(got)
	}
	w.Unwatch(now, "a", "r/1", false)
	is("")
	w.Watch(now, drain.Watch{Pod: drain.Pod{UID: "a"}, Since: now, Deadline: now.Add(time.Minute)}, "r/1")
	now = now.Add(2 * time.Minute)
	is("")
}
