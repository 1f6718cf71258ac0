package kubeproxy

import (
	"net/netip"

	"github.com/lameduck-io/lameduck/pkg/gateway"
)

// observed is an Observer as an agent knows it.
type observed struct{ *Observer }

// NewObserved returns the kube-proxy of this node as a gateway that can be observed. It is a [gateway.Cleaner] and a [gateway.Auditor].
func NewObserved(o Options) gateway.Observed { return observed{New(o)} }

// Watch implements gateway.Observed.
func (o observed) Watch(targets []netip.AddrPort, changed func()) gateway.Watch {
	return o.Observer.Watch(targets, changed)
}
