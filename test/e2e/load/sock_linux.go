package load

import (
	"errors"
	"net"
	"syscall"
)

// choosePortLate lets connect(2) choose the port of a socket that is bound to an address only.
// Otherwise bind(2) chooses at random, and one port soon comes twice (birthday paradox), which
// meets TIME_WAIT and stale conntrack entries; connect(2) counts upwards.
func choosePortLate(_, _ string, c syscall.RawConn) error {
	const ipBindAddressNoPort = 24 // linux/in.h; package syscall has it for some architectures only
	return c.Control(func(fd uintptr) {
		// An old kernel without it still connects.
		_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_IP, ipBindAddressNoPort, 1)
	})
}

// closedByPeer reports whether an idle connection is of no more use: closed, reset, or holding
// bytes that belong to no request. It does not wait.
func closedByPeer(c net.Conn) bool {
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return true
	}
	closed := true
	err = raw.Read(func(fd uintptr) bool {
		_, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		closed = !errors.Is(err, syscall.EAGAIN)
		return true
	})
	return closed || err != nil
}
