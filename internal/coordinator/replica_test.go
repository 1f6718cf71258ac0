package coordinator

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// claimant is a Claimant that opens a drain for whatever it is asked about.
type claimant struct{ c *Coordinator }

func (c claimant) Claim(_ context.Context, claim wire.Claim) wire.Claimed {
	status, crowded := c.c.Claim(Request{
		Pod: claim.Pod, Owner: "ReplicaSet/1", Targets: targetsOf(web),
		Place: drain.Place{Elapsed: time.Duration(claim.ElapsedMillis) * time.Millisecond},
	})
	return wire.Claimed{Verdict: wire.VerdictDrain, Queued: status.Phase == drain.Queued, Hold: crowded == nil,
		ElapsedMillis: time.Since(status.Since).Milliseconds()}
}

// A witness and the opener each know how long a drain has run: both count from the earlier start.
// Without that the deadline would begin again when one of them is replaced.
func TestAClaimCarriesTheClockBothWays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench()
		b.Claimant = claimant{b.Coordinator}
		claim := func(elapsed time.Duration) wire.Claimed {
			t.Helper()
			body, err := json.Marshal(wire.Claim{Operation: "delete", Pod: pod("a"),
				ElapsedMillis: elapsed.Milliseconds()})
			if err != nil {
				t.Fatal(err)
			}
			code, text := b.ask(http.MethodPost, wire.ClaimsPath, "Bearer replica", strings.NewReader(string(body)))
			var claimed wire.Claimed
			if err := json.Unmarshal([]byte(text), &claimed); code != http.StatusOK || err != nil {
				t.Fatalf("%d %s", code, text)
			}
			return claimed
		}
		want := wire.Claimed{Verdict: wire.VerdictDrain, Hold: true, ElapsedMillis: 12_000, AskedMillis: -1}
		if diff := cmp.Diff(want, claim(12*time.Second)); diff != "" {
			t.Errorf("a drain that has run for 12 s elsewhere (-want +got):\n%s", diff)
		}
		time.Sleep(time.Second)
		want.ElapsedMillis = 13_000
		if diff := cmp.Diff(want, claim(0)); diff != "" {
			t.Errorf("a second later, by one that knows nothing of it (-want +got):\n%s", diff)
		}
		// Now the API server asks this replica too.
		if _, _, err := b.Drain(t.Context(), requestOf(pod("a"), web), time.Now()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(300 * time.Millisecond)
		want.ElapsedMillis, want.AskedMillis = 13_300, 300
		if diff := cmp.Diff(want, claim(0)); diff != "" {
			t.Errorf("after the API server asked (-want +got):\n%s", diff)
		}
		if got := b.core.Ledger.Status(time.Now(), drain.AtHold,
			pod("a").UID); time.Until(got.Deadline) != 16700*time.Millisecond {
			t.Errorf("the deadline is in %s", time.Until(got.Deadline))
		}
		// Another one that stops leaves a call to this one, unless this one stops too: one of them
		// answers.
		onlyAsked := func() int64 {
			t.Helper()
			_, text := b.ask(http.MethodPost, wire.ClaimsPath, "Bearer replica",
				strings.NewReader(`{"pod":{"uid":"uid-a"},"onlyAsked":true}`))
			var claimed wire.Claimed
			if err := json.Unmarshal([]byte(text), &claimed); err != nil {
				t.Fatal(err)
			}
			return claimed.AskedMillis
		}
		if b.ReliedOn("uid-a") || onlyAsked() < 0 || !b.ReliedOn("uid-a") {
			t.Error("a call that was left to this replica is not remembered")
		}
		b.Stop()
		if asked := onlyAsked(); asked >= 0 {
			t.Errorf("a replica that stops says that it was asked %d ms ago", asked)
		}
		// A replica that cannot judge has no opinion, and opens nothing.
		b.Able = func() error { return errors.New("just started") }
		if got := claim(0); got.Verdict != "" {
			t.Errorf("verdict %q of a replica that is not ready", got.Verdict)
		}
	})
}

// A replica that starts goes on where the others are: it has their drains, and their clocks.
func TestAReplicaThatStartsAdoptsWhatIsOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old, started := newBench(), newBench()
		for _, name := range []string{"a", "b"} {
			targets := []drain.Targets{{Service: web, Usable: []drain.UID{"uid-a", "uid-b"}}}
			old.Unroute(Request{Pod: pod(name), Targets: targets})
		}
		time.Sleep(12 * time.Second)
		code, text := old.ask(http.MethodGet, wire.ReplicaPath, "Bearer replica", nil)
		var told wire.Replica
		if err := json.Unmarshal([]byte(text), &told); code != http.StatusOK || err != nil {
			t.Fatalf("%d %s", code, text)
		}
		want := []drain.Claim{
			{Pod: pod("a"), Services: []drain.Service{web}, ElapsedMillis: 12_000},
			{Pod: pod("b"), Services: []drain.Service{web}, ElapsedMillis: 12_000, Queued: true},
		}
		if diff := cmp.Diff(want, told.Drains); diff != "" {
			t.Fatalf("open drains (-want +got):\n%s", diff)
		}
		started.Polled([]wire.Replica{told}, true)
		started.Polled([]wire.Replica{told}, true) // twice changes nothing
		if diff := cmp.Diff(want, started.core.Ledger.Shared(time.Now()).Drains); diff != "" {
			t.Errorf("adopted (-want +got):\n%s", diff)
		}
		status, _, _ := started.Drain(t.Context(), requestOf(pod("a"), web), time.Now())
		if time.Until(status.Deadline) != 18*time.Second {
			t.Errorf("the deadline is in %s, want 18s", time.Until(status.Deadline))
		}
	})
}

// One denial denies. A replica that is polled tells which agents let drains expire, and a replica
// that has just started does not wait for an agent that the other one has suspended.
func TestAReplicaThatStartsLearnsWhoIsSuspended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old, started := newBench(), newBench()
		all := []drain.Expected{{ID: "silent", Name: "edge/silent", Ready: true}}
		old.Expect(all)
		for _, name := range []string{"a", "b", "c"} {
			_, _, _ = old.Drain(t.Context(), requestOf(pod(name), web), time.Now().Add(31*time.Second))
			old.GatePassed(pod(name).UID)
		}
		time.Sleep(time.Second)
		_, text := old.ask(http.MethodGet, wire.ReplicaPath, "Bearer replica", nil)
		var told wire.Replica
		if err := json.Unmarshal([]byte(text), &told); err != nil {
			t.Fatal(err)
		}
		want := []drain.Silence{
			{Agent: "one", Strikes: 3, SinceMillis: 91_000, LastMillis: 1000, Met: true},
			{Agent: "silent", Strikes: 3, SinceMillis: 91_000, LastMillis: 1000},
		}
		if diff := cmp.Diff(want, told.Silent); diff != "" {
			t.Fatalf("silent (-want +got):\n%s", diff)
		}
		started.Expect(all)
		if status, _, _ := started.Drain(t.Context(), requestOf(pod("d"), web), time.Now()); !status.Waits() {
			t.Fatalf("%s %s before it was told", status.Phase, status.Reason)
		}
		started.Polled([]wire.Replica{told}, false)
		if status, _, _ := started.Drain(t.Context(), requestOf(pod("d"), web),
			time.Now()); status.Reason != drain.Suspended {
			t.Errorf("%s %s", status.Phase, status.Reason)
		}
	})
}

// The opener decides which pods of an owner are held; a witness does as it says, so that not one
// holds these and the other those.
func TestAWitnessHoldsWhomTheOpenerHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench()
		b.MaxHolds, b.MaxHoldsPerOwner = 2, 1
		drainAs := func(name string, turn Turn) error {
			_, _, err := b.Drain(t.Context(),
				Request{Pod: pod(name), Owner: "ReplicaSet/1", Targets: targetsOf(web), Turn: turn},
				time.Now().Add(time.Second))
			return err
		}
		if err := drainAs("a", TurnUnheld); !errors.Is(err, ErrTooManyHolds) {
			t.Errorf("unheld by the opener: %v", err)
		}
		if err := drainAs("b", TurnJudged); err != nil {
			t.Errorf("the first that is judged here: %v", err)
		}
		if err := drainAs("c", TurnJudged); !errors.Is(err, ErrTooManyOfOwner) {
			t.Errorf("the second: %v", err)
		}
		if err := drainAs("c", TurnHeld); err != nil {
			t.Errorf("held by the opener: %v", err)
		}
	})
}
