package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/version"
)

const help = `kubectl lameduck shows what Lameduck's coordinators know.

  kubectl lameduck status               coordinators, agents, and what went wrong lately
  kubectl lameduck drains [--watch]     pods whose deletion waits for gateways
  kubectl lameduck explain POD          what would happen if the pod were deleted now; nothing does

It reaches the coordinators through the API server (pods/portforward), asks all of them, and joins what they say.

Flags:
`

type options struct {
	command string
	pod     string
	// namespace is where explain looks, and what drains is limited to. Empty: not given.
	namespace string
	output    string
	watch     bool
	evict     bool
	// system is the namespace of the coordinators, selector what their pods are known by, port
	// where they serve; 0: as their pods say.
	system   string
	selector string
	port     int
	timeout  time.Duration
	config   *rest.Config
}

var outputs = []string{"", "wide", "json", "yaml"}

// parse reads the command line, and the kubeconfig that it names. Its errors wrap errUsage, or are
// pflag.ErrHelp or errPrinted.
func parse(args []string, out io.Writer) (options, error) {
	var o options
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	var overrides clientcmd.ConfigOverrides
	f := pflag.NewFlagSet("kubectl lameduck", pflag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.Usage = func() {}
	f.StringVarP(&o.namespace, "namespace", "n", "",
		"namespace: of explain's pod (default: the context's), or what drains shows (default: all)")
	f.StringVarP(&o.output, "output", "o", "", "wide, json or yaml; empty: a table")
	f.BoolVarP(&o.watch, "watch", "w", false, "with drains: go on showing what changes")
	f.BoolVar(&o.evict, "evict", false, "with explain: evicted, as kubectl drain does, and not deleted")
	f.StringVar(&rules.ExplicitPath, "kubeconfig", "", "path of the kubeconfig file")
	f.StringVar(&overrides.CurrentContext, "context", "", "context of the kubeconfig file")
	f.StringVar(&o.system, "lameduck-namespace", "lameduck-system", "namespace of the coordinators")
	f.StringVar(&o.selector, "lameduck-selector", "app.kubernetes.io/name=lameduck,app.kubernetes.io/component=webhook",
		"labels of the coordinators' pods")
	f.IntVar(&o.port, "lameduck-port", 0, fmt.Sprintf("port of the coordinators' --dashboard-address (default: "+
		"their container port %q, or %d)", api.PortName, api.Port))
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
	case "status", "drains":
	default:
		return bad("unknown command %q: there are status, drains and explain", o.command)
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
	case o.evict && o.command != "explain":
		return bad("--evict goes with explain")
	case o.timeout <= 0:
		return bad("--timeout %s: must be more than 0s", o.timeout)
	case o.port < 0 || o.port > 65535:
		return bad("--lameduck-port %d: not a port", o.port)
	}
	loaded := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &overrides)
	var err error
	if o.config, err = loaded.ClientConfig(); err != nil {
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
