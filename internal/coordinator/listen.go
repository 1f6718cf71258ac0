package coordinator

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ListenConfig returns the configuration of the listener for agents. A connection ends after away
// if its other end does not acknowledge what is written, or does not answer keep-alive probes.
// Heartbeats are written all the time, so the stream of a node that has lost power ends within away
// and a heartbeat. Otherwise the kernel would retry for a quarter of an hour, during which the
// agent would count as connected.
func ListenConfig(away time.Duration) net.ListenConfig {
	return net.ListenConfig{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: away / 2, Interval: max(away/5, time.Second),
			Count: 3},
		// Connections inherit it from the socket that accepts them.
		Control: func(_, _ string, conn syscall.RawConn) error {
			var err error
			if controlErr := conn.Control(func(fd uintptr) {
				err = syscall.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(away.Milliseconds()))
			}); controlErr != nil {
				return controlErr
			}
			return err
		},
	}
}
