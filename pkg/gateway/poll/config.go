package poll

import (
	"fmt"
	"log/slog"
	"net/netip"
	"net/url"
	"time"

	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/gateway"
)

// Config is what the kinds of polled gateways have in common.
type Config struct {
	// Population is the gateway's name, namespace/name of its Deployment for example. Its replicas
	// have the same one, and each of them has to acknowledge.
	Population string `json:"population"`
	// Admin is where this replica answers its operators: http://127.0.0.1:PORT or unix:///PATH.
	Admin string `json:"admin"`
	// Services are those that it routes to, namespace/name. Empty: every Service.
	Services []string `json:"services,omitempty"`
}

// Routes implements gateway.Kind.
func (c *Config) Routes() []gateway.Route {
	var all []gateway.Route
	for i, s := range c.Services {
		all = append(all, gateway.Route{Key: fmt.Sprintf("services[%d]", i), Service: s})
	}
	return all
}

// Check implements gateway.Kind. Only the agent's own network namespace can be polled: the address
// of a Service is that of any replica, and the sockets of another pod are not seen.
func (c *Config) Check() (errs []error) {
	if c.Population == "" || c.Population == gateway.Nodes {
		errs = append(errs, fmt.Errorf("population %q: must name the gateway, for example namespace/name of its "+
			"Deployment: its replicas are asked together", c.Population))
	}
	u, err := url.Parse(c.Admin)
	if err != nil || u == nil {
		return append(errs, fmt.Errorf("admin %q: %w", c.Admin, err))
	}
	address, err := netip.ParseAddrPort(u.Host)
	loopback := u.Scheme == "http" && err == nil && address.Addr().IsLoopback()
	if !loopback && (u.Scheme != "unix" || u.Host != "" || u.Path == "") {
		errs = append(errs, fmt.Errorf("admin %q: must be http://127.0.0.1:PORT or unix:///PATH: the agent runs in "+
			"the pod of the gateway", c.Admin))
	}
	return errs
}

// Poll returns the gateway. settle is the settle time: how long the workers may take to apply what
// the admin interface already shows. A target is Removed only after it.
func (c *Config) Poll(read Read, settle time.Duration, log *slog.Logger) *Gateway {
	return &Gateway{
		name: c.Population, admin: c.Admin, read: read, settle: settle, log: log,
		watches: map[*watch]struct{}{}, wake: signal.New(), named: map[string]bool{},
	}
}
