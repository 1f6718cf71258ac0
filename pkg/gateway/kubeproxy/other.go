//go:build !linux

package kubeproxy

import (
	"context"
	"errors"
	"net/netip"
)

var errLinux = errors.New("kube-proxy's rules need Linux")

// Observer observes nothing: there is no kube-proxy without Linux.
type Observer struct{}

// Watch is a question that is never answered.
type Watch struct{}

// New returns an Observer.
func New(Options) *Observer { return &Observer{} }

// Run fails.
func (o *Observer) Run(context.Context) error { return errLinux }

// Audits returns none.
func (o *Observer) Audits() Audits { return Audits{} }

// Absent reports true.
func (o *Observer) Absent() bool { return true }

// Watch returns a Watch that stays Unknown.
func (o *Observer) Watch([]netip.AddrPort, func()) *Watch { return &Watch{} }

// Look is Watch.
func (o *Observer) Look([]netip.AddrPort, func()) *Watch { return &Watch{} }

// Clean fails.
func (o *Observer) Clean([]netip.AddrPort) error { return errLinux }

// Reading returns the zero Reading.
func (w *Watch) Reading() Reading { return Reading{} }

// Count does nothing.
func (w *Watch) Count() {}

// Close does nothing.
func (w *Watch) Close() {}
