// Package sockets reads the TCP connections of the process's network namespace from the kernel, and
// closes idle ones. Agents beside a gateway use it where the gateway does not count requests.
package sockets

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
	"unsafe"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Constants for struct inet_diag_req_v2 and struct inet_diag_msg of linux/inet_diag.h.
const (
	sockDiagByFamily = 20
	sockDestroy      = 21
	diagInfo         = 2  // INET_DIAG_INFO
	diagCgroup       = 21 // INET_DIAG_CGROUP_ID
	requestLen       = 56
	messageLen       = 72
	// states are those in which a connection can carry a request or an answer, and LISTEN: not
	// TIME_WAIT and CLOSE.
	states = 1<<unix.BPF_TCP_LISTEN | 1<<unix.BPF_TCP_ESTABLISHED | 1<<unix.BPF_TCP_SYN_SENT |
		1<<unix.BPF_TCP_FIN_WAIT1 | 1<<unix.BPF_TCP_FIN_WAIT2 | 1<<unix.BPF_TCP_CLOSE_WAIT | 1<<unix.BPF_TCP_LAST_ACK
	timeout = 3 * time.Second
	// pageSize is how many bytes the kernel sends at a time: the most that it does.
	pageSize = 32 << 10
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

// List returns the open TCP connections that were opened in the network namespace. Those that were
// accepted are not among them: a pod that is also a client of the gateway keeps them open. List
// needs no capability.
func List() ([]Socket, error) {
	all, listens := []Socket{}, map[uint16]bool{}
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		request := netlink.Header{Type: sockDiagByFamily, Flags: netlink.Request | netlink.Dump}
		answers, err := ask(request, Socket{family: family})
		if err != nil {
			return nil, fmt.Errorf("list sockets: %w", err)
		}
		for _, m := range answers {
			if len(m.Data) < messageLen {
				continue
			}
			s := parse(m.Data)
			if m.Data[1] == unix.BPF_TCP_LISTEN {
				listens[s.port()] = true
				continue
			}
			all = append(all, s)
		}
	}
	// The kernel gives no port that is listened on to a connection that is opened.
	return slices.DeleteFunc(all, func(s Socket) bool { return listens[s.port()] }), nil
}

// port returns the local port.
func (s Socket) port() uint16 { return binary.BigEndian.Uint16(s.id[:]) }

// Cookie returns the number that identifies the socket to eBPF programs.
func (s Socket) Cookie() uint64 {
	return uint64(binary.NativeEndian.Uint32(s.id[40:])) | uint64(binary.NativeEndian.Uint32(s.id[44:]))<<32
}

// Close resets the connection if it is still quiet, and reports whether it did. A request that the
// owner writes between the check and the reset, some microseconds, is lost. Close needs
// CAP_NET_ADMIN.
func (s Socket) Close(after time.Duration) (bool, error) {
	is, err := ask(netlink.Header{Type: sockDiagByFamily, Flags: netlink.Request}, s)
	if err == nil && (len(is) != 1 || len(is[0].Data) < messageLen || !parse(is[0].Data).Quiet(after)) {
		return false, nil
	}
	if err == nil {
		_, err = ask(netlink.Header{Type: sockDestroy, Flags: netlink.Request | netlink.Acknowledge}, s)
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESTALE) {
		return false, nil // it is closed
	}
	if err != nil {
		return false, fmt.Errorf("close a socket to %s: %w", s.Remote, err)
	}
	return true, nil
}

// CanClose returns an error if the kernel does not support Close.
func CanClose() error {
	_, err := ask(netlink.Header{Type: sockDestroy, Flags: netlink.Request | netlink.Acknowledge},
		Socket{family: unix.AF_INET}) // which does not exist
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return fmt.Errorf("close sockets (it needs CONFIG_INET_DIAG_DESTROY): %w", err)
}

// ask sends one request about sockets with the family and the ID of s.
func ask(header netlink.Header, s Socket) ([]netlink.Message, error) {
	conn, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, &netlink.Config{MessageBufferSize: pageSize})
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	defer conn.Close() //nolint:errcheck // nothing is written
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	request := make([]byte, requestLen)
	request[0], request[1], request[2] = s.family, unix.IPPROTO_TCP, 1<<(diagInfo-1)
	binary.NativeEndian.PutUint32(request[4:], states)
	copy(request[8:], s.id[:])
	return conn.Execute(netlink.Message{Header: header, Data: request})
}

func parse(data []byte) Socket {
	s := Socket{family: data[0], id: [48]byte(data[4:52])}
	size := 4
	if s.family == unix.AF_INET6 {
		size = 16
	}
	address, _ := netip.AddrFromSlice(data[24 : 24+size])
	s.Remote = netip.AddrPortFrom(address.Unmap(), binary.BigEndian.Uint16(data[6:]))
	attributes, err := netlink.UnmarshalAttributes(data[messageLen:])
	if err != nil {
		return s
	}
	for _, a := range attributes {
		switch {
		case a.Type == diagCgroup && len(a.Data) == 8:
			s.Cgroup = binary.NativeEndian.Uint64(a.Data)
		case a.Type == diagInfo && data[1] == unix.BPF_TCP_ESTABLISHED:
			s.info(a.Data)
		}
	}
	// idiag_rqueue: the owner has not read the answer yet.
	s.answered = s.answered && binary.NativeEndian.Uint32(data[56:]) == 0
	return s
}

// info reads struct tcp_info, whose length differs between kernels.
func (s *Socket) info(data []byte) {
	var info unix.TCPInfo
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&info)), unsafe.Sizeof(info)), data)
	sent, received, acknowledged := info.Last_data_sent, info.Last_data_recv, info.Last_ack_recv
	// All times here are in milliseconds. An answer also acknowledges its request. A request that
	// was sent in the same tick as the previous answer gets a separate acknowledgement, 40 ms
	// later, because the other end delays it. Answers to keep-alive probes come later than
	// keepAlive.
	const tick, keepAlive = 10, 10_000
	alone := acknowledged+tick < received && received-acknowledged < keepAlive
	if info.Unacked > 0 || info.Notsent_bytes > 0 {
		return
	}
	// A SYN counts as one byte that is acknowledged. Pools open connections in advance.
	unused := info.Bytes_received == 0 && info.Bytes_acked <= 1
	if unused || info.Bytes_received > 0 && received <= sent && !alone {
		s.answered, s.ago = true, time.Duration(received)*time.Millisecond
	}
}
