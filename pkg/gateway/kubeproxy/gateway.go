package kubeproxy

import "github.com/lameduck-io/lameduck/pkg/gateway"

// Config makes the agent that of a node, which observes what kube-proxy wrote into the node's
// kernel.
type Config struct{}

// Name implements gateway.Kind.
func (*Config) Name() string { return "kube-proxy" }

// Routes implements gateway.Kind: every Service.
func (*Config) Routes() []gateway.Route { return nil }
