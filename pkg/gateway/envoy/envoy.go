// Package envoy observes an Envoy by its admin interface, from the pod that it runs in.
//
// /clusters lists the hosts that Envoy's main thread knows. A host that is listed in no cluster is
// Removed. So is one that the control plane has declared to be DRAINING, UNHEALTHY or TIMEOUT,
// unless Envoy can send to it nevertheless:
//
//   - In panic, when fewer hosts of its priority are healthy than healthy_panic_threshold says
//     (50 %), requests go to every host. DRAINING ones do not count as hosts there, and get
//     requests all the same (envoyproxy/envoy#46800). A host is Kept if no other one is healthy.
//   - override_host_status may name its status: a session is kept by a cookie or header.
//   - lb_subset_config makes a panic of each subset, which /clusters does not show. So may a
//     load_balancing_policy that is not among those that respect the health of hosts, such as
//     override_host, by which a header names the host.
//
// A change of health alone, as to DRAINING, may reach the workers later than it is listed: Envoy
// before 1.40 merges those within an update_merge_window (1 s) of the last change of the cluster.
// The same holds for hosts whose recovery ends a panic, in later versions, too.
//
// A failed health check or an outlier detection never makes a host Removed, because the host may
// recover. A host with pending_dynamic_removal is not Removed either: Envoy sends to it while it
// passes its checks. Each priority is judged separately.
//
// A host that is still listed is Idle under two conditions. No request runs on it or waits for a
// connection to it (rq_active, rq_pending_active). And no more connections to it are open than
// cx_active plus one for each health check. A request on an additional connection began before the
// host or its cluster was removed and added again, and no counter includes it. A host that is no
// longer listed is Idle only when no connection to it is open: Envoy closes the connections of a
// removed host when their last request has ended. The same holds if an older Envoy does not count
// waiting requests. A gRPC stream is a request. An idle HTTP/2 connection is not.
//
// Not seen: hosts behind internal listeners, ORIGINAL_DST clusters, upstreams over UDP (HTTP/3),
// and the runtime key upstream.healthy_panic_threshold.
package envoy

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/poll"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// settle is how long the workers may take to follow the main thread: 51 ms was measured with
	// fifteen runnable threads for each core, 335 ms with other programs on the cores as well
	// (decision 32).
	settle = 500 * time.Millisecond
	// mergeWindow is Envoy's default update_merge_window.
	mergeWindow = time.Second
	// initMost is how long after its start a process may begin to wait for the end of its parent.
	// It is initialized first.
	initMost = time.Minute
)

// respectful are the packages of the load balancing policies that send to no unhealthy or draining
// host outside of a panic.
var respectful = []string{
	"round_robin", "least_request", "random", "ring_hash", "maglev", "wrr_locality", "client_side_weighted_round_robin",
}

var policies = regexp.MustCompile(`load_balancing_policies\.(\w+)\.v3\.`)

// defaultPanic is Envoy's healthy_panic_threshold, in percent.
const defaultPanic = 50

// Config configures the agent of one Envoy. The agent runs in Envoy's pod.
type Config struct{ poll.Config }

// Name implements gateway.Kind.
func (*Config) Name() string { return "envoy" }

// Observe implements gateway.ObservedKind.
func (c *Config) Observe(log *slog.Logger) gateway.Observed {
	return c.Poll((&reader{}).read, settle, log)
}

// reader caches the balancing settings of clusters for a quarter of the settle time, so they are
// read again before a host becomes Removed.
type reader struct {
	configured map[string]balancing
	at         time.Time
}

// serverInfo has fields of envoy.admin.v3.ServerInfo.
type serverInfo struct {
	State   string `json:"state"`
	Uptime  string `json:"uptime_current_epoch"`
	Options struct {
		Epoch  int    `json:"restart_epoch"`
		Parent string `json:"parent_shutdown_time"`
	} `json:"command_line_options"`
}

// clusters has fields of envoy.admin.v3.Clusters.
type clusters struct {
	Statuses []struct {
		Name  string `json:"name"`
		Hosts []host `json:"host_statuses"`
	} `json:"cluster_statuses"`
}

type host struct {
	Address struct {
		Socket struct {
			Address string `json:"address"`
			Port    uint16 `json:"port_value"`
		} `json:"socket_address"`
		// Internal: what Istio's gateways have for pods of an ambient mesh, by ADDRESS:PORT.
		Internal struct {
			Endpoint string `json:"endpoint_id"`
		} `json:"envoy_internal_address"`
	} `json:"address"`
	Hostname string `json:"hostname"` // what Envoy has resolved to the address
	Stats    []struct {
		Name  string `json:"name"`
		Value string `json:"value"` // absent: 0
	} `json:"stats"`
	Health struct {
		EDS            string `json:"eds_health_status"`
		FailedCheck    bool   `json:"failed_active_health_check"`
		FailedOutlier  bool   `json:"failed_outlier_check"`
		PendingRemoval bool   `json:"pending_dynamic_removal"`
		PendingCheck   bool   `json:"pending_active_hc"`
	} `json:"health_status"`
	Priority int `json:"priority"`
}

// out reports whether the control plane has declared that Envoy must not send to the host.
func (h host) out() bool {
	return slices.Contains([]string{"DRAINING", "UNHEALTHY", "TIMEOUT"}, h.Health.EDS) && !h.Health.PendingRemoval
}

// usable reports whether Envoy counts the host as healthy or degraded.
func (h host) usable() bool {
	return !h.out() && !h.Health.FailedCheck && !h.Health.FailedOutlier && !h.Health.PendingCheck
}

// balancing has fields of envoy.config.cluster.v3.Cluster.
type balancing struct {
	Name   string `json:"name"`
	Common struct {
		Panic *struct {
			Value float64 `json:"value"`
		} `json:"healthy_panic_threshold"`
		Override struct {
			Statuses []string `json:"statuses"`
		} `json:"override_host_status"`
		MergeWindow string `json:"update_merge_window"`
	} `json:"common_lb_config"`
	Subsets *struct{}       `json:"lb_subset_config"`
	Policy  json.RawMessage `json:"load_balancing_policy"`
	Checks  []struct{}      `json:"health_checks"` // each keeps a connection to each host
}

// settle is how long the workers may take to apply a change of a host's health.
func (b balancing) settle() time.Duration {
	window, err := time.ParseDuration(b.Common.MergeWindow)
	if err != nil {
		window = mergeWindow
	}
	return window + settle
}

// respects reports whether the cluster's policy is known to send only to healthy hosts.
func (b balancing) respects() bool {
	named := policies.FindAllSubmatch(b.Policy, -1)
	other := func(name [][]byte) bool { return !slices.Contains(respectful, string(name[1])) }
	return b.Subsets == nil && (len(named) > 0 || len(b.Policy) == 0) && !slices.ContainsFunc(named, other)
}

// read implements poll.Read.
func (r *reader) read(get func(path string, into any) error) ([]poll.Host, error) {
	var info serverInfo
	if err := get("/server_info", &info); err != nil {
		return nil, err
	}
	up, _ := time.ParseDuration(info.Uptime)
	parent, _ := time.ParseDuration(info.Options.Parent)
	switch {
	case info.Options.Epoch > 0 && up <= parent+initMost:
		return nil, fmt.Errorf("Envoy was restarted hot %s ago: its parent may send until %s", up, parent+initMost)
	case info.State == "PRE_INITIALIZING", info.State == "INITIALIZING":
		return nil, fmt.Errorf("Envoy is %s: %w", info.State, poll.ErrNotStarted)
	case info.State != "LIVE" && info.State != "DRAINING":
		return nil, fmt.Errorf("Envoy is %s", info.State)
	}
	var c clusters
	if err := get("/clusters?format=json", &c); err != nil {
		return nil, err
	}
	hosts := []poll.Host{}
	for _, cluster := range c.Statuses {
		for _, h := range cluster.Hosts {
			if _, err := netip.ParseAddr(h.Hostname); err != nil && h.Hostname != "" {
				hosts = append(hosts, poll.Host{Name: h.Hostname}) // its address may be a Service's
			}
			address, err := netip.ParseAddr(h.Address.Socket.Address)
			target := netip.AddrPortFrom(address.Unmap(), h.Address.Socket.Port)
			if err != nil {
				if target, err = netip.ParseAddrPort(h.Address.Internal.Endpoint); err != nil {
					hosts = append(hosts, poll.Host{Name: h.Address.Socket.Address}) // "": a pipe
					continue
				}
			}
			is := poll.Host{Target: target, State: health.Routing}
			is.Active, is.Open, is.Counted = h.active()
			if h.out() {
				if now := time.Now(); now.Sub(r.at) > settle/4 {
					if r.configured, err = readBalancing(get); err != nil {
						return nil, err
					}
					r.at = now
				}
				b := r.configured[cluster.Name]
				is.State, is.Settle = b.state(h, cluster.Hosts), b.settle()
				is.Open += len(b.Checks)
			}
			hosts = append(hosts, is)
		}
	}
	return hosts, nil
}

// active returns how many requests run on the host or wait for it, how many connections are open,
// and whether all requests are counted.
func (h host) active() (sum, open int, counted bool) {
	for _, s := range h.Stats {
		n, _ := strconv.Atoi(s.Value)
		switch s.Name {
		case "rq_pending_active":
			sum, counted = sum+n, true
		case "rq_active":
			sum += n
		case "cx_active":
			open = n
		}
	}
	return sum, open, counted
}

// readBalancing returns how each cluster balances.
func readBalancing(get func(path string, into any) error) (map[string]balancing, error) {
	all := map[string]balancing{}
	for _, resource := range []string{"static_clusters", "dynamic_active_clusters"} {
		var dump struct {
			Configs []struct {
				Cluster balancing `json:"cluster"`
			} `json:"configs"`
		}
		if err := get("/config_dump?resource="+resource, &dump); err != nil {
			return nil, err
		}
		for _, c := range dump.Configs {
			all[c.Cluster.Name] = c.Cluster
		}
	}
	return all, nil
}

// state returns what a cluster does with h, a host that is out. If b has no name, the cluster's
// configuration is unknown.
func (b balancing) state(h host, all []host) health.State {
	usable, total, others := 0, 0, false
	for _, o := range all {
		others = others || o.usable()
		if o.Priority != h.Priority || o.Health.PendingCheck || o.Health.EDS == "DRAINING" {
			continue // Envoy excludes it
		}
		total++
		if o.usable() {
			usable++
		}
	}
	threshold := float64(defaultPanic)
	if b.Common.Panic != nil {
		threshold = b.Common.Panic.Value
	}
	switch {
	case b.Name == "" || !b.respects() || slices.Contains(b.Common.Override.Statuses, h.Health.EDS):
		return health.Routing
	case threshold == 0 || total > 0 && 100*float64(usable) >= threshold*float64(total):
		return health.Removed
	case !others:
		return health.Kept
	}
	return health.Routing
}
