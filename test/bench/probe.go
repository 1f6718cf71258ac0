package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/pkg/health"
	"github.com/lameduck-io/lameduck/pkg/health/probe"
)

const (
	probeTargets  = 1000
	probeInterval = 500 * time.Millisecond // 2,000 probes a second
	probeWarm     = time.Second
	probeMeasured = 2 * time.Second
	probeRounds   = 5
)

// The processes whose CPU is measured are children of their own: this program again, or HAProxy.
func init() {
	if len(os.Args) < 2 || !strings.HasPrefix(os.Args[1], "child-") {
		return
	}
	// Not on the goroutine that initialises, which is bound to its thread: that makes each of its
	// sleeps expensive.
	failed := make(chan error)
	go func() {
		switch os.Args[1] {
		case "child-backend":
			failed <- serveChecks()
		case "child-probes":
			failed <- probeAll(os.Args[2])
		}
	}()
	fmt.Fprintln(os.Stderr, "bench:", os.Args[1], <-failed)
	os.Exit(1)
}

// probeSpeed measures what a probe costs the process that makes it, in CPU time of user and system,
// over what HAProxy's own check on the same backends costs HAProxy.
func probeSpeed() ([]Result, error) {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	backend := exec.Command(self, "child-backend")
	backend.Stderr = os.Stderr
	out, err := backend.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := backend.Start(); err != nil {
		return nil, err
	}
	defer end(backend)
	port, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("start the backend: %w", err)
	}
	port = strings.TrimSpace(port)
	config := filepath.Join(dir, "haproxy.cfg")
	if err := os.WriteFile(config, []byte(haproxyConfig(dir, port)), 0o600); err != nil {
		return nil, err
	}
	var proxies, ours, over []float64
	for range probeRounds {
		var cost [2]float64
		for i, command := range [][]string{{"haproxy", "-db", "-f", config}, {self, "child-probes", port}} {
			if cost[i], err = perProbe(command, port); err != nil {
				return nil, fmt.Errorf("%s: %w", filepath.Base(command[0])+" "+command[1], err)
			}
		}
		proxies, ours, over = append(proxies, cost[0]), append(ours, cost[1]), append(over, cost[1]/cost[0])
	}
	return []Result{{
		Name: "health/probe-cpu", Ratio: median(over), Goal: 1,
		Note: fmt.Sprintf("CPU of an HTTP probe on a new connection, %.1f us, over that of a check of HAProxy, %.1f us",
			median(ours), median(proxies)),
	}}, nil
}

// perProbe runs command, which probes the backend, and returns what a probe costs it, in
// microseconds.
func perProbe(command []string, port string) (float64, error) {
	c := exec.Command(command[0], command[1:]...)
	var said strings.Builder
	c.Stderr, c.Stdout = &said, &said
	if err := c.Start(); err != nil {
		return 0, err
	}
	defer end(c)
	time.Sleep(probeWarm)
	count, used, began, err := reading(c.Process.Pid, port)
	if err != nil {
		return 0, err
	}
	time.Sleep(probeMeasured)
	countAfter, usedAfter, ended, err := reading(c.Process.Pid, port)
	if err != nil {
		return 0, err
	}
	probes := countAfter - count
	if wanted := int(ended.Sub(began) / probeInterval * probeTargets); probes < wanted/2 || probes > wanted*2 {
		// A machine that is this busy measures nothing.
		return 0, fmt.Errorf("%d probes, %d were due; it said %.300q", probes, wanted, said.String())
	}
	return float64((usedAfter - used).Microseconds()) / float64(probes), nil
}

// reading returns how many probes the backend has answered and how much CPU time the process has
// used, user and system.
func reading(pid int, port string) (int, time.Duration, time.Time, error) {
	conn, err := net.Dial("tcp", "127.0.0.1:"+port)
	if err != nil {
		return 0, 0, time.Time{}, err
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "COUNT"); err != nil {
		return 0, 0, time.Time{}, err
	}
	text, err := io.ReadAll(conn)
	if err != nil {
		return 0, 0, time.Time{}, err
	}
	count, err := strconv.Atoi(string(text))
	if err != nil {
		return 0, 0, time.Time{}, err
	}
	// The clock of another process's CPU time, as clock_getcpuclockid(3) makes its number.
	var used unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|2), &used); err != nil {
		return 0, 0, time.Time{}, fmt.Errorf("read the CPU time: %w", err)
	}
	return count, time.Duration(used.Nano()), time.Now(), nil
}

// end ends a child.
func end(c *exec.Cmd) {
	_ = c.Process.Kill()
	_ = c.Wait()
}

func probeTarget(i int) netip.Addr { return netip.AddrFrom4([4]byte{127, 1, byte(i >> 8), byte(i)}) }

func haproxyConfig(dir, port string) string {
	var b strings.Builder
	// One thread: more make a check more expensive.
	fmt.Fprintf(&b, `global
    nbthread 1
    maxconn 100
defaults
    mode http
    timeout connect 1s
    timeout client 1s
    timeout server 1s
    timeout check 1s
frontend f
    bind unix@%s/f
    default_backend b
backend b
    option httpchk
    http-check send meth GET uri /healthz ver HTTP/1.1 hdr Host 127.0.0.1 hdr User-Agent bench hdr Accept */*
    http-check expect status 200-399
`, dir)
	for i := range probeTargets {
		fmt.Fprintf(&b, "    server s%d %s:%s check inter %dms\n", i, probeTarget(i), port,
			probeInterval.Milliseconds())
	}
	return b.String()
}

// serveChecks answers health checks on all of 127.0.0.0/8, and how many it answered to who asks for
// COUNT.
func serveChecks() error {
	l, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		return err
	}
	fmt.Println(l.Addr().(*net.TCPAddr).Port)
	var count atomic.Int64
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			var b [1024]byte
			n, err := conn.Read(b[:])
			if err != nil {
				return
			}
			if string(b[:n]) == "COUNT" {
				fmt.Fprint(conn, count.Load())
				return
			}
			count.Add(1)
			io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n")
		}()
	}
}

// probeAll probes the targets for ever.
func probeAll(port string) error {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return err
	}
	c := health.DefaultCheck(health.HTTP)
	c.Path, c.Interval = "/healthz", probeInterval
	s := &ring{check: &c, from: time.Now()}
	for i := range probeTargets {
		s.keys = append(s.keys, health.Key{Pool: "web", Target: health.Target{
			UID:  health.UID(fmt.Sprintf("00000000-0000-4000-8000-%012d", i)),
			Addr: netip.AddrPortFrom(probeTarget(i), uint16(n)),
		}})
	}
	if err := (&probe.Runner{Source: s}).Run(context.Background()); err != nil {
		return err
	}
	return errors.New("ended")
}

// ring is a bare schedule: its targets in turn, evenly spread over the interval.
type ring struct {
	keys  []health.Key
	check *health.Check
	from  time.Time
	next  int
	// failed is how many probes were no success.
	failed int
}

func (r *ring) due(n int) time.Time {
	return r.from.Add(time.Duration(n) * r.check.Interval / time.Duration(len(r.keys)))
}

// Due implements [probe.Source].
func (r *ring) Due(now time.Time, jobs []health.Job, most int) ([]health.Job, time.Time) {
	for range most {
		due := r.due(r.next)
		if due.After(now) {
			break
		}
		jobs = append(jobs, health.Job{Key: r.keys[r.next%len(r.keys)], Check: r.check, Due: due})
		r.next++
	}
	return jobs, r.due(r.next)
}

// Report implements [probe.Source].
func (r *ring) Report(_ time.Time, job health.Job, outcome health.Outcome) bool {
	if outcome.Kind != health.Success {
		if r.failed++; r.failed == 1 {
			fmt.Fprintln(os.Stderr, "bench:", job.Key, outcome)
		}
	}
	return true
}
