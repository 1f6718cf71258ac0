package kubeproxy

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/lameduck-io/lameduck/internal/signal"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// Observer follows the rules that kube-proxy writes in the node's network namespace. All methods
// may be called by several goroutines at once.
type Observer struct {
	log    *slog.Logger
	boot   string
	netns  int
	buffer int           // for notifications
	every  time.Duration // between the beginnings of audits
	audits struct{ same, corrected, failed atomic.Uint64 }

	mu      sync.Mutex
	sources map[tableID]*source
	watches map[*Watch]struct{}
	// going counts the open watches of each target.
	going map[netip.AddrPort]int
	reads int // complete readings so far
	// followed is whether nftables have been read, and all changes since.
	followed bool
	// written is when kube-proxy last wrote a table of nftables, or these were read.
	written time.Time
	wake    signal.Signal
	// accounted is since when the kernel counts packets of new connections. Zero: it does not.
	accounted time.Time
	// others: count comes again without being woken, for targets to which the kernel still sends.
	others bool
	// generation is that of readings, see Reading.
	generation string
	// regroup: other targets are going, so that Kept may be Routing, and Routing Kept.
	regroup signal.Signal
	// legacy is what is known of the legacy iptables, by family.
	legacy     map[uint8]legacyState
	wakeLegacy signal.Signal
	// legacyWhole is whether kube-proxy had written them at the last look, by family; absent: not
	// looked.
	legacyWhole map[uint8]bool
	// legacyFailed is the error of the last reading of them, by family. Only the loop that reads
	// writes it.
	legacyFailed map[uint8]string
	// beside is what else chooses pods here. Empty: nothing that is known.
	beside string
	// present is when kube-proxy's rules were last there, and absent the last answer of Absent.
	present time.Time
	absent  bool
}

// source is one table that kube-proxy may write.
type source struct {
	graph *table
	// complete: all of it is there. lost: it was, and kube-proxy has written to no complete table
	// of the family since.
	complete, lost bool
}

// Options say what an Observer does.
type Options struct {
	// Log gets a line when reading begins and fails. None is no log.
	Log *slog.Logger
	// NetNS is an open file of the network namespace to observe; 0 is that of this process. In
	// another one the legacy iptables are not seen.
	NetNS int
}

// Config makes the agent that of a node, which observes what kube-proxy wrote into the node's
// kernel.
type Config struct{}

// Name implements gateway.Kind.
func (*Config) Name() string { return "kube-proxy" }

// Routes implements gateway.Kind: every Service.
func (*Config) Routes() []gateway.Route { return nil }

// Check implements gateway.Kind.
func (*Config) Check() []error { return nil }

// Observe implements gateway.ObservedKind. What it returns is also a [gateway.Cleaner] and a
// [gateway.Auditor].
func (*Config) Observe(log *slog.Logger) gateway.Observed { return New(Options{Log: log}) }

// New returns an Observer that knows nothing until Run runs.
func New(options Options) *Observer {
	o := &Observer{
		log: options.Log, boot: rand.Text()[:8], netns: options.NetNS, buffer: buffer, every: auditEvery,
		watches: map[*Watch]struct{}{}, going: map[netip.AddrPort]int{}, wake: signal.New(),
		regroup: signal.New(), legacy: map[uint8]legacyState{}, legacyWhole: map[uint8]bool{},
		legacyFailed: map[uint8]string{},
		wakeLegacy:   signal.New(),
	}
	if o.log == nil {
		o.log = slog.New(slog.DiscardHandler)
	}
	o.sources = o.unknown()
	o.renew()
	for _, family := range families {
		id := tableID{family, legacyTable}
		o.sources[id] = &source{graph: newTableGraph(id)}
	}
	return o
}

// Run subscribes to the kernel's notifications, reads the tables, and follows changes until ctx is
// done. It then returns nil. If notifications are lost or the tables cannot be read, it logs that
// and begins again, and every reading is Unknown in between. Call Run once.
func (o *Observer) Run(ctx context.Context) error {
	const first, most = 20 * time.Millisecond, 5 * time.Second
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	o.lookBeside() // before anything is read
	wg.Go(func() { o.watchBeside(ctx) })
	wg.Go(func() { o.count(ctx) })
	wg.Go(func() { o.group(ctx) })
	if o.netns == 0 {
		wg.Go(func() { o.pollLegacy(ctx) })
	}
	pause := first
	for {
		began := time.Now()
		err := o.follow(ctx)
		o.lose(time.Now())
		if ctx.Err() != nil {
			return nil
		}
		o.log.Warn("reading kube-proxy's rules again", "error", err)
		if time.Since(began) > most {
			pause = first
		}
		if !signal.Sleep(ctx, pause) {
			return nil
		}
		pause = min(2*pause, most)
	}
}

// Population implements gateway.Observed.
func (o *Observer) Population() string { return gateway.Nodes }

// Audits returns how many audits there were, by result, see [Observer.Run].
func (o *Observer) Audits() gateway.Audits {
	a := &o.audits
	return gateway.Audits{Same: a.same.Load(), Corrected: a.corrected.Load(), Failed: a.failed.Load()}
}

// Absent reports whether there is no kube-proxy whose rules this package reads: it has written
// none, or they were deleted and not written again for 10 s. All watches are Unknown then;
// kube-proxy in ipvs mode, or what replaces it, may send to pods. It is false until the tables were
// read, and while legacy rules cannot be read. Call it several times a second: the 10 s count from
// the last call that found rules.
func (o *Observer) Absent() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.followed || o.netns == 0 && len(o.legacyWhole) < len(families) {
		return o.absent
	}
	now := time.Now()
	for id, s := range o.sources {
		if s.complete || o.legacyWhole[id.family] || o.legacyFailed[id.family] != "" {
			o.present = now
		}
	}
	o.absent = now.Sub(o.present) >= absentAfter
	return o.absent
}

// Mode implements gateway.Moder. It returns the mode of kube-proxy whose rules are there: nftables
// or iptables.
func (o *Observer) Mode() (mode string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, s := range o.sources {
		switch {
		case s.complete && id.name == proxyTable:
			return "nftables"
		case s.complete || o.legacyWhole[id.family]:
			mode = "iptables"
		}
	}
	return mode
}

func (o *Observer) dial() (*netlink.Conn, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: o.netns, MessageBufferSize: pageSize})
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket: %w", err)
	}
	return conn, nil
}

// dumped is what the tables were, see [dumper.tables].
type dumped struct {
	all      []change
	from, to uint32
	took     time.Duration
	err      error
}

func (o *Observer) read(ctx context.Context) *dumped {
	began := time.Now()
	conn, err := o.dial()
	if err != nil {
		return &dumped{err: err}
	}
	d := dumper{conn: conn, ours: ours}
	defer d.close()
	defer context.AfterFunc(ctx, d.close)()
	all, from, err := d.tables(ctx, families)
	return &dumped{all, from, d.generation, time.Since(began), err}
}

// follow subscribes, reads and follows. At intervals it audits: it reads again while it follows,
// and what was read replaces what was followed if the two differ. It returns on an error, or when
// ctx is done.
func (o *Observer) follow(ctx context.Context) error {
	conn, err := o.dial()
	if err != nil {
		return err
	}
	s, err := subscribe(conn, o.buffer, ours)
	if err != nil {
		return err
	}
	defer s.close()
	defer context.AfterFunc(ctx, s.close)()
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()

	// In another network namespace nothing says whether it is done.
	if o.netns == 0 {
		if err := o.account(); err != nil {
			o.log.Warn("packets of connections are not counted: connections that clients keep are waited for until "+
				"the Idle bound", "error", err)
		}
	}
	var (
		followed bool
		last     uint32 // the generation up to which all is received, or read
		due      = time.Now()
		done     chan *dumped // nil while nothing is being read
		r        *dumped      // what was read, while it is ahead of last
		since    []commit     // all that were received since that began
	)
	for {
		deadline := due
		switch now := time.Now(); {
		case done != nil:
			deadline = now.Add(readLook)
		case !now.Before(due):
			done, since = make(chan *dumped, 1), nil
			deadline, due = now.Add(readLook), now.Add(o.every)
			wg.Go(func() { done <- o.read(ctx) })
		}
		c, err := s.next(deadline)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case errors.Is(err, unix.ENOBUFS):
			return fmt.Errorf("more changes of nftables than the buffer holds: %w", err)
		case err != nil:
			return fmt.Errorf("read changes of nftables: %w", err)
		default:
			follows, err := c.follows(last)
			if err != nil {
				return err
			}
			if !follows {
				continue
			}
			if last = c.generation; done != nil {
				since = append(since, c)
			}
			if followed {
				o.make(c)
			}
		}
		if r == nil {
			select {
			case r = <-done:
			default:
			}
		}
		if r == nil || r.err == nil && (last == 0 && r.from != r.to || last != 0 && after(r.to, last)) {
			continue // what was read is ahead of what was received
		}
		if last, err = o.conclude(r, since, last, followed); err != nil {
			return err
		}
		followed = true
		r, done, since = nil, nil, nil
	}
}

// conclude adopts r, or records that it failed, and returns the last generation that is received or
// read. Before anything was followed a failure is an error.
func (o *Observer) conclude(r *dumped, since []commit, last uint32, followed bool) (uint32, error) {
	switch {
	case r.err == nil:
		since = slices.DeleteFunc(since, func(c commit) bool { return !after(c.generation, r.from) })
		replaced := o.adopt(r.all, since, time.Now())
		if last == 0 || after(r.to, last) {
			last = r.to
		}
		switch {
		case !followed:
			o.log.Info("kube-proxy's rules are read", "changes", len(r.all), "kernelGeneration", last, "took", r.took)
		case replaced:
			o.audits.corrected.Add(1)
			o.log.Error("kube-proxy's rules were followed wrongly, and are corrected", "kernelGeneration", last)
		default:
			o.audits.same.Add(1)
		}
	case !followed:
		return last, r.err
	default:
		o.audits.failed.Add(1)
		o.log.Warn("kube-proxy's rules are not audited", "error", r.err)
	}
	return last, nil
}

// follows reports whether c comes next after generation last, 0 for none. One that is missing in
// between is an error.
func (c commit) follows(last uint32) (bool, error) {
	switch {
	case last == 0 || c.generation == successor(last):
		return true, nil
	case after(c.generation, last):
		return false, fmt.Errorf("generation %d of nftables follows %d: notifications are missing", c.generation, last)
	}
	return false, nil
}

// successor is the generation after g; the kernel leaves out 0.
func successor(g uint32) uint32 {
	if g++; g == 0 {
		g++
	}
	return g
}

// unknown returns the tables of nftables as they are before they are read.
func (o *Observer) unknown() map[tableID]*source {
	all := map[tableID]*source{}
	for _, family := range families {
		for _, name := range []string{proxyTable, natTable} {
			id := tableID{family, name}
			all[id] = &source{graph: newTableGraph(id)}
		}
	}
	return all
}

func (o *Observer) lose(now time.Time) {
	o.mu.Lock()
	maps.Copy(o.sources, o.unknown())
	o.followed = false
	o.evaluate(now)
}

// adopt replaces what is known by what was read and the transactions since. It reports whether that
// differs.
func (o *Observer) adopt(all []change, since []commit, now time.Time) bool {
	fresh := o.unknown()
	for _, c := range append([]commit{{changes: all}}, since...) {
		for i := range c.changes {
			fresh[c.changes[i].table].graph.apply(&c.changes[i])
		}
	}
	o.mu.Lock()
	same := o.followed
	for id, s := range fresh {
		same = same && s.graph.equal(o.sources[id].graph)
	}
	if same {
		o.mu.Unlock()
		return false
	}
	maps.Copy(o.sources, fresh)
	o.followed, o.written = true, now
	o.renew()
	o.judge(nil)
	o.evaluate(now)
	return true
}

func (o *Observer) make(c commit) {
	if len(c.changes) == 0 {
		return
	}
	o.mu.Lock()
	written := map[tableID]bool{}
	for i := range c.changes {
		if id := c.changes[i].table; o.sources[id].graph.apply(&c.changes[i]) || id.name == proxyTable {
			written[id] = true
		}
	}
	if len(written) == 0 {
		o.mu.Unlock()
		return
	}
	o.written = c.at
	o.judge(written)
	o.evaluate(c.at)
}

// judge records which sources are complete and which are lost, after some were written to.
func (o *Observer) judge(written map[tableID]bool) {
	used := map[uint8]bool{} // families of which it is known where kube-proxy writes
	for id, s := range o.sources {
		complete := s.graph.complete()
		if s.complete && !complete {
			s.lost = true
			o.renew() // what was acknowledged before is void
		}
		used[id.family] = used[id.family] || complete && (!s.complete || written[id])
		s.complete = complete
	}
	for id, s := range o.sources {
		s.lost = s.lost && !used[id.family]
	}
}

func (o *Observer) renew() {
	o.generation = fmt.Sprintf("%s.%d", o.boot, o.reads)
	o.reads++
}

// known reports whether it is known where kube-proxy sends packets of the family.
func (o *Observer) known(family uint8) bool {
	if !o.followed || o.legacy[family] == legacyUnread { // what is not read may send, too
		return false
	}
	known := false
	for id, s := range o.sources {
		if id.family == family {
			if s.lost {
				return false
			}
			known = known || s.complete
		}
	}
	return known
}

// evaluate updates all watches, unlocks mu, and calls changed of those of which update reports so.
func (o *Observer) evaluate(now time.Time) {
	var told []*Watch
	for w := range o.watches {
		if w.update(now) {
			told = append(told, w)
		}
	}
	o.mu.Unlock()
	for _, w := range told {
		w.changed()
	}
}

// Watch is an observation of the targets of one pod. Close ends it.
type Watch struct {
	o       *Observer
	targets []netip.AddrPort
	changed func()
	looks   bool
	closed  sync.Once

	reading gateway.Reading // o.mu
	// written: kube-proxy has written since the watch began, at began, and changed was called then.
	written bool // o.mu
	began   time.Time
	// held are the open connections, as last counted.
	held map[string]held // o.mu
	// period counts the changes of the state; empty the counts in a row without a connection since;
	// asked the calls of Count.
	period, empty, asked int // o.mu
	// busy: the last count had a connection to wait for.
	busy bool // o.mu
	// entered is when the state was entered, by this process's clock; walked when all connections
	// were last counted, next when they are due again.
	entered, walked, next time.Time // o.mu
	// noticed are the connections that the last full count found, ended ones too, each with what it
	// had carried, and since when; nil before Count. clients: one of them was no probe and went
	// straight to a target. quietSince is when the last count ended that found an open one, or one
	// that had come.
	noticed    map[uint64]time.Time // o.mu
	clients    bool                 // o.mu
	quietSince time.Time            // o.mu
}

// groupPause is the pause before watches are evaluated for other targets: many come and go at once,
// and each concerns each.
const groupPause = 10 * time.Millisecond

// group evaluates watches when others have come or gone, with a fifth of a core at most.
func (o *Observer) group(ctx context.Context) {
	pause := groupPause
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.regroup:
		}
		if !signal.Sleep(ctx, pause) {
			return
		}
		began := time.Now()
		o.mu.Lock()
		o.evaluate(began)
		pause = max(groupPause, 4*time.Since(began))
	}
}

// Watch begins to observe the targets of a pod. Port 0 is every port of the address. changed is
// called when State, Generation or NoConnections changes, and when a count first finds a connection
// to wait for. It must not block. Several goroutines may call it at the same time, and once more
// after Close. The first reading is available when Watch returns. A target without a valid address
// is Unknown.
//
// A reading is Unknown at the start, after an overrun, and when the rules were deleted. It is Kept
// also before kube-proxy has written that there is another endpoint: the caller must know from
// EndpointSlices whether there is one. A connection that its client keeps from one request to the
// next is among Connections, but is waited for only until a moment without packets: 40 ms if
// requests were seen to follow each other, else 1 s, and in the former case for 1 s at most.
// NoConnections reports that two counts in a row found no connection to wait for. In Routing
// connections are counted every second or less often, in Kept ten times a second. Since is when the
// end of the commit was read.
func (o *Observer) Watch(targets []netip.AddrPort, changed func()) gateway.Watch {
	return o.watch(targets, changed, false)
}

// Look is Watch for targets that may be other pods' by now: for the other watches they remain
// endpoints to which kube-proxy can send.
func (o *Observer) Look(targets []netip.AddrPort, changed func()) gateway.Watch {
	return o.watch(targets, changed, true)
}

func (o *Observer) watch(targets []netip.AddrPort, changed func(), looks bool) *Watch {
	w := &Watch{o: o, changed: changed, looks: looks, began: time.Now()}
	for _, t := range targets {
		w.targets = append(w.targets, netip.AddrPortFrom(t.Addr().Unmap().WithZone(""), t.Port()))
	}
	o.mu.Lock()
	if !looks {
		for _, t := range w.targets {
			o.going[t]++
		}
	}
	o.watches[w] = struct{}{}
	if len(o.watches) == 1 {
		o.lookForLegacy()
	}
	w.update(w.began)
	o.mu.Unlock()
	o.regroup.Raise()
	return w
}

// Reading returns what is known now.
func (w *Watch) Reading() gateway.Reading {
	w.o.mu.Lock()
	defer w.o.mu.Unlock()
	is := w.reading
	if !w.o.legacyWhole[unix.NFPROTO_IPV4] && !w.o.legacyWhole[unix.NFPROTO_IPV6] {
		is.Written = w.o.written // of legacy rules there is no notification
	}
	return is
}

// Close ends the watch. A repeat does nothing.
func (w *Watch) Close() {
	w.closed.Do(func() {
		w.o.mu.Lock()
		defer w.o.regroup.Raise()
		defer w.o.mu.Unlock()
		delete(w.o.watches, w)
		if w.looks {
			return
		}
		for _, t := range w.targets {
			if w.o.going[t]--; w.o.going[t] == 0 {
				delete(w.o.going, t)
			}
		}
	})
}

// update reads the state again, and reports whether it or the generation has changed, or kube-proxy
// has written for the first time since the watch began. The caller holds o.mu.
func (w *Watch) update(now time.Time) bool {
	state := w.o.state(w.targets)
	if state == health.Removed && w.reading.State == health.Idle {
		state = health.Idle
	}
	first := !w.written && w.o.written.After(w.began)
	w.written = w.written || first
	return w.enter(state, now) || first
}

// enter makes state the state. The caller holds o.mu.
func (w *Watch) enter(state health.State, now time.Time) bool {
	if state == w.reading.State && w.o.generation == w.reading.Generation {
		return false
	}
	w.reading.Generation = w.o.generation
	if state == w.reading.State && state != health.Removed {
		return true
	}
	if w.reading.State < health.Removed {
		for key, h := range w.held {
			h.kept = false // it may have been used since
			w.held[key] = h
		}
	}
	w.reading.State, w.reading.Since = state, now
	w.reading.Connections, w.reading.NoConnections = 0, state == health.Idle
	w.period++
	w.empty, w.busy = 0, false
	w.entered = time.Now()
	if w.next = w.entered.Add(countKept); state == health.Removed {
		w.next = w.entered.Add(countFirst)
	}
	// Else count would look at all watches for each of many that come at once.
	if state == health.Removed || (state == health.Routing || state == health.Kept) && !w.o.others {
		w.o.wake.Raise()
	}
	return true
}

// state returns what the rules do with targets: never Idle. The caller holds mu.
func (o *Observer) state(targets []netip.AddrPort) health.State {
	if len(targets) == 0 {
		return health.Unknown
	}
	most := sendsNothing
	for _, target := range targets {
		family := uint8(unix.NFPROTO_IPV4)
		if target.Addr().Is6() {
			family = unix.NFPROTO_IPV6
		}
		if !target.Addr().IsValid() || !o.known(family) {
			return health.Unknown
		}
		for id, s := range o.sources {
			if id.family == family {
				most = max(most, s.graph.sending(target, func(d netip.AddrPort) bool {
					return d == target || netip.AddrPortFrom(d.Addr(), 0) == target || o.isGoing(d)
				}))
			}
		}
	}
	return [...]health.State{sendsNothing: health.Removed, sendsLast: health.Kept, sendsToo: health.Routing}[most]
}

func (o *Observer) isGoing(d netip.AddrPort) bool {
	return o.going[d] > 0 || o.going[netip.AddrPortFrom(d.Addr(), 0)] > 0
}
