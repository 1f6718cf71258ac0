package gateway

import (
	"log/slog"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// Kind is the configuration of one gateway in an agent's file. The package of each kind implements
// it, as a [DirectedKind] or as an [ObservedKind] and not both, on a pointer to the struct that the
// file is decoded into.
type Kind interface {
	// Name is what the kind is called on the wire, in metrics and in logs.
	Name() string
	// Routes are what the gateway routes. None: every Service. The agent checks them.
	Routes() []Route
	// Check returns what is wrong with the configuration, except the routes, which the agent
	// checks. Each error begins with the key.
	Check() []error
}

// DirectedKind is a [Kind] of gateway that an agent can direct.
type DirectedKind interface {
	Kind
	// OwnsPool reports whether the agent decides which targets of a pool get traffic. Health checks
	// are for these kinds only.
	OwnsPool() bool
	// StateDir is a folder that outlives the agent's container, where the agent can keep its
	// exclusions. Empty: there is none.
	StateDir() string
	// Direct returns the gateway. The configuration has passed Check.
	Direct() (Directed, error)
}

// Refuser is a [Directed] that replaces an excluded pod by another pod of the same Service.
type Refuser interface {
	// Refuse sets the reason for which the pods of a pool cannot replace each other. Apply then
	// fails for WantRemoved in this pool. An empty reason allows it again. Refuse may be called
	// from any goroutine.
	Refuse(pool health.Pool, why string)
}

// ObservedKind is a [Kind] of gateway that an agent can only observe. If its population is [Nodes]
// the agent runs on each node and answers the hooks of the node's pods. Otherwise it runs beside a
// replica of the gateway.
type ObservedKind interface {
	Kind
	// Observe returns the gateway.
	Observe(log *slog.Logger) Observed
}
