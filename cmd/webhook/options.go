package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/lameduck-io/lameduck/internal/certs"
	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/internal/config"
	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/internal/version"
	"github.com/lameduck-io/lameduck/pkg/admission"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

type options struct {
	kubeconfig string
	namespace  string
	replica    string
	// ordinal is the ordinal of this replica's entry in the webhook configuration. tokenFile is the
	// file with the token by which other replicas identify this one. Empty: this replica asks no
	// others.
	ordinal   int
	tokenFile string
	// version: print the version and exit.
	version bool
	configuration
	// times are all times of the protocol. excluded are the namespaces whose pods never wait,
	// including this replica's own.
	times    drain.Times
	excluded []string
}

// flags declares the flags: for values that differ between replicas, and for values that Kustomize
// overlays set. A flag that is not given leaves its value in o.
func flags(o *options, getenv func(string) string) (f *flag.FlagSet, path *string, print *bool) {
	conf := &o.configuration
	f = flag.NewFlagSet("webhook", flag.ContinueOnError)
	path = f.String("config", "", "configuration file, kind "+kind+"; ${NAME} in it is replaced by the environment; "+
		"flags override it; empty: none")
	print = f.Bool("print-config", false, "print the configuration with its defaults, and end")
	f.BoolVar(&o.version, "version", false, "print which version this is, and end")
	f.StringVar(&o.kubeconfig, "kubeconfig", getenv("KUBECONFIG"),
		"kubeconfig file for the API server; empty: the pod's service account")
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
	f.DurationVar(&conf.Times.ShutdownDelay.Duration, "shutdown-delay", conf.Times.ShutdownDelay.Duration,
		"times.shutdownDelay: how long after SIGTERM reviews are still answered")
	f.TextVar(&conf.LogLevel, "log-level", conf.LogLevel, "logLevel: debug, info, warn or error")
	return f, path, print
}

// parse reads the command line and the file that it names. An error is flag.ErrHelp or errPrinted,
// or wraps errUsage and names the flag or the key, and the value.
func parse(args []string, getenv func(string) string, out io.Writer) (options, error) {
	o := options{configuration: defaults()}
	f, path, print := flags(&o, getenv)
	if err := cli.Parse(f, args, "webhook holds deletions of pods until the gateways that route to them have stopped. "+
		"webhook check --help: find out whether the API server asks.", out); err != nil {
		return o, err
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
		o.configuration = defaults()
		o.APIVersion, o.Kind = "", ""
		if err := config.Read(content, getenv, &o.configuration); err != nil {
			return o, fmt.Errorf("%w: --config %q: %w", errUsage, *path, err)
		}
		// The flags are parsed again, so that they override the file.
		f, _, _ = flags(&o, getenv)
		if err := cli.Parse(f, args, "", out); err != nil {
			return o, err
		}
	}
	if *print {
		if err := errors.Join(config.Unread(o.configuration)...); err != nil {
			return o, fmt.Errorf("%w: --config %q: %w", errUsage, *path, err)
		}
		text, err := config.Print(o.configuration)
		if err != nil {
			return o, err
		}
		fmt.Fprint(out, text)
		return o, errPrinted
	}
	o.times = drain.DefaultTimes()
	o.times.Webhook, o.times.Hold = o.Times.Webhook.Duration, o.Times.Hold.Duration
	o.times.Deadline, o.times.IdleBound = o.Times.Deadline.Duration, o.Times.IdleBound.Duration
	if err := o.check(); err != nil {
		return o, fmt.Errorf("%w: %w", errUsage, err)
	}
	o.excluded = append(slices.Clone(o.ExcludedNamespaces), o.namespace)
	return o, nil
}

// hook returns the options of the preStop hook for new pods.
func (b barrier) hook() admission.HookOptions {
	return admission.HookOptions{Bound: b.Bound.Duration, Port: b.Port, Image: b.Image, PullSecrets: b.ImagePullSecrets,
		ExecOnly: b.ExecOnly}
}

// sameSocket reports whether a program cannot listen at both addresses. An empty host is every one.
func sameSocket(a, b string) bool {
	host, port, _ := net.SplitHostPort(a)
	otherHost, otherPort, _ := net.SplitHostPort(b)
	return port == otherPort && port != "0" && (host == otherHost || host == "" || otherHost == "")
}

// check returns an error that names all invalid values, not only the first.
func (o options) check() error {
	var errs []error
	must := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	must(o.APIVersion == config.APIVersion, "apiVersion %q: must be %q", o.APIVersion, config.APIVersion)
	must(o.Kind == kind, "kind %q: must be %q", o.Kind, kind)
	config.CheckRanges(o.configuration, must)
	must(o.Times.Webhook.Duration%time.Second == 0, "times.webhook %s: must be whole seconds", o.Times.Webhook)
	must(o.namespace != "", "--namespace %q: required, or set POD_NAMESPACE", o.namespace)
	must(o.namespace == "" || len(validation.IsDNS1123Label(o.namespace)) == 0,
		"--namespace %q: not a namespace's name", o.namespace)
	must(o.ordinal >= 0, "--ordinal %d: must not be negative", o.ordinal)
	must(o.replica != "", "--replica %q: required, or set POD_NAME", o.replica)
	addresses := []struct{ flag, value string }{
		{"--admission-address", o.Addresses.Admission}, {"--agents-address", o.Addresses.Agents},
		{"--metrics-address", o.Addresses.Metrics}, {"--probes-address", o.Addresses.Probes},
		{"--dashboard-address", o.Addresses.Dashboard},
	}
	for i, a := range addresses {
		if a.value == "" && a.flag == "--dashboard-address" {
			continue // it is not served
		}
		_, err := net.ResolveTCPAddr("tcp", a.value)
		must(err == nil && strings.Contains(a.value, ":"), "%s %q: not a host:port: %v", a.flag, a.value, err)
		for _, other := range addresses[:i] {
			must(err != nil || !sameSocket(a.value, other.value), "%s %q: %s %q has this port", a.flag, a.value,
				other.flag, other.value)
		}
	}
	if dir := o.Certificates.Dir; dir != "" {
		for _, name := range []string{"tls.crt", "tls.key"} {
			_, err := os.Stat(filepath.Join(dir, name))
			must(err == nil, "--cert-dir %q: %v", dir, err)
		}
		_, err := os.Stat(filepath.Join(dir, certs.CAKey))
		must(err == nil || o.tokenFile == "", "--cert-dir %q: no %s, with which replicas verify each other: %v", dir,
			certs.CAKey, err)
	}
	if file := o.Certificates.AdmissionSecretFile; file != "" {
		if err := admission.CheckSecretFile(file); err != nil {
			errs = append(errs, fmt.Errorf("--admission-secret-file %q: %w", file, err))
		}
	}
	for _, of := range []struct{ key, name string }{
		{"secret", o.Certificates.Secret}, {"configMap", o.Certificates.ConfigMap},
		{"webhookConfiguration", o.Certificates.WebhookConfiguration},
	} {
		must(len(validation.IsDNS1123Subdomain(of.name)) == 0, "certificates.%s %q: not an object's name", of.key,
			of.name)
	}
	for i, name := range o.Certificates.Names {
		_, err := netip.ParseAddr(name)
		must(err == nil || len(validation.IsDNS1123Subdomain(name)) == 0,
			"certificates.names[%d] %q: neither a DNS name nor an address", i, name)
	}
	must(o.Certificates.RotateEvery.Duration >= 3*o.Certificates.Overlap.Duration,
		"certificates.rotateEvery %s: must be at least three times certificates.overlap %s",
		o.Certificates.RotateEvery, o.Certificates.Overlap)
	if o.kubeconfig != "" {
		_, err := os.Stat(o.kubeconfig)
		must(err == nil, "--kubeconfig %q: %v", o.kubeconfig, err)
	}
	must(o.Mode == keys.Enforce || o.Mode == keys.Observe, "mode %q: must be enforce or observe; \"off\" is for the "+
		"label "+keys.Mode+" of a namespace or pod", o.Mode)
	for _, name := range o.ExcludedNamespaces {
		must(len(validation.IsDNS1123Label(name)) == 0, "excludedNamespaces: %q is not a namespace's name", name)
	}
	if err := o.Barrier.hook().Check(); err != nil {
		errs = append(errs, fmt.Errorf("barrier.%w", err))
	}
	errs = append(errs, coverage.Check(o.Gateways)...)
	if err := o.times.Check(); err != nil {
		errs = append(errs, fmt.Errorf("times: %w", err))
	}
	return errors.Join(errs...)
}
