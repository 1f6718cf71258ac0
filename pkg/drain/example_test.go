package drain_test

import (
	"fmt"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// A deletion is asked for, the one agent that routes the pod's Service must acknowledge it, and
// does.
func ExampleLedger() {
	now := time.Now()
	web := drain.Service{Namespace: "shop", Name: "web"}
	l := drain.NewLedger(drain.DefaultTimes(), drain.ScopeAuto, drain.DefaultSampling())
	l.Expect(now, []drain.Expected{{ID: "a1", Name: "edge/haproxy-0", Ready: true}})
	session := l.Connect(now, "a1", drain.Hello{Boot: "b1"})
	l.Declare("a1", session, "", []drain.Route{{
		Service: web, Via: drain.Endpoints, Kind: drain.Directed,
	}})

	pod := drain.Pod{Namespace: "shop", Name: "web-1", UID: "4d1c"}
	targets := []drain.Targets{{Service: web, Usable: []drain.UID{"4d1c", "4d1d"}}}
	s := l.Ask(now, pod, targets, drain.Place{})
	fmt.Println(s.Phase, "waits for", s.Waiting[0].Name)

	open, _, told, _ := l.ChangesFor("a1", 0) // what the agent is sent
	fmt.Println("excludes", open[0].Pod)
	upTo := &drain.UpTo{Revision: told, State: drain.Idle}
	l.Report(now, now, "a1", session, upTo, nil)
	s = l.Status(now, drain.AtHold, pod.UID)
	fmt.Println(s.Phase, s.Reason)
	// Output:
	// Unrouting waits for edge/haproxy-0
	// excludes shop/web-1
	// Released Acknowledged
}
