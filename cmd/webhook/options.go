package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/lameduck-io/lameduck/internal/config"
	"github.com/lameduck-io/lameduck/internal/version"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// maxLearnFrom is how many of the times that agents took a replica still knows when it forgets
// some: it halves them when they are 20,000. With more to learn from, samples would come and go, or
// never come.
const maxLearnFrom = 9000

// options are the command line and the configuration file, checked.
type options struct {
	kubeconfig string
	namespace  string
	replica    string
	// ordinal is that of this replica's entry in the webhook configuration. tokenFile proves to the
	// others who it is. Empty: it asks none.
	ordinal      int
	tokenFile    string
	certificates credentials
	// The addresses of the listeners. metrics serves metrics and probes those of the kubelet,
	// without TLS.
	admission, agents, metrics, probes string
	// dashboard is where operators look. Empty: nowhere.
	dashboard        string
	times            drain.Times
	maxHolds         int
	maxHoldsPerOwner int
	// shutdownDelay is how long after SIGTERM reviews are still taken.
	shutdownDelay time.Duration
	excluded      []string
	// barrier is how new pods are made to wait before SIGTERM, where that is enabled.
	barrier admission.Barrier
	// scope is which node agents are asked at the barrier.
	scope    drain.Scope
	sampling drain.Sampling
	logLevel slog.Level
	// version has the program say which it is, and end.
	version bool
}

// flags declares the command line. What it does not say stays as it is in conf.
func flags(o *options, conf *configuration, getenv func(string) string) (f *flag.FlagSet, path *string, print *bool) {
	f = flag.NewFlagSet("webhook", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	path = f.String("config", "", "configuration file, kind "+kind+"; ${NAME} in it is replaced by the environment; "+
		"flags win over it; empty: none")
	print = f.Bool("print-config", false, "print the configuration with its defaults, and end")
	f.BoolVar(&o.version, "version", false, "print which version this is, and end")
	f.StringVar(&o.kubeconfig, "kubeconfig", getenv("KUBECONFIG"),
		"file to reach the API server with; empty: as a pod does")
	f.StringVar(&o.namespace, "namespace", getenv("POD_NAMESPACE"),
		"the namespace this runs in; pods there never wait (default $POD_NAMESPACE)")
	f.StringVar(&o.replica, "replica", getenv("POD_NAME"),
		"the name of this replica, unique among all (default $POD_NAME)")
	f.IntVar(&o.ordinal, "ordinal", 0, "the number of this replica's entry in the webhook configuration, from 0; "+
		"the label "+ordinalLabel+" of its pod")
	f.StringVar(&o.tokenFile, "token-file", "",
		"projected service account token for the audience lameduck.io, by which the replicas know each other; "+
			"empty: this one asks no other")
	f.StringVar(&conf.Certificates.Dir, "cert-dir", conf.Certificates.Dir,
		"certificates.dir: directory with tls.crt and tls.key; empty: the replicas make them")
	f.StringVar(&conf.Certificates.AdmissionSecretFile, "admission-secret-file", conf.Certificates.AdmissionSecretFile,
		"certificates.admissionSecretFile: file with the secret that ends the webhook's path; empty: the replicas "+
			"make it")
	f.StringVar(&conf.Addresses.Admission, "admission-address", conf.Addresses.Admission,
		"addresses.admission: host:port where the API server asks")
	f.StringVar(&conf.Addresses.Agents, "agents-address", conf.Addresses.Agents,
		"addresses.agents: host:port where agents connect")
	f.StringVar(&conf.Addresses.Metrics, "metrics-address", conf.Addresses.Metrics,
		"addresses.metrics: host:port of /metrics, without TLS")
	f.StringVar(&conf.Addresses.Probes, "probes-address", conf.Addresses.Probes,
		"addresses.probes: host:port of /livez and /readyz, without TLS")
	f.StringVar(&conf.Addresses.Dashboard, "dashboard-address", conf.Addresses.Dashboard,
		"addresses.dashboard: host:port of the live page and its API: plain and open on a loopback address, as "+
			"behind kubectl port-forward, else with TLS and bearer tokens; empty: not served")
	f.DurationVar(&conf.Times.Webhook.Duration, "webhook-timeout", conf.Times.Webhook.Duration,
		"times.webhook: timeoutSeconds of the webhook configuration")
	f.DurationVar(&conf.Times.Hold.Duration, "hold", conf.Times.Hold.Duration,
		"times.hold: how long one call waits at most")
	f.DurationVar(&conf.Times.Deadline.Duration, "deadline", conf.Times.Deadline.Duration,
		"times.deadline: how long a pod is kept at most")
	f.DurationVar(&conf.Times.IdleBound.Duration, "idle-bound", conf.Times.IdleBound.Duration,
		"times.idleBound: how long running requests are waited for once no new ones come")
	f.IntVar(&conf.Holds.Most, "max-holds", conf.Holds.Most,
		"holds.most: calls that wait at one time; more are told to come back")
	f.IntVar(&conf.Holds.PerOwner, "max-holds-per-owner", conf.Holds.PerOwner,
		"holds.perOwner: of these, calls for pods of one owner")
	f.DurationVar(&conf.Times.ShutdownDelay.Duration, "shutdown-delay", conf.Times.ShutdownDelay.Duration,
		"times.shutdownDelay: how long after SIGTERM reviews are still answered")
	f.Func("exclude-namespaces", "excludedNamespaces: comma-separated namespaces whose pods never wait, besides the "+
		"own one (default "+strings.Join(conf.ExcludedNamespaces, ",")+")", func(text string) error {
		conf.ExcludedNamespaces = []string{}
		for _, name := range strings.Split(text, ",") {
			if name = strings.TrimSpace(name); name != "" {
				conf.ExcludedNamespaces = append(conf.ExcludedNamespaces, name)
			}
		}
		return nil
	})
	f.DurationVar(&conf.Barrier.Bound.Duration, "barrier-bound", conf.Barrier.Bound.Duration,
		"barrier.bound: how long a new pod's barrier may keep it from SIGTERM, in whole seconds; its grace period "+
			"grows by it")
	f.IntVar(&conf.Barrier.Port, "barrier-port", conf.Barrier.Port,
		"barrier.port: port of the node agents, on loopback and the node's address")
	f.StringVar(&conf.Barrier.Image, "barrier-image", conf.Barrier.Image,
		"barrier.image: image that has /lameduck-wait, for pods whose hook cannot be an httpGet")
	f.TextVar(&conf.Barrier.Ask, "barrier-ask", conf.Barrier.Ask,
		"barrier.ask: which node agents are asked: all, quorum (a sample; the others by the time that they were "+
			"seen to take), local (the pod's own node), or auto: all, up to 200")
	f.BoolVar(&conf.Barrier.ExecOnly, "barrier-exec-only", conf.Barrier.ExecOnly,
		"barrier.execOnly: never use a hook of kind httpGet: for clusters where Pod Security is enforced by other "+
			"means than the namespace's label")
	f.TextVar(&conf.LogLevel, "log-level", conf.LogLevel, "logLevel: debug, info, warn or error")
	return f, path, print
}

// parse reads the command line and the file that it names. Its errors wrap errUsage and name the
// flag or the key and the value, or are flag.ErrHelp or errPrinted.
func parse(args []string, getenv func(string) string, out io.Writer) (options, error) {
	var o options
	conf := defaults()
	f, path, print := flags(&o, &conf, getenv)
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(out, "webhook holds deletions of pods until the gateways that route to them have let "+
				"go.\n\nFlags:")
			f.SetOutput(out)
			f.PrintDefaults()
			return o, err
		}
		return o, fmt.Errorf("%w: %w", errUsage, err)
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("%w: unexpected argument %q", errUsage, f.Arg(0))
	}
	if o.version {
		fmt.Fprintln(out, version.String("webhook"))
		return o, errPrinted
	}
	if *path != "" {
		content, err := os.ReadFile(*path)
		if err != nil {
			return o, fmt.Errorf("%w: --config %q: %w", errUsage, *path, err)
		}
		conf = defaults()
		conf.APIVersion, conf.Kind = "", ""
		if err := config.Read(content, getenv, &conf); err != nil {
			return o, fmt.Errorf("%w: --config %q: %w", errUsage, *path, err)
		}
		var errs []error
		conf.checkRead(func(ok bool, format string, args ...any) {
			if !ok {
				errs = append(errs, fmt.Errorf(format, args...))
			}
		})
		if len(errs) > 0 {
			return o, fmt.Errorf("%w: --config %q: %w", errUsage, *path, errors.Join(errs...))
		}
		// Again, so that what the command line says wins.
		if f, _, _ = flags(&o, &conf, getenv); f.Parse(args) != nil {
			return o, fmt.Errorf("%w: %q", errUsage, args)
		}
	}
	if *print {
		text, err := config.Print(conf)
		if err != nil {
			return o, err
		}
		fmt.Fprint(out, text)
		return o, errPrinted
	}
	o.take(conf)
	if err := o.check(); err != nil {
		return o, fmt.Errorf("%w: %w", errUsage, err)
	}
	o.excluded = append(o.excluded, o.namespace)
	return o, nil
}

// take takes in what conf says.
func (o *options) take(conf configuration) {
	o.admission, o.agents, o.metrics, o.dashboard = conf.Addresses.Admission, conf.Addresses.Agents,
		conf.Addresses.Metrics, conf.Addresses.Dashboard
	o.probes = conf.Addresses.Probes
	o.times = drain.DefaultTimes()
	o.times.Webhook, o.times.Hold = conf.Times.Webhook.Duration, conf.Times.Hold.Duration
	o.times.Deadline, o.times.IdleBound = conf.Times.Deadline.Duration, conf.Times.IdleBound.Duration
	o.shutdownDelay = conf.Times.ShutdownDelay.Duration
	o.maxHolds, o.maxHoldsPerOwner = conf.Holds.Most, conf.Holds.PerOwner
	o.excluded = slices.Clone(conf.ExcludedNamespaces)
	o.barrier = admission.Barrier{Bound: conf.Barrier.Bound.Duration, Port: conf.Barrier.Port,
		Image: conf.Barrier.Image, PullSecrets: conf.Barrier.ImagePullSecrets, ExecOnly: conf.Barrier.ExecOnly}
	o.scope = conf.Barrier.Ask
	o.sampling = drain.Sampling{AllUpTo: conf.Barrier.Sampling.AllUpTo, Size: conf.Barrier.Sampling.Size,
		Learn: conf.Barrier.Sampling.LearnFrom}
	o.certificates = conf.Certificates
	o.logLevel = conf.LogLevel
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
	must(o.namespace == "" || len(validation.IsDNS1123Label(o.namespace)) == 0,
		"--namespace %q: not a namespace's name", o.namespace)
	must(o.ordinal >= 0, "--ordinal %d: must not be negative", o.ordinal)
	must(o.replica != "", "--replica %q: required, or set POD_NAME", o.replica)
	for _, a := range []struct{ flag, value string }{
		{"--admission-address", o.admission}, {"--agents-address", o.agents}, {"--metrics-address", o.metrics},
		{"--probes-address", o.probes},
	} {
		_, err := net.ResolveTCPAddr("tcp", a.value)
		must(err == nil && strings.Contains(a.value, ":"), "%s %q: not a host:port: %v", a.flag, a.value, err)
	}
	if o.dashboard != "" {
		_, err := net.ResolveTCPAddr("tcp", o.dashboard)
		must(err == nil, "--dashboard-address %q: not a host:port: %v", o.dashboard, err)
	}
	if dir := o.certificates.Dir; dir != "" {
		for _, name := range []string{"tls.crt", "tls.key"} {
			_, err := os.Stat(filepath.Join(dir, name))
			must(err == nil, "--cert-dir %q: %v", dir, err)
		}
	}
	if file := o.certificates.AdmissionSecretFile; file != "" {
		if err := admission.CheckSecretFile(file); err != nil {
			errs = append(errs, fmt.Errorf("--admission-secret-file %q: %w", file, err))
		}
	}
	for _, of := range []struct{ key, name string }{
		{"secret", o.certificates.Secret}, {"configMap", o.certificates.ConfigMap},
		{"webhookConfiguration", o.certificates.WebhookConfiguration},
	} {
		must(len(validation.IsDNS1123Subdomain(of.name)) == 0, "certificates.%s %q: not an object's name", of.key,
			of.name)
	}
	for i, name := range o.certificates.Names {
		_, err := netip.ParseAddr(name)
		must(err == nil || len(validation.IsDNS1123Subdomain(name)) == 0,
			"certificates.names[%d] %q: neither a DNS name nor an address", i, name)
	}
	must(o.certificates.Overlap.Duration > 0, "certificates.overlap %s: must be positive", o.certificates.Overlap)
	must(o.certificates.RotateEvery.Duration >= 3*o.certificates.Overlap.Duration,
		"certificates.rotateEvery %s: must be at least three times certificates.overlap %s",
		o.certificates.RotateEvery, o.certificates.Overlap)
	if o.kubeconfig != "" {
		_, err := os.Stat(o.kubeconfig)
		must(err == nil, "--kubeconfig %q: %v", o.kubeconfig, err)
	}
	must(o.shutdownDelay >= 0 && o.shutdownDelay <= time.Minute, "--shutdown-delay %s: must be 0s to 1m",
		o.shutdownDelay)
	for _, of := range []struct {
		key   string
		value int
	}{{"allUpTo", o.sampling.AllUpTo}, {"size", o.sampling.Size}, {"learnFrom", o.sampling.Learn}} {
		must(of.value > 0, "barrier.sampling.%s %d: must be at least 1", of.key, of.value)
	}
	must(o.sampling.Learn <= maxLearnFrom, "barrier.sampling.learnFrom %d: must be at most %d: a replica forgets "+
		"what is older", o.sampling.Learn, maxLearnFrom)
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
