package health

import (
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// FuzzChangeIsReplace: whatever EndpointSlices said, the difference to what they say now leads to
// the same set as the whole list does, in what is wanted, in health, and in what is planned; and a
// list that is told twice changes nothing.
func FuzzChangeIsReplace(f *testing.F) {
	for seed := range uint64(20) {
		f.Add(script(seed, 60))
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 1000 {
			t.Skip("long enough")
		}
		uids := []UID{"a", "b", "c", ""}
		whole, steps := newWorld(t), newWorld(t)
		both := []*world{whole, steps}
		for _, w := range both {
			w.Synced()
			w.SetCheck(w.now, "web", everySecond)
		}
		said := map[Target]bool{}
		for len(script) >= 8 {
			lot := script[:8]
			script = script[8:]
			var all []Endpoint
			says, dying := map[Target]bool{}, map[Target]bool{}
			for _, b := range lot {
				e := Endpoint{
					Target: Target{uids[b&3], netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, b >> 2 & 3}), 80)},
				}
				switch b >> 4 & 7 {
				case 0:
					continue
				case 1:
				case 2:
					e.Terminating = b>>7 == 1
				default:
					e.Routable = true
				}
				all = append(all, e)
				says[e.Target] = says[e.Target] || e.Routable
				dying[e.Target] = dying[e.Target] || e.Terminating
			}
			// Who makes differences says one thing of a target, not two in one breath.
			all = slices.DeleteFunc(all, func(e Endpoint) bool { return dying[e.Target] && e.Routable })
			for target := range dying {
				says[target] = says[target] && !dying[target]
			}
			var changes []Change
			for _, e := range all {
				if routable := says[e.Target]; dying[e.Target] || said[e.Target] != routable {
					changes = append(changes, Change{Endpoint: e})
				}
			}
			// Of a target that is listed twice the last change counts, and routable wins.
			routable := func(c Change) bool { return c.Routable }
			changes = append(slices.DeleteFunc(slices.Clone(changes), routable),
				slices.DeleteFunc(changes, func(c Change) bool { return !routable(c) })...)
			for target := range said {
				if _, still := says[target]; !still {
					changes = append(changes,
						Change{Endpoint: Endpoint{Target: target, Routable: true, Terminating: true}, Unlisted: true})
				}
			}
			said = says
			whole.list("web", all)
			steps.Change(steps.now, "web", changes)
			for _, w := range both {
				w.step()
				if lot[0]&1 == 1 {
					for uid := range maps.Keys(map[UID]bool{"a": true, "b": true}) {
						for target := range says {
							if target.UID == uid {
								w.outcome(Key{"web", target}, Outcome{Kind: Success + OutcomeKind(lot[1]%4)})
							}
						}
					}
				}
				verify(t, w.Set, func() string { return "" })
			}
			a, b := whole.Targets(), steps.Targets()
			if diff := cmp.Diff(a, b, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
				t.Fatalf("the whole list leads elsewhere (-whole +changes):\n%s", diff)
			}
			if diff := cmp.Diff(whole.Pending(), steps.Pending(),
				cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
				t.Fatal(diff)
			}
			planned := whole.schedule.planned
			whole.list("web", all)
			if diff := cmp.Diff(a, whole.Targets(),
				cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" ||
				whole.schedule.planned != planned {
				t.Fatalf("the same list again changes something:\n%s", diff)
			}
			for _, w := range both {
				w.pass(time.Second)
			}
		}
		// apply(have, Diff(have, want)) == want: once the gateway has done what is pending, it
		// routes to what is chosen, and to nothing else.
		for _, w := range both {
			w.settle()
			routed := map[Key]bool{}
			for k, s := range w.proxy.now {
				if s.routed {
					routed[k] = true
				}
			}
			chosen := map[Key]bool{}
			for _, d := range w.Targets() {
				if d.Why == WhyChosen || d.Why == WhyFailingOpen {
					chosen[d.Key] = true
				}
			}
			if diff := cmp.Diff(text(chosen), text(routed)); diff != "" {
				t.Fatalf("the proxy routes otherwise (-chosen +routed):\n%s", diff)
			}
		}
	})
}
