// Command demo shows the effect of Lameduck. It runs the same rolling update under load three
// times, unprotected, with a preStop sleep, and with Lameduck, on a real control plane and a real
// HAProxy.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/report"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout)
	interrupted := ctx.Err() != nil
	stop()
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(2)
	case interrupted:
		fmt.Fprintln(os.Stderr, "demo: interrupted; nothing is left running")
		os.Exit(130)
	default:
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("bad usage")

// options are the command line.
type options struct {
	bin, out  string
	lag       time.Duration
	rate      float64
	keepAlive bool
	keep      bool
	logs      string
}

func parse(args []string, help io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("demo", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.StringVar(&o.bin, "bin", "bin", "directory with the programs webhook, agent and app")
	f.StringVar(&o.out, "out", "demo.json", "file for the result")
	f.DurationVar(&o.lag, "lag", time.Second,
		"time between a change of EndpointSlices and the gateway's learning of it, in all three runs")
	f.Float64Var(&o.rate, "rate", 300, "requests per second")
	f.BoolVar(&o.keepAlive, "keep-alive", false,
		"clients keep their connections instead of opening one for each request")
	f.BoolVar(&o.keep, "keep", false, "after the runs, keep the live page and the API server open, with a rolling "+
		"update now and then, until Ctrl-C")
	f.StringVar(&o.logs, "logs", "", "directory for the logs of everything that ran; empty: they are not kept")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(help, "demo performs a rolling update under load three times: unprotected, with preStop: "+
				"sleep, with Lameduck.\n\nFlags:")
			f.SetOutput(help)
			f.PrintDefaults()
			return o, err
		}
		return o, fmt.Errorf("%w: %w", errUsage, err)
	}
	switch {
	case f.NArg() > 0:
		return o, fmt.Errorf("%w: unexpected argument %q", errUsage, f.Arg(0))
	case o.lag < 0 || o.lag > 10*time.Second:
		return o, fmt.Errorf("%w: -lag %s: must be from 0 to 10s", errUsage, o.lag)
	case o.rate <= 0 || o.rate > 2000:
		return o, fmt.Errorf("%w: -rate %g: must be more than 0 and at most 2000", errUsage, o.rate)
	}
	var err error
	if o.bin, err = filepath.Abs(o.bin); err != nil {
		return o, err
	}
	programs := []string{"webhook", "agent", "app"}
	if o.keep {
		programs = append(programs, "kubectl-lameduck")
	}
	for _, program := range programs {
		if _, err := os.Stat(filepath.Join(o.bin, program)); err != nil {
			return o, fmt.Errorf("%w: -bin %q: %w", errUsage, o.bin, err)
		}
	}
	return o, nil
}

func run(ctx context.Context, args []string, out io.Writer) error {
	o, err := parse(args, out)
	if err != nil {
		return err
	}
	haproxy, err := stage.HAProxy()
	if err != nil {
		return err
	}
	if !cluster.Inside() {
		if _, err := cluster.BuildControlPlane(ctx, out); err != nil {
			return err
		}
	}
	if err := cluster.Enter(); err != nil {
		return err
	}
	began := time.Now()
	say := func(format string, args ...any) {
		fmt.Fprintf(out, "%5.1fs  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	d, err := newDemo(ctx, o, say)
	if err != nil {
		return err
	}
	defer d.close()
	result, err := d.perform(ctx)
	if err != nil {
		return err
	}
	result.Kubernetes, result.Gateway = d.cluster.Binaries().Version, version(ctx, haproxy)
	fmt.Fprintf(out, "\nOne rolling update of %d pods under %g requests a second, three times. The pods exit at "+
		"once on SIGTERM.\n"+
		"In all three runs the gateway learns of EndpointSlices %s late.\n\n", replicas, o.rate, o.lag)
	fmt.Fprint(out, report.Table(result, isTerminal(out)))
	fmt.Fprintf(out, "\nOne drain of the run with Lameduck, from the API server's receipt of its DELETE:\n\n%s\n",
		report.Timeline(result.Drain, isTerminal(out)))
	encoded, err := json.MarshalIndent(result, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(o.out, append(encoded, '\n'), 0o644); err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	fmt.Fprintf(out, "Written to %s after %.0f s.\n", o.out, time.Since(began).Seconds())
	err = judge(result, o.lag, out)
	if o.keep {
		return errors.Join(err, d.keepOpen(ctx))
	}
	return err
}

// judge holds the result against what the README says. A lost request is an error; a rolling update
// that took too long, which a busy machine may cause, is reported.
func judge(d report.Demo, lag time.Duration, out io.Writer) error {
	unprotected, lameduck := d.Unprotected.RolloutSeconds, d.Lameduck.RolloutSeconds
	most, rule := 1.25*unprotected, "1.25 times the unprotected one"
	if lag > time.Second {
		most, rule = unprotected+lag.Seconds(), fmt.Sprintf("the unprotected one and the lag of %s", lag)
	}
	for _, goal := range []struct {
		most float64
		rule string
	}{{most, rule}, {d.PreStop.RolloutSeconds / 2, "half of that with preStop"}} {
		verdict := "met"
		if lameduck > goal.most {
			verdict = "MISSED"
		}
		fmt.Fprintf(out, "Goal %s: rolling update with Lameduck %.2f s, at most %.2f s, %s.\n", verdict, lameduck,
			goal.most, goal.rule)
		if lag > time.Second {
			break
		}
	}
	switch {
	case d.Lameduck.Failed > 0:
		return fmt.Errorf("%d of %d requests failed with Lameduck: %v", d.Lameduck.Failed, d.Lameduck.Requests,
			d.Lameduck.FailedBy)
	case d.Unprotected.Failed == 0:
		return errors.New("no request failed unprotected, so this run shows nothing")
	}
	return nil
}

func version(ctx context.Context, haproxy string) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	text, err := exec.CommandContext(ctx, haproxy, "-v").Output()
	words := strings.Fields(string(text))
	if err != nil || len(words) < 3 {
		return "HAProxy of unknown version"
	}
	return "HAProxy " + words[2]
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// logger writes to a file of the logs directory, or nowhere.
func logger(dir string) *slog.Logger {
	if dir == "" {
		return slog.New(slog.DiscardHandler)
	}
	f, err := os.Create(filepath.Join(dir, "node.log"))
	if err != nil {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(f, nil))
}
