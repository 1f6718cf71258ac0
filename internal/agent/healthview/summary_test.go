package healthview

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
	"github.com/lameduck-io/lameduck/pkg/health"

	"k8s.io/apimachinery/pkg/types"
)

// Each target that EndpointSlices want is counted once, as what keeps it from traffic, or else by
// its health; and a name is given to those that operators have to look at.
func TestSummariesCountEachTargetOnce(t *testing.T) {
	set := health.New(health.Options{UsablePercent: 50})
	web := endpoints.Port{Service: types.NamespacedName{Namespace: "shop", Name: "web"}, Name: "http"}
	ports := map[health.Pool]endpoints.Port{"web": web, "admin": {Service: web.Service, Name: "admin"},
		"api": {Service: types.NamespacedName{Namespace: "shop", Name: "api"}}}
	b := NewSummary(set, ports, func() map[health.UID]string { return map[health.UID]string{"bad": "shop/web-bad"} })
	now := time.Now()
	target := func(n int, uid health.UID) health.Target {
		return health.Target{UID: uid, Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), 80)}
	}
	claim := func(uids ...health.UID) (all []health.Change) {
		for i, uid := range uids {
			all = append(all, health.Change{Endpoint: health.Endpoint{Target: target(i+1, uid), Routable: true}})
		}
		return all
	}
	b.look()
	if b.Last() != nil {
		t.Error("it tells before EndpointSlices are known")
	}
	set.Change(now, "web", append(claim("good", "bad", "new", "let-go"),
		health.Change{Endpoint: health.Endpoint{Target: target(9, "unready")}}))
	set.Change(now, "admin", claim("good"))
	set.Synced()
	check, err := health.ParseCheck(`{"path": "/", "healthy": {"successes": 1}, "unhealthy": {"httpFailures": 1}}`)
	if err != nil {
		t.Fatal(err)
	}
	set.SetCheck(now, "web", check)
	at := now
	// probe ends one probe of each target as outcomes says, that of any other without a result.
	probe := func(outcomes map[health.UID]health.Outcome) {
		for range 1001 {
			jobs, _ := set.Due(at, nil, 10)
			for _, j := range jobs {
				set.Report(at, j, outcomes[j.Key.Target.UID])
			}
			at = at.Add(10 * time.Millisecond)
		}
	}
	probe(map[health.UID]health.Outcome{"good": {Kind: health.Success, Code: 200},
		"bad": {Kind: health.HTTPFailure, Code: 503}})
	set.Exclude(now, "let-go", "a/1", now, now.Add(time.Minute))
	b.look()
	got := b.Last()
	if got == nil || got.Services != 2 || len(got.Told) != 2 {
		t.Fatalf("%+v", got)
	}
	if want := (wire.TargetCounts{Usable: 1, Unknown: 2, Unhealthy: 1, Excluded: 1}); got.All != want ||
		got.Told[0].TargetCounts != want {
		t.Errorf("%+v, %+v, want %+v", got.All, got.Told[0].TargetCounts, want)
	}
	first := got.Told[0]
	if first.Service.Name != "web" || !first.Checked || first.FailingOpen || len(first.Targets) != 1 {
		t.Fatalf("%+v", first)
	}
	if bad := first.Targets[0]; bad.Pod != "shop/web-bad" || bad.Address != target(2, "").Addr ||
		bad.Last != "http failure: 503" || bad.Since.IsZero() || bad.Why == "" {
		t.Errorf("%+v", bad)
	}
	if empty := got.Told[1]; empty.Service.Name != "api" || empty.Checked ||
		empty.TargetCounts != (wire.TargetCounts{}) {
		t.Errorf("%+v", empty)
	}
	if b.look(); b.Last() != got {
		t.Error("the same is reported again")
	}
	probe(map[health.UID]health.Outcome{"good": {Kind: health.HTTPFailure, Code: 500}})
	b.look()
	if is := b.Last(); is == got || is.All.Unhealthy != 2 || !is.Told[0].FailingOpen {
		t.Errorf("two of three are bad: %+v", is)
	}
}

// However many Services there are, what is told fits into what a coordinator keeps, and those with
// trouble are in it.
func TestSummariesFit(t *testing.T) {
	pools := map[health.Pool]health.Count{}
	ports := map[health.Pool]endpoints.Port{}
	var all []health.Detail
	for n := range 1000 {
		pool := health.Pool(fmt.Sprintf("pool-%03d", n))
		ports[pool] = endpoints.Port{Service: types.NamespacedName{Namespace: "shop", Name: string(pool)}}
		pools[pool] = health.Count{FailingOpen: n == 900}
		for i := range 10 {
			d := health.Detail{Key: health.Key{Pool: pool,
				Target: health.Target{UID: health.UID(fmt.Sprint(n, i)), Addr: netip.MustParseAddrPort("10.0.0.1:80")}}}
			if n >= 500 && n < 520 {
				d.Verdict, d.Why = health.Unhealthy, health.WhyUnhealthy
			}
			all = append(all, d)
		}
	}
	sum := summarize(all, pools, ports, func() map[health.UID]string { return nil })
	size := 0
	for _, s := range sum.Told {
		size += s.Size()
	}
	if size > wire.MaxHealthKept || len(sum.Told) > wire.MaxHealthServices || len(sum.Told) < 50 ||
		sum.Services != 1000 || sum.All.Unknown != 9800 || sum.All.Unhealthy != 200 {
		t.Errorf("%d bytes, %d Services of %d, %+v", size, len(sum.Told), sum.Services, sum.All)
	}
	if !sum.Told[0].FailingOpen || sum.Told[1].Service.Name != "pool-500" || sum.Told[20].Service.Name != "pool-519" ||
		sum.Told[21].Service.Name != "pool-000" {
		t.Errorf("told first: %v", sum.Told[:22])
	}
	h, _ := new(wire.Teller).Next(1, sum)
	if err := h.Check(); err != nil {
		t.Error(err)
	}
}
