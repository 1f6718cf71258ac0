package haproxy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// maxRounds bounds how often Apply and Observe begin again because workers came or went meanwhile.
// A worker that has just ended stays in the list until the master has reaped it.
const maxRounds = 8

// pause waits before a further round: 2 ms, doubled each time, half a second in all. It reports
// false if the context ended.
func pause(ctx context.Context, round int) bool {
	if round == 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(time.Millisecond << round)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// Gateway is one running HAProxy in master-worker mode. It implements gateway.Directed and is not
// safe for concurrent use.
type Gateway struct {
	cli      cli
	file     string
	backends []Backend
	byPool   map[health.Pool]*Backend
	wanted   wanted // what the servers file lists
	// unused holds the targets that the last reading found taken out and without a stream in any
	// process, with the list of processes of that reading: while they stay taken out there, no
	// stream can begin for them.
	unused map[health.Key]string
}

// New checks the configuration, and reads the servers file, or writes one without servers if there
// is none. Servers that an existing file lists are kept: they are Owned, and nothing but an op
// removes them. If the sections of the file differ from the configuration they are written anew;
// HAProxy takes that up with its next reload. New does not talk to HAProxy.
func New(c Config) (*Gateway, error) {
	if err := errors.Join(c.Check()...); err != nil {
		return nil, fmt.Errorf("haproxy config: %w", err)
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	g := &Gateway{
		cli:      cli{path: c.MasterSocket, timeout: c.Timeout},
		backends: slices.Clone(c.Backends),
		byPool:   map[health.Pool]*Backend{},
		wanted:   wanted{},
	}
	owned := false
	for i := range g.backends {
		b := &g.backends[i]
		b.Lines, b.Pool = slices.Clone(b.Lines), b.pool()
		g.byPool[b.Pool] = b
		owned = owned || b.Owned
	}
	if !owned {
		return g, nil
	}
	g.file = c.ServersFile
	have, err := readFile(g.file)
	if err != nil {
		return nil, err
	}
	for _, b := range g.backends {
		if b.Owned {
			g.wanted[b.Backend] = map[string]bool{}
			maps.Copy(g.wanted[b.Backend], have[b.Backend])
		}
	}
	if err := writeFile(g.file, render(g.backends, g.wanted)); err != nil {
		return nil, err
	}
	return g, nil
}

// list asks the master for its processes. The name of the generation also holds the socket's
// identity: in a container a restarted master and worker usually have the pids they had.
func (g *Gateway) list(ctx context.Context) (processes, string, error) {
	answer, err := g.cli.table(ctx, 0, "show proc", procBegin)
	if err != nil {
		return processes{}, "", err
	}
	p, err := parseProcesses(answer)
	if err != nil {
		return p, "", &Error{Command: "show proc", Kind: KindMalformed, Err: err}
	}
	socket := "?"
	if st, err := os.Stat(g.cli.path); err == nil {
		socket = fmt.Sprintf("%x", st.ModTime().UnixNano())
	}
	return p, p.String() + " " + socket, nil
}

// current says whether there is a worker that takes new requests. Without one nothing can be said
// about routing.
func (p processes) current() bool {
	return slices.ContainsFunc(p.Workers, func(w process) bool { return !w.Old })
}

func (g *Gateway) state(ctx context.Context, pid int, backend string) (*index, error) {
	cmd := "show servers state " + backend
	answer, err := g.cli.table(ctx, pid, cmd, stateBegin)
	if err != nil {
		return nil, err
	}
	list, err := parseState(answer, backend)
	if err != nil {
		return nil, &Error{Command: cmd, Process: pid, Kind: KindMalformed, Err: err}
	}
	return newIndex(list), nil
}

// stat reads the counters of a backend by its number: a frontend may have the same name, and "show
// stat" would take that.
func (g *Gateway) stat(ctx context.Context, pid int, backend string, id int) (map[string]traffic, error) {
	cmd := fmt.Sprintf("show stat %d 4 -1", id) // 4: servers, -1: all
	answer, err := g.cli.table(ctx, pid, cmd, statBegin)
	if err != nil {
		return nil, err
	}
	m, err := parseStat(answer, backend)
	if err != nil {
		return nil, &Error{Command: cmd, Process: pid, Kind: KindMalformed, Err: err}
	}
	return m, nil
}

func (g *Gateway) info(ctx context.Context, pid int) (info, error) {
	answer, err := g.cli.table(ctx, pid, "show info", infoBegin)
	if err != nil {
		return info{}, err
	}
	in, err := parseInfo(answer)
	if err == nil && in.PID != pid {
		err = fmt.Errorf("it is of pid %d", in.PID)
	}
	if err != nil {
		return in, &Error{Command: "show info", Process: pid, Kind: KindMalformed, Err: err}
	}
	return in, nil
}

func (g *Gateway) streams(ctx context.Context, pid int) (map[string]int, error) {
	// At least the stream of this command is in the list, so that it is never empty.
	answer, err := g.cli.table(ctx, pid, "show sess", sessBegin)
	if err != nil {
		return nil, err
	}
	m, err := parseStreams(answer)
	if err != nil {
		return nil, &Error{Command: "show sess", Process: pid, Kind: KindMalformed, Err: err}
	}
	return m, nil
}

// deletable says whether "del server" may be sent: the server was in maintenance when x was read,
// and no stream is bound to it in a list of streams that was read later. HAProxy itself does not
// look for streams before 2.6.16, 2.8.4 and 2.9, and dies of it (its issues 2323 and 2378): a
// stream that has its answer, and whose client does not, is in none of the counters.
func (g *Gateway) deletable(ctx context.Context, pid int, b *Backend, x *index, name string) (bool, error) {
	if !x.settled[name] {
		return false, nil
	}
	if x.streams == nil {
		var err error
		if x.streams, err = g.streams(ctx, pid); err != nil {
			return false, err
		}
	}
	return x.streams[b.Backend+"/"+name] == 0, nil
}

// index is the servers of one backend in one process.
type index struct {
	// id is the backend's number in this process.
	id     int
	byName map[string]*server
	// settled are those that were in maintenance when they were read. streams, nil until needed,
	// was read later.
	settled map[string]bool
	streams map[string]int
	byAddr  map[string][]*server // of servers that are not the agent's
	own     []health.Target
}

func newIndex(list []server) *index {
	x := &index{byName: make(map[string]*server, len(list)), byAddr: map[string][]*server{}, settled: map[string]bool{}}
	for i := range list {
		x.id = list[i].Backend
		x.settled[list[i].Name] = list[i].takenOut()
		x.add(&list[i])
	}
	return x
}

func (x *index) add(s *server) {
	x.byName[s.Name] = s
	if t, ok := parseName(s.Name); ok {
		x.own = append(x.own, t)
		return
	}
	if s.Addr.IsValid() {
		x.byAddr[s.Addr.String()] = append(x.byAddr[s.Addr.String()], s)
	}
}

// of returns the servers that send to the key: in an owned backend the one with its name, and in
// any backend those that operators made at its address.
func (x *index) of(b *Backend, k health.Key, name string) []*server {
	var out []*server
	if b.Owned {
		if s := x.byName[name]; s != nil {
			out = append(out, s)
		}
	}
	return append(out, x.byAddr[k.Target.Addr.String()]...)
}

// step is one op with what is known of it.
type step struct {
	op      health.Op
	backend *Backend
	name    string
	errs    map[int]error // by pid; 0 for those of no process
	last    bool          // no later op of the batch is about the same key
}

func (s *step) fail(pid int, err error) {
	if s.errs[pid] == nil {
		s.errs[pid] = err
	}
}

// resolve finds the backend and the server name of a key. With KindBadKey the backend is good: no
// server can have been made for the key. Servers that operators made go by their addresses.
func (g *Gateway) resolve(k health.Key) (*Backend, string, error) {
	b := g.byPool[k.Pool]
	if b == nil {
		return nil, "", &Error{Command: fmt.Sprintf("pool %q", k.Pool), Kind: KindNoPool}
	}
	name, err := serverName(k.Target)
	if err != nil && (b.Owned || !k.Target.Addr.IsValid()) {
		return b, "", &Error{Command: "target " + k.Target.String(), Kind: KindBadKey, Err: err}
	}
	return b, name, nil
}

// Apply implements gateway.Directed. For owned backends it first writes the servers file, once,
// then changes each live process, then asks whether there are new ones, and changes these. An old
// worker takes nothing new from listeners, so that only removals are carried out there; HAProxy
// refuses even these once the worker has stopped its proxies, which is an error (KindStopping)
// while a client is still connected to that worker.
func (g *Gateway) Apply(ctx context.Context, ops []health.Op) error {
	g.unused = nil
	steps := make([]*step, len(ops))
	last := map[health.Key]*step{}
	for i, op := range ops {
		s := &step{op: op, errs: map[int]error{}}
		steps[i] = s
		var err error
		if s.backend, s.name, err = g.resolve(op.Key); err != nil {
			s.fail(0, err)
			continue
		}
		if p := last[op.Key]; p != nil {
			p.last = false
		}
		s.last, last[op.Key] = true, s
	}
	todo := g.persist(steps)
	if len(todo) > 0 {
		if err := g.direct(ctx, todo); err != nil {
			for _, s := range todo {
				s.fail(0, err)
			}
		}
		g.forget(todo)
	}
	var errs []error
	for _, s := range steps {
		for _, pid := range slices.Sorted(maps.Keys(s.errs)) {
			errs = append(errs, fmt.Errorf("%s: %w", s.op, s.errs[pid]))
		}
	}
	return errors.Join(errs...)
}

// persist writes the servers file as it will be after all steps, and returns the steps that may go
// on. If the file cannot be written, servers are still added, since new pods must not wait for a
// disk, but none that the file lists is removed: a reload would bring it back after its removal was
// acknowledged.
func (g *Gateway) persist(steps []*step) []*step {
	next := g.wanted.clone()
	var todo []*step
	for _, s := range steps {
		if s.backend == nil {
			continue
		}
		todo = append(todo, s)
		if !s.backend.Owned {
			continue
		}
		switch s.op.Want {
		case health.WantRouted:
			next[s.backend.Backend][s.name] = true
		case health.WantRemoved, health.WantAbsent:
			delete(next[s.backend.Backend], s.name)
		}
	}
	if g.file == "" {
		return todo
	}
	err := writeFile(g.file, render(g.backends, next))
	if err == nil {
		g.wanted = next
		return todo
	}
	kept := todo[:0:0]
	for _, s := range todo {
		if s.backend.Owned && s.op.Want == health.WantRouted {
			s.fail(0, err)
		}
		if s.backend.Owned && s.op.Want != health.WantRouted && g.wanted[s.backend.Backend][s.name] {
			s.fail(0, err)
			continue
		}
		kept = append(kept, s)
	}
	return kept
}

// forget takes servers out of the file again that HAProxy refused by their definition: they would
// make its next start fail.
func (g *Gateway) forget(steps []*step) {
	if g.file == "" {
		return
	}
	next := g.wanted.clone()
	for _, s := range steps {
		if !s.backend.Owned || s.op.Want != health.WantRouted || !s.last {
			continue
		}
		for _, err := range s.errs {
			if errors.Is(err, KindRefused) {
				delete(next[s.backend.Backend], s.name)
			}
		}
	}
	if err := writeFile(g.file, render(g.backends, next)); err == nil {
		g.wanted = next
	}
}

// direct carries out the steps in every process, new ones included, until there is none left that
// was not told.
func (g *Gateway) direct(ctx context.Context, steps []*step) error {
	done := map[int]bool{}
	retry := false // the last round left a process to be tried again
	for round := range maxRounds {
		if retry && !pause(ctx, round) {
			break
		}
		retry = false
		procs, _, err := g.list(ctx)
		if err != nil {
			return err
		}
		// What failed in a process that has ended since does not matter.
		live := map[int]bool{0: true}
		for _, p := range procs.Workers {
			live[p.PID] = true
		}
		for _, s := range steps {
			maps.DeleteFunc(s.errs, func(pid int, _ error) bool { return !live[pid] })
		}
		idle := true
		for _, p := range procs.Workers {
			if done[p.PID] {
				continue
			}
			idle = false
			done[p.PID] = g.tell(ctx, p, steps)
			if !done[p.PID] {
				retry = true
			}
		}
		if idle {
			if !procs.current() {
				return &Error{Command: "show proc", Kind: KindGone, Text: "no worker takes new requests"}
			}
			return nil
		}
	}
	if err := ctx.Err(); err != nil {
		return &Error{Command: "show proc", Kind: KindTimeout, Err: err}
	}
	if retry {
		return nil // the steps hold what failed
	}
	return &Error{Command: "show proc", Kind: KindChanging}
}

// tell carries out the steps in one process. It reports false if the process should be tried again
// after the list was read anew: it began to stop, or ended, in the middle.
func (g *Gateway) tell(ctx context.Context, p process, steps []*step) bool {
	// Errors of an earlier try in this process are void.
	for _, s := range steps {
		delete(s.errs, p.PID)
	}
	again := false
	states := map[*Backend]*index{}
	stateErrs := map[*Backend]error{}
	changed := map[*Backend]bool{}
	sealed := sealing{g: g, pid: p.PID}
	for i, s := range steps {
		b := s.backend
		if p.Old && s.op.Want == health.WantRouted || s.op.Want == health.WantUnknown {
			continue
		}
		if states[b] == nil && stateErrs[b] == nil {
			states[b], stateErrs[b] = g.state(ctx, p.PID, b.Backend)
			if p.Old && errors.Is(stateErrs[b], KindNoBackend) {
				states[b], stateErrs[b] = newIndex(nil), nil // it is newer than this worker
			}
		}
		err := stateErrs[b]
		if err == nil {
			var did bool
			did, err = g.step(ctx, p, s, states[b])
			changed[b] = changed[b] || did
		}
		switch {
		case err == nil:
		case errors.Is(err, KindStopping) && !p.Old:
			again = true
			s.fail(p.PID, err)
		case errors.Is(err, KindStopping):
			// If nothing new can come in, what the worker would do with it does not matter.
			if ok, sealErr := sealed.is(ctx); !ok {
				s.fail(p.PID, errors.Join(err, sealErr))
			}
		case lost(err):
			// Every command after it would wait for its timeout.
			for _, s := range steps[i:] {
				s.fail(p.PID, err)
			}
			return !gone(err)
		default:
			s.fail(p.PID, err)
		}
	}
	g.verify(ctx, p, steps, changed)
	return !again
}

// step brings one server of one process to what the op wants, and reports whether it sent a change.
func (g *Gateway) step(ctx context.Context, p process, s *step, x *index) (bool, error) {
	switch s.op.Want {
	case health.WantRouted:
		if s.backend.Owned {
			return g.route(ctx, p, s, x)
		}
		return g.ready(ctx, p, s, x)
	case health.WantRemoved, health.WantAbsent:
		return g.remove(ctx, p, s, x)
	}
	return false, nil
}

// setState sets the administrative state of a server, and records it in srv.
func (g *Gateway) setState(ctx context.Context, pid int, b *Backend, srv *server, state string) error {
	err := g.cli.change(ctx, pid, "set server "+b.Backend+"/"+srv.Name+" state "+state, "")
	if err != nil {
		return err
	}
	if state == "maint" {
		srv.Admin |= adminForcedMaint
	} else {
		srv.Admin &^= adminForcedMaint | adminForcedDrain
	}
	return nil
}

// ready makes the servers ready that operators made at the address of the op.
func (g *Gateway) ready(ctx context.Context, p process, s *step, x *index) (did bool, err error) {
	b := s.backend
	list := x.of(b, s.op.Key, s.name)
	if len(list) == 0 {
		return false, &Error{Command: "route " + s.op.Key.String(), Process: p.PID, Kind: KindNoServer,
			Text: "no server of backend " + b.Backend + " has the address " + s.op.Target.Addr.String()}
	}
	for _, srv := range list {
		if srv.Admin&(adminForcedMaint|adminForcedDrain) != 0 {
			did = true
			if err := g.setState(ctx, p.PID, b, srv, "ready"); err != nil {
				return did, err
			}
		}
	}
	return did, nil
}

// route adds the agent's own server of the op if the process does not have it, and makes it ready.
func (g *Gateway) route(ctx context.Context, p process, s *step, x *index) (did bool, err error) {
	b, srv := s.backend, x.byName[s.name]
	if srv == nil {
		did = true
		err := g.cli.change(ctx, p.PID,
			"add server "+b.Backend+"/"+s.name+" "+s.op.Target.Addr.String()+" "+serverWords(b),
			"New server registered.")
		// It may exist by now: an earlier command whose answer was lost. verify reads what it is.
		if err != nil && !errors.Is(err, KindExists) {
			return did, err
		}
		srv = &server{Name: s.name, Addr: s.op.Target.Addr, Admin: adminForcedMaint}
		x.add(srv)
	}
	if srv.Addr != s.op.Target.Addr {
		return did, &Error{Command: "route " + s.op.Key.String(), Process: p.PID, Kind: KindConflict,
			Text: "server " + s.name + " is at " + srv.Addr.String()}
	}
	if srv.Admin&(adminForcedMaint|adminForcedDrain) == 0 {
		return did, nil
	}
	// Checks of a server added at run time are off until asked for (HAProxy's management guide,
	// "add server").
	if slices.Contains(strings.Fields(b.ServerOptions), "check") {
		if err := g.cli.change(ctx, p.PID, "enable health "+b.Backend+"/"+s.name, ""); err != nil {
			return true, err
		}
	}
	return true, g.setState(ctx, p.PID, b, srv, "ready")
}

// remove puts the servers of the op into maintenance, and deletes the agent's own server if that is
// to be absent and can be deleted.
func (g *Gateway) remove(ctx context.Context, p process, s *step, x *index) (did bool, err error) {
	b := s.backend
	for _, srv := range x.of(b, s.op.Key, s.name) {
		if srv.takenOut() {
			continue
		}
		did = true
		if err := g.setState(ctx, p.PID, b, srv, "maint"); err != nil && !errors.Is(err, KindNoServer) {
			return did, err
		}
	}
	if s.op.Want == health.WantRemoved || !b.Owned || x.byName[s.name] == nil {
		return did, nil
	}
	if safe, err := g.deletable(ctx, p.PID, b, x, s.name); !safe || err != nil {
		return did, err // the op comes again
	}
	err = g.cli.change(ctx, p.PID, "del server "+b.Backend+"/"+s.name, "Server deleted.")
	switch {
	case errors.Is(err, KindBusy):
		// Requests, or idle pooled connections (package comment, Deleting). The op comes again.
		return true, nil
	case err == nil, errors.Is(err, KindNoServer):
		delete(x.byName, s.name)
		return true, nil
	}
	return true, err
}

// verify reads back the backends that were changed, and compares.
func (g *Gateway) verify(ctx context.Context, p process, steps []*step, changed map[*Backend]bool) {
	states := map[*Backend]*index{}
	for _, s := range steps {
		b := s.backend
		if !changed[b] || !s.last || s.errs[p.PID] != nil || s.op.Want == health.WantUnknown || p.Old {
			continue
		}
		if states[b] == nil {
			x, err := g.state(ctx, p.PID, b.Backend)
			if err != nil {
				s.fail(p.PID, err)
				if lost(err) {
					return
				}
				continue
			}
			states[b] = x
		}
		list := states[b].of(b, s.op.Key, s.name)
		text := ""
		switch s.op.Want {
		case health.WantRouted:
			srv := states[b].byName[s.name]
			switch {
			case b.Owned && srv == nil:
				text = "server " + s.name + " is not there"
			case b.Owned && srv.Addr != s.op.Target.Addr:
				text = "server " + s.name + " is at " + srv.Addr.String()
			case b.Owned && srv.takenOut():
				text = "server " + s.name + " is in maintenance"
			case !b.Owned && !slices.ContainsFunc(list, func(s *server) bool { return !s.takenOut() }):
				// In a pool that is not owned another key of the batch may have the same address.
				if !g.sameAddress(steps, s) {
					text = "every server at the address is in maintenance"
				}
			}
		default:
			for _, srv := range list {
				if !srv.takenOut() && (b.Owned || !g.sameAddress(steps, s)) {
					text = "server " + srv.Name + " is not in maintenance"
				}
			}
		}
		if text != "" {
			s.fail(p.PID, &Error{Command: s.op.String(), Process: p.PID, Kind: KindNotApplied, Text: text})
		}
	}
}

// sameAddress says whether another op of the batch is about the same address of the same pool.
func (g *Gateway) sameAddress(steps []*step, s *step) bool {
	return slices.ContainsFunc(steps, func(o *step) bool {
		return o != s && o.op.Pool == s.op.Pool && o.op.Target.Addr == s.op.Target.Addr
	})
}

// sealing answers, once, whether a process can still be brought a new request.
type sealing struct {
	g     *Gateway
	pid   int
	asked bool
	yes   bool
	err   error
}

// is says that no new request can come into the process: it has closed its listeners, and each
// client connection that is left, if any, is connected through to a server and ends with that. A
// connection that is idle, has sent half a request or waits for an answer may still bring a
// request, and it would be routed as if nothing had happened.
//
// Clients are counted first: a process that is stopping gets no more of them, so that a tunnel
// counted later was among them.
func (s *sealing) is(ctx context.Context) (bool, error) {
	if s.asked {
		return s.yes, s.err
	}
	s.asked = true
	in, err := s.g.info(ctx, s.pid)
	if err != nil {
		s.err = err
		return false, err
	}
	if s.yes = in.Stopping && in.Clients == 0; s.yes || !in.Stopping {
		return s.yes, nil
	}
	answer, err := s.g.cli.table(ctx, s.pid, "show sess all", sessBegin)
	if err == nil {
		var n int
		if n, err = parseTunnels(answer); err != nil {
			err = &Error{Command: "show sess all", Process: s.pid, Kind: KindMalformed, Err: err}
		} else {
			s.yes = in.Clients <= n
		}
	}
	s.err = err
	return s.yes, s.err
}

// Observe implements gateway.Directed. The list of processes is read before and after the
// processes; if it changed, everything is read again.
func (g *Gateway) Observe(ctx context.Context, keys []health.Key) (health.Observation, error) {
	var err error
	for round := range maxRounds {
		if !pause(ctx, round) && err != nil {
			break
		}
		var o health.Observation
		var again bool
		if o, again, err = g.observe(ctx, keys); err == nil {
			return o, nil
		} else if !again {
			break
		}
	}
	return health.Observation{}, fmt.Errorf("observe %d keys: %w", len(keys), err)
}

func (g *Gateway) observe(ctx context.Context, keys []health.Key) (o health.Observation, again bool, err error) {
	byBackend := map[*Backend][]asked{}
	var unnamed []health.Key
	for _, k := range keys {
		b, name, err := g.resolve(k)
		if b == nil {
			return o, false, err
		}
		if err != nil {
			// No server can have been made for such a key. One key must not keep all others from
			// being read.
			unnamed = append(unnamed, k)
			continue
		}
		byBackend[b] = append(byBackend[b], asked{k, name})
	}
	o.At = time.Now()
	o.Seen, o.Unread = make(map[health.Key]health.Seen, len(keys)), map[health.Pool]error{}
	for _, k := range unnamed {
		o.Seen[k] = health.Seen{Missing: true}
	}
	before, listed, err := g.list(ctx)
	if err != nil {
		return o, gone(err), err
	}
	o.Generation = listed
	if !before.current() {
		return o, true, &Error{Command: "show proc", Kind: KindGone, Text: "no worker takes new requests"}
	}
	unused := map[health.Key]bool{}
	for k, in := range g.unused {
		unused[k] = in == listed
	}
	g.unused = map[health.Key]string{}
	for _, p := range before.Workers {
		start, err := g.observeProcess(ctx, p, byBackend, unused, &o)
		if err != nil {
			return o, gone(err) || errors.Is(err, KindChanging), err
		}
		o.Generation += " " + start
	}
	after, listedAfter, err := g.list(ctx)
	if err != nil {
		return o, gone(err), err
	}
	if listed != listedAfter {
		return o, true, &Error{Command: "show proc", Kind: KindChanging,
			Text: before.String() + ", then " + after.String()}
	}
	for k, is := range o.Seen {
		switch {
		case o.Unread[k.Pool] != nil:
			delete(o.Seen, k)
		case !is.Routed && is.Active == 0:
			g.unused[k] = listed
		}
	}
	return o, false, nil
}

// asked is a key with the name that its own server has.
type asked struct {
	key  health.Key
	name string
}

// observeProcess adds what one process does with the keys to o, and returns when the process was
// started. If the process takes new requests and has not loaded a backend, the backend's pool is
// unread.
//
// The order of the readings matters: first the servers' states and whether anything new can come in
// at all, then the counts, then the streams. What was given to a server before it was taken out is
// in the counts or the streams that are read after it, and later nothing is given to it. The
// streams are listed only for a target that is taken out, has a count of zero and is not known to
// be unused.
func (g *Gateway) observeProcess(ctx context.Context, p process, byBackend map[*Backend][]asked,
	unused map[health.Key]bool, o *health.Observation) (start string, err error) {
	in, err := g.info(ctx, p.PID)
	if err != nil {
		return "", err
	}
	states, open, err := g.states(ctx, p, byBackend, o)
	if err != nil {
		return "", err
	}
	sealed := false
	if open {
		s := sealing{g: g, pid: p.PID}
		if sealed, err = s.is(ctx); err != nil {
			return "", err
		}
	}
	counts := map[*Backend]map[string]traffic{}
	unsure := func(b *Backend, a asked, srv *server) bool {
		return counts[b][srv.Name] == traffic{} && (srv.takenOut() || sealed) && !unused[a.key]
	}
	listing := false
	for b, list := range byBackend {
		if len(states[b].byName) == 0 {
			continue
		}
		count, err := g.stat(ctx, p.PID, b.Backend, states[b].id)
		if err != nil {
			return "", err
		}
		counts[b] = count
		for _, a := range list {
			for _, srv := range states[b].of(b, a.key, a.name) {
				if _, ok := count[srv.Name]; !ok {
					return "", &Error{Command: "show stat " + b.Backend, Process: p.PID, Kind: KindChanging,
						Text: "no line for server " + srv.Name}
				}
				listing = listing || unsure(b, a, srv)
			}
		}
	}
	var streams map[string]int
	if listing {
		if streams, err = g.streams(ctx, p.PID); err != nil {
			return "", err
		}
	}
	for b, list := range byBackend {
		for _, a := range list {
			is := o.Seen[a.key]
			serving := false
			for _, srv := range states[b].of(b, a.key, a.name) {
				routed := !srv.takenOut() && !sealed
				is.Routed = is.Routed || routed
				serving = serving || srv.balanced()
				t := counts[b][srv.Name]
				active := t.Current + t.Queued
				if unsure(b, a, srv) {
					active = streams[b.Backend+"/"+srv.Name] + streams[unattributed]
				}
				is.Active += active
				// A server that operators made stays; the key is gone when nothing goes or runs
				// there.
				is.Present = is.Present || b.Owned && srv.Name == a.name || routed || active > 0
			}
			if !p.Old && !serving {
				is.Missing = true
			}
			o.Seen[a.key] = is
		}
	}
	return in.Start, nil
}

// states reads the servers' states in one process, adds the pools that are unread to o, and reports
// whether the process is old and has a server of the keys that is not taken out.
func (g *Gateway) states(ctx context.Context, p process, byBackend map[*Backend][]asked,
	o *health.Observation) (states map[*Backend]*index, open bool, err error) {
	states = map[*Backend]*index{}
	for b, list := range byBackend {
		x, err := g.state(ctx, p.PID, b.Backend)
		if errors.Is(err, KindNoBackend) {
			if !p.Old { // else the backend is newer than this worker
				o.Unread[b.Pool] = err
			}
			x, err = newIndex(nil), nil
		}
		if err != nil {
			return nil, false, err
		}
		states[b] = x
		for _, a := range list {
			open = open || p.Old && slices.ContainsFunc(x.of(b, a.key, a.name), func(s *server) bool {
				return !s.takenOut()
			})
		}
	}
	return states, open, nil
}

// Owned implements gateway.Directed: the servers that the file lists, and those with an agent's
// name in any live process. It lists those of the file even if HAProxy cannot be reached, with the
// error.
func (g *Gateway) Owned(ctx context.Context) ([]health.Key, error) {
	keys := map[health.Key]bool{}
	for _, b := range g.backends {
		for name := range g.wanted[b.Backend] {
			if t, ok := parseName(name); ok {
				keys[health.Key{Pool: b.Pool, Target: t}] = true
			}
		}
	}
	var err error
	for round := range maxRounds {
		if !pause(ctx, round) && err != nil {
			break
		}
		if err = g.owned(ctx, keys); err == nil || !(gone(err) || errors.Is(err, KindChanging)) {
			break
		}
	}
	list := slices.SortedFunc(maps.Keys(keys), func(a, b health.Key) int {
		return strings.Compare(a.String(), b.String())
	})
	if err != nil {
		return list, fmt.Errorf("list owned servers: %w", err)
	}
	return list, nil
}

func (g *Gateway) owned(ctx context.Context, keys map[health.Key]bool) error {
	before, _, err := g.list(ctx)
	if err != nil {
		return err
	}
	for _, p := range before.Workers {
		for i := range g.backends {
			b := &g.backends[i]
			if !b.Owned {
				continue
			}
			x, err := g.state(ctx, p.PID, b.Backend)
			if errors.Is(err, KindNoBackend) {
				continue // HAProxy has not loaded it yet
			}
			if err != nil {
				return err
			}
			for _, t := range x.own {
				keys[health.Key{Pool: b.Pool, Target: t}] = true
			}
		}
	}
	after, _, err := g.list(ctx)
	if err != nil {
		return err
	}
	if before.String() != after.String() {
		return &Error{Command: "show proc", Kind: KindChanging, Text: before.String() + ", then " + after.String()}
	}
	return nil
}
