package haproxy

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// maxRounds bounds the attempts of Apply and Observe, which begin again when workers start or end
// during an attempt. A worker that has just ended stays in the list until the master has reaped it.
const maxRounds = 8

// maxUnnamed bounds the streams of which HAProxy is asked for the server, one after the other.
const maxUnnamed = 64

// pause waits before each round but the first: 2 ms, doubled each time, 254 ms in all. It reports
// false if the context ended.
func pause(ctx context.Context, round int) bool {
	if round == 0 {
		return ctx.Err() == nil
	}
	return signal.Sleep(ctx, time.Millisecond<<round)
}

// Gateway is one running HAProxy in master-worker mode. It implements gateway.Directed and is not
// safe for concurrent use.
type Gateway struct {
	cli      cli
	file     string
	backends []Backend
	byPool   map[health.Pool]*Backend
	wanted   wanted // what the servers file lists, or will once it can be written
	// sealedOnes are old processes that were found sealed, by pid and start.
	sealedOnes map[string]bool
	// unwritten is when the servers file could not be written. Zero: it is as wanted.
	unwritten time.Time
	// unused has the targets that the last reading found taken out and without a stream in any
	// process. The value is the list of processes of that reading. While a target stays taken out
	// in these processes, no stream can begin for it.
	unused map[health.Key]string
	// mute has the old processes that the last reading knows nothing of, by pid, and the reason.
	mute map[int]error
	// dropped has what readings have deleted from the servers file. A command without an answer may
	// bring it after them.
	dropped map[health.Key]bool
}

// New checks the configuration, and reads the servers file, or writes one without servers if there
// is none. Servers that an existing file lists are kept: they are Owned, and nothing but an op
// removes them. If the sections of the file differ from the configuration, they are written again,
// and HAProxy loads them with its next reload. New does not connect to HAProxy.
func New(c Config) (*Gateway, error) {
	if err := errors.Join(c.Check()...); err != nil {
		return nil, fmt.Errorf("haproxy config: %w", err)
	}
	g := &Gateway{
		cli:      cli{path: c.MasterSocket, timeout: commandTimeout},
		file:     c.ServersFile,
		backends: slices.Clone(c.Backends),
		byPool:   map[health.Pool]*Backend{},
		wanted:   wanted{},

		sealedOnes: map[string]bool{}, dropped: map[health.Key]bool{},
	}
	have, err := readFile(g.file)
	if err != nil {
		return nil, err
	}
	for i := range g.backends {
		b := &g.backends[i]
		g.byPool[b.pool()] = b
		g.wanted[b.Backend] = map[string]bool{}
		maps.Copy(g.wanted[b.Backend], have[b.Backend])
	}
	if err := writeFile(g.file, render(g.backends, g.wanted)); err != nil {
		return nil, err
	}
	return g, nil
}

// read sends a command whose answer is a listing, and parses that.
func read[T any](
	ctx context.Context, c *cli, pid int, command, begin string, parse func(string) (T, error),
) (T, error) {
	var none T
	answer, err := c.table(ctx, pid, command, begin)
	if err != nil {
		return none, err
	}
	is, err := parse(answer)
	if err != nil {
		return none, &failure{Command: command, Process: pid, Kind: kindMalformed, Err: err}
	}
	return is, nil
}

// list returns the master's processes and a name for them. The name includes the modification time
// of the socket, because in a container a restarted master and worker usually get the same pids.
func (g *Gateway) list(ctx context.Context) (processes, string, error) {
	p, err := read(ctx, &g.cli, 0, "show proc", procBegin, parseProcesses)
	if err != nil {
		return p, "", err
	}
	socket := "?"
	if st, err := os.Stat(g.cli.path); err == nil {
		socket = fmt.Sprintf("%x", st.ModTime().UnixNano())
	}
	return p, p.String() + " " + socket, nil
}

// steadily calls look with the list of processes and its name. It repeats that, maxRounds times at
// most, until the list is the same after the call and no process has ended during it.
func (g *Gateway) steadily(ctx context.Context, look func(before processes, listed string) error) (err error) {
	for round := range maxRounds {
		if !pause(ctx, round) && err != nil {
			break
		}
		var before, after processes
		var listed, again string
		if before, listed, err = g.list(ctx); err == nil {
			err = look(before, listed)
		}
		if err == nil {
			after, again, err = g.list(ctx)
		}
		if err == nil && listed != again {
			err = &failure{Command: "show proc", Kind: kindChanging, Text: before.String() + ", then " + after.String()}
		}
		if !gone(err) && !errors.Is(err, kindChanging) && !errors.Is(err, kindNoWorker) {
			break
		}
	}
	return err
}

// stopping reports whether the process takes no new connections, which only itself knows: since
// HAProxy 3.1 the master also lists the one that serves as old, while a reload parses and after one
// that failed.
func (g *Gateway) stopping(ctx context.Context, p process) (bool, error) {
	if !p.Old {
		return false, nil
	}
	in, err := g.info(ctx, p.PID)
	return in.Stopping, err
}

func (g *Gateway) state(ctx context.Context, pid int, backend string) (*index, error) {
	return read(ctx, &g.cli, pid, "show servers state "+backend, stateBegin, func(answer string) (*index, error) {
		list, err := parseState(answer, backend)
		return newIndex(list), err
	})
}

// stat reads the counters of a backend by its number, because "show stat" with a name could select
// a frontend of the same name.
func (g *Gateway) stat(ctx context.Context, pid int, backend string, id int) (map[string]traffic, error) {
	command := fmt.Sprintf("show stat %d 4 -1", id) // 4: servers, -1: all
	return read(ctx, &g.cli, pid, command, statBegin, func(answer string) (map[string]traffic, error) {
		return parseStat(answer, backend)
	})
}

func (g *Gateway) info(ctx context.Context, pid int) (info, error) {
	return read(ctx, &g.cli, pid, "show info", infoBegin, func(answer string) (info, error) {
		in, err := parseInfo(answer)
		if err == nil && in.PID != pid {
			err = fmt.Errorf("it is of pid %d", in.PID)
		}
		return in, err
	})
}

// streams counts the streams of a process by server. The result is never empty: the stream of this
// command is in the list. HAProxy is asked for the server of each unnamed one, up to maxUnnamed.
func (g *Gateway) streams(ctx context.Context, pid int) (map[string]int, error) {
	all, err := read(ctx, &g.cli, pid, "show sess", sessBegin, parseStreams)
	if err != nil {
		return nil, err
	}
	for i, id := range all.unnamed {
		if i == maxUnnamed {
			all.byServer[unattributed] += len(all.unnamed) - i
			break
		}
		answer, err := g.cli.do(ctx, pid, "show sess "+id)
		if err != nil {
			return nil, err
		}
		if server := parseStream(answer); server != "" {
			all.byServer[server]++
		}
	}
	return all.byServer, nil
}

// deletable reports whether "del server" may be sent: the server was in maintenance when x was
// read, and a list of streams that was read later has none of the server. HAProxy before 2.6.16,
// 2.8.4 and 2.9 does not check the streams itself, and crashes (HAProxy issues 2323 and 2378). A
// stream that has received its answer but not yet passed it to the client is in no counter.
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
	// settled has the servers that were in maintenance when they were read. streams is nil until it
	// is needed, and is read later.
	settled map[string]bool
	streams map[string]int
}

func newIndex(list []server) *index {
	x := &index{byName: make(map[string]*server, len(list)), settled: map[string]bool{}}
	for i := range list {
		x.id = list[i].Backend
		x.settled[list[i].Name] = list[i].takenOut()
		x.byName[list[i].Name] = &list[i]
	}
	return x
}

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

// resolve returns the backend and the server name of a key. With kindBadKey the backend is valid,
// but no server can exist for the key.
func (g *Gateway) resolve(k health.Key) (*Backend, string, error) {
	b := g.byPool[k.Pool]
	if b == nil {
		return nil, "", &failure{Command: fmt.Sprintf("pool %q", k.Pool), Kind: kindNoPool}
	}
	name, err := serverName(k.Target)
	if err != nil {
		return b, "", &failure{Command: "target " + k.Target.String(), Kind: kindBadKey, Err: err}
	}
	return b, name, nil
}

// Apply implements gateway.Directed. It writes the servers file once, changes each live process,
// lists the processes again, and changes the new ones. In a worker that is stopping it carries out
// only removals. HAProxy refuses these too once the worker has stopped its proxies. The refusal is
// an error (kindStopping) while a client connection of that worker can still bring a request.
func (g *Gateway) Apply(ctx context.Context, ops []health.Op) error {
	steps := make([]*step, len(ops))
	last := map[health.Key]*step{}
	for i, op := range ops {
		delete(g.unused, op.Key)
		delete(g.dropped, op.Key)
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
	var errs []error
	todo := slices.DeleteFunc(slices.Clone(steps), func(s *step) bool { return s.name == "" })
	if len(todo) > 0 {
		errs = append(errs, g.persist(todo))
		if err := g.direct(ctx, todo); err != nil {
			for _, s := range todo {
				s.fail(0, err)
			}
		}
		g.forget(todo)
	}
	for _, s := range steps {
		for _, pid := range slices.Sorted(maps.Keys(s.errs)) {
			errs = append(errs, fmt.Errorf("%s: %w", s.op, answered(s.op, s.errs[pid])))
		}
	}
	return errors.Join(errs...)
}

// persist writes the servers file as it will be after all steps. With an error the steps are
// carried out all the same, because neither drains nor new pods must wait for a disk. HAProxy loses
// them with its next reload. The agent reads that as another generation, and repeats them. The file
// is tried again with later steps and readings.
func (g *Gateway) persist(steps []*step) error {
	for _, s := range steps {
		switch {
		case g.former(s.backend):
		case s.op.Want == health.WantRouted:
			g.wanted[s.backend.Backend][s.name] = true
		case s.op.Want == health.WantRemoved, s.op.Want == health.WantAbsent:
			delete(g.wanted[s.backend.Backend], s.name)
		}
	}
	return g.write()
}

// write writes the servers file.
func (g *Gateway) write() error {
	err := writeFile(g.file, render(g.backends, g.wanted))
	if g.unwritten = (time.Time{}); err != nil {
		g.unwritten = time.Now()
	}
	return err
}

// forget deletes servers from the file again if HAProxy refused their definition, because they
// would make its next start fail. If that fails, it is tried again as in persist.
func (g *Gateway) forget(steps []*step) {
	for _, s := range steps {
		if s.op.Want != health.WantRouted || !s.last {
			continue
		}
		for _, err := range s.errs {
			if errors.Is(err, kindRefused) {
				delete(g.wanted[s.backend.Backend], s.name)
			}
		}
	}
	_ = g.write() // persist has reported why it cannot be written
}

// direct carries out the steps in every process, until the list has no process that did not receive
// them.
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
		// Errors of a process that has ended since do not matter.
		live := map[int]bool{0: true}
		for _, p := range procs.Workers {
			live[p.PID] = true
		}
		for _, s := range steps {
			maps.DeleteFunc(s.errs, func(pid int, _ error) bool { return !live[pid] })
		}
		idle := true
		// Old ones first: one of them may serve while the new one, which parses, does not answer.
		for _, p := range slices.Backward(procs.Workers) {
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
			return nil
		}
	}
	if err := ctx.Err(); err != nil {
		return &failure{Command: "show proc", Kind: kindTimeout, Err: err}
	}
	if retry {
		return nil // the steps hold what failed
	}
	return &failure{Command: "show proc", Kind: kindChanging}
}

// tell carries out the steps in one process. It reports false if the process began to stop, or
// ended, during the steps. The caller then lists the processes again and retries.
func (g *Gateway) tell(ctx context.Context, p process, steps []*step) bool {
	// Discard the errors of an earlier attempt in this process.
	for _, s := range steps {
		if late := (*gateway.Unanswered)(nil); !errors.As(s.errs[p.PID], &late) {
			delete(s.errs, p.PID)
		}
	}
	err := g.mute[p.PID] // the next reading asks it again
	stopping := p.Old
	if !p.Old || err == nil {
		stopping, err = g.stopping(ctx, p)
	}
	if err != nil {
		for _, s := range steps {
			if s.op.Want == health.WantRemoved || s.op.Want == health.WantAbsent {
				s.fail(p.PID, err)
			}
		}
		return !gone(err)
	}
	again := false
	states := map[*Backend]*index{}
	stateErrs := map[*Backend]error{}
	sealed := sync.OnceValues(func() (bool, error) { return g.sealed(ctx, p.PID) })
	// Deletions come last, because the list of streams that they need may take too long.
	deletions := slices.DeleteFunc(slices.Clone(steps), func(s *step) bool {
		return s.op.Want != health.WantAbsent || !s.last
	})
	all := slices.Concat(steps, deletions)
	for i, s := range all {
		b := s.backend
		if stopping && s.op.Want == health.WantRouted || s.op.Want == health.WantUnknown || !stopping && g.former(b) {
			continue
		}
		if states[b] == nil && stateErrs[b] == nil {
			states[b], stateErrs[b] = g.state(ctx, p.PID, b.Backend)
			if stopping && errors.Is(stateErrs[b], kindNoBackend) {
				states[b], stateErrs[b] = newIndex(nil), nil // it is newer than this worker
			}
		}
		err := stateErrs[b]
		if err == nil {
			switch {
			case i >= len(steps):
				err = g.del(ctx, p, s, states[b])
			case s.op.Want == health.WantRouted:
				err = g.route(ctx, p, s, states[b])
			default:
				err = g.remove(ctx, p, s, states[b])
			}
		}
		switch {
		case err == nil:
		case errors.Is(err, kindStopping) && !stopping:
			again = true
			s.fail(p.PID, err)
		case errors.Is(err, kindStopping):
			// If no new request can reach the worker, the state of its server does not matter.
			if ok, sealErr := sealed(); !ok {
				s.fail(p.PID, errors.Join(err, sealErr))
			}
		case lost(err):
			s.fail(p.PID, err)
			if late := (*gateway.Unanswered)(nil); errors.As(err, &late) {
				late.Ops, err = []health.Op{s.op}, late.Err
			}
			// Every further command would wait for its timeout.
			for _, s := range all[i:] {
				s.fail(p.PID, err)
			}
			return !gone(err)
		default:
			s.fail(p.PID, err)
		}
	}
	return !again
}

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

// route adds the server of the op if the process does not have it, and makes it ready.
func (g *Gateway) route(ctx context.Context, p process, s *step, x *index) error {
	b, srv := s.backend, x.byName[s.name]
	if srv == nil {
		err := g.cli.change(ctx, p.PID,
			"add server "+b.Backend+"/"+s.name+" "+s.op.Target.Addr.String()+" "+serverWords(b),
			"New server registered.")
		// The server may exist already, from an earlier command whose answer was lost.
		if err != nil && !errors.Is(err, kindExists) {
			return err
		}
		srv = &server{Name: s.name, Addr: s.op.Target.Addr, Admin: adminForcedMaint}
		x.byName[s.name] = srv
	}
	if srv.Addr != s.op.Target.Addr {
		return &failure{Command: "route " + s.op.Key.String(), Process: p.PID, Kind: kindConflict,
			Text: "server " + s.name + " is at " + srv.Addr.String()}
	}
	if srv.Admin&(adminForcedMaint|adminForcedDrain) == 0 {
		return nil
	}
	// Checks of a server added at run time are off until asked for (HAProxy's management guide,
	// "add server").
	if slices.Contains(strings.Fields(b.ServerOptions), "check") {
		// The server has none if it was added before serverOptions had one.
		err := g.cli.change(ctx, p.PID, "enable health "+b.Backend+"/"+s.name, "")
		if err != nil && !errors.Is(err, kindNoCheck) {
			return err
		}
	}
	return g.setState(ctx, p.PID, b, srv, "ready")
}

// remove puts the server of the op into maintenance. Former backends are only read: EndpointSlices
// list none of their servers, and an old worker that is not stopping yet could lose all of them.
func (g *Gateway) remove(ctx context.Context, p process, s *step, x *index) error {
	srv := x.byName[s.name]
	if srv == nil || srv.takenOut() {
		return nil
	}
	if g.former(s.backend) {
		return &failure{Command: "remove " + s.op.Key.String(), Process: p.PID, Kind: kindStopping}
	}
	err := g.setState(ctx, p.PID, s.backend, srv, "maint")
	if errors.Is(err, kindNoServer) {
		return nil
	}
	return err
}

// del deletes the server of the op if it can be deleted.
func (g *Gateway) del(ctx context.Context, p process, s *step, x *index) error {
	b := s.backend
	if x.byName[s.name] == nil || g.former(b) {
		return nil
	}
	if safe, err := g.deletable(ctx, p.PID, b, x, s.name); !safe || err != nil {
		return err // the op comes again
	}
	err := g.cli.change(ctx, p.PID, "del server "+b.Backend+"/"+s.name, "Server deleted.")
	switch {
	case errors.Is(err, kindBusy):
		// Requests, or idle pooled connections (package comment, Deleting). The op comes again.
		return nil
	case err == nil, errors.Is(err, kindNoServer):
		delete(x.byName, s.name)
		return nil
	}
	return err
}

// sealed reports whether no new request can reach the process: it has closed its listeners, and
// each remaining client connection is a tunnel to a server. A connection that is idle, has sent
// half a request or waits for an answer may still bring a request, which would be routed as before.
//
// Clients are counted before tunnels. A stopping process accepts no more clients, so each tunnel
// that is counted later was among them. Both stay so, and listing the sessions of a process that
// has thousands takes long, so what was found sealed is remembered.
func (g *Gateway) sealed(ctx context.Context, pid int) (bool, error) {
	in, err := g.info(ctx, pid)
	if err != nil || !in.Stopping || in.Clients == 0 {
		return err == nil && in.Stopping, err
	}
	process := fmt.Sprintf("%d %s", pid, in.Start)
	if g.sealedOnes[process] {
		return true, nil
	}
	tunnels, err := read(ctx, &g.cli, pid, "show sess all", sessBegin, parseTunnels)
	if err != nil || in.Clients > tunnels {
		return false, err
	}
	if len(g.sealedOnes) >= 1000 {
		clear(g.sealedOnes)
	}
	g.sealedOnes[process] = true
	return true, nil
}

// Observe implements gateway.Directed. The list of processes is read before and after the
// processes; if it changed, everything is read again.
func (g *Gateway) Observe(ctx context.Context, keys []health.Key) (o health.Observation, err error) {
	if !g.unwritten.IsZero() && time.Since(g.unwritten) >= rewriteEvery {
		_ = g.write() // persist has reported why it cannot be written
	}
	var name string
	err = g.steadily(ctx, func(before processes, listed string) (err error) {
		name = listed
		o, err = g.observe(ctx, keys, before, listed)
		return err
	})
	if err != nil {
		return health.Observation{}, fmt.Errorf("observe %d keys: %w", len(keys), err)
	}
	g.unused = map[health.Key]string{}
	stale := false
	for k, is := range o.Seen {
		switch {
		case o.Unread[k.Pool] != nil:
			delete(o.Seen, k)
			continue
		case !is.Routed && is.Active == 0:
			g.unused[k] = name
		}
		// The command for it has failed, or the file is of an earlier agent. If it is to be routed,
		// the op comes again. If not, there is none, because no process routes to it.
		if b, server, err := g.resolve(k); err == nil && !is.Routed && g.wanted[b.Backend][server] {
			delete(g.wanted[b.Backend], server)
			g.dropped[k], stale = true, true
		} else if err == nil && is.Routed && g.dropped[k] && !g.former(b) {
			delete(g.dropped, k)
			g.wanted[b.Backend][server], stale = true, true
		}
	}
	if stale {
		_ = g.write() // it is tried again with later readings
	}
	return o, nil
}

func (g *Gateway) observe(ctx context.Context, keys []health.Key, before processes, listed string,
) (o health.Observation, err error) {
	byBackend := map[*Backend][]asked{}
	var unnamed []health.Key
	for _, k := range keys {
		b, name, err := g.resolve(k)
		if b == nil {
			return o, err
		}
		if err != nil {
			// No server can exist for such a key. It must not prevent the reading of all others.
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
	o.Generation = listed
	unused := map[health.Key]bool{}
	for k, in := range g.unused {
		unused[k] = in == listed
	}
	g.mute = map[int]error{}
	var silent error
	serving := false // without such a worker there is no evidence about routing
	for _, p := range before.Workers {
		if p.Old && silent != nil {
			g.mute[p.PID] = silent // one is enough to know nothing of any key
			continue
		}
		in, err := g.observeProcess(ctx, p, byBackend, unused, &o)
		switch {
		case err == nil:
			o.Generation += " " + in.Start
			serving = serving || !p.Old || !in.Stopping
		case p.Old && !gone(err) && !errors.Is(err, kindChanging):
			silent, g.mute[p.PID] = err, err
		default:
			return o, err
		}
	}
	switch {
	case !serving && silent != nil:
		return o, silent
	case !serving:
		return o, &failure{Command: "show proc", Kind: kindNoWorker, Text: before.String()}
	case silent == nil:
		return o, nil
	}
	o.Generation += " ?" // so that everything is read again when the process answers
	for _, list := range byBackend {
		for _, a := range list {
			is := o.Seen[a.key]
			is.Present, is.Routed, is.Active = true, true, is.Active+1
			o.Seen[a.key] = is
		}
	}
	return o, nil
}

// asked is a key and the name of its server.
type asked struct {
	key  health.Key
	name string
}

// observeProcess adds one process's reading of the keys to o, and returns what the process says of
// itself. If the process takes new requests and has not loaded a backend, the backend's pool is
// unread.
//
// The order of the readings matters: first the servers' states and whether the process is sealed,
// then the counts, then the streams. A request that was assigned to a server before the server was
// taken out is in the counts or the streams that are read later. No request is assigned to the
// server after that. The streams are listed only for a target that is taken out, has a count of
// zero and is not known to be unused.
func (g *Gateway) observeProcess(ctx context.Context, p process, byBackend map[*Backend][]asked,
	unused map[health.Key]bool, o *health.Observation) (in info, err error) {
	if in, err = g.info(ctx, p.PID); err != nil {
		return in, err
	}
	stopping := p.Old && in.Stopping
	states, open, err := g.states(ctx, p.PID, stopping, byBackend, o)
	if err != nil {
		return in, err
	}
	sealed := false
	if open {
		// With an error it is not known to be sealed, and its open servers count as Routed.
		within, cancel := context.WithTimeout(ctx, sealTimeout)
		sealed, _ = g.sealed(within, p.PID)
		cancel()
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
			return in, err
		}
		counts[b] = count
		for _, a := range list {
			srv := states[b].byName[a.name]
			if srv == nil {
				continue
			}
			if _, ok := count[srv.Name]; !ok {
				return in, &failure{Command: "show stat " + b.Backend, Process: p.PID, Kind: kindChanging,
					Text: "no line for server " + srv.Name}
			}
			listing = listing || unsure(b, a, srv)
		}
	}
	var streams map[string]int
	if listing {
		within, cancel := context.WithDeadline(ctx, o.At.Add(2*g.cli.timeout)) // of all processes
		streams, err = g.streams(within, p.PID)
		cancel()
		if errors.Is(err, kindTimeout) {
			streams, err = map[string]int{unattributed: 1}, nil // each server may have one
		}
		if err != nil {
			return in, err
		}
	}
	for b, list := range byBackend {
		for _, a := range list {
			is, srv := o.Seen[a.key], states[b].byName[a.name]
			if srv != nil {
				is.Present = true
				is.Routed = is.Routed || !srv.takenOut() && !sealed
				t := counts[b][srv.Name]
				active := t.Current + t.Queued
				if unsure(b, a, srv) {
					active = streams[b.Backend+"/"+srv.Name] + streams[unattributed]
				}
				is.Active += active
			}
			if !stopping && (srv == nil || !srv.balanced()) {
				is.Missing = true
			}
			o.Seen[a.key] = is
		}
	}
	return in, nil
}

// states reads the servers' states in one process, adds the pools that are unread to o, and reports
// whether the process is stopping and has a server of the keys that is not taken out.
func (g *Gateway) states(ctx context.Context, pid int, stopping bool, byBackend map[*Backend][]asked,
	o *health.Observation) (states map[*Backend]*index, open bool, err error) {
	states = map[*Backend]*index{}
	for b, list := range byBackend {
		x, err := g.state(ctx, pid, b.Backend)
		if errors.Is(err, kindNoBackend) {
			if !stopping && !g.former(b) { // else the backend is newer than this worker
				o.Unread[b.pool()] = err
			}
			x, err = newIndex(nil), nil
		}
		if err != nil {
			return nil, false, err
		}
		states[b] = x
		for _, a := range list {
			srv := x.byName[a.name]
			open = open || stopping && srv != nil && !srv.takenOut()
		}
	}
	return states, open, nil
}

// Owned implements gateway.Directed: the servers that the file is to list, and those with an
// agent's name in any live process. If HAProxy cannot be reached, it returns those of the file
// together with the error.
func (g *Gateway) Owned(ctx context.Context) ([]health.Key, error) {
	keys := map[health.Key]bool{}
	for _, b := range g.backends {
		for name := range g.wanted[b.Backend] {
			if t, ok := parseName(name); ok {
				keys[health.Key{Pool: b.pool(), Target: t}] = true
			}
		}
	}
	err := g.steadily(ctx, func(before processes, _ string) error { return g.owned(ctx, before, keys) })
	list := slices.SortedFunc(maps.Keys(keys), func(a, b health.Key) int {
		return strings.Compare(a.String(), b.String())
	})
	if err != nil {
		return list, fmt.Errorf("list owned servers: %w", err)
	}
	return list, nil
}

// owned adds the servers with an agent's name in each process to keys. An old worker may have a
// backend whose name was another one before the reload. It becomes a pool too, which is not in the
// configuration.
func (g *Gateway) owned(ctx context.Context, before processes, keys map[health.Key]bool) error {
	for _, p := range before.Workers {
		if p.Old && g.mute[p.PID] != nil {
			continue // the generation is another one when it answers
		}
		stopping, err := g.stopping(ctx, p)
		if err != nil {
			return err
		}
		all := func(answer string) ([]server, error) { return parseState(answer, "") }
		servers, err := read(ctx, &g.cli, p.PID, "show servers state", stateBegin, all)
		if err != nil {
			return err
		}
		for _, s := range servers {
			pool := health.Pool(s.Of)
			t, ok := parseName(s.Name)
			if !ok || g.byPool[pool] == nil && !stopping {
				continue
			}
			if g.byPool[pool] == nil {
				g.byPool[pool] = &Backend{Backend: s.Of}
			}
			keys[health.Key{Pool: pool, Target: t}] = true
		}
	}
	return nil
}

// former reports whether b is not in the configuration any more: only old workers have it.
func (g *Gateway) former(b *Backend) bool { return g.wanted[b.Backend] == nil }
