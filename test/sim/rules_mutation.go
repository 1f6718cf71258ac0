//go:build lameduckmutation

package main

import (
	"fmt"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

var broken int

func brokenRule() int { return broken }

// rules are those of the design, and what is switched off of each.
var rules = [...]string{
	1:  "level, not event: the ledger keeps the best word it has heard",
	2:  "an exclusion belongs to its holders: one holder's readmission ends all expiries",
	3:  "it ends on knowledge: a drain is abandoned as soon as nobody waits for it",
	4:  "nothing stays lost: agents are told that a pod which lives is dead",
	5:  "one clock: asking again starts it again",
	6:  "availability first: a drain that nobody owes waits",
	7:  "who is expected is read from the API: only open streams count",
	8:  "declare before you program: the agent programs at once",
	9:  "the barrier: a node that keeps the pod is believed although another endpoint is ready",
	10: "the barrier: who directs owes nothing there",
	11: "the barrier: what Services state is not waited for",
	12: "the barrier: nodes that are not in the sample get no time",
	13: "the barrier: that no endpoint is left on one node is believed of every node, whatever it says",
	14: "the barrier: who has not heard of a young pod is believed",
	15: "the barrier: with scope local, not even the pod's own node is asked",
	16: "restarts: a pod that is ready again is not routed again",
	17: "restarts: a container is kept from being stopped for as long as a pod",
	18: "the barrier: a hook that is run again begins the clock again",
	19: "the barrier: that no endpoint is left on one node is believed though its kernel may not have heard of the " +
		"other nodes'",
	20: "one order: a witness judges capacity for itself",
	21: "suspension: what another replica has counted is not believed",
	22: "namespaces: all agents are told of the end of all drains",
	24: "populations: a replica of a gateway need not be asked where enough nodes are",
	23: "owed: an agent that declares again without a Service is not waited for any more",
}

func mutate(from uint64, most int) error {
	missed, seeds := 0, append(corpus(), sequence(from, most)...)
	for rule := 1; rule < len(rules); rule++ {
		broken = rule
		drain.BreakRule(rule)
		health.BreakRule(rule)
		all := sweep(seeds, true, false, nil)
		outside := sweep(seeds, true, true, nil)
		if all.violations == 0 {
			missed++
		}
		fmt.Printf("rule %d off: %s; from outside: %s  (%s)\n", rule, caught(all), caught(outside), rules[rule])
	}
	if missed > 0 {
		return fmt.Errorf("%d rules can be switched off unnoticed", missed)
	}
	return nil
}

func caught(t totals) string {
	if t.violations == 0 {
		return fmt.Sprintf("NOT caught in %d seeds", t.seeds)
	}
	return fmt.Sprintf("caught in %4d seeds by %-9s", t.seeds, t.check)
}
