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

// Config has the settings that all kinds of polled gateways share.
type Config struct {
	// Population is the gateway's name, for example namespace/name of its Deployment. All of its
	// replicas have the same name, and each of them must acknowledge.
	Population string `json:"population"`
	// Admin is the URL of this replica's admin interface: http://127.0.0.1:PORT or unix:///PATH.
	Admin string `json:"admin"`
	// Services are the Services that the gateway routes to, each as namespace/name. Empty: every
	// Service.
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

// maxPopulation is the longest name that coordinators accept.
const maxPopulation = 253

// Check implements gateway.Kind. Only a gateway in the agent's own network namespace can be polled:
// the address of a Service leads to any replica, and the sockets of another pod are not visible.
func (c *Config) Check() (errs []error) {
	if c.Population == "" || c.Population == gateway.Nodes || len(c.Population) > maxPopulation {
		errs = append(errs, fmt.Errorf("population %q: must name the gateway, for example namespace/name of its "+
			"Deployment, in %d bytes at most: its replicas are asked together", c.Population, maxPopulation))
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
		watches: map[*watch]struct{}{}, wake: signal.New(), began: make(chan struct{}), named: map[string]bool{},
	}
}
