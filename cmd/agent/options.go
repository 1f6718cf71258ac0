package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/lameduck-io/lameduck/internal/agent/discovery"
	"github.com/lameduck-io/lameduck/internal/agent/kinds"
	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/internal/config"
	"github.com/lameduck-io/lameduck/internal/version"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// apiVersion and kind are the required values of these fields in a configuration file.
const (
	apiVersion = config.APIVersion
	kind       = "AgentConfiguration"
)

// healthTimeout is the default of the file's healthTimeout. It is kube-proxy's own limit: twice its
// synchronization period of 30 s.
const healthTimeout = 2 * 30 * time.Second

// defaultWaitAddress is the default of the file's waitAddresses. On the loopback address only the
// kubelet's hooks reach the agent.
const defaultWaitAddress = "127.0.0.1:9447"

// minHealthyPercent is the default of the file's health.minHealthyPercent.
const minHealthyPercent = 50

// options are the validated command line and configuration file.
type options struct {
	kubeconfig string
	metrics    string
	nodeName   string
	logLevel   slog.Level
	file       file
	// kind is the kind of gateway in the file. directed is the gateway itself; nil: the gateway is
	// observed.
	kind     gateway.Kind
	directed gateway.Directed
}

// file is the configuration file. The comments of its fields are also the descriptions in
// schemas/agent.json.
type file struct {
	// APIVersion is lameduck.io/v1alpha1.
	APIVersion string `json:"apiVersion"`
	// Kind is AgentConfiguration.
	Kind string `json:"kind"`
	// Coordinators configures how the agent finds and verifies the coordinators. Absent: nothing is
	// acknowledged. An agent that directs then only follows EndpointSlices, hooks wait only for the
	// kernel of their own node, and other agents do not start.
	Coordinators *discovery.Config `json:"coordinators,omitempty"`
	// Gateway is the gateway that this agent directs or observes. Exactly one of its keys is
	// required.
	Gateway kinds.Gateway `json:"gateway"`
	// Health configures health checks. It is allowed only with gateways whose pools the agent owns:
	// haproxy, apisix.
	Health *healthFile `json:"health,omitempty"`
	// WaitAddresses are the host:port addresses at which a node agent answers preStop hooks: on the
	// loopback for hooks of the kubelet, on the node's address for hooks in pods. Empty:
	// 127.0.0.1:9447. Other agents must not set it.
	WaitAddresses []string `json:"waitAddresses,omitempty"`
	// StateDir is a folder in which the agent keeps its exclusions, so that it has them when it
	// starts again. The folder must outlive the container, and no other agent may use it. Empty:
	// the folder of gateway.haproxy.serversFile, which then must outlive the container; with other
	// gateways nothing is kept.
	StateDir string `json:"stateDir,omitempty"`
	// HealthTimeout is how long a change may wait for a directed gateway before /livez and /healthz
	// fail. 0: 1 minute.
	HealthTimeout duration `json:"healthTimeout,omitempty" range:"1s..1h"`
}

// healthFile configures the health checks of targets.
type healthFile struct {
	// MinHealthyPercent is the percentage of a pool's routable targets that must be healthy. If
	// fewer are, all of them get traffic. 0: 50.
	MinHealthyPercent int `json:"minHealthyPercent,omitempty" range:"1..100"`
	// IgnoreAnnotations: use only the checks in this file, and do not read the annotation
	// lameduck.io/health-check of Services. Set it if tenants may annotate Services but must not
	// choose what the agent probes.
	IgnoreAnnotations bool `json:"ignoreAnnotations,omitempty"`
}

type duration = config.Duration

// parse reads the command line and the file that it names. An error is flag.ErrHelp or
// cli.ErrPrinted, or wraps cli.ErrUsage and names the field and the value.
func parse(args []string, getenv func(string) string, help io.Writer) (options, error) {
	var o options
	var path string
	var print, which bool
	f := flag.NewFlagSet("agent", flag.ContinueOnError)
	f.StringVar(&path, "config", "/etc/lameduck/agent.yaml",
		"configuration file; ${NAME} in it is replaced by the environment")
	f.StringVar(&o.kubeconfig, "kubeconfig", getenv("KUBECONFIG"),
		"kubeconfig file for the API server; empty: the pod's service account")
	f.StringVar(&o.metrics, "metrics-address", ":9101",
		"host:port of /metrics, /livez, /healthz, /readyz and, of a directed gateway, /startz and /v1/targets, "+
			"without TLS")
	f.StringVar(&o.nodeName, "node-name", getenv("NODE_NAME"),
		"the node this runs on: /healthz fails while it is being deleted; empty: it is not watched; required with "+
			"gateway.kubeProxy")
	f.TextVar(&o.logLevel, "log-level", slog.LevelInfo, "debug, info, warn or error")
	f.BoolVar(&print, "print-config", false, "print the configuration with its defaults, and end")
	f.BoolVar(&which, "version", false, "print which version this is, and end")
	if err := cli.Parse(f, args, "agent directs or observes the gateway beside it and acknowledges to Lameduck's "+
		"coordinators that it has stopped routing to a pod.", help); err != nil {
		return o, err
	}
	if which {
		fmt.Fprintln(help, version.String("agent"))
		return o, cli.ErrPrinted
	}
	if print {
		return o, o.file.print(path, getenv, help)
	}
	if err := cli.HostPort(o.metrics); err != nil {
		return o, fmt.Errorf("%w: --metrics-address %q: must be host:port: %w", cli.ErrUsage, o.metrics, err)
	}
	if o.kubeconfig != "" {
		if _, err := os.Stat(o.kubeconfig); err != nil {
			return o, fmt.Errorf("%w: --kubeconfig %q: %w", cli.ErrUsage, o.kubeconfig, err)
		}
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return o, fmt.Errorf("%w: --config %q: %w", cli.ErrUsage, path, err)
	}
	if o.kind, err = o.file.read(content, getenv); err != nil {
		return o, fmt.Errorf("%w: --config %q: %w", cli.ErrUsage, path, err)
	}
	switch kind := o.kind.(type) {
	case gateway.DirectedKind:
		if o.directed, err = kind.Direct(); err != nil {
			return o, fmt.Errorf("%w: --config %q: %w", cli.ErrUsage, path, err)
		}
	case gateway.ObservedKind:
		if onNode(kind) && o.nodeName == "" {
			return o, fmt.Errorf("%w: --node-name %q: required with gateway.kubeProxy, or set NODE_NAME",
				cli.ErrUsage, o.nodeName)
		}
	}
	return o, nil
}

// read decodes and checks a configuration file, and sets its defaults. Unknown fields are an error.
func (f *file) read(content []byte, getenv func(string) string) (gateway.Kind, error) {
	if err := config.Read(content, getenv, f); err != nil {
		return nil, err
	}
	kind, err := f.check()
	f.complete(kind)
	return kind, err
}

// onNode reports whether the agent is a node agent, which answers the hooks of the node's pods. Any
// other observing agent runs beside one replica of its gateway.
func onNode(kind gateway.ObservedKind) bool {
	return kind.Observe(slog.New(slog.DiscardHandler)).Population() == gateway.Nodes
}

// complete sets the defaults of keys that are not set.
func (f *file) complete(kind gateway.Kind) {
	f.HealthTimeout.Duration = cmp.Or(f.HealthTimeout.Duration, healthTimeout)
	switch kind := kind.(type) {
	case gateway.DirectedKind:
		if kind.OwnsPool() {
			f.Health = cmp.Or(f.Health, &healthFile{})
			f.Health.MinHealthyPercent = cmp.Or(f.Health.MinHealthyPercent, minHealthyPercent)
		}
		if f.Coordinators != nil {
			f.StateDir = cmp.Or(f.StateDir, kind.StateDir())
		}
	case gateway.ObservedKind:
		if onNode(kind) && len(f.WaitAddresses) == 0 {
			f.WaitAddresses = []string{defaultWaitAddress}
		}
	}
}

// print writes the complete configuration, without validating it: missing values stay missing.
func (f file) print(path string, getenv func(string) string, out io.Writer) error {
	content, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: --config %q: %w", cli.ErrUsage, path, err)
	}
	if err := config.Read(content, getenv, &f); err != nil {
		return fmt.Errorf("%w: --config %q: %w", cli.ErrUsage, path, err)
	}
	if err := errors.Join(config.Unread(f)...); err != nil {
		return fmt.Errorf("%w: --config %q: %w", cli.ErrUsage, path, err)
	}
	f.APIVersion, f.Kind = apiVersion, kind
	_, kind, _ := f.Gateway.Kind() // not validated
	f.complete(kind)
	text, err := config.Print(f)
	if err != nil {
		return err
	}
	fmt.Fprint(out, text)
	return cli.ErrPrinted
}

// check returns the kind of gateway. Its error names all invalid values, not only the first.
func (f *file) check() (gateway.Kind, error) {
	var errs []error
	must := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	must(f.APIVersion == apiVersion, "apiVersion %q: must be %q", f.APIVersion, apiVersion)
	must(f.Kind == kind, "kind %q: must be %q", f.Kind, kind)
	config.CheckRanges(f, must)
	if f.Coordinators != nil {
		f.Coordinators.Check(must)
	}
	if f.StateDir != "" {
		info, err := os.Stat(f.StateDir)
		must(err == nil, "stateDir %q: %v", f.StateDir, err)
		must(err != nil || info.IsDir(), "stateDir %q: must be a directory", f.StateDir)
		must(f.Coordinators != nil, "stateDir %q: without coordinators there is nothing to keep", f.StateDir)
	}
	for i, a := range f.WaitAddresses {
		err := cli.HostPort(a)
		must(err == nil, "waitAddresses[%d] %q: must be host:port: %v", i, a, err)
		host, _, _ := net.SplitHostPort(a)
		must(err != nil || host != "", "waitAddresses[%d] %q: has no host: for all addresses write 0.0.0.0 or [::]",
			i, a)
	}
	key, kind, err := f.Gateway.Kind()
	if err != nil {
		return nil, errors.Join(append(errs, err)...)
	}
	for _, err := range kind.Check() {
		must(false, "gateway.%s.%w", key, err)
	}
	owns := false
	switch kind := kind.(type) {
	case gateway.DirectedKind:
		owns = kind.OwnsPool()
		must(len(f.WaitAddresses) == 0, "waitAddresses %q: gateway.%s is directed, and answers no hooks",
			f.WaitAddresses, key)
	case gateway.ObservedKind:
		must(onNode(kind) || len(f.WaitAddresses) == 0, "waitAddresses %q: the agent of gateway.%s is beside a "+
			"replica, and answers no hooks: the agent on the pod's node does", f.WaitAddresses, key)
		must(onNode(kind) || f.Coordinators != nil, "coordinators: required with gateway.%s: without them nothing is "+
			"acknowledged", key)
		must(f.StateDir == "", "stateDir %q: an observing agent has no exclusions to keep", f.StateDir)
	}
	must(owns || f.Health == nil, "health: the agent does not own the pools of gateway.%s, so health checks are not "+
		"for it", key)
	for _, r := range kind.Routes() {
		at := "gateway." + key + "." + r.Key
		_, _, err := gateway.ParseService(r.Service)
		must(err == nil, "%s.service %q: must be namespace/name", at, r.Service)
		must(r.Port == "" || len(validation.IsDNS1123Label(r.Port)) == 0, "%s.port %q: not the name of a port", at,
			r.Port)
		_, err = health.ParseCheck(r.HealthCheck)
		must(err == nil, "%s.healthCheck: %w", at, err)
		must(owns || r.HealthCheck == "", "%s.healthCheck: the agent does not own the pools of gateway.%s", at, key)
	}
	return kind, errors.Join(errs...)
}
