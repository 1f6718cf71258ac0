//go:build !linux

package coordinator

import (
	"net"
	"time"
)

// ListenConfig returns the configuration of the listener for agents. A connection ends after away
// if its other end does not answer keep-alive probes. Only on Linux is there a limit for
// unacknowledged writes too.
func ListenConfig(away time.Duration) net.ListenConfig {
	return net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: away / 2,
		Interval: max(away/5, time.Second), Count: 3}}
}
