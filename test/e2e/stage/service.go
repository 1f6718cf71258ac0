package stage

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// balanceEvery is how often the stand-in of a Service looks who is behind it: as late as kube-proxy
// is at times.
const balanceEvery = 250 * time.Millisecond

// balance forwards connections to address, until Close, to the pods of a Service of System in turn.
// A connection stays with its pod, as with kube-proxy; where there is no pod it is closed.
func (s *Stage) balance(address netip.AddrPort, service string) error {
	listener, err := net.Listen("tcp", address.String())
	if err != nil {
		return fmt.Errorf("stand-in of Service %s: %w", service, err)
	}
	context.AfterFunc(s.running, func() { listener.Close() })
	var mu sync.Mutex
	var behind []string
	turn := 0
	s.nodes.Go(func() {
		ticker := time.NewTicker(balanceEvery)
		defer ticker.Stop()
		for s.running.Err() == nil {
			if pods, err := s.behind(service, address.Port()); err == nil {
				mu.Lock()
				behind = pods
				mu.Unlock()
			}
			select {
			case <-ticker.C:
			case <-s.running.Done():
			}
		}
	})
	next := func() string {
		mu.Lock()
		defer mu.Unlock()
		if len(behind) == 0 {
			return ""
		}
		turn++
		return behind[turn%len(behind)]
	}
	s.nodes.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			s.nodes.Go(func() {
				defer conn.Close()
				if to := next(); to != "" {
					s.forward(conn, to)
				} else {
					s.dropped.Add(1)
				}
			})
		}
	})
	return nil
}

// behind returns the addresses to which kube-proxy sends for a Service: those of ready pods or,
// where there is none, of terminating ones that still serve (k8s.io/kubernetes/pkg/proxy,
// CategorizeEndpoints).
func (s *Stage) behind(service string, port uint16) ([]string, error) {
	slices, err := s.Kube.DiscoveryV1().EndpointSlices(System).List(s.running,
		metav1.ListOptions{LabelSelector: discovery.LabelServiceName + "=" + service})
	if err != nil {
		return nil, err
	}
	var ready, terminating []string
	for _, slice := range slices.Items {
		for _, e := range slice.Endpoints {
			address := fmt.Sprintf("%s:%d", e.Addresses[0], port)
			switch is := e.Conditions; {
			case ptr.Deref(is.Ready, false):
				ready = append(ready, address)
			case ptr.Deref(is.Serving, false) && ptr.Deref(is.Terminating, false):
				terminating = append(terminating, address)
			}
		}
	}
	if len(ready) == 0 {
		return terminating, nil
	}
	return ready, nil
}

// Dropped returns how many connections to Services were closed because no pod was behind them.
func (s *Stage) Dropped() int { return int(s.dropped.Load()) }

// forward copies both ways until one end is done.
func (s *Stage) forward(conn net.Conn, to string) {
	server, err := net.DialTimeout("tcp", to, 5*time.Second)
	if err != nil {
		return
	}
	defer server.Close()
	stop := context.AfterFunc(s.running, func() { conn.Close(); server.Close() })
	defer stop()
	var both sync.WaitGroup
	for i, pair := range [][2]net.Conn{{conn, server}, {server, conn}} {
		both.Go(func() {
			var from io.Reader = pair[1]
			if i == 1 && s.Delay != nil {
				from = late{pair[1], s.Delay}
			}
			_, _ = io.Copy(pair[0], from)
			pair[0].Close()
			pair[1].Close()
		})
	}
	both.Wait()
}

// late delays what it reads. Its type hides that the connection could be spliced, which would pass
// everything on at once.
type late struct {
	io.Reader
	delay func() time.Duration
}

// Read implements io.Reader.
func (l late) Read(b []byte) (int, error) {
	n, err := l.Reader.Read(b)
	time.Sleep(l.delay()) // the delay is what it is for
	return n, err
}
