package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/lameduck-io/lameduck/internal/agent/discovery"
	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/internal/version"
	"github.com/lameduck-io/lameduck/pkg/config"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/haproxy"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// apiVersion and kind are what a configuration file must say it is.
const (
	apiVersion = config.APIVersion
	kind       = "AgentConfiguration"
)

// healthTimeout is how long a change may wait for the gateway, unless the file says otherwise: twice the 30 s in which kube-proxy
// synchronises, which is kube-proxy's own limit.
const healthTimeout = 2 * 30 * time.Second

// defaultWaitAddress is where hooks ask, unless the file says otherwise: the kubelet, on the loopback.
const defaultWaitAddress = "127.0.0.1:9447"

// minHealthyPercent is health.Options.UsablePercent, unless the file says otherwise.
const minHealthyPercent = 50

// options are the command line and the configuration file, checked.
type options struct {
	kubeconfig string
	people     string
	nodeName   string
	logLevel   slog.Level
	file       file
	// gateway is made from file, if that names HAProxy. Its servers file exists from then on, so that HAProxy can start.
	gateway *haproxy.Gateway
}

// file is the configuration file. What is said of a key here is said in schemas/agent.json too.
type file struct {
	// APIVersion is lameduck.io/v1alpha1.
	APIVersion string `json:"apiVersion"`
	// Kind is AgentConfiguration.
	Kind string `json:"kind"`
	// Coordinators says where they are. Absent: the agent only follows EndpointSlices, and acknowledges nothing.
	Coordinators *discovery.Config `json:"coordinators,omitempty"`
	// HAProxy is the gateway beside this agent. It or kubeProxy is given, not both.
	HAProxy *haproxyFile `json:"haproxy,omitempty"`
	// KubeProxy makes this the agent of a node, which observes what kube-proxy wrote into the kernel.
	KubeProxy *kubeProxyFile `json:"kubeProxy,omitempty"`
	// EndpointsLag delays every change of EndpointSlices on its way to the gateway. It imitates a slow control plane, for
	// demonstrations and tests; tombstones are not delayed.
	EndpointsLag duration `json:"endpointsLag,omitempty"`
	// StateDir is where tombstones are kept, so that the agent has them when it starts again: a folder that outlives the container, and
	// that no other agent uses. Empty: the folder of haproxy.serversFile, which has to outlive it too; without one nothing is kept.
	StateDir string `json:"stateDir,omitempty"`
	// HealthTimeout is how long a change may wait for the gateway before /livez and /healthz fail. 0: a minute.
	HealthTimeout duration `json:"healthTimeout,omitempty"`
	// MinHealthyPercent of the routable targets of a backend must be healthy, or all of them get traffic. 0: 50.
	MinHealthyPercent int `json:"minHealthyPercent,omitempty"`
}

// haproxyFile configures the HAProxy gateway.
type haproxyFile struct {
	// MasterSocket is the path of HAProxy's master socket: haproxy -W -S PATH.
	MasterSocket string `json:"masterSocket"`
	// ServersFile is the file with the sections of owned backends, which the agent writes and HAProxy loads by an additional -f. Required
	// if a backend is owned.
	ServersFile string `json:"serversFile,omitempty"`
	// Backends are those that the agent directs, at least one.
	Backends []backendFile `json:"backends"`
}

// kubeProxyFile makes this the agent of a node, which observes the node's kernel and answers the hooks of its pods.
type kubeProxyFile struct {
	// WaitAddresses are where hooks ask: host:port, on the loopback for the kubelet, at the node's address for the pods.
	WaitAddresses []string `json:"waitAddresses,omitempty"`
}

// backendFile is one backend and the Service port that feeds it.
type backendFile struct {
	// Backend is the name of HAProxy's backend section.
	Backend string `json:"backend"`
	// Service is namespace/name of the Service that feeds it.
	Service string `json:"service"`
	// Port is the name of the Service's port. Empty: the only one.
	Port string `json:"port,omitempty"`
	// Owned says that the agent writes the section and makes and deletes its servers. Otherwise people did, and the agent only puts servers into
	// maintenance and back.
	Owned bool `json:"owned,omitempty"`
	// Defaults names the defaults section that the owned section is made from. Empty: the last one above it.
	Defaults string `json:"defaults,omitempty"`
	// Lines are more lines of the owned section: balance, options, timeouts. They are written as they are.
	Lines []string `json:"lines,omitempty"`
	// ServerOptions are words for every server of the owned backend, such as "maxconn 50".
	ServerOptions string `json:"serverOptions,omitempty"`
	// HealthCheck is how the agent probes the targets (docs/health.md); the Service's annotation lameduck.io/health-check wins over it.
	// Absent: they are not probed.
	HealthCheck json.RawMessage `json:"healthCheck,omitempty"`
}

type duration = config.Duration

// parse reads the command line and the file that it names. Its errors wrap cli.ErrUsage and name field and value, or are flag.ErrHelp.
func parse(args []string, getenv func(string) string, help io.Writer) (options, error) {
	var o options
	var path string
	var print, which bool
	f := flag.NewFlagSet("agent", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.StringVar(&path, "config", "/etc/lameduck/agent.yaml", "configuration file; ${NAME} in it is replaced by the environment")
	f.StringVar(&o.kubeconfig, "kubeconfig", getenv("KUBECONFIG"), "file to reach the API server with; empty: as a pod does")
	f.StringVar(&o.people, "metrics-address", ":9101", "host:port of /metrics, /livez, /healthz, /readyz and /v1/targets, without TLS")
	f.StringVar(&o.nodeName, "node-name", getenv("NODE_NAME"), "the node this runs on: /healthz fails while it is being deleted; empty: it is not watched")
	f.TextVar(&o.logLevel, "log-level", slog.LevelInfo, "debug, info, warn or error")
	f.BoolVar(&print, "print-config", false, "print the configuration with its defaults, and end")
	f.BoolVar(&which, "version", false, "print which version this is, and end")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(help, "agent directs the gateway beside it and acknowledges to Lameduck's coordinators that pods are let go of.\n\nFlags:")
			f.SetOutput(help)
			f.PrintDefaults()
			return o, err
		}
		return o, fmt.Errorf("%w: %w", cli.ErrUsage, err)
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("%w: unexpected argument %q", cli.ErrUsage, f.Arg(0))
	}
	if which {
		fmt.Fprintln(help, version.String("agent"))
		return o, cli.ErrPrinted
	}
	if print {
		return o, o.file.print(path, getenv, help)
	}
	if err := cli.HostPort(o.people); err != nil {
		return o, fmt.Errorf("%w: --metrics-address %q: must be host:port: %w", cli.ErrUsage, o.people, err)
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
	if err := o.file.read(content, getenv); err != nil {
		return o, fmt.Errorf("%w: --config %q: %w", cli.ErrUsage, path, err)
	}
	if o.file.KubeProxy != nil {
		if o.nodeName == "" {
			return o, fmt.Errorf("%w: --node-name %q: required with kubeProxy, or set NODE_NAME", cli.ErrUsage, o.nodeName)
		}
		return o, nil
	}
	if o.gateway, err = haproxy.New(o.file.HAProxy.gateway()); err != nil {
		return o, fmt.Errorf("%w: --config %q: %w", cli.ErrUsage, path, err)
	}
	return o, nil
}

// read decodes and checks a configuration file. Unknown fields are refused.
func (f *file) read(content []byte, getenv func(string) string) error {
	if err := config.Read(content, getenv, f); err != nil {
		return err
	}
	f.complete()
	return f.check()
}

// complete fills in what is left to the agent.
func (f *file) complete() {
	f.HealthTimeout.Duration = cmp.Or(f.HealthTimeout.Duration, healthTimeout)
	f.MinHealthyPercent = cmp.Or(f.MinHealthyPercent, minHealthyPercent)
}

// print writes the file that this agent runs with, without looking whether it can: what is missing is missing.
func (f file) print(path string, getenv func(string) string, out io.Writer) error {
	content, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: --config %q: %w", cli.ErrUsage, path, err)
	}
	if err := config.Read(content, getenv, &f); err != nil {
		return fmt.Errorf("%w: --config %q: %w", cli.ErrUsage, path, err)
	}
	f.APIVersion, f.Kind = apiVersion, kind
	f.complete()
	f.StateDir = f.journalDir()
	text, err := config.Print(f)
	if err != nil {
		return err
	}
	fmt.Fprint(out, text)
	return cli.ErrPrinted
}

// check reports everything that is wrong, not only the first.
func (f *file) check() error {
	var errs []error
	must := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	must(f.APIVersion == apiVersion, "apiVersion %q: must be %q", f.APIVersion, apiVersion)
	must(f.Kind == kind, "kind %q: must be %q", f.Kind, kind)
	must(f.EndpointsLag.Err == nil, "endpointsLag: %w", f.EndpointsLag.Err)
	must(f.EndpointsLag.Duration >= 0, "endpointsLag %q: must not be negative", f.EndpointsLag)
	must(f.HealthTimeout.Err == nil, "healthTimeout: %w", f.HealthTimeout.Err)
	must(f.HealthTimeout.Duration >= 0, "healthTimeout %q: must not be negative", f.HealthTimeout)
	must(f.MinHealthyPercent >= 0 && f.MinHealthyPercent <= 100, "minHealthyPercent %d: must be 0 to 100", f.MinHealthyPercent)
	if f.Coordinators != nil {
		f.Coordinators.Check(must)
	}
	if f.StateDir != "" {
		info, err := os.Stat(f.StateDir)
		must(err == nil, "stateDir %q: %v", f.StateDir, err)
		must(err != nil || info.IsDir(), "stateDir %q: must be a directory", f.StateDir)
		must(f.Coordinators != nil, "stateDir %q: without coordinators there is nothing to keep", f.StateDir)
	}
	must((f.HAProxy == nil) != (f.KubeProxy == nil), "exactly one of haproxy and kubeProxy is needed: they are the gateways that this version knows")
	if f.KubeProxy != nil {
		if len(f.KubeProxy.WaitAddresses) == 0 {
			f.KubeProxy.WaitAddresses = []string{defaultWaitAddress}
		}
		for i, a := range f.KubeProxy.WaitAddresses {
			err := cli.HostPort(a)
			must(err == nil, "kubeProxy.waitAddresses[%d] %q: must be host:port: %v", i, a, err)
		}
		must(f.StateDir == "", "stateDir %q: an agent that only observes has nothing to keep", f.StateDir)
	}
	if f.HAProxy == nil {
		return errors.Join(errs...)
	}
	must(f.HAProxy.MasterSocket != "", "haproxy.masterSocket %q: required", f.HAProxy.MasterSocket)
	must(len(f.HAProxy.Backends) > 0, "haproxy.backends: at least one is needed")
	first := map[string]int{}
	for i, b := range f.HAProxy.Backends {
		_, _, err := gateway.ParseService(b.Service)
		must(err == nil, "haproxy.backends[%d].service %q: must be namespace/name", i, b.Service)
		must(b.Backend != "", "haproxy.backends[%d].backend %q: required", i, b.Backend)
		if j, twice := first[b.Backend]; twice {
			must(b.Backend == "", "haproxy.backends[%d].backend %q: is that of backends[%d] too", i, b.Backend, j)
			continue
		}
		first[b.Backend] = i
		_, err = health.ParseCheck(string(b.HealthCheck))
		must(err == nil, "haproxy.backends[%d].healthCheck: %w", i, err)
		must(!b.Owned || f.HAProxy.ServersFile != "", "haproxy.serversFile %q: required, backends[%d] is owned", f.HAProxy.ServersFile, i)
	}
	return errors.Join(errs...)
}

// journalDir is where tombstones are kept. Empty: nowhere.
func (f *file) journalDir() string {
	switch {
	case f.Coordinators == nil || f.HAProxy == nil:
		return ""
	case f.StateDir != "":
		return f.StateDir
	case f.HAProxy.ServersFile != "":
		return filepath.Dir(f.HAProxy.ServersFile)
	default:
		return ""
	}
}

// gateway is the configuration of the gateway.
func (h *haproxyFile) gateway() haproxy.Config {
	c := haproxy.Config{Socket: h.MasterSocket, ServersFile: h.ServersFile}
	for _, b := range h.Backends {
		c.Backends = append(c.Backends, haproxy.Backend{
			Pool: health.Pool(b.Backend), Backend: b.Backend, Owned: b.Owned, Defaults: b.Defaults, Lines: b.Lines, ServerOptions: b.ServerOptions,
		})
	}
	return c
}

// routes are what HAProxy routes.
func (h *haproxyFile) routes() []gateway.Route {
	var routes []gateway.Route
	for _, b := range h.Backends {
		routes = append(routes, gateway.Route{Service: b.Service, Port: b.Port, Pool: health.Pool(b.Backend), HealthCheck: string(b.HealthCheck)})
	}
	return routes
}
