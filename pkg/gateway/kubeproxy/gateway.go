package kubeproxy

import (
	"log/slog"
	"net/netip"

	"github.com/lameduck-io/lameduck/pkg/gateway"
)

// Config makes the agent that of a node, which observes what kube-proxy wrote into the node's
// kernel.
type Config struct{}

// Name implements gateway.Kind.
func (*Config) Name() string { return "kube-proxy" }

// PerRequest implements gateway.Kind.
func (*Config) PerRequest() bool { return false }

// Routes implements gateway.Kind: every Service.
func (*Config) Routes() []gateway.Route { return nil }

// Check implements gateway.Kind.
func (*Config) Check() []error { return nil }

// Observe implements gateway.ObservedKind. What it returns is also a [gateway.Cleaner] and a
// [gateway.Auditor].
func (*Config) Observe(log *slog.Logger) gateway.Observed { return observed{New(Options{Log: log})} }

// observed is an Observer as an agent knows it.
type observed struct{ *Observer }

// Population implements gateway.Observed.
func (o observed) Population() string { return gateway.Nodes }

// Watch implements gateway.Observed.
func (o observed) Watch(targets []netip.AddrPort, changed func()) gateway.Watch {
	return o.Observer.Watch(targets, changed)
}

// Look implements gateway.Looker.
func (o observed) Look(targets []netip.AddrPort, changed func()) gateway.Watch {
	return o.Observer.Look(targets, changed)
}
