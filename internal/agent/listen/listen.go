// Package listen opens the listeners of a node agent while the agent that it replaces may still
// have the same addresses. An update starts the new agent before it stops the old one, and between
// the two no hook may be refused.
package listen

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/internal/serve"
)

// tryEvery is how often listening is retried while another agent has the address. If that agent
// does not share it, hooks are refused for that long.
const tryEvery = 5 * time.Millisecond

// Address is an address of the node that the agent before this one may still have. A new agent
// starts before the old one stops, and one of them must listen at every moment: a hook that is
// refused ends immediately, and its pod stops while clients still use it.
type Address struct {
	// Address is host:port.
	Address string
	// Shared: both may listen, and the kernel gives each connection to one of them. Otherwise this
	// agent listens when the other has ended.
	Shared bool
	// Ready reports whether this agent is ready to answer hooks. Until then it does not share the
	// address.
	Ready func() bool
	// Got is called once this agent listens. May be nil.
	Got func()
	// Leave is closed when this agent is told to stop. If another one listens, it takes the
	// connections from then on. Nil: never.
	Leave <-chan struct{}
	Log   *slog.Logger
}

// Task returns server as a task that begins when the address is available. If no other agent has
// it, that is now, and a failure to listen is an error.
func (b Address) Task(server serve.Server) (serve.Task, error) {
	listener, err := b.alone()
	switch {
	case err == nil:
		b.tell()
		server.Listener = listener
		return serve.Task{Name: server.Name, Last: true, Run: func(ctx context.Context) error {
			return b.run(ctx, server)
		}}, nil
	case !errors.Is(err, syscall.EADDRINUSE):
		return serve.Task{}, err
	}
	b.Log.Info("another process has the address: waiting for it", "address", b.Address, "shared", b.Shared)
	return serve.Task{Name: server.Name, Last: true, Run: func(ctx context.Context) error {
		listener, err := b.wait(ctx)
		if err != nil || listener == nil {
			return err
		}
		b.Log.Info("listening on shared address", "address", b.Address, "shared", b.Shared)
		b.tell()
		server.Listener = listener
		return b.run(ctx, server)
	}}, nil
}

// run serves until ctx is done or, if another agent listens, until this one is told to stop.
// Running requests then have the server's grace to end.
func (b Address) run(ctx context.Context, server serve.Server) error {
	ctx, cancel := context.WithCancel(ctx)
	claim := make(chan io.Closer, 1)
	go func() {
		select {
		case <-ctx.Done():
			claim <- nil
		case <-b.Leave:
			claim <- b.hand(ctx, server.Listener.Addr())
			cancel()
		}
	}()
	err := server.Task().Run(ctx)
	cancel()
	if held := <-claim; held != nil {
		held.Close()
	}
	return err
}

// LookEvery is how often an agent that is ending checks whether another one listens.
const LookEvery = 200 * time.Millisecond

// hand waits until another agent listens at the address, or ctx is done. If two agents are told to
// stop at the same time, the second one stays: an agent that leaves takes a claim and keeps it
// until its process ends. hand returns nil if ctx is done.
func (b Address) hand(ctx context.Context, address net.Addr) (claim io.Closer) {
	at, err := netip.ParseAddrPort(address.String())
	if err != nil {
		<-ctx.Done()
		return nil
	}
	ticker := time.NewTicker(LookEvery)
	defer ticker.Stop()
	for said := false; ; {
		many, err := listeners(at)
		if err != nil && !said {
			b.Log.Warn("look for another agent: this one answers hooks until it ends", "address", b.Address,
				"error", err)
			said = true
		}
		if many > 1 {
			// An abstract socket: no file, and the kernel removes it with the process.
			claim, err := net.Listen("unix", "@lameduck/leaves/"+at.String())
			if err == nil {
				// The other one may have left between the check and the claim.
				if many, err = listeners(at); err == nil && many > 1 {
					b.Log.Info("another agent listens: new hooks go to it", "address", b.Address)
					return claim
				}
				claim.Close()
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// listeners counts the sockets of this process's network namespace that listen on an address.
func listeners(at netip.AddrPort) (int, error) {
	file, addr := "tcp", at.Addr().Unmap().AsSlice()
	if len(addr) == net.IPv6len {
		file = "tcp6"
	}
	text, err := os.ReadFile("/proc/thread-self/net/" + file)
	if err != nil {
		return 0, err
	}
	// The format of tcp4_seq_show and tcp6_seq_show in the kernel: words of 32 bits in the byte
	// order of this machine.
	var local strings.Builder
	for word := range slices.Chunk(addr, 4) {
		fmt.Fprintf(&local, "%08X", binary.NativeEndian.Uint32(word))
	}
	fmt.Fprintf(&local, ":%04X", at.Port())
	const listen = "0A"         // TCP_LISTEN
	inodes := map[string]bool{} // an entry that changes during the read may appear twice
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 9 && fields[1] == local.String() && fields[3] == listen {
			inodes[fields[9]] = true
		}
	}
	return len(inodes), nil
}

func (b Address) tell() {
	if b.Got != nil {
		b.Got()
	}
}

// alone listens if no other process does.
func (b Address) alone() (net.Listener, error) {
	listener, err := net.Listen("tcp", b.Address)
	if err != nil || !b.Shared {
		return listener, err
	}
	// The kernel shares an address only among sockets that asked for it before they were bound. So
	// this listener is closed again, before any connection.
	listener.Close()
	return listenShared(b.Address)
}

// wait listens as soon as the address is free, or as soon as this agent is ready to share it. It
// returns nil if ctx is done first.
func (b Address) wait(ctx context.Context) (net.Listener, error) {
	ticker := time.NewTicker(tryEvery)
	defer ticker.Stop()
	for {
		listener, err := b.alone()
		if errors.Is(err, syscall.EADDRINUSE) && b.Shared && b.Ready() {
			listener, err = listenShared(b.Address)
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return listener, err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil, nil
		}
	}
}

// listenShared listens on an address together with other processes of the same user.
//
// Known flaw: when one process closes its listener, connections in its queue are reset. A program
// in the kernel could choose which process gets a connection (SO_ATTACH_REUSEPORT_CBPF), but not
// every kernel accepts one: the one that this is tested on returns EOPNOTSUPP. Handing the socket
// over would remove the flaw.
func listenShared(address string) (net.Listener, error) {
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if e := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT,
				1)
		}); e != nil {
			return e
		}
		return err
	}}
	return config.Listen(context.Background(), "tcp", address)
}
