package probe

import "syscall"

func init() {
	// The acknowledgement of SYN+ACK waits for the request, or, of a TCP check, for the RST. At
	// worst it does not.
	dialer.Control = func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_QUICKACK, 0)
		})
	}
}
