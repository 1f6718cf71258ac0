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
	// PerRequest reports whether the gateway counts requests to tell whether it is Idle. Otherwise
	// it counts connections.
	PerRequest() bool
	// Routes are what the gateway routes. None: every Service. The agent checks them.
	Routes() []Route
	// Check returns everything else that is wrong, each error beginning with the key.
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

// Refuser is a [Directed] in which any pod of a Service must be able to stand for another.
type Refuser interface {
	// Refuse notes why that is not so for a pool: its targets are not taken out then. Empty: it is.
	// It may be called from any goroutine.
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
