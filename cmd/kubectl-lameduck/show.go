package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
)

func count(n int) string { return strconv.Itoa(n) }

// seconds words a time as kubectl does, but for what is short.
func seconds(s float64) string {
	switch {
	case s < 0:
		return "0s"
	case s < 10:
		return fmt.Sprintf("%.1fs", s)
	case s < 120:
		return fmt.Sprintf("%.0fs", s)
	case s < 7200:
		return fmt.Sprintf("%.0fm", s/60)
	case s < 48*3600:
		return fmt.Sprintf("%.0fh", s/3600)
	default:
		return fmt.Sprintf("%.0fd", s/86400)
	}
}

// encode writes v as the options say. It reports false if they want a table.
func encode(o options, v any, out io.Writer) (bool, error) {
	switch o.output {
	case "json":
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return true, e.Encode(v)
	case "yaml":
		text, err := yaml.Marshal(v)
		if err == nil {
			_, err = out.Write(text)
		}
		return true, err
	}
	return false, nil
}

// table writes rows under a head, in columns.
func table(out io.Writer, head string, rows [][]string) {
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, strings.ReplaceAll(head, " ", "\t"))
	for _, row := range rows {
		for i, cell := range row {
			if cell == "" {
				row[i] = "-"
			}
		}
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	_ = w.Flush() // what cannot be written, nobody is left to be told of
}

func status(ctx context.Context, o options, all replicas, out, stderr io.Writer) error {
	answers, err := ask[api.View](ctx, o, all, api.ViewPath)
	if err != nil {
		return err
	}
	w := merge(answers)
	w.Drains = in(w.Drains, o.namespace)
	if done, err := encode(o, w, out); done {
		return err
	}
	complain(answers, stderr)
	writeStatus(w, o.output == "wide", out)
	return nil
}

// outcomesShown is how many outcomes status lists if not everything is asked for.
const outcomesShown = 5

// missingShown is how many pods without the barrier are named if not everything is asked for.
const missingShown = 3

func writeStatus(w whole, wide bool, out io.Writer) {
	now := time.Now()
	var rows [][]string
	for _, c := range w.Coordinators {
		state := "ready"
		switch {
		case c.Error != "":
			state = "silent"
		case c.Stopping:
			state = "stopping"
		case !c.Ready:
			state = "not-ready"
		}
		row := []string{c.Name, state, "", "", "", ""}
		if c.Error == "" {
			row = []string{c.Name, state, fmt.Sprintf("%d/%d", c.Connected, c.Expected), count(c.Drains),
				count(c.Holds), seconds(now.Sub(c.Started).Seconds())}
		}
		rows = append(rows, row)
	}
	table(out, "COORDINATOR STATE AGENTS DRAINS HOLDS AGE", rows)
	fmt.Fprintln(out)

	rows = nil
	head := "AGENT GATEWAY STATE CONNECTED SERVICES LAST-DRAIN"
	if wide {
		head += " NODE LABEL FEATURES UID"
	}
	answered := len(slices.DeleteFunc(slices.Clone(w.Coordinators), func(c coordinator) bool { return c.Error != "" }))
	for _, g := range w.Agents {
		last := ""
		if s := max(g.IdleSeconds, g.RemovedSeconds); s > 0 {
			last = milliseconds(s)
		}
		services := "everything"
		if g.Declared {
			services = count(g.Services)
		}
		row := []string{g.Name, g.Gateway, g.State, fmt.Sprintf("%d/%d", len(g.ConnectedTo), answered), services, last}
		if wide {
			row = append(row, g.Node, g.Label, strings.Join(g.Features, ","), g.ID)
		}
		rows = append(rows, row)
	}
	if len(rows) == 0 {
		fmt.Fprintln(out, "No agent is known: nobody can be asked, and deletions go on as without Lameduck.")
	} else {
		table(out, head, rows)
	}
	fmt.Fprintln(out)
	if len(w.Drains) == 0 {
		fmt.Fprintln(out, "Nothing is draining.")
	} else {
		writeDrains(w.Drains, wide, out)
	}

	writeBarriers(w.Barriers, now, out)
	if named := w.BarrierMissingPods; w.BarrierMissing > 0 {
		if !wide {
			named = named[:min(len(named), missingShown)]
		}
		fmt.Fprintf(out, "\nPods that ask for the barrier and were created without it: %s", strings.Join(named, ", "))
		if more := w.BarrierMissing - len(named); more > 0 {
			fmt.Fprintf(out, " and %d more", more)
		}
		fmt.Fprintln(out, ". They stop without waiting until they are created again.")
	}
	writeHealth(w.TargetHealth, wide, out)
	shown := w.Outcomes
	title := "Last outcomes:"
	if !wide {
		shown = slices.DeleteFunc(slices.Clone(w.Outcomes), func(o oneOutcome) bool { return !o.Abnormal })
		title = "Last deletions that went on without every gateway's word:"
		if len(shown) > outcomesShown {
			shown = shown[:outcomesShown]
		}
	}
	if len(shown) == 0 {
		return
	}
	fmt.Fprintf(out, "\n%s\n", title)
	rows = nil
	for _, o := range shown {
		took := ""
		if o.TookSeconds != nil {
			took = milliseconds(*o.TookSeconds)
		}
		why := o.Message
		if why == "" {
			why = strings.Join(o.Silent, ", ")
		}
		rows = append(rows, []string{seconds(now.Sub(o.At).Seconds()), o.Namespace + "/" + o.Pod, o.Reason, took, why})
	}
	table(out, "AGO POD REASON WAITED WHY", rows)
}

// writeBarriers tells who waits to be told to stop. Nobody: nothing.
func writeBarriers(all []api.Barrier, now time.Time, out io.Writer) {
	var rows [][]string
	for _, b := range all {
		d := oneDrain{Drain: api.Drain{Phase: b.Phase, Reason: b.Reason, Reports: b.Reports, Waiting: b.Waiting}}
		waits := d.waitsFor(2)
		if b.Phase != "Released" && b.StatedUntil.After(now) {
			waits += ", and a stated wait of " + seconds(b.StatedSeconds)
		}
		rows = append(rows, []string{b.Namespace, b.Pod, b.Phase, seconds(now.Sub(b.Since).Seconds()), b.Hook, waits})
	}
	if len(rows) > 0 {
		fmt.Fprintln(out, "\nWaiting to stop, at the barrier:")
		table(out, "NAMESPACE POD PHASE AGE HOOK WAITS-FOR", rows)
	}
}

// writeHealth tells which Services have trouble; wide: all.
func writeHealth(h api.TargetHealth, wide bool, out io.Writer) {
	var rows [][]string
	for _, s := range h.Services {
		if !s.Trouble && !wide {
			continue
		}
		state := "well"
		switch {
		case s.FailingOpen > 0:
			state = fmt.Sprintf("fails-open (%d/%d)", s.FailingOpen, s.Gateways)
		case s.Unwell > 0:
			state = fmt.Sprintf("unhealthy (%d/%d)", s.Unwell, s.Gateways)
		case s.Trouble:
			state = "in-doubt"
		case len(s.Says) > 0 && !s.Says[0].Checked:
			state = "not-checked"
		}
		row := []string{s.Namespace, s.Name, state, "", ""}
		if len(s.Says) > 0 {
			g := s.Says[0]
			row[3] = fmt.Sprintf("%d/%d", g.Usable+g.Unknown, g.Usable+g.Unknown+g.Unhealthy+g.Excluded+g.Doubtful)
			var bad []string
			for _, t := range g.Targets {
				name := t.Pod
				if name == "" {
					name = t.Address
				}
				bad = append(bad, strings.TrimSuffix(name+" ("+t.Last+")", " ()"))
			}
			row[4] = strings.Join(bad, ", ")
		}
		rows = append(rows, row)
	}
	if len(rows) > 0 {
		fmt.Fprintln(out, "\nWhat gateways believe of their targets:")
		table(out, "NAMESPACE SERVICE STATE USABLE UNHEALTHY", rows)
	}
}

func milliseconds(s float64) string {
	if s < 1 {
		return fmt.Sprintf("%.0fms", s*1000)
	}
	return seconds(s)
}

func drains(ctx context.Context, o options, all replicas, out, stderr io.Writer) error {
	answers, err := ask[api.View](ctx, o, all, api.ViewPath)
	if err != nil {
		return err
	}
	list := in(merge(answers).Drains, o.namespace)
	complain(answers, stderr)
	if done, err := encode(o, list, out); done {
		return err
	}
	if len(list) == 0 {
		fmt.Fprintln(stderr, "Nothing is draining.")
		return nil
	}
	writeDrains(list, o.output == "wide", out)
	return nil
}

const drainsHead, drainsWide = "NAMESPACE POD PHASE AGE REMAINING WAITS-FOR", " OWED COORDINATORS UID"

func drainRow(d oneDrain, wide bool) []string {
	most := 2
	if wide {
		most = 20
	}
	row := []string{d.Namespace, d.Pod, d.Phase, seconds(d.AgeSeconds), seconds(d.RemainingSeconds), d.waitsFor(most)}
	if wide {
		row = append(row, count(d.Owed), strings.Join(d.Coordinators, ","), d.UID)
	}
	return row
}

func writeDrains(list []oneDrain, wide bool, out io.Writer) {
	var rows [][]string
	for _, d := range list {
		rows = append(rows, drainRow(d, wide))
	}
	head := drainsHead
	if wide {
		head += drainsWide
	}
	table(out, head, rows)
}

// explained is what coordinators say together of one pod. They know the same cluster, but for what
// has just changed; the first that answers is believed, and it is said if another differs.
type explained struct {
	api.Explanation
	// Differs are coordinators that say something else, and what.
	Differs []string `json:"differs"`
}

func explain(ctx context.Context, o options, all replicas, out, stderr io.Writer) error {
	operation := "delete"
	if o.evict {
		operation = "evict"
	}
	answers, err := ask[api.Explanation](ctx, o, all, api.ExplainPath+"/"+o.namespace+"/"+o.pod+"?operation="+operation)
	if errors.Is(err, errNotFound) {
		return fmt.Errorf("no pod %s in namespace %s, as far as Lameduck's coordinators know", o.pod, o.namespace)
	}
	if err != nil {
		return err
	}
	x := joinExplanations(answers)
	if done, err := encode(o, x, out); done {
		return err
	}
	complain(answers, stderr)
	writeExplanation(x, out)
	return nil
}

func joinExplanations(answers []answer[api.Explanation]) explained {
	x := explained{Differs: []string{}}
	first := true
	for _, a := range answers {
		switch {
		case a.err != nil:
		case first:
			x.Explanation, first = a.said, false
		default:
			if a.said.Answer != x.Answer || a.said.Reason != x.Reason || a.said.UID != x.UID {
				x.Differs = append(x.Differs, a.replica.name+": "+a.said.Summary)
			}
			if x.Drain == nil {
				x.Drain = a.said.Drain
			}
			if b, said := x.Barrier, a.said.Barrier; b != nil && said != nil {
				if !b.Connected && said.Connected {
					b.Agent, b.Connected = said.Agent, true
				}
				if b.Open == nil {
					b.Open = said.Open
				}
			}
			// An agent that one coordinator lacks may be connected to another.
			for _, g := range a.said.Gates {
				i := slices.IndexFunc(x.Gates, func(h api.Gate) bool { return h.Agent == g.Agent && h.Gate == g.Gate })
				if i < 0 {
					x.Gates = append(x.Gates, g)
				} else if !g.Connected && x.Gates[i].Connected {
					x.Gates[i] = g
				}
			}
			for _, u := range a.said.Uncovered {
				if !slices.Contains(x.Uncovered, u) {
					x.Uncovered = append(x.Uncovered, u)
				}
			}
		}
	}
	if x.Barrier != nil && x.Barrier.Connected {
		// It is connected to one of them, which is enough.
		x.Uncovered = slices.DeleteFunc(x.Uncovered, func(u api.Uncovered) bool { return u.What == api.BarrierItself })
	}
	return x
}

// gatesShown bounds the gateways that explain lists: a barrier may ask hundreds of nodes. --output
// json has them all.
const gatesShown = 30

// writeBarrier tells what the pod and its node have for the second gate.
func writeBarrier(b *api.ExplainedBarrier, out io.Writer) {
	if b == nil {
		return
	}
	fmt.Fprintln(out, "\nAt the barrier, before SIGTERM:")
	for _, h := range b.Hooks {
		fmt.Fprintf(out, "  container %s, hook %s\n", h.Container, h.Kind)
	}
	if b.BoundSeconds > 0 {
		fmt.Fprintf(out, "  hooks last %s at most", seconds(b.BoundSeconds))
		if b.GraceSeconds > 0 {
			fmt.Fprintf(out, "; the application then has %s", seconds(b.GraceSeconds))
		}
		fmt.Fprintln(out)
	}
	switch {
	case b.Node == "":
	case b.Agent == "":
		fmt.Fprintf(out, "  on %s nobody answers them\n", b.Node)
	case b.Connected:
		fmt.Fprintf(out, "  on %s %s answers them, and is connected\n", b.Node, b.Agent)
	default:
		fmt.Fprintf(out, "  on %s %s answers them, and is not connected\n", b.Node, b.Agent)
	}
	for _, s := range b.Stated {
		switch {
		case s.Error != "":
			fmt.Fprintf(out, "  %s/%s states a wait that cannot be read: %s\n", s.Namespace, s.Service, s.Error)
		case s.Cut:
			fmt.Fprintf(out, "  %s/%s states a wait of %s, which the bound cuts\n", s.Namespace, s.Service,
				seconds(s.Seconds))
		default:
			fmt.Fprintf(out, "  %s/%s states a wait of %s\n", s.Namespace, s.Service, seconds(s.Seconds))
		}
	}
	if o := b.Open; o != nil {
		fmt.Fprintf(out, "  it waits there now: %s, %d of %d have let go\n", o.Phase, o.Owed-o.Waiting, o.Owed)
	}
}

func writeExplanation(x explained, out io.Writer) {
	fmt.Fprintf(out, "Pod %s/%s: %s\n", x.Namespace, x.Pod, x.Summary)
	fmt.Fprintf(out, "Reason: %s\n", x.Reason)
	if x.Drain != nil {
		fmt.Fprintf(out, "It is being drained: %s, %d of %d gateways have let go.\n", x.Drain.Phase,
			x.Drain.Owed-x.Drain.Waiting, x.Drain.Owed)
	}
	if len(x.Services) > 0 {
		fmt.Fprintln(out, "\nServices that list it:")
		for _, s := range x.Services {
			fmt.Fprintf(out, "  %s/%s, %d usable targets\n", s.Namespace, s.Name, s.Usable)
		}
	}
	if len(x.Gates) > 0 {
		fmt.Fprintln(out, "\nWould have to acknowledge:")
		for i, g := range x.Gates {
			if i == gatesShown {
				fmt.Fprintf(out, "  and %d more\n", len(x.Gates)-i)
				break
			}
			what := g.Gateway
			if what == "" {
				what = "gateway"
			}
			if g.Node != "" {
				what += " on " + g.Node
			}
			fmt.Fprintf(out, "  %s (%s), at the %s: %s\n", g.Agent, what, g.Gate, g.Why)
		}
	}
	writeBarrier(x.Barrier, out)
	if len(x.Uncovered) > 0 {
		fmt.Fprintln(out, "\nNot covered:")
		for _, u := range x.Uncovered {
			fmt.Fprintf(out, "  %s: %s\n", u.What, u.Why)
		}
	}
	for _, d := range x.Differs {
		fmt.Fprintf(out, "\nAnother coordinator says something else: %s\n", d)
	}
}

// watchRetry is how long after the end of a stream the next try is made.
const watchRetry = 2 * time.Second

// watchDrains prints a line for each drain and each time that one enters another phase or waits for
// others, and how it ended, until ctx is done. Coordinators that come later are not asked.
func watchDrains(ctx context.Context, o options, all replicas, out, stderr io.Writer) error {
	// Whoever is not reached at all ends it, so that a missing right is said once and at once.
	if _, err := ask[api.View](ctx, o, all, api.ViewPath); err != nil {
		return err
	}
	w := &watcher{o: o, out: out, views: map[string]answer[api.View]{}, shown: map[string]string{}}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var following sync.WaitGroup
	var once sync.Once
	var failed error
	for _, r := range all {
		following.Go(func() {
			for ctx.Err() == nil {
				err := r.follow(ctx, func(v api.View) {
					if err := w.take(answer[api.View]{replica: r, said: v}); err != nil {
						once.Do(func() { failed = err })
						cancel() // nobody reads any more
					}
				})
				if ctx.Err() == nil {
					fmt.Fprintln(stderr, "warning: coordinator", r.name, "ended the stream:", err)
					w.drop(r)
				}
				select {
				case <-ctx.Done():
				case <-time.After(watchRetry):
				}
			}
		})
	}
	following.Wait()
	return failed
}

// watcher prints what changes.
type watcher struct {
	o   options
	out io.Writer

	mu    sync.Mutex
	views map[string]answer[api.View]
	// shown is what was printed of each drain last.
	shown map[string]string
	begun bool
}

// drop forgets what a coordinator said.
func (w *watcher) drop(r *replica) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.views, r.name)
}

func (w *watcher) take(a answer[api.View]) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.views[a.replica.name] = a
	var answers []answer[api.View]
	for _, name := range slices.Sorted(maps.Keys(w.views)) {
		answers = append(answers, w.views[name])
	}
	all := merge(answers)
	open := map[string]bool{}
	var rows []event
	for _, d := range in(all.Drains, w.o.namespace) {
		open[d.UID] = true
		sign := d.Phase + " " + d.waitsFor(20)
		if w.shown[d.UID] != sign {
			w.shown[d.UID] = sign
			rows = append(rows, event{"drain", d})
		}
	}
	for uid := range w.shown {
		if open[uid] {
			continue
		}
		delete(w.shown, uid)
		if i := slices.IndexFunc(all.Outcomes, func(o oneOutcome) bool {
			return o.UID == uid && o.Gate != "barrier"
		}); i >= 0 {
			rows = append(rows, event{"outcome", all.Outcomes[i]})
		}
	}
	return w.print(rows)
}

// event is one line of --watch.
type event struct {
	Type   string `json:"type"`
	Object any    `json:"object"`
}

func (w *watcher) print(events []event) error {
	var text strings.Builder
	if w.o.output == "json" {
		for _, e := range events {
			line, err := json.Marshal(e)
			if err != nil {
				return err
			}
			text.Write(append(line, '\n'))
		}
	} else {
		wide := w.o.output == "wide"
		if !w.begun {
			w.begun = true
			fmt.Fprintf(&text, "%-20s %-44s %-14s %-7s %s\n", "NAMESPACE", "POD", "PHASE", "AGE", "WAITS-FOR")
		}
		for _, e := range events {
			switch is := e.Object.(type) {
			case oneDrain:
				most := 2
				if wide {
					most = 20
				}
				fmt.Fprintf(&text, "%-20s %-44s %-14s %-7s %s\n", is.Namespace, is.Pod, is.Phase,
					seconds(is.AgeSeconds), is.waitsFor(most))
			case oneOutcome:
				took := ""
				if is.TookSeconds != nil {
					took = milliseconds(*is.TookSeconds)
				}
				fmt.Fprintf(&text, "%-20s %-44s %-14s %-7s %s\n", is.Namespace, is.Pod, is.Reason, took,
					strings.Join(append([]string{"ended"}, is.Silent...), " "))
			}
		}
	}
	_, err := io.WriteString(w.out, text.String())
	return err
}

// follow reads the stream of events until it ends.
func (r *replica) follow(ctx context.Context, take func(api.View)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// A coordinator says something every 2 s.
	silent := time.AfterFunc(3*watchRetry, func() { cancel(errors.New("it says nothing any more")) })
	defer silent.Stop()
	response, err := r.get(ctx, api.EventsPath)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, mostAnswer)
	view := false
	for lines.Scan() {
		silent.Reset(3 * watchRetry)
		if name, ok := strings.CutPrefix(lines.Text(), "event: "); ok {
			view = name == "view"
		}
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok && view {
			var v api.View
			if err := json.Unmarshal([]byte(data), &v); err != nil {
				return fmt.Errorf("read an event: %w", err)
			}
			take(v)
		}
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return io.EOF
}
