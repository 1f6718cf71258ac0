package haproxy

import (
	"context"
	"errors"
	"path/filepath"

	"github.com/lameduck-io/lameduck/pkg/gateway"
)

// Name implements gateway.Kind.
func (c *Config) Name() string { return "haproxy" }

// Routes implements gateway.Kind.
func (c *Config) Routes() []gateway.Route {
	var routes []gateway.Route
	for i, b := range c.Backends {
		routes = append(routes, gateway.Route{Key: keyOf(i), Service: b.Service, Port: b.Port, Pool: b.pool(),
			HealthCheck: string(b.HealthCheck)})
	}
	return routes
}

// OwnsPool implements gateway.DirectedKind.
func (c *Config) OwnsPool() bool { return true }

// StateDir implements gateway.DirectedKind. HAProxy reads the servers file there when it starts.
func (c *Config) StateDir() string { return filepath.Dir(c.ServersFile) }

// Direct implements gateway.DirectedKind: see [New]. The servers file exists from then on, so that
// HAProxy can start.
func (c *Config) Direct() (gateway.Directed, error) { return New(*c) }

// Stopped implements gateway.Directed. It reports whether the master socket does not exist or
// refuses connections. A HAProxy that is stopping and has closed its listeners has not stopped: it
// still routes the requests of its open connections.
func (g *Gateway) Stopped(ctx context.Context) bool {
	_, err := g.Observe(ctx, nil)
	return errors.Is(err, kindNoSocket) || errors.Is(err, kindNotListening)
}
