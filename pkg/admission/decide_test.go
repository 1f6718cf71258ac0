package admission

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/keys"
)

// matching are facts that make each row of the table match, and no other.
var matching = map[Reason]func(*Facts){
	DryRun:               func(f *Facts) { f.DryRun = true },
	Excluded:             func(f *Facts) { f.Excluded = true },
	ModeOff:              func(f *Facts) { f.Mode = keys.Off },
	MirrorPod:            func(f *Facts) { f.Mirror = true },
	BreakGlass:           func(f *Facts) { f.BreakGlass = true },
	Terminating:          func(f *Facts) { f.Terminating = true },
	Finished:             func(f *Facts) { f.Finished = true },
	NotRunning:           func(f *Facts) { f.NotRunning = true },
	Forced:               func(f *Facts) { f.Forced = true },
	NamespaceTerminating: func(f *Facts) { f.NamespaceTerminating = true },
	DisruptionTarget:     func(f *Facts) { f.DisruptionTarget = true },
	NodeLost:             func(f *Facts) { f.NodeLost = true },
	Observed:             func(f *Facts) { f.Mode = keys.Observe },
	Starting:             func(f *Facts) { f.Cold, f.Up = true, 10*time.Second-1 },
	Cold:                 func(f *Facts) { f.Cold = true },
	UnknownPod:           func(f *Facts) { f.Unknown = true },
	NotListed:            func(f *Facts) { f.Listed = false },
	NoAgents:             func(f *Facts) { f.Agents, f.CouldRoute = 0, false },
	NotRouted:            func(f *Facts) { f.CouldRoute = false },
	NotReady:             func(f *Facts) { f.Ready, f.NotReadyFor = false, 10*time.Second+1 },
	Budget:               func(f *Facts) { f.Operation, f.Budget = Evict, "no room" },
	BudgetBroken:         func(f *Facts) { f.Operation, f.BudgetBroken = Evict, true },
	CoolOff:              func(f *Facts) { f.Refused = 2 },
	LastTarget:           func(f *Facts) { f.LastOf = "shop/web" },
	BarrierWaits:         barred,
	Draining:             func(*Facts) {},
}

// barred are the facts of a pod whose barrier will wait.
func barred(f *Facts) {
	f.Mode, f.Barred = keys.Enforce, true
	f.Bound, f.Own, f.Grace = 30*time.Second, 30*time.Second, time.Minute
	f.Hooks = coordinator.Hooks{IdleBound: 10 * time.Second, Connected: true, Allowed: true, Heard: true}
}

// Each fact without which a barrier may not wait makes the hold wait for Idle.
func TestBarrierWillWait(t *testing.T) {
	for name, c := range map[string]struct {
		set  func(*Facts)
		want string // in the reason why not; empty: it waits
	}{
		"all is well":                        {func(*Facts) {}, ""},
		"a container without the hook":       {func(f *Facts) { f.Barred = false }, "preStop hook"},
		"mode observe":                       {func(f *Facts) { f.Mode = keys.Observe }, "observe"},
		"mode off":                           {func(f *Facts) { f.Mode = keys.Off }, "off"},
		"just enough grace":                  {func(f *Facts) { f.Grace = 40 * time.Second }, ""},
		"deleted with too short a grace":     {func(f *Facts) { f.Grace = 39 * time.Second }, "grace period 39s"},
		"deleted with grace 1":               {func(f *Facts) { f.Grace = time.Second }, "grace period 1s"},
		"a negative grace is 1":              {func(f *Facts) { f.Grace = -time.Hour }, "grace period"},
		"a short bound":                      {func(f *Facts) { f.Bound = 10 * time.Second }, ""},
		"too short a bound":                  {func(f *Facts) { f.Bound = 9 * time.Second }, "bound 9s"},
		"a longer Idle bound":                {func(f *Facts) { f.Hooks.IdleBound = 31 * time.Second }, "31s"},
		"no agent of the node is connected":  {func(f *Facts) { f.Hooks.Connected = false }, "connected"},
		"the agent may not ask":              {func(f *Facts) { f.Hooks.Allowed = false }, "right"},
		"half of the places are taken":       {func(f *Facts) { f.Hooks.Crowded = true }, "too many barriers"},
		"a workload whose hooks never asked": {func(f *Facts) { f.Hooks.Heard = false }, "workload"},
	} {
		t.Run(name, func(t *testing.T) {
			f := plain()
			barred(&f)
			c.set(&f)
			will, got := barrierWillWait(f)
			if will != (c.want == "") || will != (got == "") || !strings.Contains(got, c.want) {
				t.Errorf("%t, %q; want %q", will, got, c.want)
			}
			want := BarrierWaits
			switch {
			case f.Mode == keys.Observe:
				want = Observed
			case f.Mode == keys.Off:
				want = ModeOff
			case c.want != "":
				want = Draining
			}
			if v := Decide(f); v.Reason != want {
				t.Errorf("decided by %s, want %s", v.Reason, want)
			}
		})
	}
}

// plain are the facts of a ready pod that a gateway routes to: its deletion waits.
func plain() Facts {
	return Facts{Operation: Delete, Up: time.Hour, Listed: true, Ready: true, Agents: 1, CouldRoute: true}
}

// Of any two rows that match, the upper one wins. Without this, say, a pod on a lost node is denied
// for ten seconds after each start. Which row is above which is reviewed in docs/how-it-works.md.
func TestDecideInOrder(t *testing.T) {
	for i, upper := range Table {
		for _, lower := range Table[i:] {
			f := plain()
			matching[lower.Reason](&f)
			matching[upper.Reason](&f)
			got := Decide(f)
			if got.Reason != upper.Reason || got.Action != upper.Answer.Action || got.Warn != upper.Answer.Warn {
				t.Errorf("%s and %s: %+v", upper.Reason, lower.Reason, got)
			}
			if (got.Action == Deny || got.Warn) != (got.Message != "") || got.Words == "" {
				t.Errorf("%s: words %q, message %q", got.Reason, got.Words, got.Message)
			}
		}
	}
}

// A word of an operator is kept also in observe, and no gateway is told: it is to be seen what they
// do by themselves.
func TestNoGatewayIsToldInObserve(t *testing.T) {
	for _, r := range Table {
		f := plain()
		matching[r.Reason](&f)
		f.Mode = keys.Observe
		if got := Decide(f); got.Action != Allow || got.Unroute {
			t.Errorf("%s: %+v", r.Reason, got)
		}
	}
}

func TestMessages(t *testing.T) {
	for reason, want := range map[Reason]string{
		Starting: "has just started", Cold: "no view of the cluster", Budget: violates + " no room",
		CoolOff:    "deletion was allowed 2 times within 10m0s",
		LastTarget: "no other pod of Service shop/web is ready",
	} {
		f := plain()
		matching[reason](&f)
		if got := Decide(f); !strings.Contains(got.Message, want) {
			t.Errorf("%s: %q, want %q", reason, got.Message, want)
		}
	}
}

var update = flag.Bool("update", false, "write the table into docs/how-it-works.md")

// What is documented is what is decided: the order, the words and the answer of each row.
func TestTheTableIsDocumented(t *testing.T) {
	const page, head = "../../docs/how-it-works.md", "| reason | the pod | answer |\n|---|---|---|\n"
	var table strings.Builder
	for _, r := range Table {
		answer := "yes at once"
		switch {
		case r.Answer.Unroute:
			answer += "; gateways are told"
		case r.Answer.Warn:
			answer += ", with a warning"
		case r.Answer.Action == Deny:
			answer = "429, and nothing is unrouted"
		case r.Answer.Action == Drain:
			answer = "the drain is opened; yes when it is released, else 429"
			if r.Reason == BarrierWaits {
				answer = "the drain is opened; yes when every gateway has reported `Removed`, else 429"
			}
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s |\n", r.Reason, r.Words, answer)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, _ := strings.Cut(string(text), head)
	have, after, found := strings.Cut(rest, "\n\n")
	if !found {
		t.Fatalf("%s has no such table", page)
	}
	if have+"\n" == table.String() {
		return
	}
	if !*update {
		t.Fatalf("%s has another table: go test ./pkg/admission -run TestTheTable -update", page)
	}
	if err := os.WriteFile(page, []byte(before+head+table.String()+"\n"+after), 0o666); err != nil {
		t.Fatal(err)
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
		"not ready for a day and published":    {func(f *Facts) { f.NotReadyFor = 24 * time.Hour }, Draining},
		"not ready in slices, ready itself":    {func(f *Facts) { f.Ready = false }, Draining},
		"a budget does not concern a deletion": {func(f *Facts) { f.Budget = "no room" }, Draining},
		"an eviction with room":                {func(f *Facts) { f.Operation = Evict }, Draining},
		"one allowed deletion was refused":     {func(f *Facts) { f.Refused = 1 }, Draining},
		"off the lists, and its drain is open": {func(f *Facts) { f.Listed, f.Draining = false, true }, Draining},
		"unready for long, and its drain is open": {func(f *Facts) {
			f.Ready, f.NotReadyFor, f.Draining = false, time.Minute, true
		}, Draining},
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
	for _, r := range Table {
		for name, set := range map[string]func(*Facts){
			"not ready": func(f *Facts) { f.Ready = false },
			"no agent":  func(f *Facts) { f.CouldRoute = false },
			// The API server may still refuse it for its budget, again and again.
			"evicted": func(f *Facts) { f.Operation = Evict },
		} {
			f := plain()
			matching[r.Reason](&f)
			if got := Decide(f); got.Unroute != r.Answer.Unroute {
				t.Errorf("%s: unrouted is %t", r.Reason, got.Unroute)
			}
			set(&f)
			if got := Decide(f); got.Unroute {
				t.Errorf("%s and %s: unrouted", r.Reason, name)
			}
		}
	}
}
