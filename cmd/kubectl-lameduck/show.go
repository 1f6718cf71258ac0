package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/internal/check"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/pkg/target"
)

func count(n int) string { return strconv.Itoa(n) }

// seconds formats a duration as kubectl does. If it is less than 10 s, the result has one decimal.
func seconds(s float64) string {
	if s < 10 {
		return fmt.Sprintf("%.1fs", max(0, s))
	}
	return duration.HumanDuration(time.Duration(s * float64(time.Second)))
}

// kind returns the type of an object of --output json or yaml.
func kind(name string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: "lameduck.io/v1", Kind: name}
}

// drainList is the output of drains.
type drainList struct {
	metav1.TypeMeta `json:",inline"`
	Items           []oneDrain `json:"items"`
}

// encode writes v as JSON or YAML if the options ask for that. Otherwise it reports false, and the
// caller prints a table.
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

func table(out io.Writer, head string, rows [][]string) {
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, strings.ReplaceAll(head, " ", "\t"))
	for _, row := range rows {
		for i, cell := range row {
			if row[i] = target.Printable(cell); cell == "" {
				row[i] = "-"
			}
		}
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	_ = w.Flush() // an error has no reader left
}

func status(ctx context.Context, o options, all replicas, out, stderr io.Writer) error {
	var covers []answer[api.Coverage]
	var asked sync.WaitGroup
	asked.Go(func() { covers, _ = ask[api.Coverage](ctx, o, all, api.CoveragePath) }) // none answered: it says so
	answers, err := ask[api.View](ctx, o, all, api.ViewPath)
	if err != nil {
		return err
	}
	asked.Wait()
	w := merge(answers)
	w.Coverage = least(covers)
	w.Drains = in(w.Drains, o.namespace)
	if done, err := encode(o, w, out); done {
		return err
	}
	complain(answers, stderr)
	writeStatus(w, o.output == "wide", out)
	return nil
}

// outcomesShown is how many outcomes status lists without --output wide.
const outcomesShown = 5

// gapsShown is how many uncovered consumers status lists without --output wide.
const gapsShown = 10

// missingShown is how many pods without the barrier status names without --output wide.
const missingShown = 3

func writeStatus(w whole, wide bool, out io.Writer) {
	now := time.Now()
	if w.Unasked {
		fmt.Fprint(out, "Deletions do not wait: there is no ValidatingWebhookConfiguration "+check.Configuration+
			". Apply the manifests again, or run helm upgrade.\n\n")
	}
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
		head += " GATEWAY-MODE NODE LABEL FEATURES UID"
	}
	answered := len(slices.DeleteFunc(slices.Clone(w.Coordinators), func(c coordinator) bool { return c.Error != "" }))
	for _, g := range w.Agents {
		last := ""
		if s := max(g.IdleSeconds, g.RemovedSeconds); s > 0 {
			last = milliseconds(s)
		}
		services := "everything" // it has not declared, and so must acknowledge all drains
		switch {
		case g.EveryService:
			services = "all"
		case g.Declared:
			services = count(g.Services)
		}
		connected := fmt.Sprintf("%d/%d", len(g.ConnectedTo), answered-len(g.UnlistedBy))
		row := []string{g.Name, g.Gateway, g.State, connected, services, last}
		if wide {
			row = append(row, g.GatewayMode, g.Node, g.Label, strings.Join(g.Features, ","), g.ID)
		}
		rows = append(rows, row)
	}
	if len(rows) == 0 {
		fmt.Fprintln(out, "No agent is known, so no gateway can be asked: deletions continue as without Lameduck.")
	} else {
		table(out, head, rows)
	}
	writeMore(w.MoreAgents, " agents", out)
	fmt.Fprintln(out)
	switch {
	case len(w.Drains) > 0:
		writeDrains(w.Drains, wide, out)
	case w.MoreDrains == 0:
		fmt.Fprintln(out, "Nothing is draining.")
	}
	writeMore(w.MoreDrains, " drains: coordinators list the oldest of all namespaces", out)

	writeBarriers(w, now, out)
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
	writeCoverage(w.Coverage, wide, out)
	shown := w.Outcomes
	title := "Last outcomes:"
	if !wide {
		// Each coordinator has its own outcome of a deletion.
		had := map[string]bool{}
		shown = slices.DeleteFunc(slices.Clone(w.Outcomes), func(o oneOutcome) bool {
			again := had[o.UID+o.Gate]
			had[o.UID+o.Gate] = again || o.Abnormal
			return again || !o.Abnormal
		})
		title = "Last deletions that continued without every gateway's acknowledgement:"
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
		rows = append(rows, []string{seconds(now.Sub(o.At).Seconds()), o.Namespace + "/" + o.Pod, o.Gate, o.Reason,
			o.took(), cmp.Or(o.Message, strings.Join(o.Silent, ", "))})
	}
	table(out, "AGO POD GATE REASON WAITED WHY", rows)
}

// writeMore prints how many more there are than a list has, if there are any.
func writeMore(more int, what string, out io.Writer) {
	if more > 0 {
		fmt.Fprintf(out, "and %d more%s\n", more, what)
	}
}

// writeBarriers prints the pods at the barrier, if there are any.
func writeBarriers(w whole, now time.Time, out io.Writer) {
	var rows [][]string
	for _, b := range w.Barriers {
		waits := waitsFor(b.Drain, 2)
		if b.StatedUntil.After(now) {
			waits += ", and a stated wait of " + seconds(b.StatedSeconds)
		}
		rows = append(rows, []string{b.Namespace, b.Pod, b.Phase, seconds(now.Sub(b.Since).Seconds()), b.Hook, waits})
	}
	if len(rows) > 0 {
		fmt.Fprintf(out, "\nPods at the barrier: %d. Waiting to stop: %d.\n", w.BarriersOpen, w.BarriersWaiting)
		table(out, "NAMESPACE POD PHASE AGE HOOK WAITS-FOR", rows)
		writeMore(w.BarriersOpen-len(rows), "", out)
	}
}

// writeHealth prints the Services with unhealthy targets or, if wide, all Services.
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
				bad = append(bad, strings.TrimSuffix(cmp.Or(t.Pod, t.Address)+" ("+t.Last+")", " ()"))
			}
			row[4] = strings.Join(bad, ", ")
		}
		rows = append(rows, row)
	}
	if len(rows) > 0 {
		fmt.Fprintln(out, "\nTarget health, as gateways see it:")
		table(out, "NAMESPACE SERVICE STATE USABLE UNHEALTHY", rows)
	}
}

// least returns the coverage of the coordinator that finds the most uncovered consumers. All
// coordinators read the same cluster, so they differ only while one is behind.
func least(answers []answer[api.Coverage]) (worst *api.Coverage) {
	for i := range answers {
		a := &answers[i]
		if a.err == nil && (worst == nil || cmp.Or(cmp.Compare(worst.Uncovered, a.said.Uncovered),
			cmp.Compare(worst.Services, a.said.Services), cmp.Compare(a.said.Whole, worst.Whole)) < 0) {
			worst = &a.said
		}
	}
	return worst
}

// writeCoverage prints how many Services are covered, and the consumers that are not.
func writeCoverage(c *api.Coverage, wide bool, out io.Writer) {
	if c == nil {
		fmt.Fprintln(out, "\nCoverage is not known: no coordinator answered.")
		return
	}
	fmt.Fprintf(out, "\nServices with pods: %d. Waited for whole: %d; not known: %d; not waited for: %d.\n", c.Services,
		c.Whole, c.Possible, c.Services-c.Whole-c.Possible)
	if c.Error != "" {
		fmt.Fprintln(out, "Not all could be read:", c.Error)
	}
	shown := c.Items
	if !wide {
		shown = shown[:min(len(shown), gapsShown)]
	}
	var rows [][]string
	for _, i := range shown {
		rows = append(rows, []string{i.Service, i.Name, i.Why})
	}
	if len(rows) > 0 {
		table(out, "SERVICE ROUTED-BY NOT-WAITED-FOR-BECAUSE", rows)
	}
	writeMore(c.Uncovered-len(rows), "", out)
}

func milliseconds(s float64) string {
	if s < 1 {
		return fmt.Sprintf("%.0fms", s*1000)
	}
	return seconds(s)
}

// took returns how long the drain lasted. Empty: there was no drain.
func (o oneOutcome) took() string {
	if o.TookSeconds == nil {
		return ""
	}
	return milliseconds(*o.TookSeconds)
}

func drains(ctx context.Context, o options, all replicas, out, stderr io.Writer) error {
	answers, err := ask[api.View](ctx, o, all, api.ViewPath)
	if err != nil {
		return err
	}
	w := merge(answers)
	list := in(w.Drains, o.namespace)
	complain(answers, stderr)
	if w.MoreDrains > 0 {
		fmt.Fprintf(stderr, "warning: %d more drains are open: coordinators list the oldest of all namespaces\n",
			w.MoreDrains)
	}
	if done, err := encode(o, drainList{kind("DrainList"), list}, out); done {
		return err
	}
	if len(list) == 0 {
		if w.MoreDrains == 0 {
			fmt.Fprintln(stderr, "Nothing is draining.")
		}
		return nil
	}
	writeDrains(list, o.output == "wide", out)
	return nil
}

func writeDrains(list []oneDrain, wide bool, out io.Writer) {
	head, named := "NAMESPACE POD PHASE AGE REMAINING WAITS-FOR", 2
	if wide {
		head, named = head+" OWED COORDINATORS UID", 20
	}
	var rows [][]string
	for _, d := range list {
		row := []string{d.Namespace, d.Pod, d.Phase, seconds(d.AgeSeconds), seconds(d.RemainingSeconds),
			waitsFor(d.Drain, named)}
		if wide {
			row = append(row, count(d.Owed), strings.Join(d.Coordinators, ","), d.UID)
		}
		rows = append(rows, row)
	}
	table(out, head, rows)
}

// explained is the merged explanation of one pod.
type explained struct {
	metav1.TypeMeta `json:",inline"`
	api.Explanation
	// Unasked is why the API server does not ask Lameduck. The explanation then is without effect.
	Unasked string `json:"unasked,omitempty"`
}

// unasked returns why the API server asks no coordinator about deletions in a namespace, which
// coordinators cannot know. Empty: it asks, or with an error: that is not known.
func unasked(ctx context.Context, o options, kube kubernetes.Interface) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	all, err := kube.AdmissionregistrationV1().ValidatingWebhookConfigurations().Get(ctx, check.Configuration,
		metav1.GetOptions{})
	if apierrors.IsNotFound(err) || err == nil && len(all.Webhooks) == 0 {
		return "ValidatingWebhookConfiguration " + check.Configuration + " is missing, or has no entry", nil
	}
	if err != nil {
		return "", err
	}
	namespace, err := kube.CoreV1().Namespaces().Get(ctx, o.namespace, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	for _, w := range all.Webhooks {
		by, err := metav1.LabelSelectorAsSelector(w.NamespaceSelector)
		if err != nil || by.Matches(labels.Set(namespace.Labels)) {
			return "", nil
		}
	}
	return fmt.Sprintf("no entry of ValidatingWebhookConfiguration %s selects namespace %s", check.Configuration,
		o.namespace), nil
}

func explain(ctx context.Context, o options, kube kubernetes.Interface, all replicas, out, stderr io.Writer) error {
	operation := "delete"
	if o.evict {
		operation = "evict"
	}
	answers, err := ask[api.Explanation](ctx, o, all, api.ExplainPath+"/"+o.namespace+"/"+o.pod+"?operation="+operation)
	if err != nil && slices.ContainsFunc(answers, func(a answer[api.Explanation]) bool {
		return errors.Is(a.err, errNotFound)
	}) {
		return fmt.Errorf("no pod %s in namespace %s, as far as Lameduck's coordinators know", o.pod, o.namespace)
	}
	if err != nil {
		return err
	}
	var said []api.Explanation
	var silent []string
	for _, a := range answers {
		if a.err == nil {
			said = append(said, a.said)
		} else {
			silent = append(silent, a.replica.name)
		}
	}
	why, err := unasked(ctx, o, kube)
	x := explained{kind("Explanation"), said[0].Join(said[1:]...), why}
	x.Silent = silent
	complain(answers, stderr)
	if err != nil {
		fmt.Fprintf(stderr, "warning: whether the API server asks Lameduck about this pod is not known: %v\n", err)
	}
	if done, err := encode(o, x, out); done {
		return err
	}
	writeExplanation(x, out)
	return nil
}

// gatesShown bounds the gateways that explain lists, because a barrier may ask hundreds of nodes.
// --output json lists all of them.
const gatesShown = 30

// writeBarrier prints the pod's hooks, the agent that answers them and the stated waits.
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
		fmt.Fprintf(out, "  on %s no agent answers them\n", b.Node)
	case b.Connected:
		fmt.Fprintf(out, "  on %s %s answers them, and is connected\n", b.Node, b.Agent)
	default:
		fmt.Fprintf(out, "  on %s %s answers them, and is not connected\n", b.Node, b.Agent)
	}
	for _, s := range b.Stated {
		wait := "of " + seconds(s.Seconds)
		switch {
		case s.Error != "":
			wait = "that cannot be read: " + s.Error
		case s.AtMost:
			wait = "of at most " + seconds(s.Seconds)
		}
		if s.Cut {
			wait += ", which the bound cuts"
		}
		fmt.Fprintf(out, "  %s/%s states a wait %s\n", s.Namespace, s.Service, wait)
	}
	if o := b.Open; o != nil {
		fmt.Fprintf(out, "  it waits there now: %s, %d of %d have acknowledged\n", o.Phase, o.Owed-o.Waiting, o.Owed)
	}
}

func writeExplanation(x explained, out io.Writer) {
	if x.Unasked != "" {
		fmt.Fprintf(out, "The API server does not ask Lameduck about this pod, and its deletion is not held: %s.\n"+
			"If it asked:\n", x.Unasked)
	}
	fmt.Fprintf(out, "Pod %s/%s: %s\n", x.Namespace, x.Pod, x.Summary)
	fmt.Fprintf(out, "Reason: %s\n", x.Reason)
	if x.Drain != nil {
		fmt.Fprintf(out, "It is being drained: %s, %d of %d gateways have acknowledged.\n", x.Drain.Phase,
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
			what := cmp.Or(g.Gateway, "gateway")
			if g.Node != "" {
				what += " on " + g.Node
			}
			fmt.Fprintf(out, "  %s (%s), at the %s: %s\n", g.Agent, what, g.Gate, g.Why)
		}
	}
	writeBarrier(x.Barrier, out)
	if len(x.Consumers) > 0 {
		fmt.Fprintln(out, "\nRouted by:")
		for _, c := range x.Consumers {
			fmt.Fprintf(out, "  %s (%s), for %s: %s\n", c.Name, c.Kind, c.Service,
				strings.TrimSuffix(c.State+", "+c.Why, ", "))
		}
	}
	if len(x.Uncovered) > 0 {
		fmt.Fprintln(out, "\nNot covered:")
		for _, u := range x.Uncovered {
			fmt.Fprintf(out, "  %s: %s\n", u.What, u.Why)
		}
	}
	for _, d := range x.Differs {
		fmt.Fprintf(out, "\nAnother coordinator has a different answer: %s\n", d)
	}
}

// watchEvery is the interval at which --watch asks the coordinators.
const watchEvery = 500 * time.Millisecond

// event is one item of --watch: a drain that is new, or whose phase or missing agents have changed,
// or the outcome of one.
type event struct {
	metav1.TypeMeta `json:",inline"`
	Type            string `json:"type"`
	Object          any    `json:"object"`
}

// watchDrains prints events until ctx is done. It does not ask coordinators that start later.
func watchDrains(ctx context.Context, o options, all replicas, out, stderr io.Writer) error {
	const line = "%-20s %-44s %-14s %-7s %s\n"
	shown, ended := map[string]string{}, map[string]bool{}
	silent := ""
	for first := true; ; first = false {
		answers, err := ask[api.View](ctx, o, all, api.ViewPath)
		if first && err != nil {
			return err
		}
		var trouble strings.Builder
		if complain(answers, &trouble); trouble.String() != silent && ctx.Err() == nil {
			silent = trouble.String()
			fmt.Fprint(stderr, silent)
		}
		if first && o.output != "json" {
			fmt.Fprintf(out, line, "NAMESPACE", "POD", "PHASE", "AGE", "WAITS-FOR")
		}
		w := merge(answers)
		var events []event
		open := map[string]bool{}
		for _, d := range in(w.Drains, o.namespace) {
			open[d.UID], ended[d.UID] = true, false
			if sign := d.Phase + " " + waitsFor(d.Drain, 20); shown[d.UID] != sign {
				shown[d.UID] = sign
				events = append(events, event{kind("DrainEvent"), "drain", d})
			}
		}
		for _, e := range w.Outcomes {
			if e.Gate == "barrier" || open[e.UID] || ended[e.UID] || o.namespace != "" && e.Namespace != o.namespace {
				continue
			}
			ended[e.UID] = true
			delete(shown, e.UID)
			if !first { // of earlier ones only status tells
				events = append(events, event{kind("DrainEvent"), "outcome", e})
			}
		}
		for _, e := range events {
			if o.output == "json" {
				err = json.NewEncoder(out).Encode(e)
			} else if d, ok := e.Object.(oneDrain); ok {
				_, err = fmt.Fprintf(out, line, d.Namespace, d.Pod, d.Phase, seconds(d.AgeSeconds),
					waitsFor(d.Drain, 2))
			} else {
				d := e.Object.(oneOutcome)
				_, err = fmt.Fprintf(out, line, d.Namespace, d.Pod, d.Reason, d.took(),
					strings.Join(append([]string{"ended"}, d.Silent...), " "))
			}
			if err != nil {
				return err // the reader has gone
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(watchEvery):
		}
	}
}
