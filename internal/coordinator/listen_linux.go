package coordinator

import (
	"net"
	"syscall"
	"time"
)

// tcpUserTimeout is TCP_USER_TIMEOUT of linux/tcp.h.
const tcpUserTimeout = 0x12

// ListenConfig returns how to listen for agents: a connection whose other end does not acknowledge
// what is written, or does not answer while nothing is, ends after away. Heartbeats are written all
// the time, so that the stream of a node that has lost its power ends within away and a heartbeat;
// without this the kernel tries for a quarter of an hour, and all that time the agent counts as
// connected.
func ListenConfig(away time.Duration) net.ListenConfig {
	return net.ListenConfig{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: away / 2, Interval: max(away/5, time.Second),
			Count: 3},
		// Connections inherit it from the socket that accepts them.
		Control: func(_, _ string, conn syscall.RawConn) error {
			var err error
			if controlErr := conn.Control(func(fd uintptr) {
				err = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(away.Milliseconds()))
			}); controlErr != nil {
				return controlErr
			}
			return err
		},
	}
}
