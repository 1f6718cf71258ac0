package exclusion

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// Watches are the pods whose deletions are only measured, because their mode is observe:
// coordinators want to know when the gateway stops routing to them by itself. Nothing is excluded.
// It implements [client.Watches].
type Watches struct {
	Set *health.Set

	mu sync.Mutex
	// holders are the holders of each pod's watch, each with the end of its watch.
	holders map[drain.UID]map[string]time.Time
}

// Watch implements client.Watches.
func (w *Watches) Watch(now time.Time, of drain.Watch, holder string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.holders == nil {
		w.holders = map[drain.UID]map[string]time.Time{}
	}
	if w.holders[of.Pod.UID] == nil {
		w.holders[of.Pod.UID] = map[string]time.Time{}
	}
	w.holders[of.Pod.UID][holder] = now.Add(of.Deadline.Sub(of.Since))
}

// Unwatch implements client.Watches.
func (w *Watches) Unwatch(_ time.Time, uid drain.UID, holder string, _ bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.holders[uid], holder)
	if len(w.holders[uid]) == 0 {
		delete(w.holders, uid)
	}
}

// Watched implements client.Watches.
func (w *Watches) Watched(holder string) (uids []drain.UID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for uid, holders := range w.holders {
		if _, ok := holders[holder]; ok {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids
}

// Reports implements client.Watches.
func (w *Watches) Reports(now time.Time) (reports []drain.Report) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for uid, holders := range w.holders {
		maps.DeleteFunc(holders, func(_ string, until time.Time) bool { return now.After(until) })
		if len(holders) == 0 {
			delete(w.holders, uid)
			continue
		}
		r := drain.Report{UID: uid, HasSent: true}
		r.State, r.InFlight, r.Generation = w.Set.Of(uid)
		reports = append(reports, r)
	}
	slices.SortFunc(reports, func(a, b drain.Report) int { return strings.Compare(string(a.UID), string(b.UID)) })
	return reports
}
