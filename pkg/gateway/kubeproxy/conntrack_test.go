package kubeproxy

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// network makes the ranges of pods and Services this namespace's own, once.
func network(t testing.TB) {
	t.Helper()
	if routes := run(t, "", "ip", "route", "show", "table", "all"); strings.Contains(routes, "10.96.0.0/16") {
		return
	}
	for _, c := range []string{
		"link set lo up", "address add 10.244.255.1/32 dev lo", "route add local 10.244.0.0/16 dev lo",
		"route add 10.96.0.0/16 dev lo src 10.244.255.1",
		"-6 address add fd00::ff/128 dev lo nodad", "-6 address add fd00::1/128 dev lo nodad",
		"-6 address add fd00::2/128 dev lo nodad", "-6 route add fd10::/64 dev lo src fd00::ff",
	} {
		run(t, "", "ip", strings.Fields(c)...)
	}
}

// pod accepts connections at an address and keeps them until their clients end them.
func pod(t testing.TB, address string) {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	// Its clients may be cut off from it: the test ends what they cannot.
	var wg sync.WaitGroup
	done := make(chan struct{})
	t.Cleanup(func() {
		close(done)
		l.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			ended := make(chan struct{})
			wg.Go(func() {
				io.Copy(conn, conn)
				close(ended)
			})
			wg.Go(func() {
				select {
				case <-done:
				case <-ended:
				}
				conn.Close()
			})
		}
	})
}

// echo says something on a connection and waits for it to come back.
func echo(conn net.Conn) error {
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := conn.Write([]byte("x")); err != nil {
		return err
	}
	_, err := io.ReadFull(conn, make([]byte, 1))
	return err
}

func connect(t testing.TB, address string) net.Conn {
	t.Helper()
	conn, err := net.DialTimeout("tcp", address, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := echo(conn); err != nil {
		t.Fatal(err)
	}
	return conn
}

// A connection through the Service's address keeps the pod from being Idle, for as long as it is
// open; one to another pod, or another port of it, does not.
func TestIdle(t *testing.T) {
	for _, test := range []struct {
		service    service
		a, b, port string
	}{
		{service{"web", "10.96.0.1", false}, "10.244.0.1:8080", "10.244.0.2:8080", "10.244.0.1:9090"},
		{service{"web", "fd10::1", true}, "[fd00::1]:8080", "[fd00::2]:8080", "[fd00::1]:9090"},
	} {
		t.Run(test.service.family(), func(t *testing.T) {
			empty(t)
			network(t)
			s, a, b := test.service, test.a, test.b
			pod(t, a)
			pod(t, b)
			pod(t, test.port)
			nft(t, append(setUp(s.family()), s.sync([]string{a})...)...)
			o := start(t, Options{})
			through := connect(t, net.JoinHostPort(s.clusterIP, "80"))
			w := watch(t, o, a)
			address := netip.AddrPortFrom(netip.MustParseAddrPort(a).Addr(), 0).String()
			whole := watch(t, o, address)
			w.wait(health.Kept)
			nft(t, s.sync([]string{b}, a)...)
			w.wait(health.Removed)
			connect(t, b)
			other := connect(t, test.port)
			w.stays(health.Removed)
			if err := echo(through); err != nil {
				t.Error("the connection does not outlive the rules:", err)
			}
			until(t, "1 connection to "+a, func() bool { return w.Reading().Connections == 1 })
			until(t, "2 connections to "+address, func() bool { return whole.Reading().Connections == 2 })
			through.Close()
			w.wait(health.Idle)
			whole.stays(health.Removed)
			other.Close()
			whole.wait(health.Idle)
			// It is a level: the rules say otherwise, and so does the reading.
			nft(t, s.sync([]string{a, b})...)
			w.wait(health.Routing)
			nft(t, s.sync([]string{b}, a)...)
			w.wait(health.Idle)
		})
	}
}

// A pod that the kernel keeps, for want of another one, is asked to be quiet. Without this it
// counts as quiet whatever is open to it.
func TestQuietThoughItIsSentTo(t *testing.T) {
	empty(t)
	network(t)
	s, a, b := service{"web", "10.96.0.1", false}, "10.244.0.1:8080", "10.244.0.2:8080"
	pod(t, a)
	nft(t, append(setUp(s.family()), s.sync([]string{a})...)...)
	o := start(t, Options{})
	through := connect(t, net.JoinHostPort(s.clusterIP, "80"))
	w := watch(t, o, a)
	if r := w.wait(health.Kept); r.NoConnections {
		t.Errorf("at first it is %+v", r)
	}
	until(t, "a connection that is counted", func() bool { return w.Reading().Connections == 1 })
	next := func() time.Time {
		o.mu.Lock()
		defer o.mu.Unlock()
		return w.next
	}
	for range emptyCounts + 1 {
		before := next()
		until(t, "another count", func() bool { return next() != before })
	}
	if r := w.Reading(); r.State != health.Kept || r.NoConnections {
		t.Errorf("with an open connection it is %+v", r)
	}
	for len(w.news) > 0 {
		<-w.news
	}
	through.Close()
	until(t, "no connection", func() bool { return w.Reading().NoConnections })
	select {
	case <-w.news:
	case <-time.After(20 * time.Second):
		t.Error("that it is quiet is not told")
	}
	again := connect(t, net.JoinHostPort(s.clusterIP, "80"))
	until(t, "a new connection", func() bool { return !w.Reading().NoConnections })
	again.Close()
	// Another one comes: what was counted before is not known of the new state.
	nft(t, s.sync([]string{a, b})...)
	w.wait(health.Routing)
	until(t, "no connection, to one of two", func() bool { return w.Reading().NoConnections })
	nft(t, s.sync([]string{b}, a)...)
	w.wait(health.Idle)
	if !w.Reading().NoConnections {
		t.Error("what is Idle is not quiet")
	}
}

// Idle is a level: connections that arrive later by ways that this kernel's rules do not show (from
// a node that is late and was not asked, from a load balancer) are in the table of the pod's node,
// and end it until they are gone.
func TestIdleIsCountedAgain(t *testing.T) {
	empty(t)
	network(t)
	s, a := service{"web", "10.96.0.1", false}, "10.244.0.1:8080"
	pod(t, a)
	nft(t, append(setUp("ip"), s.sync([]string{"10.244.0.2:8080"})...)...)
	o := start(t, Options{})
	w := watch(t, o, a)
	since := w.wait(health.Idle).Since
	var late []net.Conn
	for range 5 {
		late = append(late, connect(t, a)) // stays open
	}
	until(t, "5 connections", func() bool { r := w.Reading(); return r.State == health.Removed && r.Connections == 5 })
	for _, one := range late {
		one.Close()
	}
	if again := w.wait(health.Idle).Since; !again.After(since) {
		t.Errorf("Idle since %s, and before since %s", again, since)
	}
	// Who cannot wait for the next count has it made.
	asked := time.Now()
	connect(t, a)
	w.Count()
	until(t, "a count", func() bool { return w.Reading().State == health.Removed })
	if counted := w.Reading().Counted; counted.Before(asked) {
		t.Errorf("counted %s before it was asked for", asked.Sub(counted))
	}
}

// What a reading calls quiet is seen, never supposed: a client that goes straight to the pod is
// open, or has come and ended between two counts, or has not come. Without any, without counters
// and after a pause of the counts nothing is quiet; probes from the node's own address neither show
// nor prevent it.
func TestQuiet(t *testing.T) {
	for _, test := range []struct{ name, node, client, pod string }{
		{"ip", "10.244.255.1", "10.244.7.7", "10.244.9.9:8080"},
		{"ip6", "fd00::ff", "fd01::7", "[fd01::9]:8080"},
	} {
		t.Run(test.name, func(t *testing.T) {
			empty(t)
			network(t)
			// As in IPv4, addresses of no interface.
			run(t, "", "ip", "-6", "route", "replace", "local", "fd01::/64", "dev", "lo")
			if err := os.WriteFile("/proc/sys/net/ipv6/ip_nonlocal_bind", []byte("1"), 0); err != nil {
				t.Fatal(err)
			}
			pod(t, test.pod)
			cluster := "10.96.0.1"
			if test.name == "ip6" {
				cluster = "fd10::1"
			}
			s := service{"web", cluster, test.name == "ip6"}
			nft(t, append(setUp(s.family()), s.sync([]string{test.pod})...)...)
			o := start(t, Options{})
			dial := func(from string) net.Conn {
				t.Helper()
				d := net.Dialer{Timeout: 10 * time.Second, LocalAddr: net.TCPAddrFromAddrPort(
					netip.AddrPortFrom(netip.MustParseAddr(from), 0))}
				conn, err := d.Dial("tcp", test.pod)
				if err == nil {
					err = echo(conn)
				}
				if err != nil {
					t.Fatal(err)
				}
				return conn
			}
			w := watch(t, o, test.pod)
			w.wait(health.Kept)
			// count has connections counted from now on, and returns for how long all was quiet.
			count := func() time.Duration {
				t.Helper()
				asked := time.Now()
				w.Count()
				until(t, "a count", func() bool { return w.Reading().Counted.After(asked) })
				return w.Reading().Quiet
			}
			count()
			dial(test.node).Close()
			connect(t, net.JoinHostPort(cluster, "80")).Close()
			for began := time.Now(); time.Since(began) < 300*time.Millisecond; {
				if quiet := count(); quiet != 0 {
					t.Fatalf("no client has gone straight to the pod, and it has been quiet for %s", quiet)
				}
			}
			one := dial(test.client)
			if quiet := count(); quiet != 0 {
				t.Errorf("a connection is open, and it has been quiet for %s", quiet)
			}
			one.Close()
			until(t, "quiet", func() bool { return count() > 200*time.Millisecond })
			opened := time.Now()
			probe := dial(test.node)
			for range 3 {
				if quiet := count(); quiet < 200*time.Millisecond && time.Since(opened) < maxProbe {
					t.Errorf("counts have found a probe, and it has been quiet for %s", quiet)
				}
			}
			until(t, "a connection from the node that is no probe", func() bool { return count() == 0 })
			if took := time.Since(opened); took < maxProbe {
				t.Errorf("a connection from the node counts after %s", took)
			}
			probe.Close()
			until(t, "quiet", func() bool { return count() > 200*time.Millisecond })
			came := time.Now()
			dial(test.client).Close()
			until(t, "the end of a connection", func() bool { count(); return w.Reading().Connections == 0 })
			if quiet := count(); quiet > time.Since(came) {
				t.Errorf("a connection came %s ago, and it has been quiet for %s", time.Since(came), quiet)
			}
			until(t, "quiet", func() bool { return count() > 200*time.Millisecond })
			o.mu.Lock()
			w.walked = w.walked.Add(-maxUnseen) // as if nothing had been counted since
			paused := time.Now()
			o.mu.Unlock()
			if quiet := count(); quiet > time.Since(paused) {
				t.Errorf("after a pause of %s it has been quiet for %s", maxUnseen, quiet)
			}
			until(t, "quiet", func() bool { return count() > 200*time.Millisecond })
			o.mu.Lock()
			o.accounted = time.Time{}
			o.mu.Unlock()
			for range 2 {
				if quiet := count(); quiet != 0 {
					t.Errorf("the kernel does not count packets, and it has been quiet for %s", quiet)
				}
			}
		})
	}
}

// exchange sends a request and waits for the answer, each as long as the smallest of HTTP.
func exchange(t *testing.T, conn net.Conn) {
	t.Helper()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	message := make([]byte, 120)
	if _, err := conn.Write(message); err != nil {
		t.Error(err)
	} else if _, err := io.ReadFull(conn, message); err != nil {
		t.Error(err)
	}
}

// A client that keeps its connection is waited for until a pause between two requests, or for a
// second; a connection whose first request runs until it ends.
func TestKeptConnections(t *testing.T) {
	for _, family := range []struct {
		service        service
		a, b, silentAt string
	}{
		{service{"web", "10.96.0.1", false}, "10.244.0.1:8080", "10.244.0.2:8080", "10.244.0.1:9090"},
		{service{"web", "fd10::1", false}, "[fd00::1]:8080", "[fd00::2]:8080", "[fd00::1]:9090"},
	} {
		for _, test := range []struct {
			name        string
			every       time.Duration // between two requests; 0: after one, none
			least, most time.Duration
		}{
			{"idle", 0, maxKept, maxKept + 800*time.Millisecond},
			{"used now and then", 130 * time.Millisecond, 100 * time.Millisecond, maxKept},
			// Not at least maxKept: a client that does not get the CPU pauses.
			{"used all the time", time.Millisecond, countFirst, maxKept + 800*time.Millisecond},
		} {
			try := func(t *testing.T) (took time.Duration) {
				empty(t)
				network(t)
				s := family.service
				pod(t, family.a)
				nft(t, append(setUp(s.family()), s.sync([]string{family.a})...)...)
				o := start(t, Options{})
				w := watch(t, o, family.a)
				w.wait(health.Kept) // and so packets are counted
				conn := connect(t, net.JoinHostPort(s.clusterIP, "80"))
				exchange(t, conn)
				done := make(chan struct{})
				var wg sync.WaitGroup
				defer wg.Wait()
				defer close(done)
				if test.every > 0 {
					wg.Go(func() {
						for {
							exchange(t, conn)
							select {
							case <-done:
								return
							case <-time.After(test.every):
							}
						}
					})
				}
				w.Close() // else the connection has long been known when the target is Removed
				began := time.Now()
				w = watch(t, o, family.a)
				nft(t, s.sync([]string{family.b}, family.a)...)
				removed := time.Now()
				is := w.wait(health.Idle)
				took = is.Since.Sub(removed)
				if least := is.Since.Sub(began); least < test.least {
					t.Errorf("Idle after %s at most, want %s to %s", least, test.least, test.most)
				}
				if is.Connections != 1 {
					t.Errorf("%d connections are open, want 1", is.Connections)
				}
				// It stays so while the client goes on.
				since := is.Counted
				until(t, "it is counted again", func() bool { is = w.Reading(); return is.Counted.After(since) })
				if is.State != health.Idle || is.Connections != 1 {
					t.Errorf("later it is %+v", is)
				}
				return took
			}
			t.Run(family.service.family()+" "+test.name, func(t *testing.T) {
				var took time.Duration
				for range 3 { // the machine may be too busy for one
					t.Run("", func(t *testing.T) { took = try(t) })
					if took <= test.most {
						return
					}
				}
				t.Errorf("Idle after %s at least, want %s to %s", took, test.least, test.most)
			})
		}
	}
}

// The kernel is made to count packets, and is otherwise left as it is.
func TestAccount(t *testing.T) {
	empty(t)
	const sysctl = "/proc/sys/net/netfilter/nf_conntrack_acct"
	nft(t, "add table inet lameduck", "add chain inet lameduck other")
	before := run(t, "", "nft", "list", "ruleset")
	if err := os.WriteFile(sysctl, []byte("0"), 0); err != nil {
		missing(t, err) // read-only, as in the agent's container
	}
	o := New(Options{})
	for range 2 { // a repeat does nothing
		if err := o.account(); err != nil {
			t.Fatal(err)
		}
	}
	if text, err := os.ReadFile(sysctl); string(text) != "1\n" {
		t.Errorf("%s is %q, %v", sysctl, text, err)
	}
	if after := run(t, "", "nft", "list", "ruleset"); after != before {
		t.Errorf("the rules are\n%s\nwant\n%s", after, before)
	}
	if o.accounted.IsZero() {
		t.Error("it is not known that packets are counted")
	}
}

// Of each connection the counts show what is to be waited for.
func TestHeld(t *testing.T) {
	const ms = time.Millisecond
	four, six := netip.MustParseAddrPort("10.244.0.1:80"), netip.MustParseAddrPort("[fd00::1]:80")
	// One side has sent a SYN, acknowledgements of 52 bytes, and what is said besides.
	sent := func(packets, payload int64) traffic { return traffic{packets, 8 + 52*packets + payload} }
	type count struct {
		at              time.Duration
		asked, answered traffic
	}
	every := func(pause time.Duration, n int, next func(i int64) count) []count {
		var all []count
		for i := range int64(n) {
			c := next(i)
			c.at = time.Duration(i) * pause
			all = append(all, c)
		}
		return all
	}
	for _, test := range []struct {
		name   string
		counts []count
		udp    bool
		old    bool
		// offloaded: the counters stand still.
		offloaded bool
		// waiting is when the pod is Removed.
		waiting time.Duration
		kept    time.Duration // -1: never
	}{
		{name: "the first request waits for its answer", kept: -1,
			counts: every(100*ms, 100, func(int64) count { return count{asked: sent(3, 200), answered: sent(2, 0)} })},
		{name: "the first request is uploaded", kept: -1,
			counts: every(100*ms, 100, func(i int64) count {
				return count{asked: sent(3+2*i, 3000*i), answered: sent(2+i, 0)}
			})},
		{name: "after Continue the first request is uploaded", kept: -1,
			counts: every(100*ms, 100, func(i int64) count {
				return count{asked: sent(3+2*i, 3000*i), answered: sent(3+i, 25)}
			})},
		{name: "the first answer is long", kept: -1,
			counts: every(100*ms, 100, func(i int64) count {
				return count{asked: sent(3+i, 200), answered: sent(3+2*i, 100+3000*i)}
			})},
		{name: "the first answer is long, and segments are lost", kept: -1,
			counts: every(100*ms, 100, func(i int64) count {
				return count{asked: sent(3+i, 200+28*i), answered: sent(3+2*i, 100+3000*i)}
			})},
		{name: "the last answer is long, then it is quiet", kept: 2000 * ms,
			counts: every(100*ms, 100, func(i int64) count {
				i = min(i, 10)
				return count{asked: sent(30+i, 2000), answered: sent(30+2*i, 2000+3000*i)}
			})},
		{name: "a flowtable carries it", kept: -1, offloaded: true,
			counts: every(100*ms, 100, func(int64) count {
				return count{asked: sent(4, 200), answered: sent(3, 100)}
			})},
		{name: "quiet since it was answered", kept: 1000 * ms,
			counts: every(100*ms, 100, func(int64) count {
				return count{asked: sent(4, 200), answered: sent(3, 100)}
			})},
		{name: "requests with pauses", kept: 150 * ms, // 100 ms: the first that is seen is answered
			counts: every(50*ms, 100, func(i int64) count {
				return count{asked: sent(4+i/4, 200+200*((i+3)/4)), answered: sent(3+i/4, 100+100*((i+2)/4))}
			})},
		{name: "requests without pauses", kept: 1000 * ms,
			counts: every(10*ms, 200, func(i int64) count {
				return count{asked: sent(4+i, 200+200*i), answered: sent(3+i, 100+100*i)}
			})},
		{name: "requests without pauses since long before", waiting: 500 * ms, kept: 1500 * ms,
			counts: every(10*ms, 200, func(i int64) count {
				return count{asked: sent(4+i, 200+200*i), answered: sent(3+i, 100+100*i)}
			})},
		{name: "quiet since long before", waiting: 500 * ms, kept: 1000 * ms,
			counts: every(100*ms, 100, func(int64) count {
				return count{asked: sent(4, 200), answered: sent(3, 100)}
			})},
		{name: "a later request waits for its answer", kept: 1100 * ms,
			counts: every(100*ms, 100, func(i int64) count {
				return count{asked: sent(4+min(i, 1), 200+200*min(i, 1)), answered: sent(3, 100)}
			})},
		{name: "opened and not used", kept: 1000 * ms,
			counts: every(100*ms, 100, func(int64) count { return count{asked: sent(2, 0), answered: sent(1, 0)} })},
		{name: "opened, then used", kept: -1,
			counts: every(100*ms, 100, func(i int64) count {
				if i < 5 {
					return count{asked: sent(2, 0), answered: sent(1, 0)}
				}
				return count{asked: sent(3, 200), answered: sent(2, 0)}
			})},
		{name: "the first request comes with the acknowledgement", kept: -1,
			counts: every(100*ms, 100, func(int64) count { return count{asked: sent(2, 40), answered: sent(2, 0)} })},
		{name: "without counters", kept: -1, counts: every(100*ms, 100, func(int64) count { return count{} })},
		{name: "older than counters", old: true, kept: 1000 * ms,
			counts: every(100*ms, 100, func(int64) count { return count{} })},
		{name: "the first request is younger than counters", old: true, kept: -1,
			counts: every(100*ms, 100, func(int64) count { return count{asked: sent(3, 200), answered: sent(2, 0)} })},
		{name: "no answer to a SYN that is younger than counters", old: true, kept: -1,
			counts: every(100*ms, 100, func(i int64) count { return count{asked: sent(1+i/10, 0)} })},
		{name: "no answer to one SYN, which is younger than counters", old: true, kept: -1,
			counts: every(100*ms, 100, func(int64) count { return count{asked: sent(1, 0)} })},
		{name: "not TCP", udp: true, kept: -1,
			counts: every(100*ms, 100, func(int64) count {
				return count{asked: sent(4, 200), answered: sent(3, 100)}
			})},
	} {
		for _, to := range []netip.AddrPort{four, six} {
			t.Run(fmt.Sprint(test.name, to), func(t *testing.T) {
				began, kept := time.Now(), time.Duration(-1)
				var h held
				for _, c := range test.counts {
					one := connection{protocol: unix.IPPROTO_TCP, state: tcpEstablished, to: to, asked: c.asked,
						answered: c.answered, offloaded: test.offloaded}
					if test.udp {
						one.protocol = unix.IPPROTO_SCTP
					}
					if to == six {
						one.asked.bytes += 20 * one.asked.packets
						one.answered.bytes += 20 * one.answered.packets
					}
					at := began.Add(c.at)
					if h.see(one, test.old, began.Add(test.waiting), at, at); h.kept && kept < 0 {
						kept = c.at
					}
				}
				if kept != test.kept {
					t.Errorf("not waited for from %s on, want %s", kept, test.kept)
				}
			})
		}
	}
}

// Clean deletes the connections of the pod, and no other.
// The kernel dumps a connection that a flowtable carries without its TCP state and its timeout, and
// without counting its packets unless the flowtable does. Requests run on it all the same. (Linux,
// ctnetlink_dump_info; Calico's nftables data plane has a flowtable.)
func TestOffloadedConnection(t *testing.T) {
	be16 := func(n uint16) []byte { return binary.BigEndian.AppendUint16(nil, n) }
	tuple := func(number uint16, from, to string, fromPort, toPort uint16) []byte {
		return nest(number, nest(ctaTupleIP, encode(ctaIPv4Src, netip.MustParseAddr(from).AsSlice()),
			encode(ctaIPv4Dst, netip.MustParseAddr(to).AsSlice())),
			nest(ctaTupleProto, encode(ctaProtoNum, []byte{unix.IPPROTO_TCP}), encode(ctaProtoSrc, be16(fromPort)),
				encode(3, be16(toPort))))
	}
	const ordinary = 1<<1 | 1<<2 | 1<<3 | 1<<5 // it has a reply, is assured and confirmed, and has DNAT
	state := nest(ctaProtoInfo, nest(ctaInfoTCP, encode(1, []byte{tcpEstablished})))
	for _, test := range []struct {
		name            string
		status          uint32
		state           []byte
		open, offloaded bool
	}{
		{"established", ordinary, state, true, false},
		{"in the flowtable", ordinary | 1<<14, nil, true, true},
		{"in hardware", ordinary | 1<<14 | 1<<15, nil, true, true},
		{"closed", ordinary, nil, false, false},
	} {
		c, err := decodeConnection(slices.Concat(tuple(ctaTupleOrig, "10.244.2.9", "10.96.0.10", 40000, 80),
			tuple(ctaTupleReply, "10.244.1.7", "10.244.2.9", 8080, 40000), encode32(ctaStatus, test.status),
			test.state, encode32(ctaID, 7)))
		if err != nil || c.open() != test.open || c.offloaded != test.offloaded {
			t.Errorf("%s: open %t, offloaded %t, %v", test.name, c.open(), c.offloaded, err)
		}
	}
}

func TestClean(t *testing.T) {
	empty(t)
	network(t)
	web, a, b, dns := service{"web", "10.96.0.1", false}, "10.244.0.1:8080", "10.244.0.2:8080", "10.244.0.1:5353"
	for _, p := range []string{a, b} {
		pod(t, p)
	}
	nft(t, append(setUp("ip"), web.sync([]string{a})...)...)
	o := New(Options{})
	if err := o.Clean([]netip.AddrPort{netip.MustParseAddrPort("10.244.0.1:0"),
		netip.MustParseAddrPort("10.244.0.2:0")}); err != nil {
		t.Fatal(err)
	}
	through := connect(t, "10.96.0.1:80")
	direct := connect(t, b)
	udp, err := net.Dial("udp", dns)
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	udp.Write([]byte("x"))
	counts := func(target string) int {
		var n int
		c := counter{dial: o.dial}
		defer c.close()
		want := netip.MustParseAddrPort(target)
		if err := c.walk(map[netip.Addr]bool{want.Addr(): true}, func(c connection) {
			if c.to == want {
				n++
			}
		}); err != nil {
			t.Fatal(err)
		}
		return n
	}
	if counts(a) != 1 || counts(dns) != 1 || counts(b) != 1 {
		t.Fatalf("connections before: %d, %d, %d, want 1 of each", counts(a), counts(dns), counts(b))
	}
	if err := o.Clean([]netip.AddrPort{netip.MustParseAddrPort("[::ffff:10.244.0.1]:8080")}); err != nil {
		t.Fatal(err)
	}
	if counts(a) != 0 || counts(dns) != 1 {
		t.Errorf("after one port: %d, %d, want 0, 1", counts(a), counts(dns))
	}
	for range 2 { // a repeat does nothing
		if err := o.Clean([]netip.AddrPort{netip.MustParseAddrPort("10.244.0.1:0")}); err != nil {
			t.Fatal(err)
		}
	}
	if counts(dns) != 0 || counts(b) != 1 {
		t.Errorf("after all ports: %d, %d, want 0, 1", counts(dns), counts(b))
	}
	if err := echo(direct); err != nil {
		t.Error("a connection to another pod:", err)
	}
	_ = through
	if err := o.Clean([]netip.AddrPort{{}}); err == nil {
		t.Error("no address is cleaned without an error")
	}
}

// Many addresses, and no more connections counted for it.
func TestManyAddresses(t *testing.T) {
	empty(t)
	network(t)
	s, a := service{"web", "10.96.0.1", false}, "10.244.0.1:8080"
	pod(t, a)
	nft(t, append(setUp("ip"), s.sync([]string{"10.244.0.2:8080"})...)...)
	o := start(t, Options{})
	held := connect(t, a)
	w := watch(t, o, a)
	var others []*follower
	for i := range 100 {
		others = append(others, watch(t, o, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 1, byte(i)}),
			0).String()))
	}
	for _, other := range others {
		other.wait(health.Idle)
	}
	w.stays(health.Removed)
	if n := w.Reading().Connections; n != 1 {
		t.Errorf("%d connections are counted, want 1", n)
	}
	held.Close()
	w.wait(health.Idle)
}

// flood fills the kernel's table with connections to other pods.
func flood(t testing.TB, o *Observer, n int) {
	t.Helper()
	conn, err := o.dial()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	const ctNew, ctaStatus, ctaTimeout, ctaIPv4Dst, ctaProtoDst = 0, 3, 7, 2, 3
	port := func(kind, port uint16) []byte { return encode(kind, binary.BigEndian.AppendUint16(nil, port)) }
	tuple := func(kind uint16, from, to []byte, fromPort, toPort uint16) []byte {
		return nest(kind, nest(ctaTupleIP, encode(ctaIPv4Src, from), encode(ctaIPv4Dst, to)),
			nest(ctaTupleProto, encode(ctaProtoNum, []byte{unix.IPPROTO_TCP}), port(ctaProtoSrc, fromPort),
				port(ctaProtoDst, toPort)))
	}
	var all []netlink.Message
	for i := range n {
		client, pod, at := []byte{10, 250, byte(i >> 12), byte(i >> 4)}, []byte{10, 251, 0, byte(i % 200)},
			uint16(20000+i%16)
		all = append(all, request(unix.NFNL_SUBSYS_CTNETLINK, ctNew, netlink.Create, unix.AF_INET,
			tuple(ctaTupleOrig, client, pod, at, 8080), tuple(ctaTupleReply, pod, client, 8080, at),
			encode32(ctaTimeout, 60), encode32(ctaStatus, 0xe),
			nest(ctaProtoInfo, nest(ctaInfoTCP, encode(1, []byte{tcpEstablished})))))
	}
	for some := range slices.Chunk(all, 100) {
		if err := ask(conn, some...); err != nil {
			t.Fatal(err)
		}
	}
	if sysctl("nf_conntrack_count") < n {
		t.Fatalf("%d connections, want %d", sysctl("nf_conntrack_count"), n)
	}
}

func opens(found map[netip.Addr][]connection) []connection {
	return slices.DeleteFunc(slices.Concat(slices.Collect(maps.Values(found))...),
		func(c connection) bool { return !c.open() })
}

// However they are counted, the connections are the same: one address after the other, all that
// there are, or the known ones alone.
func TestCounter(t *testing.T) {
	empty(t)
	network(t)
	four, six := service{"web", "10.96.0.1", false}, service{"web", "fd10::1", true}
	pods := []string{"10.244.0.1:8080", "10.244.0.2:8080", "10.244.0.2:9090", "[fd00::1]:8080"}
	for _, p := range pods {
		pod(t, p)
	}
	nft(t, append(setUp("ip"), four.sync(pods[:1])...)...)
	nft(t, append(setUp("ip6"), six.sync(pods[3:])...)...)
	o := New(Options{})
	want := map[netip.AddrPort]int{}
	var clients []net.Conn
	for i, address := range []string{"10.96.0.1:80", pods[1], pods[2], pods[2], "[fd10::1]:80"} {
		clients = append(clients, connect(t, address))
		want[netip.MustParseAddrPort([]string{pods[0], pods[1], pods[2], pods[2], pods[3]}[i])]++
	}
	connect(t, pods[0]).Close()
	addrs := map[netip.Addr]bool{}
	for _, p := range pods {
		addrs[netip.MustParseAddrPort(p).Addr()] = true
	}
	c := counter{dial: o.dial}
	defer c.close()
	var known []connection
	check := func(name string, addrs map[netip.Addr]bool, ask []connection) {
		t.Helper()
		found, took, err := c.find(addrs, ask)
		if err != nil {
			t.Fatal(err)
		}
		known = opens(found)
		got := map[netip.AddrPort]int{}
		for _, one := range known {
			got[one.to]++
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s: %v are open, want %v", name, got, want)
		}
		if took <= 0 || took > time.Minute {
			t.Errorf("%s: the CPU has worked for %s", name, took)
		}
	}
	check("all, because there are few", addrs, nil)
	check("the known ones", nil, known)
	check("again", nil, known)
	flood(t, o, 2*sysctl("nf_conntrack_buckets")/messageCost+1)
	check("one address after the other", addrs, nil)
	if c.deaf {
		t.Error("this kernel sends more than it is asked for")
	}
	c.deaf = true
	check("all, because the kernel sends them anyway", addrs, nil)
	// Questions about what has ended are answered, too, wherever they stand.
	none := known[0]
	none.original = bytes.Clone(none.original)
	none.original[len(none.original)-4] ^= 0xff // its port
	many := slices.Repeat([]connection{none}, 20)
	check("the known ones between others", nil, slices.Concat(many, known[:2], many, known[2:], many))
	clients[1].Close()
	delete(want, netip.MustParseAddrPort(pods[1]))
	until(t, "the end of a connection", func() bool {
		found, _, err := c.find(nil, known)
		return err == nil && len(opens(found)) == len(known)-1
	})
	check("the known ones, after one has ended", nil, known)
}
