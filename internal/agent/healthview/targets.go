// Package healthview shows the health of an agent's targets: to operators as /v1/targets of the
// agent, and to coordinators as a summary. It only reads package health, which has the verdicts.
package healthview

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/lameduck-io/lameduck/internal/endpoints"
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
	// Why is the reason why the target has traffic, or has none: a name of [health.Why].
	Why string `json:"why"`
	// Since is when the reason began, where that is known.
	Since *time.Time `json:"since,omitempty"`
	// ReadAt is when State was read.
	ReadAt *time.Time `json:"readAt,omitempty"`
	// Health is the verdict of the checks: a name of [health.Verdict]. HealthSince is when it was
	// reached.
	Health      string     `json:"health"`
	HealthSince *time.Time `json:"healthSince,omitempty"`
	// LastOutcome is the outcome of the last probe, or of the gateway's own check, at
	// LastOutcomeAt.
	LastOutcome   string         `json:"lastOutcome,omitempty"`
	LastOutcomeAt *time.Time     `json:"lastOutcomeAt,omitempty"`
	Counters      targetCounters `json:"counters"`
	// Exclusion is there while the pod has one.
	Exclusion *exclusionView `json:"exclusion,omitempty"`
}

// targetCounters are the counters of one target.
type targetCounters struct {
	// Active is how many requests or connections the gateway had there when it was read.
	Active int `json:"active"`
	// The others count outcomes towards the next verdict.
	Successes    uint8 `json:"successes"`
	HTTPFailures uint8 `json:"httpFailures"`
	TCPFailures  uint8 `json:"tcpFailures"`
	Timeouts     uint8 `json:"timeouts"`
}

// exclusionView is the state of an exclusion.
type exclusionView struct {
	State string    `json:"state"`
	Since time.Time `json:"since"`
}

// States of a target in the gateway.
const (
	stateUnread  = "unread"  // not read since the gateway was last reloaded, or the agent started
	stateRouted  = "routed"  // every process may send there
	statePartly  = "partly"  // some processes may
	stateRemoved = "removed" // present, but no process sends new requests there
	stateAbsent  = "absent"  // in no process
)

func viewTargets(all []health.Detail, ports map[health.Pool]endpoints.Port,
	names map[health.UID]string) []targetView {
	views := []targetView{}
	for _, t := range all {
		of := ports[t.Pool]
		v := targetView{
			Address: t.Target.Addr.String(), Pod: names[t.Target.UID], UID: string(t.Target.UID),
			Service: of.Service.String(), Port: of.Name, Pool: string(t.Pool), State: stateOf(t), Why: t.Why.String(),
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

// maxReaders bounds the answers that are read at the same time. Each is whole in memory, 2 MB for
// 5,000 targets, until it is read or the server's time to write it is over.
const maxReaders = 8

// Targets answers GET /v1/targets with all targets, sorted by pool and address. ports are the
// Services that feed each pool, names returns namespace/name of pods.
func Targets(set *health.Set, ports map[health.Pool]endpoints.Port, names func() map[health.UID]string) http.Handler {
	readers := make(chan struct{}, maxReaders)
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		select {
		case readers <- struct{}{}:
			defer func() { <-readers }()
		default:
			http.Error(w, "others are still reading", http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		_ = e.Encode(map[string][]targetView{"targets": viewTargets(set.Targets(), ports, names())})
	})
}
