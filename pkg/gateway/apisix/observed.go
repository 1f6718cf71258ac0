package apisix

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"strings"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/poll"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// ObservedConfig is one APISIX that something else configures, in whose pod the agent runs:
// stand-alone, or with the ingress controller. Admin is its control API with the plug-in lameduck,
// whose global rule has {"observed": true}: http://127.0.0.1:9090.
type ObservedConfig struct{ poll.Config }

// Name implements gateway.Kind.
func (*ObservedConfig) Name() string { return "apisix-observed" }

// Observe implements gateway.ObservedKind. The settle time is 0, because each answer contains the
// reports of all processes themselves.
func (c *ObservedConfig) Observe(log *slog.Logger) gateway.Observed {
	g := c.Poll(read, 0, log)
	g.Counts = true
	return g
}

// read implements poll.Read. A target is Removed if every process, including the old ones, has
// reported and does not list it. Requests that began before that report of their process may still
// be sent to it.
func read(get func(path string, into any) error) ([]poll.Host, error) {
	hosts, discovers, err := processes(get)
	if err != nil || !discovers {
		return hosts, err
	}
	more, err := dump(get)
	return append(hosts, more...), err
}

func processes(get func(path string, into any) error) (hosts []poll.Host, discovers bool, err error) {
	var is report
	if err := get("/v1/plugin/lameduck", &is); err != nil {
		return nil, false, err
	}
	is.trim()
	if err := is.missing(); err != nil {
		return nil, false, err
	}
	running := is.running()
	for pid, p := range is.Processes {
		switch {
		case p.Report == nil:
			return nil, false, fmt.Errorf("process %s shuts down and has never reported", pid)
		case p.Report.Nodes == nil:
			return nil, false, fmt.Errorf(`process %s is not observed: the global rule has no {"observed": true}`, pid)
		case p.Report.Unlisted != "":
			return nil, false, fmt.Errorf("process %s sends to %s: not covered", pid, p.Report.Unlisted)
		}
		discovers = discovers || p.Report.Discovers
		for node, out := range p.Report.Nodes {
			h, is := host(node)
			if is && out > 0 {
				h.State = health.Removed
				for began, n := range running[pid] {
					if began < out {
						h.Active += n
					}
				}
			}
			hosts = append(hosts, h)
		}
	}
	return hosts, discovers, nil
}

// host returns the host of a node, and reports whether the node is an address rather than a name.
func host(node string) (poll.Host, bool) {
	target, err := netip.ParseAddrPort(node)
	if err != nil {
		return poll.Host{Name: node}, false
	}
	target = netip.AddrPortFrom(target.Addr().Unmap(), target.Port())
	return poll.Host{Target: target, State: health.Routing, Counted: true}, true
}

// running counts requests by process and by the number of the last report before they began.
func (r *report) running() map[string]map[int64]int {
	all := map[string]map[int64]int{}
	for key, n := range r.Picks {
		words := strings.Fields(key)
		if len(words) != 3 || words[1] != "*" {
			continue
		}
		if all[words[0]] == nil {
			all[words[0]] = map[int64]int{}
		}
		began, _ := strconv.ParseInt(words[2], 10, 64) // another text: before all reports
		all[words[0]][began] += n
	}
	return all
}

// list is a list that Lua has encoded, which writes an empty one as an object.
type list[T any] []T

// UnmarshalJSON implements json.Unmarshaler.
func (l *list[T]) UnmarshalJSON(text []byte) error {
	if string(text) == "{}" {
		return nil
	}
	return json.Unmarshal(text, (*[]T)(l))
}

// dump returns the endpoints that discovery.kubernetes has found.
func dump(get func(path string, into any) error) ([]poll.Host, error) {
	var is struct {
		Endpoints list[struct {
			Endpoints list[struct{ Name, Value string }]
		}]
	}
	if err := get("/v1/discovery/kubernetes/dump", &is); err != nil {
		return nil, err
	}
	var hosts []poll.Host
	for _, cluster := range is.Endpoints {
		for _, service := range cluster.Endpoints {
			var ports map[string]list[struct {
				Host string
				Port int
			}]
			if json.Unmarshal([]byte(service.Value), &ports) != nil {
				hosts = append(hosts, poll.Host{Name: service.Name}) // the pods of this one alone are unknown
				continue
			}
			for _, nodes := range ports {
				for _, n := range nodes {
					h, _ := host(address(n.Host, n.Port))
					hosts = append(hosts, h)
				}
			}
		}
	}
	return hosts, nil
}
