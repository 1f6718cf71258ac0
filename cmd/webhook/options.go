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
	configuration
	// times are all times of the protocol. excluded are the namespaces whose pods never wait,
	// including this replica's own.
	times    drain.Times
	excluded []string
}

// parse reads the command line and the file that it names. An error is flag.ErrHelp or errPrinted,
// or wraps errUsage and names the flag or the key, and the value.
func parse(args []string, getenv func(string) string, out io.Writer) (options, error) {
	o := options{configuration: defaults()}
	f := flag.NewFlagSet("webhook", flag.ContinueOnError)
	path := f.String("config", "", "configuration file, kind "+kind+"; ${NAME} in it is replaced by the environment; "+
		"empty: none")
	print := f.Bool("print-config", false, "print the configuration with its defaults, and end")
	which := f.Bool("version", false, "print which version this is, and end")
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
	if err := cli.Parse(f, args, "webhook holds deletions of pods until the gateways that route to them have stopped. "+
		"webhook check --help: find out whether the API server asks.", out); err != nil {
		return o, err
	}
	if *which {
		fmt.Fprintln(out, version.String("webhook"))
		return o, errPrinted
	}
	if *path != "" {
		content, err := os.ReadFile(*path)
		if err != nil {
			return o, fmt.Errorf("%w: --config %q: %w", errUsage, *path, err)
		}
		o.APIVersion, o.Kind = "", ""
		if err := config.Read(content, getenv, &o.configuration); err != nil {
			return o, fmt.Errorf("%w: --config %q: %w", errUsage, *path, err)
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
	addresses := []struct{ key, value string }{
		{"admission", o.Addresses.Admission}, {"agents", o.Addresses.Agents}, {"metrics", o.Addresses.Metrics},
		{"probes", o.Addresses.Probes}, {"dashboard", o.Addresses.Dashboard},
	}
	for i, a := range addresses {
		if a.value == "" && a.key == "dashboard" {
			continue // it is not served
		}
		_, err := net.ResolveTCPAddr("tcp", a.value)
		must(err == nil && strings.Contains(a.value, ":"), "addresses.%s %q: not a host:port: %v", a.key, a.value, err)
		for _, other := range addresses[:i] {
			must(err != nil || !sameSocket(a.value, other.value), "addresses.%s %q: addresses.%s %q has this port",
				a.key, a.value, other.key, other.value)
		}
	}
	if dir := o.Certificates.Dir; dir != "" {
		for _, name := range []string{"tls.crt", "tls.key"} {
			_, err := os.Stat(filepath.Join(dir, name))
			must(err == nil, "certificates.dir %q: %v", dir, err)
		}
		_, err := os.Stat(filepath.Join(dir, certs.CAKey))
		must(err == nil || o.tokenFile == "", "certificates.dir %q: no %s, with which replicas verify each other: %v",
			dir, certs.CAKey, err)
	}
	if file := o.Certificates.AdmissionSecretFile; file != "" {
		if err := admission.CheckSecretFile(file); err != nil {
			errs = append(errs, fmt.Errorf("certificates.admissionSecretFile %q: %w", file, err))
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
