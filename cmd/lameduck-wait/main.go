// Command lameduck-wait is a preStop hook. It asks the agent on the pod's node whether the pod may
// stop, waits for the answer, and then runs the container's own hook. The webhook copies it into
// pods whose hook cannot be an httpGet. It runs in users' containers, so it is one static file, has
// no dependencies there, and uses little of their memory: no TLS, no HTTP library.
//
//	lameduck-wait --agent='$(LAMEDUCK_HOST_IP):9447' --id=ID --container=NAME --bound=30s
//	    [--sleep=5s | --http-get=URL | -- COMMAND...]
//	lameduck-wait --install PATH
//	lameduck-wait --version
//
// $(NAME) in --agent and --http-get is the environment variable of that name: kubelets expand it in
// a container's command, not in a hook's.
//
// If the agent does not answer, the wait ends at the bound at the latest: a missing answer never
// keeps a pod. The container's own hook runs then as well. If the wait ended before the bound and
// that hook succeeds, this program fails, so that the kubelet writes an Event FailedPreStopHook:
// nothing else shows that the pod did not wait. An answer other than 200 ends the wait too: the
// agent refuses, or something in between answers, such as a service mesh.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

func main() {
	os.Exit(run(context.Background(), os.Args, os.Getenv, os.Stdout, os.Stderr))
}

// Exit codes of lameduck-wait itself. Otherwise it exits with the code of the container's own hook.
// exitUsage: its command line is invalid. exitFailed: it could not install itself, got no answer
// from the agent or a refusal, or could not run the container's hook.
const (
	exitFailed = 1
	exitUsage  = 2
)

var errPrinted = errors.New("printed")

// run is the whole program, and returns its exit code. If the hook fails, the kubelet shows the
// output in an Event.
func run(ctx context.Context, args []string, getenv func(string) string, stdout, stderr io.Writer) int {
	o, err := parse(args[1:], getenv, stdout)
	switch {
	case errors.Is(err, flag.ErrHelp), errors.Is(err, errPrinted):
		return 0
	case err != nil:
		fmt.Fprintln(stderr, "lameduck-wait:", err)
		return exitUsage
	}
	if o.install != "" {
		if err := install(args[0], o.install); err != nil {
			fmt.Fprintln(stderr, "lameduck-wait:", err)
			return exitFailed
		}
		return 0
	}
	began := time.Now()
	answer, err := wait(ctx, o)
	if err != nil {
		answer = "did not wait any longer: " + err.Error()
	}
	fmt.Fprintf(stdout, "lameduck-wait: %s (%.1fs)\n", answer, time.Since(began).Seconds())
	code, ownErr := own(ctx, o, stdout, stderr)
	if ownErr != nil {
		fmt.Fprintln(stderr, "lameduck-wait:", ownErr)
	}
	if err != nil && !errors.Is(err, errBound) && code == 0 {
		return exitFailed
	}
	return code
}

// own runs the hook that the container had before the webhook wrapped it, and returns its exit
// code.
func own(ctx context.Context, o options, stdout, stderr io.Writer) (int, error) {
	switch {
	case o.httpGet != "":
		if err := follow(ctx, o.http, o.headers); err != nil {
			return exitFailed, fmt.Errorf("the container's own hook: %w", err)
		}
	case o.sleep > 0:
		select {
		case <-time.After(o.sleep):
		case <-ctx.Done():
			return exitFailed, fmt.Errorf("sleep: %w", ctx.Err())
		}
	case len(o.command) > 0:
		// Not syscall.Exec: this process reports a command that does not exist, as the container's
		// own hook.
		cmd := exec.CommandContext(ctx, o.command[0], o.command[1:]...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, stdout, stderr
		err := cmd.Run()
		var exit *exec.ExitError
		switch {
		case errors.As(err, &exit) && exit.ExitCode() >= 0:
			return exit.ExitCode(), nil
		case errors.As(err, &exit): // by a signal, as a shell says it
			return 128 + int(exit.Sys().(syscall.WaitStatus).Signal()), nil
		case err != nil:
			return 127, fmt.Errorf("the container's own hook: %w", err)
		}
	}
	return 0, nil
}
