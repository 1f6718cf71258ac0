package kubeproxy

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

// What kube-proxy writes, in the real kernel, read by an agent's gateway.
func TestContract(t *testing.T) {
	gatewaytest.RunObserved(t, func(t *testing.T) *gatewaytest.ObservedHarness {
		empty(t)
		network(t)
		s, a, b := service{"web", "10.96.0.1", false}, "10.244.0.1:8080", "10.244.0.2:8080"
		pod(t, a)
		pod(t, b)
		nft(t, append(setUp(s.family()), s.sync([]string{b})...)...)
		return &gatewaytest.ObservedHarness{
			Gateway: start(t, Options{}), Target: netip.MustParseAddrPort(a),
			Route:   func() { nft(t, s.sync([]string{a, b})...) },
			Unroute: func() { nft(t, s.sync([]string{b}, a)...) },
			Clutter: func() { // no kube-proxy writes this
				nft(t, "add map ip kube-proxy odd { type ipv4_addr . mark : ipv4_addr . mark ; }",
					"add element ip kube-proxy odd { 10.96.0.9 . 0x1 : 10.244.0.9 . 0x2 }",
					"add chain ip kube-proxy odd",
					"add rule ip kube-proxy odd ip protocol 99 dnat to 10.244.0.8-10.244.0.9",
					"add rule ip kube-proxy services ip daddr 10.96.0.9 goto odd")
			},
			Connect: func() (bool, func(), error) {
				conn, err := net.DialTimeout("tcp", net.JoinHostPort(s.clusterIP, "80"), 10*time.Second)
				if err != nil {
					return false, func() {}, err
				}
				if err := echo(conn); err != nil {
					return false, func() {}, err
				}
				// The client's end has the Service's address. Who answered is in the table of
				// connections.
				at := strings.Contains(run(t, "", "ss", "-Htn", "state", "established", "src", a),
					conn.LocalAddr().String())
				return at, func() { conn.Close() }, nil
			},
		}
	})
}
