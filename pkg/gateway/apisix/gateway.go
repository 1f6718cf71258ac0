// Package apisix directs an APISIX in etcd mode (role traditional) by the Admin API, or observes
// one that something else configures ([ObservedConfig]).
//
// # Model
//
// An upstream object is a pool. The agent creates the object and merges differences into its nodes:
// null removes an address, and 1 adds it. Routes of operators refer to the object by upstream_id.
// Its labels name the pods at the addresses: the value of ADDRESS@UID is "routed" or
// "removed/UNTIL/AGENT". The replicas of an APISIX share the object, and each replica has an agent.
// If one agent has removed a target, the others do not add it again before UNTIL, because they may
// not have received the exclusion yet. They do not remove the last one either, unless it is to be
// absent: an agent may believe that a target which another has removed is still routed.
//
// The agent never writes weight 0, because retries would still go there. Package health decides
// whether the last target is kept. An upstream without targets is not empty: it has one node that
// refuses connections.
//
// # What is proved, and how
//
// An answer of the Admin API proves only that etcd has stored the change. A process may be stopped,
// disconnected from etcd, or shutting down with the configuration that it had at a reload. So each
// process under the master reports the version and the nodes that it routes by. A target is out
// once every process has reported a version at or after the one that was first read without it. A
// process that accepts new requests must have reported within the last 500 ms; otherwise there is
// no observation. A process that is shutting down neither reports nor applies changes: until it
// ends, it routes by its last report.
//
// A request uses the nodes that its process had when the request began. That includes its retries,
// and a connection that is opened only after a slow upload. The plug-in counts requests by that
// version. For a target that is out, Active is the number of requests of earlier versions,
// including those to other targets.
//
// While something else routes to a target that is to be out (a route, service, plug-in or other
// upstream with that node, or one that resolves the Service), its pool is unread, with the reason.
//
// # Known holes
//
//   - A worker that is forked after the reading, by a reload that began before the removal, may
//     route by what the master had read, until its first answer from etcd.
//   - A name among the nodes of a route that resolves to a pod.
//   - Requests that plug-ins send by themselves (ai-proxy, forward-auth); Kafka and Dubbo.
//   - UNTIL compares the clocks of two nodes.
//   - A write without an answer of another agent, or of this one before it was restarted, and one
//     that is carried out more than a minute after APISIX answers others.
package apisix

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// lateFor is how long a write without an answer may still be carried out: APISIX reads from etcd,
// and then writes, and by default waits for 30 s each time.
const lateFor = time.Minute

// Gateway implements gateway.Directed.
type Gateway struct {
	cfg         Config
	name, admin string
	services    map[health.Pool]string
	client      *http.Client
	read        func(context.Context) (*report, error)
	// out has the targets of the last reading that are out.
	out map[health.Key]out
	// creating has until when a creation without an answer may replace an upstream object. Until
	// then each of its versions is a generation. So is the first one of a pool in unowned, which
	// the last list of owned targets left out because it could not be read.
	creating map[health.Pool]time.Time
	unowned  map[health.Pool]bool
	// last is the last complete report. sees reports whether the agent sees the same processes in
	// proc.
	last *report
	sees bool
	proc string
	// uses were read at listed.
	uses   []use
	listed time.Time
}

// out is the first version that was read without a target, and the target's label then. Each
// removal has a different label.
type out struct {
	version int64
	label   label
}

func open(cfg Config, name string) *Gateway {
	g := &Gateway{
		cfg: cfg, name: name, admin: strings.TrimSuffix(cfg.Admin, "/") + "/apisix/admin/", proc: "/proc",
		services: map[health.Pool]string{}, out: map[health.Key]out{},
		creating: map[health.Pool]time.Time{}, unowned: map[health.Pool]bool{},
		client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
	}
	g.read = g.control
	for _, u := range cfg.Upstreams {
		g.services[health.Pool(u.Upstream)] = u.Service
	}
	return g
}

// Apply implements gateway.Directed. It waits up to 500 ms for every process to apply the changes.
func (g *Gateway) Apply(ctx context.Context, ops []health.Op) error {
	wants := map[health.Key]health.Want{}
	for _, op := range ops {
		if op.Want != health.WantUnknown { // of two ops for a key the later one holds
			wants[op.Key] = op.Want
		}
	}
	failed, writes := g.writeAll(ctx, wants), maps.Clone(wants)
	maps.DeleteFunc(writes, func(k health.Key, _ health.Want) bool { return failed[k] != nil })
	for deadline := time.Now().Add(fresh); len(writes) > 0; {
		o, err := g.observe(ctx, slices.Collect(maps.Keys(writes)))
		if err != nil {
			return errors.Join(join(wants, failed), err)
		}
		late, idle := map[health.Key]error{}, map[health.Key]health.Want{}
		for k, want := range writes {
			switch is, read := o.Seen[k]; {
			case !read:
				late[k] = o.Unread[k.Pool]
			case want == health.WantRouted && is.Missing:
				late[k] = errors.New("not every process routes to it")
			case want != health.WantRouted && is.Routed:
				late[k] = errors.New("a process may still route to it")
			case want == health.WantAbsent && is.Present && is.Active == 0:
				idle[k] = forget
			}
		}
		if len(late) == 0 || time.Now().After(deadline) || !signal.Sleep(ctx, pause) {
			maps.Copy(failed, late)
			maps.Copy(failed, g.writeAll(ctx, idle))
			break
		}
	}
	return join(wants, failed)
}

func join(wants map[health.Key]health.Want, failed map[health.Key]error) error {
	var errs []error
	for k, err := range failed {
		errs = append(errs, fmt.Errorf("%s: %w", health.Op{Key: k, Want: wants[k]}, err))
	}
	return errors.Join(errs...)
}

// writeAll writes each upstream object once, and returns why keys were not written.
func (g *Gateway) writeAll(ctx context.Context, wants map[health.Key]health.Want) map[health.Key]error {
	failed, done := map[health.Key]error{}, map[health.Pool]error{}
	for k := range wants {
		err, ok := done[k.Pool]
		if !ok {
			var vetoed map[health.Key]error
			vetoed, err = g.write(ctx, k.Pool, wants)
			maps.Copy(failed, vetoed)
			done[k.Pool] = err
		}
		if err != nil {
			failed[k] = err
		}
	}
	return failed
}

// Observe implements gateway.Directed.
func (g *Gateway) Observe(ctx context.Context, keys []health.Key) (health.Observation, error) {
	o, err := g.observe(ctx, keys)
	if err != nil {
		return o, fmt.Errorf("observe %d keys: %w", len(keys), err)
	}
	maps.DeleteFunc(g.out, func(k health.Key, _ out) bool { return !slices.Contains(keys, k) })
	return o, nil
}

// observe reads etcd before the processes, so that their reports are compared with a version that
// was stored earlier.
func (g *Gateway) observe(ctx context.Context, keys []health.Key) (health.Observation, error) {
	var nothing health.Observation
	o := health.Observation{At: time.Now(), Seen: map[health.Key]health.Seen{}, Unread: map[health.Pool]error{}}
	pools := map[health.Pool]*upstream{}
	var silent error // the Admin API does not answer at all
	load := func(pool health.Pool) *upstream {
		if pools[pool] == nil && o.Unread[pool] == nil && silent == nil {
			u, err := g.upstream(ctx, pool)
			if pools[pool] = u; errors.As(err, new(*url.Error)) {
				silent = err
			} else if err != nil {
				o.Unread[pool] = err
			}
		}
		return pools[pool]
	}
	for _, k := range keys {
		if g.services[k.Pool] == "" {
			return nothing, fmt.Errorf("no upstream %q is configured", k.Pool)
		}
		if u := load(k.Pool); u != nil && !u.routes(k.Target) {
			if err := g.list(ctx); err != nil {
				o.Unread[k.Pool] = err
			}
		}
	}
	maps.DeleteFunc(g.creating, func(_ health.Pool, until time.Time) bool { return !o.At.Before(until) })
	for _, pool := range slices.Sorted(maps.Keys(g.services)) {
		_, creating := g.creating[pool]
		if !creating && !g.unowned[pool] {
			continue
		}
		if u := load(pool); u != nil {
			o.Generation += fmt.Sprintf(" %s@%d", pool, u.version)
		}
	}
	if silent != nil {
		return nothing, silent
	}
	r, err := g.report(ctx)
	if err != nil {
		return nothing, err
	}
	o.Generation = r.generation() + o.Generation
	for _, k := range keys {
		if o.Unread[k.Pool] != nil {
			continue
		}
		is, err := g.see(k, pools[k.Pool], r)
		if err != nil {
			o.Unread[k.Pool] = err
		}
		o.Seen[k] = is
	}
	maps.DeleteFunc(o.Seen, func(k health.Key, _ health.Seen) bool { return o.Unread[k.Pool] != nil })
	return o, nil
}

// see judges one target. An error is the reason why its pool is unread.
func (g *Gateway) see(k health.Key, u *upstream, r *report) (health.Seen, error) {
	l, known := u.labels[k.Target]
	routed, shared := u.routes(k.Target), u.shared(k.Target)
	is := health.Seen{Routed: routed, Missing: !routed}
	since := out{version: math.MaxInt64}
	if routed {
		delete(g.out, k)
	} else {
		if err := g.uncovered(k, u); err != nil {
			return is, err
		}
		var was bool
		if since, was = g.out[k]; !was || l != "" && l != since.label {
			since = out{u.version, l}
			g.out[k] = since
		}
	}
	for pid, p := range r.Processes {
		version, nodes := p.of(k.Pool)
		weight, listed := nodes[k.Target.Addr.String()]
		is.Routed = is.Routed || version < since.version || listed && !shared
		is.Missing = is.Missing || !p.old() && weight == 0
		if version == 0 && !p.old() {
			return is, fmt.Errorf("process %s has not loaded upstream %s", pid, k.Pool)
		}
	}
	is.Active = r.active(k.Pool, since.version)
	is.Present = known || is.Routed || is.Active > 0
	return is, nil
}

// Owned implements gateway.Directed: the targets that agents have labeled. It leaves out a pool
// that cannot be read. The generation is another one when it can be.
func (g *Gateway) Owned(ctx context.Context) (keys []health.Key, _ error) {
	for pool := range g.services {
		u, err := g.upstream(ctx, pool)
		if errors.As(err, new(*url.Error)) {
			return nil, fmt.Errorf("list owned targets: %w", err)
		}
		if g.unowned[pool] = err != nil; err != nil {
			continue
		}
		for t := range u.labels {
			keys = append(keys, health.Key{Pool: pool, Target: t})
		}
	}
	return keys, nil
}

// Stopped implements gateway.Directed. It requires a process namespace that the agent shares with
// APISIX. A closed port alone is no evidence, because workers that are shutting down still serve.
func (g *Gateway) Stopped(ctx context.Context) bool {
	if _, err := g.read(ctx); !errors.Is(err, syscall.ECONNREFUSED) || !g.sees {
		return false
	}
	for pid, p := range g.last.Processes {
		if g.started(pid) == p.Started {
			return false
		}
	}
	return g.started(g.last.Master) != g.last.Started
}

// started returns when a process was started, in ticks. Empty: it has ended.
func (g *Gateway) started(pid string) string {
	text, _ := os.ReadFile(filepath.Join(g.proc, pid, "stat")) // no file: no process
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" {
		return ""
	}
	return fields[19]
}
