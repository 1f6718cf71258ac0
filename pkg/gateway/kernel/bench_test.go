//go:build linux

package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// TestWhatItCosts prints what a connect() costs without the programs, with them, with 10,000
// exclusions and redirected, and how long it takes from the order to the reading that shows
// Removed.
func TestWhatItCosts(t *testing.T) {
	p := newPod(t, false)
	dials := p.child(t, "dial")
	a, b := listen(t, "127.0.91.1"), listen(t, "127.0.91.2")
	measure := func(what string) {
		took, err := time.ParseDuration(dials.ask("time %s", a))
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("connect() %s: median %s", what, took)
	}
	measure("warm up")
	measure("without the programs")
	g := p.open(t)
	apply(t, g, health.WantRouted, a, b)
	measure("with the programs")
	var times []time.Duration
	for range 200 {
		began := time.Now()
		apply(t, g, health.WantRemoved, a)
		if o, err := g.Observe(t.Context(), []health.Key{key(a)}); err != nil || o.Seen[key(a)].Routed {
			t.Fatalf("it is seen as %+v, %v", o, err)
		}
		times = append(times, time.Since(began))
		apply(t, g, health.WantRouted, a)
	}
	slices.Sort(times)
	t.Logf("from the order to Removed: median %s, 99th percentile %s", times[100], times[198])
	if times[100] > goal {
		t.Errorf("from the order to Removed: median %s, want %s at most", times[100], goal)
	}
	var many []netip.AddrPort
	for i := range 10_000 {
		var ip [4]byte
		binary.BigEndian.PutUint32(ip[:], 10<<24+uint32(i))
		many = append(many, netip.AddrPortFrom(netip.AddrFrom4(ip), 80))
	}
	apply(t, g, health.WantRemoved, many...)
	measure("with 10,000 exclusions")
	apply(t, g, health.WantRemoved, a)
	measure("redirected")
	apply(t, g, health.WantRouted, a)
	began := time.Now()
	apply(t, g, health.WantRemoved, a)
	if _, err := g.Observe(t.Context(), []health.Key{key(a)}); err != nil {
		t.Fatal(err)
	}
	t.Logf("from the order to Removed beside 10,000 exclusions: %s", time.Since(began))
}

// goal is for the median from the order to Removed.
const goal = time.Millisecond

// timeDials returns the median of many connect() calls.
func timeDials(to netip.AddrPort) string {
	var times []time.Duration
	for range 2000 {
		fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
		if err != nil {
			return err.Error()
		}
		sa := &syscall.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
		began := time.Now()
		err = syscall.Connect(fd, sa)
		times = append(times, time.Since(began))
		syscall.Close(fd)
		if err != nil {
			return err.Error()
		}
	}
	slices.Sort(times)
	return fmt.Sprint(times[len(times)/2])
}
