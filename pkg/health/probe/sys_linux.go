package probe

import (
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The system calls of the loop, none of which can block: sockets do not, and epoll is only polled. They are made raw, without telling Go's
// scheduler, which would wake its monitor thread for each: that took more CPU than the probes.

// errno is 0 or an errno.
type errno = unix.Errno

// rawRead and rawWrite are recv and send, which cost less than read and write.
func rawRead(fd int, b []byte) (int, errno) {
	n, _, e := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), 0, 0, 0)
	return int(n), e
}

func rawWrite(fd int, b []byte) (int, errno) {
	n, _, e := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_NOSIGNAL, 0, 0)
	return int(n), e
}

func rawClose(fd int) {
	_, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0)
}

func rawSocket(family int) (int, errno) {
	fd, _, e := unix.RawSyscall(unix.SYS_SOCKET, uintptr(family), unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	return int(fd), e
}

func rawConnect(fd int, addr netip.AddrPort) errno {
	// Ports stand in the order of the network.
	port := addr.Port()
	var bytes [2]byte
	bytes[0], bytes[1] = byte(port>>8), byte(port)
	port = *(*uint16)(unsafe.Pointer(&bytes))
	var e errno
	if ip := addr.Addr(); ip.Is4() {
		sa := unix.RawSockaddrInet4{Family: unix.AF_INET, Port: port, Addr: ip.As4()}
		_, _, e = unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&sa)), unsafe.Sizeof(sa))
	} else {
		sa := unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: port, Addr: ip.As16()}
		_, _, e = unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&sa)), unsafe.Sizeof(sa))
	}
	return e
}

// dontAck makes the first acknowledgement wait for what is sent next. At worst it does not.
func dontAck(fd int) {
	var zero int32
	_, _, _ = unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, unix.TCP_QUICKACK, uintptr(unsafe.Pointer(&zero)), unsafe.Sizeof(zero), 0)
}

// resetOnClose makes close send RST. At worst it sends FIN.
func resetOnClose(fd int) {
	linger := unix.Linger{Onoff: 1}
	_, _, _ = unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_LINGER, uintptr(unsafe.Pointer(&linger)), unsafe.Sizeof(linger), 0)
}

// pendingError returns why a connection was not made, 0 if it was.
func pendingError(fd int) errno {
	var value int32
	size := uint32(unsafe.Sizeof(value))
	_, _, e := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_ERROR,
		uintptr(unsafe.Pointer(&value)), uintptr(unsafe.Pointer(&size)), 0)
	if e != 0 {
		return e
	}
	return errno(value)
}

func epollAdd(epfd, fd int, event *unix.EpollEvent) errno {
	_, _, e := unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(epfd), unix.EPOLL_CTL_ADD, uintptr(fd), uintptr(unsafe.Pointer(event)), 0, 0)
	return e
}

// epollPoll returns the events there are, without waiting for any.
func epollPoll(epfd int, events []unix.EpollEvent) (int, errno) {
	n, _, e := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
	return int(n), e
}
