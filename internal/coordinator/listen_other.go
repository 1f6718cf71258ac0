//go:build !linux

package coordinator

import (
	"net"
	"time"
)

// ListenConfig returns how to listen for agents: a connection whose other end does not answer while
// nothing is written ends after away. Only Linux can say so of a connection on which something is.
func ListenConfig(away time.Duration) net.ListenConfig {
	return net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: away / 2,
		Interval: max(away/5, time.Second), Count: 3}}
}
