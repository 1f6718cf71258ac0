package drain

import (
	"cmp"
	"slices"
	"time"
)

// What follows is for those who look at a ledger and change nothing. To look costs what there is to see: an agent at each drain that it
// may owe.

// Word is what one agent that owes a drain says of it.
type Word struct {
	Agent AgentID
	// Name is namespace/name of the agent's pod, or its ID if the API does not list it.
	Name  string
	State State
	Proof Proof
	// Heard is as of when the report that counts was true. Zero: none counts, and State is StateUnknown.
	Heard     time.Time
	Connected bool
	// Suspended says that it is told of the drain and not waited for.
	Suspended bool
}

// Words returns what the agents that owe the drain of uid say at now, and how many they are. The words are at most most: those who are least
// far come first, then it goes by names. A drain that is not open has none.
func (l *Ledger) Words(now time.Time, uid UID, most int) (words []Word, owed int) {
	if d := l.at(AtHold, uid); d != nil && d.open {
		return l.words(now, d, most)
	}
	return nil, 0
}

func (l *Ledger) words(now time.Time, d *drain, most int) (words []Word, owed int) {
	// Of many only a few are asked for: those of each state are kept apart, and no more of them than that.
	var of [Idle + 1][]Word
	said := l.hearing(d)
	for _, a := range l.owing(d) {
		if owes, _ := l.owes(now, a); !owes {
			continue
		}
		owed++
		r := said[a.slot]
		state, _, _ := l.word(now, r, d)
		if state > Idle || len(of[state]) >= most {
			continue
		}
		w := Word{Agent: a.id, Name: a.name, State: state, Connected: a.session != 0}
		w.Suspended, _ = l.waived(now, a, d)
		if state != StateUnknown {
			w.Proof, w.Heard = r.Proof, r.at
		}
		of[state] = append(of[state], w)
	}
	words = slices.Concat(of[:]...)
	return words[:min(len(words), most)], owed
}

// Oldest returns the pods of the oldest open drains, at most most, and how many are open.
func (l *Ledger) Oldest(most int) (oldest []UID, open int) { return l.oldest(AtHold, most) }

func (l *Ledger) oldest(gate Gate, most int) (oldest []UID, open int) {
	var all []*drain
	l.each(func(d *drain) {
		if d.open && d.gate == gate {
			all = append(all, d)
		}
	})
	slices.SortFunc(all, func(a, b *drain) int { return cmp.Or(a.since.Compare(b.since), cmp.Compare(a.pod.UID, b.pod.UID)) })
	for _, d := range all[:min(len(all), most)] {
		oldest = append(oldest, d.pod.UID)
	}
	return oldest, len(all)
}

// Acknowledges reports whether r, by an agent, is about the open drain of its pod and counts here.
func (l *Ledger) Acknowledges(id AgentID, r Report) bool { return l.vouches(AtHold, id, r) }

func (l *Ledger) vouches(gate Gate, id AgentID, r Report) bool {
	if r.Gate != gate {
		return false
	}
	d := l.at(gate, r.UID)
	return d != nil && d.open && r.Number == d.number && l.routes(l.agents[id], d)
}

// OnlyElsewhere returns how many pods other replicas unroute and this one does not.
func (l *Ledger) OnlyElsewhere() (n int) {
	for uid := range l.elsewhere {
		if d := l.at(AtHold, uid); d == nil || !d.open {
			n++
		}
	}
	return n
}

// Known is an agent as a ledger knows it.
type Known struct {
	ID AgentID
	// Name is namespace/name of its pod, or its ID if the API does not list it.
	Name string
	// Expected says that the API lists it. Ready and Label are from there.
	Expected, Ready bool
	Label           Label
	// Connected says that it has a session here. If not, Lost is when it ended or, never connected, when the API first listed it.
	Connected bool
	Lost      time.Time
	// Declared says that it is known what it routes: so many Services.
	Declared bool
	Services int
	// Left says that its gateway accepts nothing any more, Suspended that it is not waited for.
	Left, Suspended bool
	// Heard is when the newest of its reports that still count was true. Zero: there is none, as when nothing is drained.
	Heard time.Time
}

// Agents returns every agent that is known, in the order of their names.
func (l *Ledger) Agents() []Known {
	all := make([]Known, 0, len(l.agents))
	for _, a := range l.agents {
		k := Known{
			ID: a.id, Name: a.name, Expected: a.expected, Ready: a.ready, Label: a.label, Connected: a.session != 0,
			Declared: a.declared, Services: len(a.routes), Left: a.left, Suspended: a.breaker.open,
		}
		if !k.Connected {
			k.Lost = a.lostAt
		}
		for g := range gates {
			for _, r := range a.reports[g] {
				k.Heard = later(k.Heard, r.at)
			}
		}
		all = append(all, k)
	}
	slices.SortFunc(all, func(a, b Known) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	return all
}

// Party is an agent whose gateway may send to the pods of a Service, and what it can vouch for.
type Party struct {
	Known
	// Undeclared says that it is not known what it routes, so that it may route everything.
	Undeclared bool
	// Routes are what it declared of the Services in question; of an undeclared one there are none.
	Routes []Route
	// Hold says that it would have to acknowledge at the hold, Barrier that it can only be asked after the deletion has begun. Neither: it can
	// vouch for nothing.
	Hold, Barrier bool
	// Until is when it is no longer waited for, because it is away and its pod is not ready. Zero: it is.
	Until time.Time
}

// Parties returns who may send to the pods of services at now, in the order of their names: those who would owe a drain of such a pod, and
// those who would not. Agents that have left are not among them.
func (l *Ledger) Parties(now time.Time, services []Service) []Party {
	parties := []Party{}
	for _, k := range l.Agents() {
		a := l.agents[k.ID]
		p := Party{Known: k, Undeclared: !a.declared}
		if a.left {
			continue
		}
		if p.Undeclared {
			p.Hold, p.Barrier = a.label != LabelFollowing, a.label != LabelDirected
		}
		for _, s := range slices.Concat(services, []Service{EveryService}) {
			r, ok := a.routes[s]
			if !ok {
				continue
			}
			p.Routes = append(p.Routes, r)
			p.Hold = p.Hold || owesAt(AtHold, r)
			p.Barrier = p.Barrier || r.Via == Endpoints && r.Can == Observe
		}
		if !p.Undeclared && len(p.Routes) == 0 {
			continue
		}
		if !k.Connected && !k.Ready {
			p.Until = a.lostAt.Add(l.times.Away)
			p.Hold = p.Hold && now.Before(p.Until)
		}
		parties = append(parties, p)
	}
	return parties
}
