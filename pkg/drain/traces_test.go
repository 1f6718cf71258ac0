package drain

import (
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write what happens into the traces")

// Each file in testdata/traces is prose with commands, which begin with ">". What a ledger does
// then is written below each command, so that a change of the protocol is reviewed as prose. The
// commands are those of [trace.do].
//
// To write the files again: go test ./pkg/drain -run TestTraces -update.
func TestTraces(t *testing.T) {
	files, err := filepath.Glob("testdata/traces/*.txt")
	if err != nil || len(files) < 8 {
		t.Fatalf("%d traces, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			x, got := &trace{T: t, replicas: map[string]*replica{}}, ""
			for line := range strings.Lines(string(text)) {
				command, ok := strings.CutPrefix(line, "> ")
				switch {
				case ok:
					got += line + x.do(strings.Fields(command))
				case !strings.HasPrefix(line, "      "):
					got += line
				}
			}
			if got == string(text) {
				return
			}
			if !*update {
				t.Errorf("%s has another outcome: run with -update, and read the difference", file)
			} else if err := os.WriteFile(file, []byte(got), 0o666); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// trace is some replicas of the coordinator, on one clock.
type trace struct {
	*testing.T
	passed   time.Duration
	replicas map[string]*replica
}

// replica is one ledger, with what was last written of each drain, and what each agent was told.
type replica struct {
	*world
	expected []Expected
	written  map[string]string
	told     map[AgentID]uint64
	// before is what Told was before the agent was told something last.
	before map[AgentID]uint64
}

func (x *trace) replica(name string) *replica {
	r := x.replicas[name]
	if r == nil {
		r = &replica{newWorld(x.T), nil, map[string]string{}, map[AgentID]uint64{}, map[AgentID]uint64{}}
		r.pass(x.passed)
		x.replicas[name] = r
	}
	return r
}

// do carries out a command and returns what follows from it. A command may begin with the name of
// a replica, as "second:". Without, it is for the first. The next word is the subject, the one
// after it what happens to it.
func (x *trace) do(words []string) (follows string) {
	of, ok := strings.CutSuffix(words[0], ":")
	if ok {
		words = words[1:]
	} else {
		of = "first"
	}
	r, id, p, rest := x.replica(of), AgentID(words[0]), pod(words[0]), words[2:]
	services, targets := options(rest)
	switch verb := words[1]; verb {
	case "passes": // DURATION passes
		x.passed += x.duration(words[0])
		for _, name := range slices.Sorted(maps.Keys(x.replicas)) {
			r := x.replicas[name]
			r.now = t0.Add(x.passed)
			look, _ := r.Tick(r.now)
			for _, p := range look {
				follows += x.line(name, "the API server is asked whether %s is terminating", p.Name)
			}
		}
	case "routes": // AGENT routes [SERVICE ...]
		if r.sessions[id] == 0 {
			r.sessions[id], r.told[id] = r.Connect(r.now, id, Hello{}), 0
		}
		if repeat, _ := r.Declare(id, r.sessions[id], "", routes(services...)); repeat {
			r.told[id] = 0
		}
	case "observes": // AGENT observes as POPULATION
		r.sessions[id], r.told[id] = r.Connect(r.now, id, Hello{Observes: true}), 0
		r.observeAs(id, rest[1])
	case "listed": // AGENT listed ready, or unready: by the API
		r.expected = slices.DeleteFunc(r.expected, func(e Expected) bool { return e.ID == id })
		r.expected = append(r.expected, Expected{ID: id, Name: words[0], Ready: rest[0] == "ready"})
		r.Expect(r.now, r.expected)
	case "disconnects": // AGENT disconnects
		r.Disconnect(r.now, id, r.sessions[id])
		delete(r.sessions, id)
	case "leaves": // AGENT leaves
		r.Leave(id, r.sessions[id])
	// AGENT reports STATE of POD [in SERVICE] [quiet] [late], or sees at the barrier. Late: it is
	// about the drain before this one.
	case "reports", "sees":
		report := Report{UID: pod(rest[2]).UID, NoConnections: slices.Contains(rest, "quiet")}
		x.state(rest[0], &report.State)
		if verb == "sees" {
			report.Gate = AtBarrier
		}
		if len(rest) > 4 && rest[3] == "in" {
			report.Kept = "shop/" + rest[4]
		}
		if rest[len(rest)-1] == "late" {
			report.Number = r.at(AtHold, report.UID).number - 1
		}
		r.report(id, report)
	// AGENT acknowledges STATE [but STATE of POD] [late]: of all that it was told. Late: it had not
	// read yet what it was told last.
	case "acknowledges":
		up := UpTo{Revision: r.agents[id].told}
		if rest[len(rest)-1] == "late" {
			up.Revision = r.before[id]
		}
		var but []Report
		if len(rest) > 4 {
			uid := pod(rest[4]).UID
			but = []Report{{UID: uid, Number: r.at(AtHold, uid).number}}
			x.state(rest[2], &but[0].State)
		}
		x.state(rest[0], &up.State)
		r.Report(r.now, r.now, id, r.sessions[id], &up, but)
	case "deleted", "restarted": // POD deleted SERVICE[=USABLE+USABLE] ...
		s := r.Ask(r.now, p, targets, Place{Restart: verb == "restarted"})
		r.Hold(p.UID)(r.now, s.Phase == Released) // it is answered at once
	case "terminating": // POD terminating
		r.GatePassed(r.now, AtHold, p.UID)
	case "barrier": // POD barrier AGENT SERVICE [last] [stated=DURATION]
		b := Barrier{Pod: p, By: AgentID(rest[0]), Services: services[1:2], Since: r.now, Bound: 30 * time.Second,
			Targets: []netip.AddrPort{netip.MustParseAddrPort("10.1.0.7:0")}, Last: slices.Contains(rest, "last")}
		if stated, ok := strings.CutPrefix(rest[len(rest)-1], "stated="); ok {
			b.Stated = x.duration(stated)
		}
		r.OpenBarrier(r.now, b)
	case "gone": // POD gone
		r.GatePassed(r.now, AtBarrier, p.UID)
	case "lives": // POD lives
		r.NotTerminating(r.now, p.UID)
	case "ready": // POD ready
		r.ReadyAgain(r.now, p.UID, r.now)
	case "polls", "adopts": // REPLICA polls REPLICA
		r = x.replica(words[0])
		r.Polled(r.now, []Shared{x.replica(rest[0]).Shared(r.now)}, verb == "adopts")
	default:
		x.Fatalf("no such command: %s", strings.Join(words, " "))
	}
	for _, name := range slices.Sorted(maps.Keys(x.replicas)) {
		follows += x.changes(name, x.replicas[name])
	}
	if follows == "" && words[1] != "routes" && words[1] != "observes" {
		follows = "      nothing follows\n"
	}
	return follows
}

// options reads the Services of a command, with their usable targets where these are named.
func options(words []string) (services []Service, targets []Targets) {
	for _, w := range words {
		name, pods, known := strings.Cut(w, "=")
		s := Service{"shop", name}
		services, targets = append(services, s), append(targets, Targets{Service: s})
		if known {
			targets[len(targets)-1] = usable(s, strings.Split(pods, "+")...)
		}
	}
	return services, targets
}

func (x *trace) state(text string, into *State) {
	if err := into.UnmarshalText([]byte(text)); err != nil {
		x.Fatal(err)
	}
}

func (x *trace) duration(text string) time.Duration {
	d, err := time.ParseDuration(text)
	if err != nil {
		x.Fatal(err)
	}
	return d
}

func (x *trace) line(replica, format string, args ...any) string {
	if len(x.replicas) > 1 {
		format = replica + ": " + format
	}
	return fmt.Sprintf("      %4s  "+format+"\n", append([]any{x.passed}, args...)...)
}

// changes says which drains of a replica are not what they were, and what it tells agents.
func (x *trace) changes(name string, r *replica) (text string) {
	uids := slices.Sorted(maps.Keys(r.subjects))
	for _, uid := range uids {
		for gate := range gates {
			s := r.Status(r.now, gate, uid)
			is := status(s)
			key := fmt.Sprint(uid, gate)
			if s.Phase != PhaseUnknown && r.written[key] != is {
				r.written[key] = is
				text += x.line(name, "%s at the %s: %s", s.Pod.Name, gate, is)
			}
		}
	}
	for _, s := range r.Suspensions() {
		how := "is suspended"
		if s.Over {
			how = "is not suspended any more"
		}
		text += x.line(name, "%s %s", s.Agent, how)
	}
	for _, id := range slices.Sorted(maps.Keys(r.sessions)) {
		before := r.agents[id].told
		open, released, _, next := r.ChangesFor(id, r.told[id])
		if len(open) > 0 {
			r.before[id] = before
		}
		r.told[id] = next
		for _, o := range open {
			if o.Watch != nil {
				text += x.line(name, "-> %s: watch %s", id, o.Watch.Pod.Name)
			} else {
				text += x.line(name, "-> %s: exclude %s", id, o.Pod.Name)
			}
		}
		for _, o := range released {
			what, pod := "readmit", strings.TrimPrefix(string(o.UID), "uid-")
			switch {
			case o.Gate == AtBarrier:
				what = "watch no more:"
			case o.Terminating:
				what = "never readmit"
			}
			text += x.line(name, "-> %s: %s %s", id, what, pod)
		}
	}
	return text
}

// status is a drain in words.
func status(s Status) string {
	text := s.Phase.String()
	if s.Reason != ReasonNone {
		text += ", " + s.Reason.String()
	}
	for i, a := range s.Waiting {
		text += []string{"; waits for", ","}[min(i, 1)] + fmt.Sprintf(" %s (%s)", a.Agent, a.State)
	}
	for _, a := range s.Suspended {
		text += fmt.Sprintf("; %s is suspended", a.Agent)
	}
	for _, a := range append(s.Lost, s.Away...) {
		text += fmt.Sprintf("; %s is lost", a.Agent)
	}
	if s.Waits() {
		text += fmt.Sprintf("; until %s", s.Deadline.Sub(t0))
	}
	return text
}
