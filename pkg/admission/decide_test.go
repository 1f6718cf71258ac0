package admission

import (
	"strings"
	"testing"
	"time"
)

// row is one row of the table: the facts that make it match, and what it says.
type row struct {
	name string
	set  func(*Facts)
	want Verdict
	// text is a part of the message. Empty: there is none.
	text string
}

// table is the design's, row by row; where it differs a comment says why. Each row matches alone,
// and wins against every later one.
var table = []row{
	// dry run, in either place: now.
	{"dry run", func(f *Facts) { f.DryRun = true }, Verdict{Action: Allow, Reason: DryRun}, ""},

	// kube-system, the own namespace, opted out, break-glass annotation: not called, else now.
	// Whoever breaks the glass wants the pod gone, not its requests lost: gateways are told.
	{"excluded", func(f *Facts) { f.Excluded = true }, Verdict{Action: Allow, Reason: Excluded}, ""},
	{"opted out", func(f *Facts) { f.OptedOut = true }, Verdict{Action: Allow, Reason: OptedOut}, ""},
	// Deleting a mirror pod does not stop its static pod: nothing that is said of it unroutes it.
	{"mirror pod", func(f *Facts) { f.Mirror = true }, Verdict{Action: Allow, Reason: MirrorPod}, ""},
	{"break glass", func(f *Facts) { f.BreakGlass = true }, Verdict{Action: Allow, Reason: BreakGlass, Unroute: true},
		""},

	// terminating, Succeeded, Failed, Pending, unscheduled, group system:nodes, grace 0: now;
	// unroute in the background if routed. A terminating pod is known to agents as such: it is not
	// unrouted.
	{"terminating", func(f *Facts) { f.Terminating = true }, Verdict{Action: Allow, Reason: Terminating}, ""},
	{"finished", func(f *Facts) { f.Finished = true }, Verdict{Action: Allow, Reason: Finished, Unroute: true}, ""},
	{"not running", func(f *Facts) { f.NotRunning = true }, Verdict{Action: Allow, Reason: NotRunning, Unroute: true},
		""},
	{"by node", func(f *Facts) { f.ByNode = true }, Verdict{Action: Allow, Reason: ByNode, Unroute: true}, ""},
	{"forced", func(f *Facts) { f.Forced = true }, Verdict{Action: Allow, Reason: Forced, Unroute: true}, ""},

	// namespace terminating, DELETECOLLECTION by the namespace controller: now; unroute in the
	// background.
	{"namespace terminating", func(f *Facts) { f.NamespaceTerminating = true },
		Verdict{Action: Allow, Reason: NamespaceTerminating, Unroute: true}, ""},

	// DisruptionTarget=True, node NotReady or out of service: now; unroute in the background.
	{"disruption target", func(f *Facts) { f.DisruptionTarget = true },
		Verdict{Action: Allow, Reason: DisruptionTarget, Unroute: true}, ""},
	{"node lost", func(f *Facts) { f.NodeLost = true }, Verdict{Action: Allow, Reason: NodeLost, Unroute: true}, ""},

	// caches cold for more than 10 s after start: now; in the first 10 s 429.
	// Further up than in the design: all that follows rests on caches.
	{"starting", func(f *Facts) { f.Cold, f.Up = true, 10*time.Second-1 }, Verdict{Action: Deny, Reason: Starting},
		"has just started"},
	{"cold", func(f *Facts) { f.Cold = true }, Verdict{Action: Allow, Reason: Cold, Warn: true},
		"no view of the cluster"},

	// no agent can route the pod and no EndpointSlice lists it: now.
	// Either is enough, docs/decisions/0005. With no agent expected, too (rule 7); at once, because
	// agents are part of what is cold at first.
	{"unknown pod", func(f *Facts) { f.Unknown = true }, Verdict{Action: Allow, Reason: UnknownPod}, ""},
	{"not listed", func(f *Facts) { f.Listed = false }, Verdict{Action: Allow, Reason: NotListed}, ""},
	{"no agents", func(f *Facts) { f.Agents, f.CouldRoute = 0, false }, Verdict{Action: Allow, Reason: NoAgents}, ""},
	{"not routed", func(f *Facts) { f.CouldRoute = false }, Verdict{Action: Allow, Reason: NotRouted}, ""},

	// not ready in every slice for more than 10 s, and not publishNotReadyAddresses: now.
	// Slices that publish unready addresses list the pod as ready.
	{"not ready", func(f *Facts) { f.Ready, f.NotReadyFor = false, 10*time.Second+1 },
		Verdict{Action: Allow, Reason: NotReady}, ""},

	// eviction whose PodDisruptionBudget has nothing left, or whose budget our open drains use up:
	// 429 without unrouting. Deletions that drain count too, not only evictions: they will be gone
	// when this one comes to the API server. Unready pods are asked about as the API server does.
	// What it refuses with another code than 429 is left to it.
	{"budget", func(f *Facts) { f.Operation, f.Budget = Evict, "no room" }, Verdict{Action: Deny, Reason: Budget},
		"no room"},
	{"budgets that the API server refuses by itself", func(f *Facts) { f.Operation, f.BudgetBroken = Evict, true },
		Verdict{Action: Allow, Reason: BudgetBroken}, ""},

	// two drains of this UID in 10 min that were allowed and yet not deleted: now, cool-off.
	{"cool-off", func(f *Facts) { f.Refused = 2 }, Verdict{Action: Allow, Reason: CoolOff, Warn: true},
		"let go 2 times within 10m0s"},

	// last usable target of a Service: if another ready pod exists that an owed gateway does not
	// route yet: hold; else now, and keep routing to it. EndpointSlices say whether another exists;
	// that a gateway does not route it yet is what its agent reports, as Kept, and holds the drain.
	{"last target", func(f *Facts) { f.LastOf = "shop/web" }, Verdict{Action: Allow, Reason: LastTarget, Warn: true},
		"no other pod of Service shop/web is ready"},

	// too many holds, more drains than the bound: 429. Otherwise: drain; hold; allow when Released,
	// else 429. The caps are the ledger's.
	{"otherwise", func(*Facts) {}, Verdict{Action: Drain, Reason: Draining}, ""},
}

// plain are the facts of a ready pod that a gateway routes to: its deletion waits.
func plain() Facts {
	return Facts{Operation: Delete, Up: time.Hour, Listed: true, Ready: true, Agents: 1, CouldRoute: true}
}

func TestDecide(t *testing.T) {
	for _, r := range table {
		t.Run(r.name, func(t *testing.T) {
			f := plain()
			r.set(&f)
			got := Decide(f)
			message := got.Message
			got.Message = ""
			if got != r.want {
				t.Errorf("%+v, want %+v", got, r.want)
			}
			if !strings.Contains(message, r.text) || r.text == "" && message != "" {
				t.Errorf("message %q, want %q", message, r.text)
			}
			if (got.Action == Deny || got.Warn) && message == "" {
				t.Error("nobody is told why")
			}
		})
	}
}

// Of any two rows that match, the upper one wins. Without this, say, a pod on a lost node is denied
// for ten seconds after each start.
func TestDecideInOrder(t *testing.T) {
	for i, upper := range table {
		for _, lower := range table[i+1:] {
			f := plain()
			lower.set(&f)
			upper.set(&f)
			if got := Decide(f); got.Reason != upper.want.Reason {
				t.Errorf("%q and %q: %s, want %s", upper.name, lower.name, got.Reason, upper.want.Reason)
			}
		}
	}
}

func TestDecideAtItsEdges(t *testing.T) {
	for name, c := range map[string]struct {
		set  func(*Facts)
		want Reason
	}{
		"cold for 10 s": {func(f *Facts) { f.Cold, f.Up = true, 10*time.Second }, Cold},
		"not ready for 10 s": {func(f *Facts) { f.Ready, f.NotReadyFor = false, 10*time.Second },
			Draining},
		"not ready for a day and published":       {func(f *Facts) { f.NotReadyFor = 24 * time.Hour }, Draining},
		"not ready in slices, ready itself":       {func(f *Facts) { f.Ready = false }, Draining},
		"a budget does not concern a deletion":    {func(f *Facts) { f.Budget = "no room" }, Draining},
		"an eviction with room":                   {func(f *Facts) { f.Operation = Evict }, Draining},
		"one drain was in vain":                   {func(f *Facts) { f.Refused = 1 }, Draining},
		"an agent that the API does not list yet": {func(f *Facts) { f.Agents = 0 }, Draining},
	} {
		t.Run(name, func(t *testing.T) {
			f := plain()
			c.set(&f)
			if got := Decide(f); got.Reason != c.want {
				t.Errorf("%s, want %s", got.Reason, c.want)
			}
		})
	}
}

// Who is not routed to is not unrouted: an unknown pod must not cost agents anything.
func TestDecideUnroutesOnlyWhatIsRouted(t *testing.T) {
	for _, r := range table {
		for name, set := range map[string]func(*Facts){
			"not ready": func(f *Facts) { f.Ready = false },
			"no agent":  func(f *Facts) { f.CouldRoute = false },
		} {
			f := plain()
			r.set(&f)
			set(&f)
			if got := Decide(f); got.Unroute {
				t.Errorf("%s and %s: unrouted", r.name, name)
			}
		}
	}
}

func TestEveryReasonOfTheTableHasASeries(t *testing.T) {
	for _, r := range table {
		found := false
		for _, reason := range reasons {
			found = found || reason == r.want.Reason
		}
		if !found {
			t.Errorf("%s is not in reasons", r.want.Reason)
		}
	}
}
