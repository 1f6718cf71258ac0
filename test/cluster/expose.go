package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// Listen listens on a TCP address of the machine, also from inside the namespace: the process
// outside creates the socket and passes it in. Programs on the machine can connect to it. Outside
// the namespace, Listen is net.Listen.
func Listen(address string) (net.Listener, error) {
	if !Inside() {
		return net.Listen("tcp", address)
	}
	if outside == nil {
		return nil, errors.New("only the program that called cluster.Enter can listen outside, not its children")
	}
	conn := <-outside
	defer func() { outside <- conn }()
	if err := conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return nil, err
	}
	if _, err := conn.Write([]byte(address)); err != nil {
		return nil, fmt.Errorf("ask for a socket outside: %w", err)
	}
	text, rights := make([]byte, 1024), make([]byte, syscall.CmsgSpace(4))
	n, rn, _, _, err := conn.ReadMsgUnix(text, rights)
	if err != nil {
		return nil, fmt.Errorf("ask for a socket outside: %w", err)
	}
	if rn == 0 {
		return nil, errors.New(string(text[:n]))
	}
	messages, err := syscall.ParseSocketControlMessage(rights[:rn])
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("ask for a socket outside: no socket in the answer (%v)", err)
	}
	fds, err := syscall.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return nil, fmt.Errorf("ask for a socket outside: no socket in the answer (%v)", err)
	}
	file := os.NewFile(uintptr(fds[0]), "listener")
	defer file.Close()
	return net.FileListener(file)
}

// serveOutside answers Listen, outside: with a socket, or with the text of an error.
func serveOutside(conn *net.UnixConn) {
	request := make([]byte, 1024)
	for {
		n, err := conn.Read(request)
		if err != nil || n == 0 {
			return
		}
		file, err := listenFile(string(request[:n]))
		if err != nil {
			conn.Write([]byte(err.Error()))
			continue
		}
		conn.WriteMsgUnix(nil, syscall.UnixRights(int(file.Fd())), nil)
		file.Close()
	}
}

func listenFile(address string) (*os.File, error) {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	return listener.(*net.TCPListener).File()
}

// Expose forwards connections to an address of the machine to an address inside, until ctx ends,
// and returns the address of the machine. If outer is empty, that address is 127.0.0.1 with the
// port of inner or, if that port is in use, any other.
func Expose(ctx context.Context, inner, outer string) (string, error) {
	addresses := []string{outer}
	if outer == "" {
		_, port, err := net.SplitHostPort(inner)
		if err != nil {
			return "", fmt.Errorf("expose %q: %w", inner, err)
		}
		addresses = []string{net.JoinHostPort("127.0.0.1", port), "127.0.0.1:0"}
	}
	var listener net.Listener
	var err error
	for _, address := range addresses {
		if listener, err = Listen(address); err == nil {
			break
		}
	}
	if err != nil {
		return "", fmt.Errorf("expose %s: %w", inner, err)
	}
	context.AfterFunc(ctx, func() { listener.Close() })
	go func() {
		var wg sync.WaitGroup
		defer wg.Wait()
		for {
			conn, err := listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				time.Sleep(10 * time.Millisecond) // out of file descriptors, or the client has gone
				continue
			}
			wg.Go(func() { forward(ctx, conn, inner) })
		}
	}()
	return listener.Addr().String(), nil
}

// forward copies both ways until both ends are done, either breaks, or ctx ends.
func forward(ctx context.Context, client net.Conn, address string) {
	defer client.Close()
	dialer := net.Dialer{Timeout: 5 * time.Second}
	server, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return
	}
	defer server.Close()
	stop := context.AfterFunc(ctx, func() { client.Close(); server.Close() })
	defer stop()
	var wg sync.WaitGroup
	for _, pair := range [][2]net.Conn{{client, server}, {server, client}} {
		wg.Go(func() {
			if _, err := io.Copy(pair[0], pair[1]); err != nil {
				client.Close()
				server.Close()
				return
			}
			pair[0].(*net.TCPConn).CloseWrite() // half closed: the other direction may go on
		})
	}
	wg.Wait()
}
