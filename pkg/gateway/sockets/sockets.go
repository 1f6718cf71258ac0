// Package sockets reads the TCP connections of the process's network namespace from the kernel, and
// closes idle ones. Agents beside a gateway use it where the gateway does not count requests.
package sockets

import (
	"net/netip"
	"time"
)

// Socket is one open TCP connection of the network namespace, opened there.
type Socket struct {
	Remote netip.AddrPort
	// Cgroup is the ID of the cgroup (v2) that opened it.
	Cgroup uint64
	// answered reports whether no request is open. Either no bytes have passed, or the last ones
	// came from the remote end and were read. In that case the remote end has also acknowledged
	// everything before them. ago is the time since the last bytes came, or since the connection
	// was opened.
	answered bool
	ago      time.Duration
	// id is struct inet_diag_sockid, with the socket's cookie.
	family byte
	id     [48]byte
}

// Quiet reports whether the connection counts as idle: nothing has passed for at least after, since
// an answer or since it was opened. It is false if after is 0.
func (s Socket) Quiet(after time.Duration) bool { return after > 0 && s.answered && s.ago >= after }
