package main

import (
	"context"
	"net/netip"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/gateway/kubeproxy"
)

// kernel is what a node agent needs of the node's kernel, see package kubeproxy.
type kernel interface {
	// Run follows the kernel until ctx is done.
	Run(ctx context.Context) error
	// Watch calls changed, which must not block, when the reading of targets has changed. Port 0 is every port of the address.
	Watch(targets []netip.AddrPort, changed func()) kernelWatch
	// Clean forgets the connections to a pod that is gone.
	Clean(targets []netip.AddrPort) error
	// Absent reports whether there is no kube-proxy that can be observed.
	Absent() bool
	// Audits returns how often what is known was compared with the kernel, by result.
	Audits() kubeproxy.Audits
}

type kernelWatch interface {
	Reading() reading
	// Count has connections counted again at once.
	Count()
	Close()
}

// reading is what the kernel does with connections to a pod.
type reading struct {
	// State is StateUnknown, Routing, Kept, Removed or Idle.
	State      drain.State
	Generation string
	// Quiet says that there is no connection to wait for, whatever may come.
	Quiet bool
	// Connections is how many were open when they were counted at Counted, with those that are not waited for because their clients
	// keep them.
	Connections int
	Counted     time.Time
	// Since is when State was entered.
	Since time.Time
}
