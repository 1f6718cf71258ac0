package apisix

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// fresh is the maximum age of a process's report, and how long a call waits for a newer one.
	fresh = 500 * time.Millisecond
	// pause is the time between two readings of such a wait.
	pause = 10 * time.Millisecond
)

// report is the answer of the plug-in, gateways/apisix/lameduck.lua.
type report struct {
	Now       float64
	Master    string
	Started   string
	Processes map[string]*process
	// Picks counts the running requests. Each key is a process, an upstream and a version,
	// separated by spaces.
	Picks map[string]int
	Lost  bool
}

// process is a child of the master.
type process struct {
	Title, Started string
	// Report is nil if the process has not reported: it has just started, or it is shutting down.
	Report *struct {
		At        float64
		Counting  bool
		Upstreams map[health.Pool]struct {
			Version int64
			Nodes   map[string]int
		}
		// The fields below are set by the rule {"observed": true}. Nodes has each address that the
		// process sends to, with 0, and each former one, with the number of the first report
		// without it.
		Nodes     map[string]int64
		Unlisted  string
		Discovers bool
	}
}

// old reports whether the process is shutting down: it only finishes its requests, by the last
// configuration that it had. That includes a request of which half the head had arrived.
func (p *process) old() bool { return strings.HasSuffix(p.Title, "is shutting down") }

// of returns the version and the nodes by which the process routes an upstream. Version 0: unknown.
func (p *process) of(pool health.Pool) (version int64, nodes map[string]int) {
	if p.Report == nil {
		return 0, nil
	}
	u := p.Report.Upstreams[pool]
	return u.Version, u.Nodes
}

// missing returns why r is not complete, for example because a process that accepts new requests
// has not reported in time. Nil: r is complete.
func (r *report) missing() error {
	if r.Lost {
		return errors.New("the shared dictionary lameduck was full: requests are not counted")
	}
	took := false
	for pid, p := range r.Processes {
		took = took || !p.old()
		switch {
		case p.old():
		case p.Report == nil:
			return fmt.Errorf("process %s has not reported", pid)
		case r.Now-p.Report.At > fresh.Seconds():
			return fmt.Errorf("process %s has not reported for %.1f s", pid, r.Now-p.Report.At)
		case !p.Report.Counting:
			return fmt.Errorf("process %s counts no requests: the plug-in is not a global rule", pid)
		}
	}
	if !took || r.Master == "" {
		return errors.New("no process takes new requests")
	}
	return nil
}

// generation names the processes.
func (r *report) generation() string {
	all := []string{"apisix " + r.Master + "@" + r.Started}
	for pid, p := range r.Processes {
		all = append(all, pid+"@"+p.Started)
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// active counts the requests of a pool that began with a version earlier than before.
func (r *report) active(pool health.Pool, before int64) (n int) {
	for key, count := range r.Picks {
		words := strings.Fields(key)
		if len(words) != 3 || words[1] != string(pool) {
			continue
		}
		if version, err := strconv.ParseInt(words[2], 10, 64); err != nil || version < before {
			n += count
		}
	}
	return n
}

// report reads the reports of all processes. It waits up to 500 ms for a process that has just
// started or is busy.
func (g *Gateway) report(ctx context.Context) (*report, error) {
	for deadline := time.Now().Add(fresh); ; {
		r, err := g.read(ctx)
		if err != nil {
			return nil, err
		}
		if err = r.missing(); err == nil {
			g.last, g.sees = r, r.Started != "" && g.started(r.Master) == r.Started
			return r, nil
		}
		if time.Now().After(deadline) || !signal.Sleep(ctx, pause) {
			return nil, errors.Join(err, ctx.Err())
		}
	}
}

// control reads the plug-in's report of all processes.
func (g *Gateway) control(ctx context.Context) (*report, error) {
	var r report
	url := strings.TrimSuffix(g.cfg.Control, "/") + "/v1/plugin/lameduck"
	if _, err := g.call(ctx, http.MethodGet, url, nil, &r); err != nil {
		return nil, err
	}
	r.trim()
	return &r, nil
}

// trim drops the processes that take no requests.
func (r *report) trim() {
	maps.DeleteFunc(r.Processes, func(_ string, p *process) bool {
		return strings.HasPrefix(p.Title, "nginx: cache ") || strings.HasPrefix(p.Title, "nginx: privileged agent")
	})
}
