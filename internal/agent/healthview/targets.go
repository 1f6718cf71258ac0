// Package healthview shows what an agent knows of the health of its targets: to operators on the
// spot, and to coordinators as a summary.
package healthview

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// Path is where operators ask why a target gets no traffic.
const Path = "/v1/targets"

// targetView is one target as it is shown. Fields are added, never repurposed.
type targetView struct {
	Address string `json:"address"`
	// Pod is namespace/name. Empty: no EndpointSlice names it any more.
	Pod     string `json:"pod,omitempty"`
	UID     string `json:"uid"`
	Service string `json:"service"`
	Port    string `json:"port,omitempty"`
	Pool    string `json:"pool"`
	// State is what the gateway does, as it was last read: see the constants.
	State string `json:"state"`
	// Why says why the target is to have traffic, or none: the words of [health.Why].
	Why string `json:"why"`
	// Since is when the reason began, where that is known.
	Since *time.Time `json:"since,omitempty"`
	// ReadAt is when State was read.
	ReadAt *time.Time `json:"readAt,omitempty"`
	// Health is the verdict of the checks: the words of [health.Verdict]. HealthSince is when it
	// was reached.
	Health      string     `json:"health"`
	HealthSince *time.Time `json:"healthSince,omitempty"`
	// LastOutcome is that of the last probe, or what the gateway reported, at LastOutcomeAt.
	LastOutcome   string         `json:"lastOutcome,omitempty"`
	LastOutcomeAt *time.Time     `json:"lastOutcomeAt,omitempty"`
	Counters      targetCounters `json:"counters"`
	// Exclusion is there while the pod has one.
	Exclusion *exclusionView `json:"exclusion,omitempty"`
}

// targetCounters are those of one target.
type targetCounters struct {
	// Active is how many requests or connections the gateway had there when it was read.
	Active int `json:"active"`
	// The others count outcomes towards the next verdict.
	Successes    uint8 `json:"successes"`
	HTTPFailures uint8 `json:"httpFailures"`
	TCPFailures  uint8 `json:"tcpFailures"`
	Timeouts     uint8 `json:"timeouts"`
}

// exclusionView is how far an exclusion has come.
type exclusionView struct {
	State string    `json:"state"`
	Since time.Time `json:"since"`
}

// States of a target in the gateway.
const (
	stateUnread  = "unread"  // not read since the gateway was last reloaded, or since the agent began
	stateRouted  = "routed"  // every process may send there
	statePartly  = "partly"  // some processes may
	stateRemoved = "removed" // known, and nothing new is sent there
	stateAbsent  = "absent"  // not known
)

// viewTargets makes the views of what the query asks for.
func viewTargets(all []health.Detail, q targetsQuery, ports map[health.Pool]endpoints.Port,
	names map[health.UID]string) []targetView {
	views := []targetView{}
	for _, t := range all {
		of := ports[t.Pool]
		service := of.Service.String()
		if q.service != "" && q.service != service || q.pool != "" && q.pool != string(t.Pool) || q.address.IsValid() &&
			q.address != t.Target.Addr {
			continue
		}
		v := targetView{
			Address: t.Target.Addr.String(), Pod: names[t.Target.UID], UID: string(t.Target.UID),
			Service: service, Port: of.Name, Pool: string(t.Pool), State: stateOf(t), Why: t.Why.String(),
			Health: t.Verdict.String(),
			Counters: targetCounters{
				Successes: t.Counters.Successes, HTTPFailures: t.Counters.HTTPFailures,
				TCPFailures: t.Counters.TCPFailures, Timeouts: t.Counters.Timeouts,
			},
		}
		if t.Read {
			v.ReadAt, v.Counters.Active = utc(t.SeenAt), t.Seen.Active
		}
		if !t.Since.IsZero() {
			v.HealthSince = utc(t.Since)
		}
		if !t.LastAt.IsZero() {
			v.LastOutcome, v.LastOutcomeAt = t.Last.String(), utc(t.LastAt)
		}
		switch {
		case t.Exclusion != nil:
			v.Since = utc(t.Exclusion.Since)
			v.Exclusion = &exclusionView{State: t.Exclusion.State.String(), Since: *utc(t.Exclusion.StateSince)}
		case !t.Verdict.Usable():
			v.Since = v.HealthSince
		}
		views = append(views, v)
	}
	return views
}

func utc(t time.Time) *time.Time {
	t = t.UTC().Round(0)
	return &t
}

func stateOf(t health.Detail) string {
	switch {
	case !t.Read:
		return stateUnread
	case t.Seen.Routed && t.Seen.Missing:
		return statePartly
	case t.Seen.Routed:
		return stateRouted
	case t.Seen.Present:
		return stateRemoved
	default:
		return stateAbsent
	}
}

// targetsQuery is which targets are asked for, and how to show them.
type targetsQuery struct {
	service, pool string
	address       netip.AddrPort
	text          bool
}

// queryKeys are what may be asked.
var queryKeys = []string{"address", "output", "pool", "service"}

// parseTargetsQuery refuses by name what it does not know.
func parseTargetsQuery(r *http.Request) (targetsQuery, error) {
	var q targetsQuery
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return q, fmt.Errorf("query: %w", err)
	}
	q.text = accepts(r.Header.Get("Accept"), "text/plain")
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if len(values[key]) > 1 {
			return q, fmt.Errorf("query %q: given %d times", key, len(values[key]))
		}
		value := values[key][0]
		switch key {
		case "service":
			if _, _, err := gateway.ParseService(value); err != nil {
				return q, fmt.Errorf("service %q: must be namespace/name", value)
			}
			q.service = value
		case "pool":
			q.pool = value
		case "address":
			if q.address, err = netip.ParseAddrPort(value); err != nil {
				return q, fmt.Errorf("address %q: must be ip:port", value)
			}
		case "output":
			if value != "json" && value != "text" {
				return q, fmt.Errorf("output %q: must be json or text", value)
			}
			q.text = value == "text"
		default:
			return q, fmt.Errorf("query %q: unknown; known are %s", key, strings.Join(queryKeys, ", "))
		}
	}
	return q, nil
}

// accepts reports whether an Accept header names a media type before application/json.
func accepts(header, want string) bool {
	for part := range strings.SplitSeq(header, ",") {
		switch name, _, _ := mime.ParseMediaType(part); name {
		case want:
			return true
		case "application/json":
			return false
		}
	}
	return false
}

// Targets answers GET /v1/targets. ports are the Services that feed each pool, names returns
// namespace/name of pods.
func Targets(set *health.Set, ports map[health.Pool]endpoints.Port, names func() map[health.UID]string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q, err := parseTargetsQuery(r)
		if err != nil {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusBadRequest)
			_ = json.NewEncoder(w).Encode(map[string]string{"error": err.Error()})
			return
		}
		views := viewTargets(set.Targets(), q, ports, names())
		if q.text {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			_ = writeTargets(w, views, time.Now())
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string][]targetView{"targets": views})
	})
}

// writeTargets prints a table.
func writeTargets(w io.Writer, views []targetView, now time.Time) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "POOL\tADDRESS\tPOD\tSERVICE\tSTATE\tWHY\tSINCE\tHEALTH\tLAST\tACTIVE\tUID")
	for _, v := range views {
		since := ""
		if v.Since != nil {
			since = now.Sub(*v.Since).Round(time.Second).String()
		}
		cells := []string{v.Pool, v.Address, v.Pod, v.Service, v.State, v.Why, since, v.Health, v.LastOutcome,
			fmt.Sprint(v.Counters.Active), v.UID}
		for i, c := range cells {
			if c == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(table, strings.Join(cells, "\t"))
	}
	return table.Flush()
}
