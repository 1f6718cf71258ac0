package certs

import (
	"crypto/x509"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
)

var (
	names = []string{"lameduck-webhook.lameduck-system.svc", "10.0.0.1"}
	times = Times{RotateEvery: 100 * time.Hour, Overlap: time.Hour}
)

// works reports why a caller that has the bundle and the path of one state cannot call a replica
// that has the other.
func works(caller, replica State, now time.Time) error {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(caller.Trusted())
	pair, err := replica.Current.pair()
	if err != nil {
		return err
	}
	for _, name := range names {
		if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: name, CurrentTime: now}); err != nil {
			return err
		}
	}
	if path := caller.Secrets()[0]; !slices.Contains(replica.Secrets(), path) {
		return fmt.Errorf("secret %s of %d", path, len(replica.Secrets()))
	}
	return nil
}

// Callers and replicas that are less than the overlap behind can call and be called. What a caller
// has was written at some time after the state, and was read back before the next step.
func TestEveryPairWorks(t *testing.T) {
	for seed := range uint64(4) {
		random := rand.New(rand.NewPCG(seed, 0))
		now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		type view struct {
			at    time.Time
			state State
		}
		var replicas, callers []view
		var state, published State
		sets := 0
		for range 800 {
			changed := false
			var err error
			asked := ""
			if random.IntN(50) == 0 {
				asked = fmt.Sprint(now.Unix())
			} else {
				asked = state.Asked
			}
			known := state.Current != nil && string(published.Trusted()) == string(state.Trusted()) &&
				published.Current.Secret == state.Current.Secret
			if state, changed, err = state.step(now, known, asked, names, times); err != nil {
				t.Fatal(err)
			}
			if changed && state.Next != nil && state.Next.Known.IsZero() {
				sets++
			}
			// It fails half of the time.
			if random.IntN(2) == 0 {
				published = state
			}
			replicas = append(replicas, view{now, state})
			if published.Current != nil {
				callers = append(callers, view{now, published})
			}
			late := func(v view) bool { return now.Sub(v.at) >= times.Overlap }
			replicas, callers = slices.DeleteFunc(replicas, late), slices.DeleteFunc(callers, late)
			if len(callers) > 0 {
				c, r := callers[random.IntN(len(callers))], replicas[random.IntN(len(replicas))]
				if err := works(c.state, r.state, now); err != nil {
					t.Fatalf("seed %d: a caller of %s meets a replica of %s at %s: %v", seed, c.at, r.at, now, err)
				}
			}
			now = now.Add(time.Duration(random.IntN(int(20 * time.Minute))))
		}
		if sets < 10 {
			t.Errorf("seed %d: %d sets", seed, sets)
		}
	}
}

// A set is not used before all have it, however long that takes. Then it is used after the overlap,
// and not before.
func TestTheNextSetWaitsUntilItIsKnown(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var s State
	step := func(after time.Duration, known bool) bool {
		t.Helper()
		now = now.Add(after)
		next, changed, err := s.step(now, known, "", names, times)
		if err != nil {
			t.Fatal(err)
		}
		s = next
		return changed
	}
	if !step(0, false) || s.Current == nil || s.Next != nil || step(0, false) || step(99*time.Hour, true) {
		t.Fatalf("at first: %+v", s)
	}
	first := s.Current.Secret
	// Else no webhook that is reached by a Service can be given the path, and nothing ever waits.
	if wrong := validation.IsDNS1123Subdomain(first); len(wrong) > 0 {
		t.Fatalf("the API server will not have %q in a Service's path: %q", first, wrong)
	}
	if !step(time.Hour, true) || s.Next == nil || s.Current.Secret != first || len(s.Secrets()) != 2 {
		t.Fatalf("due: %+v", s)
	}
	second := s.Next.Secret
	if step(50*time.Hour, false) || s.Current.Secret != first {
		t.Fatal("used although it is not known")
	}
	if step(0, true) || step(59*time.Minute, true) || s.Current.Secret != first {
		t.Fatal("used before the overlap is over")
	}
	if !step(time.Minute, true) || s.Current.Secret != second || s.Former == nil || s.Former.Key != "" ||
		s.Secrets()[0] != second {
		t.Fatalf("after the overlap: %+v", s)
	}
	if step(50*time.Hour, false) || s.Former == nil {
		t.Fatal("forgotten although the API server still has it")
	}
	if step(0, true) || step(59*time.Minute, true) || !step(time.Minute, true) || s.Former != nil ||
		len(s.Secrets()) != 1 {
		t.Fatalf("at the end: %+v", s)
	}
	// All were away for too long.
	if !step(300*time.Hour, true) || s.Current.Secret == second || s.Next != nil || s.Former != nil {
		t.Fatalf("expired: %+v", s)
	}
}

func TestReasonsForAnotherSet(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	s, _, err := State{}.step(now, false, "", names, times)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		asked string
		names []string
		want  bool
	}{
		"none":                    {"", names, false},
		"fewer names":             {"", names[:1], false},
		"a rotation is requested": {"1", names, true},
		"another name":            {"", []string{"other"}, true},
		"another IP address":      {"", []string{names[0], "10.0.0.2"}, true},
	} {
		next, changed, err := s.step(now, true, c.asked, c.names, times)
		if err != nil || changed != c.want || (next.Next != nil) != c.want {
			t.Errorf("%s: %t, %v", name, changed, err)
		}
		if again, changed, _ := next.step(now, false, c.asked, c.names, times); c.want &&
			(changed || again.Next.Secret != next.Next.Secret) {
			t.Errorf("%s: made twice", name)
		}
	}
	damaged := *s.Current
	damaged.Key = "nonsense"
	if next, changed, err := (State{Current: &damaged}).step(now, true, "", names, times); err != nil || !changed ||
		next.Current.Secret == damaged.Secret {
		t.Errorf("damaged: %+v, %v", next, err)
	}
}

// A set that was made for 90 days is replaced in time although the next one is made for 3 years.
func TestRotateEveryIsRaised(t *testing.T) {
	was := Times{RotateEvery: 30 * 24 * time.Hour, Overlap: time.Hour}
	is := Times{RotateEvery: 365 * 24 * time.Hour, Overlap: time.Hour}
	now := time.Date(2026, 1, 1, 0, 0, 0, 500, time.UTC)
	s, _, err := State{}.step(now, false, "", names, was)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		after   time.Duration
		changed bool
	}{{was.RotateEvery - time.Hour, false}, {was.RotateEvery, true}} {
		at := now.Add(c.after)
		if wait := s.wait(at, was); wait != was.RotateEvery-c.after {
			t.Errorf("without a change it waits %s after %s", wait, c.after)
		}
		if wait := s.wait(at, is).Round(time.Second); wait != was.RotateEvery-c.after {
			t.Errorf("after %s it waits %s", c.after, wait)
		}
		if next, changed, err := s.step(at, true, "", names, is); err != nil || changed != c.changed ||
			changed && next.Next == nil {
			t.Errorf("after %s: changed %t, %v", c.after, changed, err)
		}
	}
}
