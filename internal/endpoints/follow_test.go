package endpoints

import (
	"flag"
	"fmt"
	"math/rand/v2"
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
		{"of a Service that is not followed", take, made("else", types.NamespacedName{Namespace: "shop", Name: "else"},
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

// A Service is given a second port, for which its first must get a name. Its pool had been emptied.
func TestASecondPort(t *testing.T) {
	x := following()
	for _, step := range []struct {
		why   string
		ports []string
		want  string
	}{
		{"one port", []string{":80"}, "shop/api : 10.0.0.1:80@a+"},
		{"a second one", []string{"metrics:9090", "http:80"}, ""},
		{"the first has another number", []string{"metrics:80", "http:8080"},
			"shop/api : 10.0.0.1:80@a gone 10.0.0.1:8080@a+"},
		{"and another name", []string{"web:8080", "metrics:80"}, ""},
		{"it is another port", []string{"grpc:81", "metrics:80"}, "shop/api : 10.0.0.1:8080@a gone"},
		{"the only one", []string{"metrics:9090"}, "shop/api : 10.0.0.1:9090@a+"},
	} {
		s := made("one", api, "10.0.0.1@a ready")
		s.Ports = ports(step.ports...)
		got, ambiguous := told(x.Apply(t0, s)), x.Ambiguous(Port{api, ""})
		if got != step.want || ambiguous != (step.why == "it is another port") {
			t.Fatalf("%s: told %q, want %q; ambiguous %t", step.why, got, step.want, ambiguous)
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
			w.t.Fatalf("%v: told %v, want %v (index %q)", p, w.known[p], want, said(w.x, p.Service, p.Name))
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
		// Of api no slice has several: which one it means depends on what was before.
		if s.Labels[discovery.LabelServiceName] == web.Name {
			s.Ports = ports("metrics:90", "http:80")
		}
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
// deletions, events that come twice, and watches that are interrupted. What is told in all must be
// what the present slices say, and what is told must have changed.
func TestHistories(t *testing.T) {
	for seed := range uint64(*histories) {
		w := &world{t: t, r: rand.New(rand.NewPCG(seed, 1)), x: following(), now: t0,
			known: map[Port]map[health.Target]health.Endpoint{}}
		w.history = []map[string]*discovery.EndpointSlice{{}}
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
				}
				w.relist(present, w.history[len(w.history)-1])
			default:
				name, s := w.change()
				if w.history[len(w.history)-1][name] == nil {
					w.take(w.x.Delete(w.now, s))
				} else {
					w.take(w.x.Apply(w.now, s))
				}
			}
			w.check(w.history[len(w.history)-1])
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
			w.take(w.x.Delete(w.now, s))
		}
	}
}

func versioned(version string, s *discovery.EndpointSlice) *discovery.EndpointSlice {
	s.ResourceVersion = version
	return s
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
