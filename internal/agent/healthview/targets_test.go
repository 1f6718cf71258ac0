package healthview

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync"
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

func TestTargetsSayWhy(t *testing.T) {
	w := httptest.NewRecorder()
	shown(t).ServeHTTP(w, httptest.NewRequest(http.MethodGet, Path, nil))
	var answer struct{ Targets []targetView }
	err := json.Unmarshal(w.Body.Bytes(), &answer)
	if err != nil || w.Header().Get("Content-Type") != "application/json" {
		t.Fatalf("%v: %s %s", err, w.Header(), w.Body)
	}
	var got []string
	for _, v := range answer.Targets {
		got = append(got, fmt.Sprintln(v.Pool, v.Service, v.Address, v.Pod, v.State, v.Why, v.Counters.Active))
		if excluded := v.Why == "excluded" || v.Why == "kept" ||
			v.Why == "terminating"; excluded != (v.Exclusion != nil && v.Since != nil) {
			t.Errorf("%s: exclusion %+v, since %v", v.Address, v.Exclusion, v.Since)
		}
	}
	if diff := cmp.Diff([]string{
		"api shop/api 10.1.0.1:80  routed kept 2\n", "web shop/web 10.0.0.1:80 shop/web-a routed chosen 2\n",
		"web shop/web 10.0.0.2:80 shop/web-b removed excluded 0\n",
		"web shop/web 10.0.0.3:80  routed terminating 2\n", "web shop/web 10.0.0.4:80  routed not-ready 2\n",
		"web shop/web 10.0.0.5:80  absent pending 0\n", "web shop/web [fd00::6]:80  unread pending 0\n",
	}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// slow is a reader that does not read on before over is closed.
type slow struct {
	http.ResponseWriter
	reading chan<- struct{}
	over    <-chan struct{}
}

func (s slow) Write(b []byte) (int, error) {
	s.reading <- struct{}{}
	<-s.over
	return s.ResponseWriter.Write(b)
}

// Each answer is whole in memory: readers that read slowly must not fill it.
func TestReadersAreBounded(t *testing.T) {
	handler, reading, over := shown(t), make(chan struct{}), make(chan struct{})
	var all sync.WaitGroup
	request := httptest.NewRequest(http.MethodGet, Path, nil)
	for range maxReaders {
		all.Go(func() { handler.ServeHTTP(slow{httptest.NewRecorder(), reading, over}, request) })
		<-reading
	}
	w := httptest.NewRecorder()
	if handler.ServeHTTP(w, request); w.Code != http.StatusServiceUnavailable {
		t.Errorf("one more gets %d", w.Code)
	}
	close(over)
	all.Wait()
	w = httptest.NewRecorder()
	if handler.ServeHTTP(w, request); w.Code != http.StatusOK {
		t.Errorf("after that one gets %d", w.Code)
	}
}
