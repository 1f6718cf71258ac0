package probe

import (
	"net"
	"syscall"
)

func init() {
	// The acknowledgement of SYN+ACK waits for the request, or, of a TCP check, for the RST. At
	// worst it does not.
	dialer.Control = func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_QUICKACK, 0)
		})
	}
	arrived = func(c *net.TCPConn) bool {
		raw, err := c.SyscallConn()
		if err != nil {
			return true
		}
		is := true
		_ = raw.Control(func(fd uintptr) {
			_, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
			is = err != syscall.EAGAIN
		})
		return is
	}
}
