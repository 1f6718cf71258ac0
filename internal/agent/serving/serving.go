// Package serving answers /livez and /healthz of an agent: 200 if the gateway receives its changes
// in time. Package liveness feeds it.
//
// The rules are those of kube-proxy's ProxierHealthServer (k8s.io/kubernetes,
// pkg/proxy/healthcheck), so that load balancers and keepalived can be pointed at an agent as they
// are at kube-proxy. A change is [Health.Queued] when it is known and [Health.Updated] when it is
// done, separately for each IP family. A family is late when its oldest pending change has waited
// for the timeout or longer.
//
//   - A family that was never updated is starting, and a starting family is not late, however long
//     that takes.
//   - A family without a queued change is not late, however long ago it was updated.
//   - One late family makes both answers 503. Another family's update does not help it.
//   - A node that is being deleted makes /healthz 503, and changes nothing in /livez: new traffic
//     should go elsewhere, but a restart would not help.
//
// There is one difference. kube-proxy's Updated completes all changes that are queued at that
// moment. Here it completes the changes that were queued up to a given time, so that a change that
// arrives while the gateway is being read stays pending.
//
// The answers do not depend on backends, coordinators or the API server. Otherwise a failure of one
// of these would move traffic away from working gateways, usually from all of them together.
package serving

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

// Family is an IP family, by the name that Kubernetes gives it.
type Family string

const (
	// Unknown is the zero value. Nothing is ever queued for it.
	Unknown Family = ""
	// IPv4 is the family of 10.0.0.1, and of ::ffff:10.0.0.1.
	IPv4 Family = "IPv4"
	// IPv6 is the family of fd00::1.
	IPv6 Family = "IPv6"
)

// Families are the IP families.
var Families = [...]Family{IPv4, IPv6}

// Of returns the family of an address, [Unknown] of the zero one.
func Of(addr netip.Addr) Family {
	switch {
	case !addr.IsValid():
		return Unknown
	case addr.Unmap().Is4():
		return IPv4
	default:
		return IPv6
	}
}

// Report is the body of both answers. The names are kube-proxy's.
type Report struct {
	// LastUpdated is when a family was last updated. If all is well it equals CurrentTime, as in
	// kube-proxy, because some clients check its age.
	LastUpdated time.Time `json:"lastUpdated"`
	CurrentTime time.Time `json:"currentTime"`
	// NodeEligible is absent from /livez.
	NodeEligible *bool `json:"nodeEligible,omitempty"`
	// Healthy: no family is late. The node is not considered.
	Healthy bool `json:"healthy"`
	// Status has the families that were updated at least once.
	Status map[Family]Status `json:"status,omitempty"`
}

// Status is the status of one family.
type Status struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// Health records the pending changes, and since when. Its methods may be called from any goroutine.
type Health struct {
	timeout time.Duration

	mu         sync.Mutex
	updated    map[Family]time.Time
	queued     map[Family]wait
	ineligible bool
}

// wait is when the oldest and the newest pending change of one family were queued.
type wait struct{ oldest, newest time.Time }

// New returns the health of a gateway that is starting, on an eligible node. timeout is how long a
// change may wait.
func New(timeout time.Duration) *Health {
	return &Health{timeout: timeout, updated: map[Family]time.Time{}, queued: map[Family]wait{}}
}

// Queued records a change of f for the gateway at now. While an older one is pending, the age of
// that one counts.
func (h *Health) Queued(f Family, now time.Time) {
	if f == Unknown {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	w, waiting := h.queued[f]
	if !waiting {
		w.oldest = now
	}
	if w.newest.Before(now) {
		w.newest = now
	}
	h.queued[f] = w
}

// Updated records that the gateway has all changes of f that were queued until asOf. Later changes
// stay pending, and count from asOf, because the time of the oldest of them is not known.
func (h *Health) Updated(f Family, asOf time.Time) {
	if f == Unknown {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if last, ok := h.updated[f]; !ok || last.Before(asOf) {
		h.updated[f] = asOf
	}
	w, waiting := h.queued[f]
	switch {
	case !waiting || w.oldest.After(asOf):
	case w.newest.After(asOf):
		h.queued[f] = wait{oldest: asOf, newest: w.newest}
	default:
		delete(h.queued, f)
	}
}

// SetEligible records whether the node may get new traffic. Before the first call it may.
func (h *Health) SetEligible(eligible bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ineligible = !eligible
}

// Livez returns the answer of /livez at now, and whether it is a success.
func (h *Health) Livez(now time.Time) (Report, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := Report{CurrentTime: now, Healthy: true, Status: make(map[Family]Status, len(h.updated))}
	for f, updated := range h.updated {
		if updated.After(r.LastUpdated) {
			r.LastUpdated = updated
		}
		w, waiting := h.queued[f]
		late := waiting && now.Sub(w.oldest) >= h.timeout
		r.Status[f] = Status{LastUpdated: updated, Healthy: !late}
		r.Healthy = r.Healthy && !late
	}
	if r.Healthy {
		r.LastUpdated = now
	}
	return r, r.Healthy
}

// Healthz returns the answer of /healthz at now, and whether it is a success.
func (h *Health) Healthz(now time.Time) (Report, bool) {
	r, _ := h.Livez(now)
	h.mu.Lock()
	eligible := !h.ineligible
	h.mu.Unlock()
	r.NodeEligible = &eligible
	if r.Healthy && !eligible {
		r.LastUpdated = latest(r.Status)
	}
	return r, r.Healthy && eligible
}

func latest(all map[Family]Status) time.Time {
	var last time.Time
	for _, s := range all {
		if s.LastUpdated.After(last) {
			last = s.LastUpdated
		}
	}
	return last
}

// Handler serves one of the two answers, [Health.Livez] or [Health.Healthz]: with status 200 or
// 503.
func Handler(answer func(now time.Time) (Report, bool)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		report, good := answer(time.Now())
		body, err := json.Marshal(report)
		if err != nil {
			http.Error(w, fmt.Sprintf("encode the answer: %v", err), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		if !good {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_, _ = w.Write(body) // fails if the client has disconnected
	})
}
