package serving

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// timeout is that of all tests, and late is later than it.
const (
	timeout = 10 * time.Second
	late    = 25 * time.Second
)

// step is one thing that happens at a time after the beginning.
type step struct {
	at time.Duration
	do func(h *Health, now time.Time)
}

func queued(at time.Duration, families ...Family) step {
	return step{at, func(h *Health, now time.Time) {
		for _, f := range families {
			h.Queued(f, now)
		}
	}}
}

func updated(at time.Duration, families ...Family) step {
	return step{at, func(h *Health, now time.Time) {
		for _, f := range families {
			h.Updated(f, now)
		}
	}}
}

func eligible(at time.Duration, is bool) step {
	return step{at, func(h *Health, _ time.Time) { h.SetEligible(is) }}
}

// The checks of kube-proxy's TestHealthzServer and TestLivezServer (pkg/proxy/healthcheck), in
// their order and on one server.
func TestTheSequenceOfKubeProxysTest(t *testing.T) {
	both := []Family{IPv4, IPv6}
	now, h, checks := time.Now(), New(timeout), 0
	want := func(livez, healthz bool) {
		t.Helper()
		checks++
		_, l := h.Livez(now)
		_, z := h.Healthz(now)
		if l != livez || z != healthz {
			t.Errorf("check %d: livez %t, healthz %t; want %t, %t", checks, l, z, livez, healthz)
		}
	}
	do := func(s step) { s.do(h, now) }
	want(true, true)
	do(updated(0, both...))
	want(true, true)
	now = now.Add(late)
	want(true, true)
	for _, families := range [][]Family{{IPv4}, {IPv6}, both} {
		do(queued(0, families...))
		now = now.Add(late)
		want(false, false)
		do(updated(0, both...))
		now = now.Add(timeout / 2)
		want(true, true)
	}
	for _, families := range [][]Family{{IPv6}, both} {
		do(queued(0, families...))
		now = now.Add(late)
		want(false, false)
		do(updated(0, IPv4))
		want(false, false)
		do(updated(0, IPv6))
		want(true, true)
	}
	for _, is := range []bool{true, false, true, false} {
		do(eligible(0, is))
		want(true, is)
	}
}

// The cases are those of kube-proxy's test, by meaning, and what an agent adds to them.
func TestWhoeverAsksIsTold(t *testing.T) {
	for name, c := range map[string]struct {
		steps   []step
		at      time.Duration
		livez   bool
		healthz bool
		// late are the families that are, sorted.
		late []string
	}{
		"nothing has happened":                   {nil, late, true, true, nil},
		"updated, and nothing queued for long":   {[]step{updated(0, IPv4, IPv6)}, time.Hour, true, true, nil},
		"never updated is starting, queued long": {[]step{queued(0, IPv4, IPv6)}, time.Hour, true, true, nil},
		"one starting, the other late": {[]step{updated(0, IPv4), queued(0, IPv4, IPv6)}, late, false, false,
			[]string{"IPv4"}},
		"not late yet": {[]step{updated(0, IPv4, IPv6), queued(0, IPv4)}, timeout - 1, true,
			true, nil},
		"late from the timeout on": {[]step{updated(0, IPv4, IPv6), queued(0, IPv4)}, timeout, false,
			false, []string{"IPv4"}},
		"IPv6 late": {[]step{updated(0, IPv4, IPv6), queued(1, IPv6)}, late, false, false,
			[]string{"IPv6"}},
		"both late": {[]step{updated(0, IPv4, IPv6), queued(1, IPv4, IPv6)}, late, false,
			false, []string{"IPv4", "IPv6"}},
		"late, then updated": {[]step{updated(0, IPv4, IPv6), queued(1, IPv4), updated(late, IPv4)},
			late, true, true, nil},
		"the other family's update is no help": {[]step{updated(0, IPv4, IPv6), queued(1, IPv6), updated(late, IPv4)},
			late, false, false, []string{"IPv6"}},
		"both late, one updated": {[]step{updated(0, IPv4, IPv6), queued(1, IPv4, IPv6),
			updated(late, IPv4)}, late, false, false, []string{"IPv6"}},
		"the oldest decides": {[]step{updated(0, IPv4), queued(0, IPv4), queued(timeout-1, IPv4)},
			timeout, false, false, []string{"IPv4"}},
		"queued again after an update": {[]step{updated(0, IPv4), queued(0, IPv4),
			updated(5*time.Second, IPv4), queued(6*time.Second, IPv4)}, timeout, true, true, nil},
		"queued and updated at one time": {[]step{updated(0, IPv4), queued(1, IPv4), updated(1, IPv4)}, late,
			true, true, nil},
		"queued after what was read": {[]step{updated(0, IPv4), queued(5, IPv4), updated(4, IPv4)}, late,
			false, false, []string{"IPv4"}},
		"queued long after what was read": {[]step{updated(0, IPv4), queued(5*time.Second, IPv4),
			updated(4*time.Second, IPv4)}, 4*time.Second + timeout, true, true, nil},
		"one of two was read": {[]step{updated(0, IPv4), queued(1, IPv4), queued(5*time.Second, IPv4),
			updated(4*time.Second, IPv4)}, 4*time.Second + timeout, false, false, []string{"IPv4"}},
		"one of two was read, and not late yet": {[]step{updated(0, IPv4), queued(1, IPv4), queued(5*time.Second, IPv4),
			updated(4*time.Second, IPv4)}, timeout + 1, true, true, nil},
		"a stream of changes that are done": {[]step{updated(0, IPv4), queued(1, IPv4), queued(9*time.Second, IPv4),
			updated(8*time.Second, IPv4), queued(17*time.Second, IPv4), updated(16*time.Second, IPv4)}, late, true,
			true, nil},
		"an unknown family": {[]step{updated(0, IPv4, Unknown), queued(0, Unknown)}, late, true, true,
			nil},
		"node not eligible": {[]step{updated(0, IPv4, IPv6), eligible(1, false)}, 2, true, false,
			nil},
		"node eligible again": {[]step{updated(0, IPv4, IPv6), eligible(1, false), eligible(2, true)},
			3, true, true, nil},
		"node not eligible while starting": {[]step{eligible(1, false)}, 2, true, false, nil},
		"late on a node that is not eligible": {[]step{updated(0, IPv4), queued(1, IPv4), eligible(2, false)}, late,
			false, false, []string{"IPv4"}},
	} {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			h := New(timeout)
			for _, s := range c.steps {
				s.do(h, began.Add(s.at))
			}
			live, livez := h.Livez(began.Add(c.at))
			health, healthz := h.Healthz(began.Add(c.at))
			if livez != c.livez || healthz != c.healthz {
				t.Errorf("livez %t, healthz %t, want %t and %t", livez, healthz, c.livez, c.healthz)
			}
			if live.Healthy != c.livez || health.Healthy != c.livez || live.NodeEligible != nil ||
				health.NodeEligible == nil {
				t.Errorf("reports are %+v and %+v", live, health)
			}
			if diff := cmp.Diff(live.Status, health.Status); diff != "" {
				t.Errorf("the two differ in status: %s", diff)
			}
			var got []string
			for f, s := range live.Status {
				if !s.Healthy {
					got = append(got, string(f))
				}
			}
			if slices.Sort(got); !slices.Equal(got, c.late) {
				t.Errorf("late are %v, want %v", got, c.late)
			}
		})
	}
}

// Load balancers read the status code, operators and dashboards the body.
func TestTheAnswersAreKubeProxys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now().UTC()
		stamp := func(after time.Duration) string { return began.Add(after).Format(time.RFC3339Nano) }
		h := New(timeout)
		check := func(when string, answer func(time.Time) (Report, bool), code int, want map[string]any) {
			t.Helper()
			w := httptest.NewRecorder()
			Handler(answer).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
			body, err := io.ReadAll(w.Result().Body)
			if err != nil {
				t.Fatal(err)
			}
			if w.Code != code {
				t.Errorf("%s: status %d, want %d: %s", when, w.Code, code, body)
			}
			if w.Header().Get("Content-Type") != "application/json" ||
				w.Header().Get("X-Content-Type-Options") != "nosniff" {
				t.Errorf("%s: headers %v", when, w.Header())
			}
			var got map[string]any
			if err := json.Unmarshal(body, &got); err != nil {
				t.Fatalf("%s: %v: %s", when, err, body)
			}
			for _, name := range []string{"lastUpdated", "currentTime"} {
				at, err := time.Parse(time.RFC3339Nano, got[name].(string))
				if err != nil {
					t.Fatalf("%s: %s: %v", when, name, err)
				}
				got[name] = at.UTC().Format(time.RFC3339Nano)
			}
			status, _ := got["status"].(map[string]any)
			delete(got, "status")
			if len(status) > 0 {
				got["families"] = len(status)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: body: %s", when, diff)
			}
		}
		check("starting", h.Livez, 200, map[string]any{"lastUpdated": stamp(0), "currentTime": stamp(0),
			"healthy": true})
		check("starting", h.Healthz, 200, map[string]any{"lastUpdated": stamp(0), "currentTime": stamp(0),
			"healthy": true, "nodeEligible": true})
		h.Updated(IPv4, time.Now())
		h.Updated(IPv6, time.Now())
		time.Sleep(time.Second)
		check("well", h.Healthz, 200, map[string]any{"lastUpdated": stamp(time.Second),
			"currentTime": stamp(time.Second), "healthy": true, "nodeEligible": true, "families": 2})
		h.SetEligible(false)
		check("leaving", h.Livez, 200, map[string]any{"lastUpdated": stamp(time.Second),
			"currentTime": stamp(time.Second), "healthy": true, "families": 2})
		check("leaving", h.Healthz, 503, map[string]any{"lastUpdated": stamp(0), "currentTime": stamp(time.Second),
			"healthy": true, "nodeEligible": false, "families": 2})
		h.SetEligible(true)
		h.Queued(IPv6, time.Now())
		time.Sleep(late)
		at := stamp(time.Second + late)
		check("late", h.Livez, 503, map[string]any{"lastUpdated": stamp(0), "currentTime": at, "healthy": false,
			"families": 2})
		check("late", h.Healthz, 503, map[string]any{"lastUpdated": stamp(0), "currentTime": at, "healthy": false,
			"nodeEligible": true, "families": 2})
	})
}

func TestFamilies(t *testing.T) {
	for text, want := range map[string]Family{"10.0.0.1": IPv4, "::ffff:10.0.0.1": IPv4, "fd00::1": IPv6, "": Unknown} {
		var addr netip.Addr
		if text != "" {
			addr = netip.MustParseAddr(text)
		}
		if got := Of(addr); got != want {
			t.Errorf("%q is %s, want %s", text, got, want)
		}
	}
	body, err := json.Marshal(map[Family]int{IPv4: 1, IPv6: 2, Unknown: 3})
	if err != nil || !strings.Contains(string(body), `"IPv6":2`) {
		t.Errorf("as keys: %s, %v", body, err)
	}
}
