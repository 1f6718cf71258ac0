package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	_ "k8s.io/client-go/plugin/pkg/client/auth" // kubeconfigs with auth-provider, as kubectl reads them
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/version"
)

const help = `kubectl lameduck shows the state of Lameduck's coordinators.

  kubectl lameduck status               coordinators, agents, and what went wrong lately
  kubectl lameduck drains [--watch]     pods whose deletion waits for gateways
  kubectl lameduck explain POD          what would happen if the pod were deleted now; nothing does
  kubectl lameduck report [-n NS]       what deletions in mode observe would have waited for
  kubectl lameduck check [--strict]     what is wrong with the installation, and how to fix it
  kubectl lameduck check --pre          what would be in the way of one
  kubectl lameduck version              versions of this plugin, the coordinators and the agents
  kubectl lameduck completion SHELL     how the shell completes these; bash, zsh or fish

Exit codes of check: 0 all is well, 1 errors were found, 2 something could not be checked.
It reaches the coordinators through the API server (pods/portforward), asks all of them, and merges their answers.

Flags:
`

type options struct {
	command string
	pod     string
	// namespace is the namespace of explain's pod, or the only one that drains and report show, or
	// the one that check evicts in. Empty: not given.
	namespace string
	output    string
	watch     bool
	evict     bool
	// pre and strict are flags of check.
	pre, strict bool
	// words are the words of the command line to complete.
	words []string
	// system is the namespace of the coordinators. selector is the label selector of their pods.
	// port is the port of their dashboard; 0: the container port with that name, or the default.
	system   string
	selector string
	port     int
	timeout  time.Duration
	config   *rest.Config
}

var commands = []string{"status", "drains", "explain", "report", "check", "version", "completion"}

var outputs = []string{"", "wide", "json", "yaml"}

// parse reads the command line, and the kubeconfig that it names. An error wraps errUsage, or is
// pflag.ErrHelp or errPrinted.
func parse(args []string, out io.Writer) (options, error) {
	var o options
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	var overrides clientcmd.ConfigOverrides
	if len(args) > 0 && args[0] == complete {
		o.command, o.words = args[0], args[1:]
		return o, nil
	}
	f := pflag.NewFlagSet("kubectl lameduck", pflag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.Usage = func() {}
	f.StringVarP(&o.namespace, "namespace", "n", "", "namespace: of explain's pod (default: the context's), what "+
		"drains, status and report show (default: all), or where check asks (default: one whose deletions wait)")
	everywhere := f.BoolP("all-namespaces", "A", false,
		"with drains, status or report: of all namespaces, as without -n")
	f.BoolVar(&o.pre, "pre", false, "with check: before an installation")
	f.BoolVar(&o.strict, "strict", false, "with check: warnings are errors")
	f.StringVarP(&o.output, "output", "o", "", "wide, json or yaml; empty: a table")
	f.BoolVarP(&o.watch, "watch", "w", false, "with drains: keep printing changes")
	f.BoolVar(&o.evict, "evict", false, "with explain: evicted, as kubectl drain does, and not deleted")
	f.StringVar(&rules.ExplicitPath, "kubeconfig", "", "path of the kubeconfig file")
	bound := clientcmd.RecommendedConfigOverrideFlags("")
	bound.ContextOverrideFlags.Namespace.LongName = "" // -n has another meaning here
	clientcmd.BindOverrideFlags(&overrides, f, bound)
	f.StringVar(&o.system, "lameduck-namespace", "lameduck-system", "namespace of the coordinators")
	f.StringVar(&o.selector, "lameduck-selector", "app.kubernetes.io/name=lameduck,app.kubernetes.io/component=webhook",
		"labels of the coordinators' pods")
	f.IntVar(&o.port, "lameduck-port", 0, fmt.Sprintf("port of the coordinators' addresses.dashboard "+
		"(default: their container port %q, or %d)", api.PortName, api.Port))
	f.DurationVar(&o.timeout, "timeout", 10*time.Second, "how long to wait for a coordinator")
	which := f.Bool("version", false, "print which version this is, and end")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			fmt.Fprint(out, help, f.FlagUsages())
			return o, err
		}
		return o, fmt.Errorf("%w: %w", errUsage, err)
	}
	if *which {
		fmt.Fprintln(out, version.String("kubectl-lameduck"))
		return o, errPrinted
	}
	words := f.Args()
	if len(words) == 0 || words[0] == "help" {
		fmt.Fprint(out, help, f.FlagUsages())
		return o, pflag.ErrHelp
	}
	o.command, words = words[0], words[1:]
	bad := func(format string, args ...any) (options, error) {
		return o, fmt.Errorf("%w: %s", errUsage, fmt.Sprintf(format, args...))
	}
	switch o.command {
	case "explain":
		if len(words) != 1 {
			return bad("explain takes the name of one pod, not %d", len(words))
		}
		o.pod, words = strings.TrimPrefix(words[0], "pod/"), nil
	case "completion":
		if len(words) != 1 || !slices.Contains(shells, words[0]) {
			return bad("completion takes one of %s", strings.Join(shells, ", "))
		}
		return o, nil
	case "status", "drains", "report", "check", "version":
	default:
		return bad("unknown command %q: there are %s", o.command, strings.Join(commands, ", "))
	}
	switch {
	case len(words) > 0:
		return bad("unexpected argument %q", words[0])
	case !slices.Contains(outputs, o.output):
		return bad("--output %q: must be wide, json or yaml", o.output)
	case o.watch && o.command != "drains":
		return bad("--watch goes with drains")
	case o.watch && o.output == "yaml":
		return bad("--watch has no --output yaml: take json, one object a line")
	case *everywhere && (o.namespace != "" || !slices.Contains([]string{"drains", "status", "report"}, o.command)):
		return bad("--all-namespaces goes with drains, status and report, without --namespace")
	case (o.pre || o.strict) && o.command != "check":
		return bad("--pre and --strict go with check")
	case o.output == "wide" && slices.Contains([]string{"check", "report", "version"}, o.command):
		return bad("%s has no --output wide", o.command)
	case o.evict && o.command != "explain":
		return bad("--evict goes with explain")
	case o.timeout <= 0:
		return bad("--timeout %s: must be more than 0s", o.timeout)
	case o.port < 0 || o.port > 65535:
		return bad("--lameduck-port %d: not a port", o.port)
	}
	loaded := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &overrides)
	var err error
	if o.config, err = loaded.ClientConfig(); clientcmd.IsEmptyConfig(err) {
		return o, fmt.Errorf("%w: no kubeconfig: give --kubeconfig, set KUBECONFIG or write ~/.kube/config", errUsage)
	} else if err != nil {
		return o, fmt.Errorf("%w: kubeconfig: %w", errUsage, err)
	}
	o.config.UserAgent = "kubectl-lameduck"
	if o.command == "explain" && o.namespace == "" {
		if o.namespace, _, err = loaded.Namespace(); err != nil {
			return o, fmt.Errorf("%w: kubeconfig: %w", errUsage, err)
		}
	}
	return o, nil
}
