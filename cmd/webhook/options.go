package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// options are the command line, checked.
type options struct {
	kubeconfig string
	namespace  string
	replica    string
	certDir    string
	// secretFile holds the last segment of the admission path.
	secretFile string
	// The addresses of the three listeners. people serves metrics and probes without TLS.
	admission, agents, people string
	times                     drain.Times
	maxHolds                  int
	maxHoldsPerOwner          int
	// shutdownDelay is how long after SIGTERM reviews are still taken.
	shutdownDelay time.Duration
	excluded      []string
	// barrier is how new pods are made to wait before SIGTERM, where that is enabled.
	barrier admission.Barrier
	// scope is which node agents are asked at the barrier.
	scope    drain.Scope
	logLevel slog.Level
}

// parse reads the command line. Its errors wrap errUsage and name the flag and the value, or are flag.ErrHelp.
func parse(args []string, getenv func(string) string, help io.Writer) (options, error) {
	o := options{times: drain.DefaultTimes()}
	var excluded string
	f := flag.NewFlagSet("webhook", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.StringVar(&o.kubeconfig, "kubeconfig", getenv("KUBECONFIG"), "file to reach the API server with; empty: as a pod does")
	f.StringVar(&o.namespace, "namespace", getenv("POD_NAMESPACE"), "the namespace this runs in; pods there never wait (default $POD_NAMESPACE)")
	f.StringVar(&o.replica, "replica", getenv("POD_NAME"), "the name of this replica, unique among all (default $POD_NAME)")
	f.StringVar(&o.certDir, "cert-dir", "/etc/lameduck/tls", "directory with tls.crt and tls.key; read again when they change")
	f.StringVar(&o.secretFile, "admission-secret-file", "/etc/lameduck/admission/secret", "file with the secret that ends the path of the webhook configuration, /v1/admit/<secret>; one a line, read again when it changes")
	f.StringVar(&o.admission, "admission-address", ":9443", "host:port where the API server asks")
	f.StringVar(&o.agents, "agents-address", ":9444", "host:port where agents connect")
	f.StringVar(&o.people, "metrics-address", ":8080", "host:port of /metrics, /livez and /readyz, without TLS")
	f.DurationVar(&o.times.Webhook, "webhook-timeout", o.times.Webhook, "timeoutSeconds of the webhook configuration")
	f.DurationVar(&o.times.Hold, "hold", o.times.Hold, "how long one call waits at most")
	f.DurationVar(&o.times.Deadline, "deadline", o.times.Deadline, "how long a pod is kept at most; past it the silent gateways are named and it goes")
	f.DurationVar(&o.times.IdleBound, "idle-bound", o.times.IdleBound, "how long running requests are waited for once no new ones come")
	f.IntVar(&o.maxHolds, "max-holds", 32, "calls that wait at one time; more are told to come back")
	f.IntVar(&o.maxHoldsPerOwner, "max-holds-per-owner", 8, "of these, calls for pods of one owner, such as a ReplicaSet, so that no rollout keeps others from being held")
	f.DurationVar(&o.shutdownDelay, "shutdown-delay", 5*time.Second, "how long after SIGTERM reviews are still answered, because Services route here until then; held ones are told to come back at once")
	f.StringVar(&excluded, "exclude-namespaces", "kube-system", "comma-separated namespaces whose pods never wait, besides the own one")
	f.DurationVar(&o.barrier.Bound, "barrier-bound", 30*time.Second, "how long a new pod's barrier may keep it from SIGTERM, in whole seconds; its grace period grows by it")
	f.IntVar(&o.barrier.Port, "barrier-port", 9447, "port of the node agents, on loopback and the node's address")
	f.StringVar(&o.barrier.Image, "barrier-image", "lameduck/lameduck-wait:dev", "image that has /lameduck-wait, for pods whose hook cannot be an httpGet")
	f.TextVar(&o.scope, "barrier-ask", drain.ScopeAuto, "which node agents are asked at the barrier: all, quorum (a sample; the others by the time that they were seen to take), local (the pod's own node), or auto: all, up to 200")
	f.BoolVar(&o.barrier.ExecOnly, "barrier-exec-only", false, "never use a hook of kind httpGet: for clusters where Pod Security is enforced by other means than the namespace's label")
	f.TextVar(&o.logLevel, "log-level", slog.LevelInfo, "debug, info, warn or error")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(help, "webhook holds deletions of pods until the gateways that route to them have let go.\n\nFlags:")
			f.SetOutput(help)
			f.PrintDefaults()
			return o, err
		}
		return o, fmt.Errorf("%w: %w", errUsage, err)
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("%w: unexpected argument %q", errUsage, f.Arg(0))
	}
	for _, name := range strings.Split(excluded, ",") {
		if name = strings.TrimSpace(name); name != "" {
			o.excluded = append(o.excluded, name)
		}
	}
	if err := o.check(); err != nil {
		return o, fmt.Errorf("%w: %w", errUsage, err)
	}
	o.excluded = append(o.excluded, o.namespace)
	return o, nil
}

// check reports everything that is wrong, not only the first.
func (o options) check() error {
	var errs []error
	must := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	must(o.namespace != "", "--namespace %q: required, or set POD_NAMESPACE", o.namespace)
	must(o.namespace == "" || len(validation.IsDNS1123Label(o.namespace)) == 0, "--namespace %q: not a namespace's name", o.namespace)
	must(o.replica != "", "--replica %q: required, or set POD_NAME", o.replica)
	for _, a := range []struct{ flag, value string }{
		{"--admission-address", o.admission}, {"--agents-address", o.agents}, {"--metrics-address", o.people},
	} {
		_, err := net.ResolveTCPAddr("tcp", a.value)
		must(err == nil && strings.Contains(a.value, ":"), "%s %q: not a host:port: %v", a.flag, a.value, err)
	}
	for _, name := range []string{"tls.crt", "tls.key"} {
		_, err := os.Stat(filepath.Join(o.certDir, name))
		must(err == nil, "--cert-dir %q: %v", o.certDir, err)
	}
	if err := admission.CheckSecretFile(o.secretFile); err != nil {
		errs = append(errs, fmt.Errorf("--admission-secret-file %q: %w", o.secretFile, err))
	}
	if o.kubeconfig != "" {
		_, err := os.Stat(o.kubeconfig)
		must(err == nil, "--kubeconfig %q: %v", o.kubeconfig, err)
	}
	must(o.shutdownDelay >= 0 && o.shutdownDelay <= time.Minute, "--shutdown-delay %s: must be 0s to 1m", o.shutdownDelay)
	must(o.maxHolds > 0, "--max-holds %d: must be at least 1", o.maxHolds)
	must(o.maxHoldsPerOwner > 0, "--max-holds-per-owner %d: must be at least 1", o.maxHoldsPerOwner)
	for _, name := range o.excluded {
		must(len(validation.IsDNS1123Label(name)) == 0, "--exclude-namespaces: %q is not a namespace's name", name)
	}
	if err := o.barrier.Check(); err != nil {
		errs = append(errs, fmt.Errorf("--barrier-%w", err))
	}
	if err := o.times.Check(); err != nil {
		errs = append(errs, fmt.Errorf("--webhook-timeout, --hold, --deadline, --idle-bound: %w", err))
	}
	return errors.Join(errs...)
}
