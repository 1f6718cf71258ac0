package probe

import "syscall"

func init() {
	// Delay the acknowledgement of SYN+ACK until the request or, in a TCP check, the RST. If that
	// fails, the probe takes one more packet.
	dialer.Control = func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_QUICKACK, 0)
		})
	}
}
