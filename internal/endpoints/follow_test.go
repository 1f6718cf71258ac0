package endpoints

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// told prints changes as "shop/web http: 10.0.0.1:80@a+ 10.0.0.2:80@b gone": routable +, not -,
// terminating !.
func told(changes []PortChange) string {
	var all []string
	for _, p := range changes {
		var text []string
		for _, c := range p.Changes {
			sign := "-"
			switch {
			case c.Unlisted:
				sign = " gone"
			case c.Terminating:
				sign = "!"
			case c.Routable:
				sign = "+"
			}
			text = append(text, c.Target.String()+sign)
		}
		all = append(all, p.Port.Service.String()+" "+p.Port.Name+": "+strings.Join(text, " "))
	}
	return strings.Join(all, "; ")
}

// following returns an index that follows web's port http and the only port of api.
func following() *Index {
	x := NewIndex()
	x.Follow(Port{web, "http"})
	x.Follow(Port{web, "http"}) // twice is once
	x.Follow(Port{api, ""})
	return x
}

// What is as it was is not told: a change that names a survivor would make the gateway touch it.
func TestOnlyWhatChangesIsTold(t *testing.T) {
	x := following()
	ported := func(s *discovery.EndpointSlice, list ...string) *discovery.EndpointSlice {
		s.Ports = ports(list...)
		return s
	}
	missed := func(s *discovery.EndpointSlice) []PortChange { return x.Delete(t0, s) }
	take := func(s *discovery.EndpointSlice) []PortChange { return x.Apply(t0, s) }
	for _, step := range []struct {
		why  string
		do   func(*discovery.EndpointSlice) []PortChange
		with *discovery.EndpointSlice
		want string
	}{
		{"new", take, made("one", web, "10.0.0.1@a ready", "10.0.0.2@b unready"),
			"shop/web http: 10.0.0.1:80@a+ 10.0.0.2:80@b-"},
		{"again", take, made("one", web, "10.0.0.1@a ready", "10.0.0.2@b unready"), ""},
		{"in another order", take, made("one", web, "10.0.0.2@b unready", "10.0.0.1@a ready"), ""},
		{"one turns ready", take, made("one", web, "10.0.0.2@b ready", "10.0.0.1@a ready"),
			"shop/web http: 10.0.0.2:80@b+"},
		{"one more, first", take, made("one", web, "10.0.0.3@c ready", "10.0.0.2@b ready", "10.0.0.1@a ready"),
			"shop/web http: 10.0.0.3:80@c+"},
		{"one less", take, made("one", web, "10.0.0.3@c ready", "10.0.0.1@a ready"),
			"shop/web http: 10.0.0.2:80@b gone"},
		{"another pod at the address", take, made("one", web, "10.0.0.3@c ready", "10.0.0.1@z ready"),
			"shop/web http: 10.0.0.1:80@a gone 10.0.0.1:80@z+"},
		{"it moves: in both", take, made("two", web, "10.0.0.3@c ready"), ""},
		{"it moves: in the new one", take, made("one", web, "10.0.0.1@z ready"), ""},
		{"one slice says terminating", take, made("one", web, "10.0.0.1@z ready", "10.0.0.3@c terminating"),
			"shop/web http: 10.0.0.3:80@c!"},
		{"and no longer", take, made("one", web, "10.0.0.1@z ready"), "shop/web http: 10.0.0.3:80@c+"},
		{"another number", take, ported(made("two", web, "10.0.0.3@c ready"), "http:81"),
			"shop/web http: 10.0.0.3:80@c gone 10.0.0.3:81@c+"},
		{"another name", take, ported(made("two", web, "10.0.0.3@c ready"), "https:81"),
			"shop/web http: 10.0.0.3:81@c gone"},
		{"not a pod", take, made("two", web, "10.0.0.7 ready"), "shop/web http: 10.0.0.7:80@+"},
		{"not a pod, and not ready", take, made("two", web, "10.0.0.7 unready"), "shop/web http: 10.0.0.7:80@-"},
		{"it is gone", take, made("two", web), "shop/web http: 10.0.0.7:80@ gone"},
		{"of nobody's concern", take, made("else", types.NamespacedName{Namespace: "shop", Name: "else"},
			"10.0.0.1@z ready"), ""},
		{"another Service", take, made("one", api, "10.0.0.1@z ready"),
			"shop/api : 10.0.0.1:80@z+; shop/web http: 10.0.0.1:80@z gone"},
		{"deleted", missed, made("one", web), "shop/api : 10.0.0.1:80@z gone"},
		{"deleted twice", missed, made("one", web), ""},
	} {
		if got := told(step.do(step.with)); got != step.want {
			t.Fatalf("%s: told %q, want %q", step.why, got, step.want)
		}
	}
}

// world is what an API server has, with its history, and what a watcher was told.
type world struct {
	t       *testing.T
	r       *rand.Rand
	x       *Index
	now     time.Time
	history []map[string]*discovery.EndpointSlice
	known   map[Port]map[health.Target]health.Endpoint
	// gap is where the watch went on after it was last interrupted.
	gap int
}

// take applies what was told, and checks that each change was one.
func (w *world) take(changes []PortChange) {
	w.t.Helper()
	for _, p := range changes {
		of := w.known[p.Port]
		if of == nil {
			of = map[health.Target]health.Endpoint{}
			w.known[p.Port] = of
		}
		for _, c := range p.Changes {
			was, had := of[c.Target]
			switch {
			case c.Unlisted && !had, !c.Unlisted && had && was == c.Endpoint:
				w.t.Fatalf("told of %v, which is as it was", c)
			case c.Unlisted:
				delete(of, c.Target)
			default:
				of[c.Target] = c.Endpoint
			}
		}
	}
}

// check compares what was told in all with what the present slices say, recomputed from nothing.
func (w *world) check(present map[string]*discovery.EndpointSlice) {
	w.t.Helper()
	naive := NewIndex()
	for _, s := range present {
		naive.Apply(w.now, s)
	}
	for _, p := range []Port{{web, "http"}, {api, ""}} {
		want := naive.Endpoints(p.Service, p.Name)
		if len(want) != len(w.known[p]) {
			w.t.Fatalf("%v: told %v, want %v (index %q, aside %v)", p, w.known[p], want, said(w.x, p.Service, p.Name),
				w.x.aside)
		}
		for _, e := range want {
			if got, ok := w.known[p][e.Target]; !ok || got != e {
				w.t.Fatalf("%v: told %v of %v, want %v", p, got, e.Target, e)
			}
		}
		if got, want := said(w.x, p.Service, p.Name), said(naive, p.Service, p.Name); got != want {
			w.t.Fatalf("%v: the index says %q, want %q", p, got, want)
		}
	}
}

// change makes the next version of the world: a slice is made, changed, moved to another Service,
// renumbered or deleted.
func (w *world) change() (name string, s *discovery.EndpointSlice) {
	version := len(w.history) + 1
	name = fmt.Sprint("slice-", w.r.IntN(4))
	next := map[string]*discovery.EndpointSlice{}
	for name, s := range w.history[len(w.history)-1] {
		next[name] = s
	}
	defer func() { w.history = append(w.history, next) }()
	if next[name] != nil && w.r.IntN(6) == 0 {
		s = next[name].DeepCopy()
		s.ResourceVersion = strconv.Itoa(version) // as the watch tells a deletion
		delete(next, name)
		return name, s
	}
	var list []string
	conditions := []string{" ready", " ready", " unready", " terminating", " published", ""}
	for range w.r.IntN(5) {
		host, uid := w.r.IntN(5)+1, 'a'+rune(w.r.IntN(7))
		address := fmt.Sprintf("10.0.0.%d", host)
		pod := fmt.Sprintf("@%c", uid)
		if w.r.IntN(8) == 0 {
			pod = ""
		}
		list = append(list, address+pod+conditions[w.r.IntN(len(conditions))])
	}
	s = made(name, []types.NamespacedName{web, api}[w.r.IntN(2)], list...)
	switch w.r.IntN(6) {
	case 0:
		s.Ports = ports("http:81")
	case 1:
		s.Ports = ports("metrics:90", "http:80")
	case 2:
		delete(s.Labels, discovery.LabelServiceName)
	case 3:
		s.Ports = nil
	}
	s.ResourceVersion = strconv.Itoa(version)
	next[name] = s
	return name, s
}

var histories = flag.Int("histories", 400, "how many random histories to try")

// Random histories: moves between slices, duplicates, reuse of addresses, relabelling, other ports,
// deletions, events that come twice, watches that are interrupted, and relists from a server that
// lags. What is told in all must be what the present slices say, what is told must have changed,
// and a list that goes back in time must change nothing.
func TestHistories(t *testing.T) {
	for seed := range uint64(*histories) {
		w := &world{t: t, r: rand.New(rand.NewPCG(seed, 1)), x: following(), now: t0,
			known: map[Port]map[health.Target]health.Endpoint{}}
		w.history = []map[string]*discovery.EndpointSlice{{}}
		at := func(string) string { return strconv.Itoa(len(w.history)) }
		for range 60 {
			w.now = w.now.Add(time.Second)
			present := w.history[len(w.history)-1]
			switch w.r.IntN(8) {
			case 0: // a resync, or the answer to a change of a label
				for _, s := range present {
					w.take(w.x.Apply(w.now, s.DeepCopy()))
				}
			case 1: // the watch was interrupted for some changes, and a list follows
				for range w.r.IntN(4) {
					w.change()
					w.gap = len(w.history) - 1
				}
				w.relist(present, w.history[len(w.history)-1])
				w.now = w.now.Add(settle)
				w.take(w.x.Tick(w.now, at))
			case 2: // a list goes back in time, and the watch comes forward again
				// Not before the last interruption: of a slice that came and went during it,
				// nothing was ever heard.
				back := max(w.gap, len(w.history)-1-w.r.IntN(6))
				before := len(told(w.x.Tick(w.now, at)))
				w.relist(present, w.history[back])
				w.check(present)
				w.now = w.now.Add(settle)
				w.take(w.x.Tick(w.now, func(string) string { return strconv.Itoa(back + 1) }))
				if before != 0 {
					t.Fatalf("seed %d: something was set aside", seed)
				}
				w.check(present)
				w.replay(back)
				w.check(present)
				w.now = w.now.Add(settle)
				w.take(w.x.Tick(w.now, at))
			default:
				name, s := w.change()
				if w.history[len(w.history)-1][name] == nil {
					w.take(w.x.Delete(w.now, s))
				} else {
					w.take(w.x.Apply(w.now, s))
				}
			}
			w.check(w.history[len(w.history)-1])
			if n := w.x.Behind(); n != 0 {
				t.Fatalf("seed %d: %d views are still set aside", seed, n)
			}
		}
	}
}

// relist does what an informer does with a list: it has what had, and gets got.
func (w *world) relist(had, got map[string]*discovery.EndpointSlice) {
	w.t.Helper()
	for _, s := range got {
		w.take(w.x.Apply(w.now, s))
	}
	for name, s := range had {
		if got[name] == nil {
			w.take(w.x.Missed(w.now, s))
		}
	}
}

// replay does what the watch does after a list as of back.
func (w *world) replay(back int) {
	w.t.Helper()
	for i := back + 1; i < len(w.history); i++ {
		for name, s := range w.history[i] {
			if w.history[i-1][name] != s {
				w.take(w.x.Apply(w.now, s))
			}
		}
		for name, s := range w.history[i-1] {
			if w.history[i][name] == nil {
				gone := s.DeepCopy()
				gone.ResourceVersion = strconv.Itoa(i + 1)
				w.take(w.x.Delete(w.now, gone))
			}
		}
	}
}

func versioned(version string, s *discovery.EndpointSlice) *discovery.EndpointSlice {
	s.ResourceVersion = version
	return s
}

// An etcd that was restored from a backup goes back for good: what it says counts after a while,
// and from then on at once.
func TestOlderForGood(t *testing.T) {
	x := following()
	at := func(string) string { return "60" }
	x.Apply(t0, versioned("100", made("one", web, "10.0.0.1@a ready")))
	x.Apply(t0, versioned("101", made("two", web, "10.0.0.2@b ready")))
	x.Delete(t0, versioned("102", made("three", web)))
	now := t0
	step := func(changes []PortChange, want string) {
		t.Helper()
		if got := told(changes); got != want {
			t.Fatalf("at %s: told %q, want %q", now.Sub(t0), got, want)
		}
	}
	step(x.Apply(now, versioned("50", made("one", web, "10.0.0.1@old ready"))), "")
	step(x.Missed(now, made("two", web)), "")
	step(x.Apply(now, versioned("51", made("three", web, "10.0.0.3@c ready"))), "")
	now = t0.Add(Patience - 1)
	step(x.Tick(now, at), "")
	// Another older view of the same slice does not put it off.
	step(x.Apply(now, versioned("55", made("one", web, "10.0.0.1@new ready"))), "")
	now = t0.Add(Patience)
	got := x.Tick(now, at)
	slices.SortFunc(got, func(a, b PortChange) int {
		return strings.Compare(told([]PortChange{a}), told([]PortChange{b}))
	})
	step(got, "shop/web http: 10.0.0.1:80@a gone 10.0.0.1:80@new+; shop/web http: 10.0.0.2:80@b gone; shop/web "+
		"http: 10.0.0.3:80@c+")
	step(x.Apply(now, versioned("61", made("one", web, "10.0.0.1@new unready"))), "shop/web http: 10.0.0.1:80@new-")
	step(x.Apply(now, versioned("62", made("two", web, "10.0.0.2@b ready"))), "shop/web http: 10.0.0.2:80@b+")
}

// A slice that a list lacks because it was deleted goes as soon as the watch says that the list was
// not an old one.
func TestMissedDeletion(t *testing.T) {
	x := following()
	x.Apply(t0, versioned("100", made("one", web, "10.0.0.1@a ready")))
	if got := told(x.Missed(t0, made("one", web))); got != "" {
		t.Fatalf("told %q before the watch has said how far it is", got)
	}
	now := t0.Add(settle)
	if got := told(x.Tick(now, func(string) string { return "" })); got != "" {
		t.Fatalf("told %q although nobody knows how far the watch is", got)
	}
	if got, want := told(x.Tick(now, func(string) string { return "100" })),
		"shop/web http: 10.0.0.1:80@a gone"; got != want {
		t.Fatalf("told %q, want %q", got, want)
	}
	// And an older list does not bring it back.
	if got := told(x.Apply(now, versioned("99", made("one", web, "10.0.0.1@a ready")))); got != "" {
		t.Fatalf("told %q by a list that is older than the deletion", got)
	}
	// Versions that cannot be compared, as those of a fake API server: at once.
	x.Apply(now, versioned("", made("two", web, "10.0.0.2@b ready")))
	if got, want := told(x.Missed(now, made("two", web))), "shop/web http: 10.0.0.2:80@b gone"; got != want {
		t.Fatalf("told %q, want %q", got, want)
	}
}

// A slice that has not changed must cost a walk, and no memory.
func TestUnchangedAllocatesNothing(t *testing.T) {
	a, b := hundred(), hundred()
	x := following()
	x.Apply(t0, a)
	if n := testing.AllocsPerRun(100, func() {
		x.Apply(t0, b)
		x.Apply(t0, a)
	}); n != 0 {
		t.Fatalf("%v allocations for a slice that has not changed", n)
	}
}

func hundred() *discovery.EndpointSlice {
	var list []string
	for i := range 100 {
		list = append(list, fmt.Sprintf("10.0.1.%d@%08d ready", i, i))
	}
	return versioned("7", made("one", web, list...))
}

// Whatever a slice claims to be, it is read without a panic, and taking it away leaves nothing.
func FuzzSlices(f *testing.F) {
	f.Add("10.0.0.1", "fd00::1%eth0", "http", int32(80), "IPv4")
	f.Add("", "::ffff:10.0.0.1", "", int32(-1), "FQDN")
	f.Fuzz(func(t *testing.T, one, two, port string, number int32, kind string) {
		x := following()
		s := made("one", web, "10.0.0.1@a ready", "10.0.0.2@b ready", "10.0.0.3@c")
		s.AddressType = discovery.AddressType(kind)
		s.Endpoints[0].Addresses, s.Endpoints[1].Addresses = []string{one}, []string{two, one}
		s.Endpoints[2].Addresses = nil
		s.Ports = append(s.Ports, discovery.EndpointPort{Name: &port, Port: &number}, discovery.EndpointPort{})
		w := &world{t: t, x: x, now: t0, known: map[Port]map[health.Target]health.Endpoint{}}
		w.take(x.Apply(t0, s))
		w.check(map[string]*discovery.EndpointSlice{"one": s})
		w.take(x.Delete(t0, s))
		if len(x.pods) != 0 || len(x.services) != 0 || len(w.known[Port{web, "http"}]) != 0 {
			t.Fatalf("something is left: %v %v %v", x.pods, x.services, w.known)
		}
	})
}
