package apisix

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// use is a destination of an object other than the agent's upstreams: a node, a discovered service,
// or an upstream.
type use struct{ where, node, service, upstream string }

// list reads every object of the Admin API that may have nodes of its own, at most once a second.
func (g *Gateway) list(ctx context.Context) error {
	if time.Since(g.listed) < time.Second {
		return nil
	}
	var uses []use
	for _, kind := range []string{"routes", "services", "upstreams", "plugin_configs", "global_rules", "consumers",
		"consumer_groups", "stream_routes"} {
		var answer struct {
			List []struct{ Value map[string]any }
		}
		status, err := g.call(ctx, http.MethodGet, g.admin+kind, nil, &answer)
		if err != nil && (kind != "stream_routes" || status != http.StatusBadRequest) { // 400: no stream mode
			return err
		}
		for _, object := range answer.List {
			id := fmt.Sprint(object.Value["id"])
			if kind != "upstreams" || g.services[health.Pool(id)] == "" {
				uses = walk(uses, strings.TrimSuffix(kind, "s")+" "+id, object.Value)
			}
		}
	}
	g.uses, g.listed = uses, time.Now()
	return nil
}

// walk adds the nodes and discovered services in a value, at any depth: a plug-in such as
// traffic-split may have upstreams in its configuration.
func walk(uses []use, where string, value any) []use {
	switch value := value.(type) {
	case []any:
		for _, v := range value {
			uses = walk(uses, where, v)
		}
	case map[string]any:
		for key, v := range value {
			text, _ := v.(string)
			switch {
			case key == "nodes":
				raw, _ := json.Marshal(v) // it was JSON
				for node := range nodesOf(raw) {
					uses = append(uses, use{where: where, node: node})
				}
			case key == "service_name":
				uses = append(uses, use{where: where, service: text})
			case key == "upstream_id" && strings.HasPrefix(where, "stream_route "):
				uses = append(uses, use{where: where, upstream: text})
			default:
				uses = walk(uses, where+" "+key, v)
			}
		}
	}
	return uses
}

// uncovered returns an error that names what may still send to a target that its upstream does not
// list. Nil: nothing may.
func (g *Gateway) uncovered(k health.Key, u *upstream) error {
	for _, use := range g.uses {
		switch {
		case use.node == k.Target.Addr.String():
			return fmt.Errorf("%s has the node %s: not covered", use.where, use.node)
		case strings.Contains(use.service+":", g.services[k.Pool]+":"):
			return fmt.Errorf("%s resolves %s by itself: not covered", use.where, use.service)
		case use.upstream == string(k.Pool):
			return fmt.Errorf("%s uses upstream %s, which is not read for streams: not covered", use.where, k.Pool)
		}
	}
	return u.refused
}
