// Package listen listens at addresses of a node that another agent may have.
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

// tryEvery is how often an address is tried that another agent has: for so long hooks are refused
// if the other does not share it.
const tryEvery = 5 * time.Millisecond

// Address is an address of the node that the agent before this one may still have. A new agent is
// started before the old one is stopped, and from the first moment of the one to the last of the
// other somebody must listen: a hook that is refused ends at once, and its pod is stopped under its
// clients.
type Address struct {
	// Address is host:port.
	Address string
	// Shared: both may have it, and the kernel gives each connection to one of them. Else it is
	// taken over when the other is gone.
	Shared bool
	// Ready reports whether this agent can answer as well as the other.
	Ready func() bool
	// Got is called when this agent listens. May be nil.
	Got func()
	// Leave is closed when this agent is told to stop: if another one listens, what comes from then
	// on is for that. Nil: never.
	Leave <-chan struct{}
	Log   *slog.Logger
}

// Task returns server as a task, which begins when the address is to be had. If nobody else has it,
// that is now, and an address that cannot be listened on is an error.
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
		b.Log.Info("the address is ours too", "address", b.Address, "shared", b.Shared)
		b.tell()
		server.Listener = listener
		return b.run(ctx, server)
	}}, nil
}

// run serves until ctx is done or, if another listens, until this agent is told to stop. What runs
// then has the server's grace to end.
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

// LookEvery is how often an agent that ends looks whether another one listens.
const LookEvery = 200 * time.Millisecond

// hand waits until another agent listens at the address, or ctx is done. Of two that are told to
// stop at one time the second stays: who leaves has a claim, which it is to keep for as long as it
// runs. Nil: ctx is done.
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
			b.Log.Warn("hooks are taken to the end, also those that another agent could take", "address", b.Address,
				"error", err)
			said = true
		}
		if many > 1 {
			// A name of this network namespace, without a file, which goes with the process.
			claim, err := net.Listen("unix", "@lameduck/leaves/"+at.String())
			if err == nil {
				// The other one may have left between the look and the claim.
				if many, err = listeners(at); err == nil && many > 1 {
					b.Log.Info("another agent takes the hooks that come now", "address", b.Address)
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

// listeners is how many sockets of this process's network namespace listen on an address.
func listeners(at netip.AddrPort) (int, error) {
	file, addr := "tcp", at.Addr().Unmap().AsSlice()
	if len(addr) == net.IPv6len {
		file = "tcp6"
	}
	text, err := os.ReadFile("/proc/thread-self/net/" + file)
	if err != nil {
		return 0, err
	}
	// As tcp4_seq_show and tcp6_seq_show in the kernel write it: words of 32 bits, as this computer
	// has them.
	var local strings.Builder
	for word := range slices.Chunk(addr, 4) {
		fmt.Fprintf(&local, "%08X", binary.NativeEndian.Uint32(word))
	}
	fmt.Fprintf(&local, ":%04X", at.Port())
	const listen = "0A"         // TCP_LISTEN
	inodes := map[string]bool{} // what changes while it is read may be told twice
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

// alone listens if nobody else does.
func (b Address) alone() (net.Listener, error) {
	listener, err := net.Listen("tcp", b.Address)
	if err != nil || !b.Shared {
		return listener, err
	}
	// Only who asks to share before it binds is shared with. Nobody has connected yet: nobody has
	// listened here before.
	listener.Close()
	return listenShared(b.Address)
}

// wait listens as soon as it can: beside the other when this agent is ready, and alone in any case.
// It returns nil when ctx is done first.
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

// listenShared listens on an address beside those who do the same, as the same user.
//
// Known flaw: a connection that is in the queue of the other at the moment in which that closes it
// is reset. Which of the two gets a connection a program in the kernel could say
// (SO_ATTACH_REUSEPORT_CBPF), but not every kernel takes one: that on which this is tested says
// EOPNOTSUPP. Handing the one socket over would end it.
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
