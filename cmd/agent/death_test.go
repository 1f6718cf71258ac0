package main

import (
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// The agent is killed at random moments of a drain. When it starts again it reaches neither
// coordinators nor the API server, and then the API server alone, which still calls every pod
// ready. It keeps its acknowledgements, and living pods are served all the time. In every second
// round HAProxy is reloaded while it has no agent.
func TestKilledAgentKeepsItsPromises(t *testing.T) {
	for _, name := range []string{"first", "second"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 6, time.Minute)
			promised := map[string]time.Time{}
			asked := []string{}
			for round := range 3 {
				uid := w.pods[round]
				asked = append(asked, uid)
				w.boss.drain(uid)
				if round == 0 {
					// Once at least it is killed after the promise.
					w.until("the pod is idle", func() bool { return w.boss.heard(uid) == drain.Idle })
				} else {
					time.Sleep(rand.N(60 * time.Millisecond)) // any moment of a drain
				}
				w.boss.down()
				w.api.down()
				if w.boss.heard(uid) >= drain.Removed {
					promised[uid] = time.Now()
				}
				w.die()
				if round%2 == 1 {
					w.reload()
				}
				w.live()
				time.Sleep(client.LearnTimeout + time.Second) // it gives up on coordinators
				w.api.up()
				w.until("the agent is ready", w.ready)
				time.Sleep(500 * time.Millisecond) // for what it might do wrong
				for uid, since := range promised {
					if w.routedSince(uid, since) {
						t.Errorf("round %d: %s was routed after the agent had said that it is not", round, uid)
					}
				}
				w.mustServe(asked...)
				w.boss.up()
				// Its coordinator is back and has the drain still, whether the agent remembered or
				// not.
				w.until("the pod is idle", func() bool { return w.boss.heard(uid) == drain.Idle })
				promised[uid] = time.Now()
				w.until("all are learned", w.ready)
			}
			t.Logf("%d promises kept", len(promised))
		})
	}
}

// When expiries are over, time alone lets no pod back in: the watch must be fresh.
func TestLapsedExclusions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 4, 6*time.Second)
	gone, back := w.pods[0], w.pods[1]
	w.boss.drain(gone, back)
	w.until("they are idle", func() bool {
		return w.boss.heard(gone) == drain.Idle &&
			w.boss.heard(back) == drain.Idle
	})
	promised := time.Now()
	w.boss.down()
	w.api.down()
	w.die()
	w.live()
	time.Sleep(9 * time.Second) // stored expiries are at most 7 s
	if w.routedSince(gone, promised) || w.routedSince(back, promised) {
		t.Fatal("routed again although EndpointSlices cannot be read")
	}
	w.api.up()
	w.until("the pods are routed again", func() bool {
		return w.routedSince(gone, promised) && w.routedSince(back, promised)
	})
	w.mustServe()

	// Now the watch is what hangs. Of the two pods one goes meanwhile: it must never be routed
	// again, and the other only when the watch lives.
	w.boss.restarted()
	w.boss.up()
	w.boss.drain(gone, back)
	w.until("they are idle", func() bool {
		return w.boss.heard(gone) == drain.Idle &&
			w.boss.heard(back) == drain.Idle && w.ready()
	})
	w.api.freeze(true)
	w.api.set(w.list[1:]...)
	promised = time.Now()
	w.boss.down()
	before := w.api.listed()
	w.until("the API server is asked", func() bool { return w.api.listed() > before })
	time.Sleep(11 * time.Second) // longer than source.freshTimeout: until the question has failed, and longer
	if w.routedSince(gone, promised) || w.routedSince(back, promised) {
		t.Fatal("routed again by a watch that hangs")
	}
	w.api.freeze(false)
	w.until("the pod that is left is routed again", func() bool { return w.routedSince(back, promised) })
	time.Sleep(time.Second) // nothing follows that could be awaited: it is never routed
	if w.routedSince(gone, promised) {
		t.Error("the pod that has gone is routed again")
	}
	w.mustServe(gone)
}

// A disk that takes nothing stops no drain, and is said.
func TestAJournalThatFailsStopsNoDrain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3, time.Minute)
	// Folders in the places of the new journal and of HAProxy's new file: no attempt can create
	// these.
	blocked := []string{filepath.Join(w.dir, "exclusions.json.new"), filepath.Join(w.dir, ".servers.cfg.tmp")}
	for _, path := range blocked {
		if err := os.MkdirAll(filepath.Join(path, "x"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	w.boss.drain(w.pods[0])
	w.until("the pod is idle", func() bool { return w.boss.heard(w.pods[0]) == drain.Idle })
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("the drain took %s", took)
	}
	if got := w.get("/readyz"); got != http.StatusOK {
		t.Errorf("/readyz says %d", got)
	}
	if v := w.metric("lameduck_agent_journal_failing"); v != "1" {
		t.Errorf("lameduck_agent_journal_failing is %q", v)
	}
	for _, path := range blocked {
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}
	w.boss.drain(w.pods[1])
	w.until("it works again", func() bool { return w.metric("lameduck_agent_journal_failing") == "0" })
	w.mustServe(w.pods[0], w.pods[1])
}
