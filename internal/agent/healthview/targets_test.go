package healthview

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// shown is a set with one target for each answer to the question why.
func shown(t *testing.T) http.Handler {
	t.Helper()
	set := health.New(health.Options{})
	ports := map[health.Pool]endpoints.Port{}
	for pool, name := range map[health.Pool]string{"web": "http", "api": "", "empty": ""} {
		ports[pool] = endpoints.Port{Service: types.NamespacedName{Namespace: "shop", Name: string(pool)}, Name: name}
	}
	now := time.Now()
	target := func(uid string) health.Target {
		return health.Target{UID: health.UID(uid), Addr: netip.MustParseAddrPort(map[string]string{
			"fine": "10.0.0.1:80", "asked": "10.0.0.2:80", "gone": "10.0.0.3:80", "unready": "10.0.0.4:80",
			"late": "10.0.0.5:80", "new": "[fd00::6]:80", "last": "10.1.0.1:80",
		}[uid])}
	}
	claim := func(uids ...string) (all []health.Change) {
		for _, uid := range uids {
			all = append(all, health.Change{Endpoint: health.Endpoint{Target: target(uid), Routable: true}})
		}
		return all
	}
	key := func(pool health.Pool, uid string) health.Key { return health.Key{Pool: pool, Target: target(uid)} }
	set.Change(now, "web", claim("fine", "asked", "gone", "unready", "late"))
	set.Change(now, "api", claim("last"))
	for _, uid := range []health.UID{"asked", "last"} {
		set.Exclude(now, uid, "a/1", now.Add(-3*time.Second), now.Add(time.Minute))
	}
	in := health.Seen{Present: true, Routed: true, Active: 2}
	out := health.Seen{Present: true, Missing: true}
	set.Observe(time.Now(), health.Observation{Generation: "g", At: time.Now(), Seen: map[health.Key]health.Seen{
		key("web", "fine"): in, key("web", "asked"): out, key("web", "gone"): in, key("web", "unready"): in,
		key("web", "late"): {Missing: true}, key("api", "last"): in,
	}})
	set.Change(now, "web", append(claim("fine", "asked", "gone", "late", "new"),
		health.Change{Endpoint: health.Endpoint{Target: target("unready")}}))
	set.MarkTerminating(now, "gone")
	set.Synced()
	names := map[health.UID]string{"fine": "shop/web-a", "asked": "shop/web-b"}
	return Targets(set, ports, func() map[health.UID]string { return names })
}

func ask(h http.Handler, path, accept string) *httptest.ResponseRecorder {
	request := httptest.NewRequest(http.MethodGet, path, nil)
	request.Header.Set("Accept", accept)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, request)
	return w
}

func TestTargetsSayWhy(t *testing.T) {
	h := shown(t)
	for name, c := range map[string]struct {
		query string
		want  []string
	}{
		"all": {"", []string{
			"api 10.1.0.1:80 - routed kept 2", "web 10.0.0.1:80 shop/web-a routed chosen 2",
			"web 10.0.0.2:80 shop/web-b removed excluded 0",
			"web 10.0.0.3:80 - routed terminating 2", "web 10.0.0.4:80 - routed not-ready 2",
			"web 10.0.0.5:80 - absent pending 0", "web [fd00::6]:80 - unread pending 0",
		}},
		"service": {"?service=shop/api", []string{"api 10.1.0.1:80 - routed kept 2"}},
		"pool":    {"?pool=api", []string{"api 10.1.0.1:80 - routed kept 2"}},
		"address": {"?address=[fd00::6]:80", []string{"web [fd00::6]:80 - unread pending 0"}},
		"both":    {"?address=10.0.0.1:80&pool=api", nil},
		"none":    {"?service=shop/other", nil},
	} {
		t.Run(name, func(t *testing.T) {
			w := ask(h, Path+c.query, "*/*")
			if got := w.Header().Get("Content-Type"); w.Code != http.StatusOK || got != "application/json" {
				t.Fatalf("%d %s: %s", w.Code, got, w.Body)
			}
			if len(c.want) == 0 && strings.TrimSpace(w.Body.String()) != `{"targets":[]}` {
				t.Errorf("no target is %s", w.Body)
			}
			var answer struct{ Targets []targetView }
			if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, v := range answer.Targets {
				line := []string{v.Pool, v.Address, v.Pod, v.State, v.Why, string(rune('0' + v.Counters.Active))}
				for i := range line {
					if line[i] == "" {
						line[i] = "-"
					}
				}
				got = append(got, strings.Join(line, " "))
				if excluded := v.Why == "excluded" || v.Why == "kept" ||
					v.Why == "terminating"; excluded != (v.Exclusion != nil && v.Since != nil) {
					t.Errorf("%s: exclusion %+v, since %v", v.Address, v.Exclusion, v.Since)
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestTargetsAsText(t *testing.T) {
	h := shown(t)
	for _, c := range []struct{ query, accept string }{{"", "text/plain"}, {"?output=text", "*/*"},
		{"?output=text", "application/json"}} {
		w := ask(h, Path+c.query, c.accept)
		lines := strings.Split(strings.TrimSpace(w.Body.String()), "\n")
		if !strings.HasPrefix(w.Header().Get("Content-Type"), "text/plain") || len(lines) != 8 ||
			!strings.HasPrefix(lines[0], "POOL") || !strings.Contains(lines[3], "excluded     3s") {
			t.Errorf("%s, Accept %s:\n%s", c.query, c.accept, w.Body)
		}
	}
	for _, accept := range []string{"", "*/*", "application/json, text/plain", "text/html"} {
		if w := ask(h, Path, accept); w.Header().Get("Content-Type") != "application/json" {
			t.Errorf("Accept %q is answered with %s", accept, w.Header())
		}
	}
}

func TestBadQueriesAreNamed(t *testing.T) {
	h := shown(t)
	for query, want := range map[string]string{
		"?colour=red":            "colour",
		"?service=web":           `\"web\"`,
		"?address=10.0.0.1":      `\"10.0.0.1\"`,
		"?output=xml":            `\"xml\"`,
		"?pool=a&pool=b":         "2 times",
		"?pool=%zz":              "query",
		"?service=shop/web&Pool": "Pool",
	} {
		if w := ask(h, Path+query, "*/*"); w.Code != http.StatusBadRequest ||
			!strings.Contains(w.Body.String(), want) || !strings.Contains(w.Body.String(), `"error"`) {
			t.Errorf("%s: %d %s, want %s", query, w.Code, w.Body, want)
		}
	}
}
