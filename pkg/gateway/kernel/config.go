package kernel

import (
	"fmt"
	"slices"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// Config configures the agent of one gateway that the kernel directs. The agent runs in the
// gateway's pod.
type Config struct {
	// PodUID is the UID of the gateway's pod, from the downward API: ${POD_UID}.
	PodUID string `json:"podUID"`
	// Cgroups is where the node's cgroup2 is mounted. Empty: /sys/fs/cgroup.
	Cgroups string `json:"cgroups,omitempty"`
	// Pins is the directory in the node's bpffs where exclusions outlive the agent. Empty:
	// /sys/fs/bpf/lameduck.
	Pins string `json:"pins,omitempty"`
	// Services are the ports of Services to whose pods the gateway connects. Name all of those that
	// share pods: a connection may be redirected to an endpoint of each Service that is named.
	Services []Service `json:"services"`
}

// Service is one port of a Service.
type Service struct {
	// Service is namespace/name. Any of its pods must be able to stand for another. The gateway
	// must not bind clients to a pod (a cookie, a hash) or verify certificates of single pods
	// (HBONE, Linkerd). A headless Service, or one with the session affinity ClientIP, is refused
	// if the agent may list Services.
	Service string `json:"service"`
	// Port is the name of its port. Empty: the only one.
	Port string `json:"port,omitempty"`
	// HTTP1Quiet is a duration such as 1s, at least 50ms, for plain HTTP/1.1 only. The agent closes
	// connections to an excluded pod, and redirected connections of a pod that is routed again,
	// once nothing has passed for this long after an answer. An answer that pauses for longer is
	// cut off. Empty: no connection is closed.
	HTTP1Quiet string `json:"http1Quiet,omitempty"`
}

// minQuiet is longer than the 40 ms of a delayed acknowledgement. A request that was sent in the
// same tick of the kernel's clock as the answer before it is recognized by that acknowledgement.
const minQuiet = 50 * time.Millisecond

func (s Service) pool() health.Pool { return health.Pool(s.Service + ":" + s.Port) }

func (s Service) quiet() (time.Duration, error) {
	if s.HTTP1Quiet == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(s.HTTP1Quiet)
	if err == nil && d < minQuiet {
		err = fmt.Errorf("must be %s at least", minQuiet)
	}
	return d, err
}

// Name implements gateway.Kind.
func (*Config) Name() string { return "kernel" }

// Routes implements gateway.Kind.
func (c *Config) Routes() (all []gateway.Route) {
	for i, s := range c.Services {
		all = append(all, gateway.Route{Key: fmt.Sprintf("services[%d]", i), Service: s.Service, Port: s.Port,
			Pool: s.pool()})
	}
	return all
}

// Check implements gateway.Kind.
func (c *Config) Check() (errs []error) {
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.PodUID == "" {
		bad("podUID: required: the UID of the gateway's pod, from the downward API")
	}
	if len(c.Services) == 0 {
		bad("services: required: a connection is only redirected to an endpoint of the same Service")
	}
	for i, s := range c.Services {
		if _, err := s.quiet(); err != nil {
			bad("services[%d].http1Quiet %q: %w", i, s.HTTP1Quiet, err)
		}
		if len(s.pool()) > maxPool {
			bad("services[%d] %q: longer than %d", i, s.pool(), maxPool)
		}
		if slices.ContainsFunc(c.Services[:i], func(o Service) bool { return o.pool() == s.pool() }) {
			bad("services[%d] %q: given twice", i, s.pool())
		}
	}
	return errs
}

// maxUID and maxPool bound the names in the map of targets, in bytes.
const maxUID, maxPool = 64, 160

// OwnsPool implements gateway.DirectedKind: the gateway chooses.
func (*Config) OwnsPool() bool { return false }

// StateDir implements gateway.DirectedKind.
func (*Config) StateDir() string { return "" }

const (
	// expiry is how long an exclusion outlives its agent's last renewal. The agent renews it when
	// less than renewAt is left. An exclusion must outlast every release that a coordinator may
	// still base on the agent's last report, and settle: see drain.Times.
	expiry  = 70 * time.Second
	renewAt = 60 * time.Second
	// settle is how long an address that is no endpoint any more stays excluded: the gateway may
	// learn of that later than the agent.
	settle = 10 * time.Second
)

// NextExpiry returns the new expiry of an exclusion whose present expiry is expires; 0: it is new.
// All times are since boot, and boot is now. wanted reports whether a coordinator still excludes
// the address.
func NextExpiry(wanted bool, expires, boot time.Duration) time.Duration {
	switch left := expires - boot; {
	case wanted && left < renewAt:
		return boot + expiry
	case !wanted && (expires == 0 || left > settle):
		return boot + settle
	}
	return expires
}
