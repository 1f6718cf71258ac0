package apisix

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"regexp"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// Config is one APISIX in etcd mode (role traditional), in whose pod the agent runs.
type Config struct {
	// Admin is an Admin API that writes to the etcd of this APISIX: http://127.0.0.1:9180.
	Admin string `json:"admin"`
	// AdminKeyFile holds the key of the Admin API. Read again at each request. Empty: no key.
	AdminKeyFile string `json:"adminKeyFile,omitempty"`
	// Control is the control API of this APISIX with the plug-in lameduck: http://127.0.0.1:9090.
	Control string `json:"control"`
	// Upstreams are the upstream objects that the agent creates and directs. At least one is
	// required. Routes refer to them by upstream_id.
	Upstreams []Upstream `json:"upstreams"`
}

// Upstream is one upstream object, and the Service port that feeds it. It is a pool.
type Upstream struct {
	// Upstream is its id. The agent makes it if it does not exist, and changes only its nodes and
	// labels.
	Upstream string `json:"upstream"`
	// Service is namespace/name of the Service that feeds it.
	Service string `json:"service"`
	// Port is the name of the Service's port. Empty: the only one.
	Port string `json:"port,omitempty"`
	// HealthCheck is how the agent probes the targets (docs/health.md). The Service's annotation
	// lameduck.io/health-check takes precedence over it. If both are absent, the targets are not
	// probed.
	HealthCheck json.RawMessage `json:"healthCheck,omitempty"`
}

var ids = regexp.MustCompile(`^[a-zA-Z0-9_.-]{1,64}$`)

// Name implements gateway.Kind.
func (*Config) Name() string { return "apisix" }

// Routes implements gateway.Kind.
func (c *Config) Routes() (all []gateway.Route) {
	for i, u := range c.Upstreams {
		all = append(all, gateway.Route{Key: fmt.Sprintf("upstreams[%d]", i), Service: u.Service, Port: u.Port,
			Pool: health.Pool(u.Upstream), HealthCheck: string(u.HealthCheck)})
	}
	return all
}

// Check implements gateway.Kind. The URL that proves removals must be in the agent's own pod,
// because the address of a Service leads to any replica.
func (c *Config) Check() (errs []error) {
	must := func(ok bool, field, value, why string) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s %q: %s", field, value, why))
		}
	}
	admin, err := url.Parse(c.Admin)
	must(err == nil && admin.Host != "" && (admin.Scheme == "http" || admin.Scheme == "https"), "admin", c.Admin,
		"want a URL such as http://127.0.0.1:9180")
	own, err := url.Parse(c.Control)
	ok := err == nil && own.Scheme == "http"
	if ok {
		address, err := netip.ParseAddrPort(own.Host)
		ok = err == nil && address.Addr().IsLoopback()
	}
	must(ok, "control", c.Control, "want http://127.0.0.1:PORT: the agent runs in the pod of the gateway")
	must(len(c.Upstreams) > 0, "upstreams", "", "at least one is needed")
	seen := map[string]bool{}
	for i, u := range c.Upstreams {
		must(ids.MatchString(u.Upstream) && !seen[u.Upstream], fmt.Sprintf("upstreams[%d].upstream", i), u.Upstream,
			"want at most 64 letters, digits and . _ -, and no id twice")
		seen[u.Upstream] = true
	}
	return errs
}

// OwnsPool implements gateway.DirectedKind.
func (*Config) OwnsPool() bool { return true }

// StateDir implements gateway.DirectedKind: the agent's file has a key for it.
func (*Config) StateDir() string { return "" }

// Direct implements gateway.DirectedKind. The pod's name distinguishes the agents of the replicas.
func (c *Config) Direct() (gateway.Directed, error) {
	name, err := os.Hostname()
	return open(*c, name), err
}
