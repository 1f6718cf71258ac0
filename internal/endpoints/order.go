package endpoints

import (
	"time"

	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

const (
	// Patience is how long an older view of a slice is set aside at most. It ends for clusters
	// whose etcd was restored from a backup: there, every view is older for good.
	Patience = 30 * time.Second
	// settle is how long one is set aside at least, because a watch tells how far it is a moment
	// after it has delivered a list.
	settle = 100 * time.Millisecond
	// deletedMemory is how long the version at which a slice was deleted is remembered.
	deletedMemory = 10 * time.Minute
)

// aside is a view of a slice that is older than what is known of it.
type aside struct {
	// slice is nil if the view lacks it.
	slice *discovery.EndpointSlice
	// known is the resourceVersion that is known of it, since when it is set aside.
	known string
	since time.Time
}

// deletedSlice is what is remembered of a deleted slice.
type deletedSlice struct {
	version string
	at      time.Time
}

// Missed takes in that a list after an interruption of the watch lacks a slice
// (cache.DeletedFinalStateUnknown). Either it was deleted meanwhile or the list is older than the
// slice; which of them it is can be said once the watch tells how far it is: see [Index.Tick].
func (x *Index) Missed(now time.Time, s *discovery.EndpointSlice) []PortChange {
	x.mu.Lock()
	defer x.mu.Unlock()
	name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
	known := x.known(name)
	if !ordered(known) {
		return x.forget(now, name, "")
	}
	x.setAside(now, name, nil, known)
	return nil
}

// Tick takes in the older views whose time has come: their watch, as at tells for a namespace, has
// come at least as far as what is known and has brought nothing newer, or [Patience] is over. at
// returns the last resourceVersion that the watch of a namespace has seen, "" if it cannot be told.
// Call it every few hundred milliseconds. It returns what that changes for the ports that are
// followed.
func (x *Index) Tick(now time.Time, at func(namespace string) string) []PortChange {
	x.mu.Lock()
	defer x.mu.Unlock()
	for name, g := range x.deleted {
		if now.Sub(g.at) >= deletedMemory {
			delete(x.deleted, name)
		}
	}
	var all []PortChange
	for name, a := range x.aside {
		waited := now.Sub(a.since)
		if reached := at(name.Namespace); waited >= settle && ordered(reached) && !older(reached, a.known) {
			if a.slice == nil {
				// It was not there at that version: a list that goes back before it must not bring
				// it again.
				all = append(all, x.forget(now, name, reached)...)
				continue
			}
		} else if waited < Patience {
			continue
		}
		delete(x.aside, name)
		delete(x.deleted, name)
		all = append(all, x.take(now, name, a.slice)...)
	}
	return all
}

// Behind returns how many older views are set aside.
func (x *Index) Behind() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.aside)
}

// setAside keeps the last of several older views. Its time runs from the first: one that keeps
// coming is not put off.
func (x *Index) setAside(now time.Time, name types.NamespacedName, s *discovery.EndpointSlice, known string) {
	since := now
	if a, ok := x.aside[name]; ok {
		since = a.since
	}
	x.aside[name] = aside{slice: s, known: known, since: since}
}

// forget forgets a slice that was deleted at version, and remembers that.
func (x *Index) forget(now time.Time, name types.NamespacedName, version string) []PortChange {
	delete(x.aside, name)
	if ordered(version) {
		x.deleted[name] = deletedSlice{version, now}
	}
	if x.slices[name] == nil {
		return nil
	}
	return x.take(now, name, nil)
}

// known is the resourceVersion of the last that is known of a slice, "" if nothing is.
func (x *Index) known(name types.NamespacedName) string {
	if c := x.slices[name]; c != nil {
		return c.last.ResourceVersion
	}
	return x.deleted[name].version
}

// older says whether resourceVersion a is older than b. Those of one resource can be compared
// (KEP-5504). One that cannot be is not older.
func older(a, b string) bool {
	c, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && c < 0
}

// ordered says whether a version can be compared.
func ordered(version string) bool {
	_, err := resourceversion.CompareResourceVersion(version, version)
	return err == nil
}
