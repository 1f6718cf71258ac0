// Package sockets reads the TCP connections of its own network namespace from the kernel, and
// closes those on which nothing passes. Agents beside a gateway use it where the gateway does not
// count requests.
package sockets

import (
	"net/netip"
	"time"
)

// Socket is one open TCP connection of the network namespace.
type Socket struct {
	Remote netip.AddrPort
	// Cgroup is the ID of the cgroup (v2) that opened it.
	Cgroup uint64
	// answered reports whether the last bytes on it came from the remote end and were read, and all
	// before them have arrived there, or no bytes have passed. ago is when they came, or when it
	// was opened.
	answered bool
	ago      time.Duration
	// id is struct inet_diag_sockid, with the socket's cookie.
	family byte
	id     [48]byte
}

// Quiet reports whether there is no request on the connection, if nothing passes for after once
// one is answered, or before the first.
func (s Socket) Quiet(after time.Duration) bool { return after > 0 && s.answered && s.ago >= after }
