// Package gateway has the interfaces between an agent and a data plane, and the loop that drives a
// directed one. A data plane that stops routing to a pod by itself is an [Observed].
//
// A [Directed] gateway receives operations ([health.Op]) that state which targets to route, and is
// then read. An Apply that returns no error is not evidence; only a [health.Observation] is. Data
// planes are reloaded by others, run several processes at once (an old one finishes its requests
// with its old configuration), and accept commands that they do not carry out. The [Director]
// therefore never trusts its own commands. It applies the difference between what the set wants and
// what was last read, reads again, and passes the reading to the set, which decides what to
// acknowledge.
//
// Each data plane has a package below this one. Its tests run the contract of
// [github.com/lameduck-io/lameduck/test/gatewaytest], on the real data plane, or on a fake of it
// for APISIX.
package gateway

import (
	"context"
	"fmt"
	"strings"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Directed is one running data plane that an agent can direct.
//
// Methods are called by one goroutine at a time. Each call ends by its context's deadline.
type Directed interface {
	// Apply carries out ops in the order given, each in every live process of the gateway, and
	// makes them last over a reload where the data plane allows it. An op that fails does not stop
	// the others; the error joins all that failed, each naming its op. An op that is already true
	// costs no change and is no error. The error of a command that was sent and not answered wraps
	// an [Unanswered], that of an op for which the gateway has answered no a [Refused].
	//
	// WantAbsent on a target that still has requests takes it out, keeps it, and returns no error:
	// the Observation says that it is still present, and the op comes again.
	Apply(ctx context.Context, ops []health.Op) error

	// Observe reads what every live process does with keys. It is an error if one live process
	// could not be read, because an unread process could be routing, unless that process accepts no
	// new connections and counts as routing to all keys. A pool that cannot be read, because the
	// process taking new requests has not loaded it for example, is no error: the Observation names
	// it as unread and says nothing of its keys. The others are read.
	Observe(ctx context.Context, keys []health.Key) (health.Observation, error)

	// Owned lists the keys that an agent (this one or an earlier one) made in the gateway, whether
	// routed or not. Servers that operators configured are not among them. The Director uses it at
	// start and for each new generation, to remove keys that are not wanted any more. A pool that
	// cannot be read is left out, and makes another generation when it can be.
	Owned(ctx context.Context) ([]health.Key, error)

	// Stopped reports whether the data plane has ended: nothing answers in its place, and nothing
	// routes. An agent that outlives its data plane tells coordinators so. An error or a timeout is
	// not evidence.
	Stopped(ctx context.Context) bool
}

// Starter is a [Directed] data plane that starts with what its agent has written.
type Starter interface {
	// Prepare makes the data plane, which does not run, start with keys as its only targets. It is
	// called before the first reading, by the goroutine that calls the methods of [Directed].
	Prepare(keys []health.Key) error
}

// Route is one port of a Service, and the pool of a gateway that it feeds.
type Route struct {
	// Key is the place in the agent's file that errors name, such as backends[0].
	Key string
	// Service is namespace/name. Port is the name of its port; empty: its only port. Pool is the
	// pool that it feeds.
	Service, Port string
	Pool          health.Pool
	// HealthCheck is how the agent probes the pool's targets unless the Service's annotation says
	// otherwise: JSON, as [health.ParseCheck] reads it. Empty: not at all.
	HealthCheck string
}

// ParseService splits namespace/name.
func ParseService(text string) (namespace, name string, err error) {
	namespace, name, ok := strings.Cut(text, "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
		return "", "", fmt.Errorf("%q is not namespace/name", text)
	}
	return namespace, name, nil
}
