package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/internal/version"
)

type options struct {
	agent     string // host:port
	id        string
	container string
	bound     time.Duration
	install   string

	// At most one of these is the container's own hook.
	sleep   time.Duration
	httpGet string
	command []string

	http    target // of httpGet
	headers []string
}

// parse reads the command line. Its errors name the flag and the value.
func parse(args []string, getenv func(string) string, help io.Writer) (options, error) {
	var o options
	var which bool
	f := flag.NewFlagSet("lameduck-wait", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.StringVar(&o.agent, "agent", "", "`host:port` of the agent of this node")
	f.StringVar(&o.id, "id", "", "the pod's annotation lameduck.io/barrier-id")
	f.StringVar(&o.container, "container", "", "the name of this container")
	f.DurationVar(&o.bound, "bound", 30*time.Second, "how long to wait at most")
	f.StringVar(&o.install, "install", "", "copy this program to `path`, and do nothing else")
	f.BoolVar(&which, "version", false, "print which version this is, and do nothing else")
	f.DurationVar(&o.sleep, "sleep", 0, "then sleep")
	f.StringVar(&o.httpGet, "http-get", "", "then get this `URL`; what it answers does not matter, as with a hook "+
		"of a kubelet")
	f.Func("http-header", "`Name: value` to send with --http-get; may be repeated", func(s string) error {
		if strings.ContainsAny(s, "\r\n") || !strings.Contains(s, ":") {
			return errors.New("want Name: value")
		}
		o.headers = append(o.headers, s)
		return nil
	})
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(help, "lameduck-wait waits until the gateways have stopped routing to the pod, then runs "+
				"the container's own preStop hook, which follows after --.\n\nFlags:")
			f.SetOutput(help)
			f.PrintDefaults()
		}
		return o, err
	}
	o.command = f.Args()
	if which {
		fmt.Fprintln(help, version.String("lameduck-wait"))
		return o, errPrinted
	}
	if o.install != "" {
		return o, nil
	}
	var errs []error
	var err error
	if o.agent, err = hostPort(expand(o.agent, getenv)); err != nil {
		errs = append(errs, fmt.Errorf("--agent: %w", err))
	}
	if o.id == "" {
		errs = append(errs, errors.New("--id is empty"))
	}
	if o.bound <= 0 {
		errs = append(errs, fmt.Errorf("--bound %s: must be positive", o.bound))
	}
	hooks := 0
	for _, given := range []bool{o.sleep != 0, o.httpGet != "", len(o.command) > 0} {
		if given {
			hooks++
		}
	}
	if hooks > 1 {
		errs = append(errs, errors.New("more than one of --sleep, --http-get and a command"))
	}
	if o.sleep < 0 {
		errs = append(errs, fmt.Errorf("--sleep %s: must not be negative", o.sleep))
	}
	if o.httpGet != "" {
		if o.http, err = readURL(o.httpGet, getenv); err != nil {
			errs = append(errs, fmt.Errorf("--http-get %q: %w", o.httpGet, err))
		}
	}
	return o, errors.Join(errs...)
}

// expand replaces each $(NAME) with the environment variable NAME. Any other $ stays as it is.
func expand(s string, getenv func(string) string) string {
	var out strings.Builder
	for {
		before, rest, found := strings.Cut(s, "$(")
		name, after, closed := strings.Cut(rest, ")")
		if !found || !closed {
			out.WriteString(s)
			return out.String()
		}
		out.WriteString(before + getenv(name))
		s = after
	}
}

// hostPort validates host:port. It also accepts an IPv6 address without brackets, because
// status.hostIP of a pod has none.
func hostPort(s string) (string, error) {
	i := strings.LastIndexByte(s, ':')
	if i < 1 || i == len(s)-1 {
		return "", fmt.Errorf("%q is not host:port", s)
	}
	return net.JoinHostPort(strings.Trim(s[:i], "[]"), s[i+1:]), nil
}

// target is the destination of a GET request.
type target struct {
	address string // host:port
	host    string // of the header
	path    string // with its query
}

// readURL parses http://host:port/path. The host may be $(NAME). As with kubelets, every path is
// valid: one that cannot be parsed is escaped.
func readURL(s string, getenv func(string) string) (target, error) {
	rest, ok := strings.CutPrefix(s, "http://")
	if !ok {
		return target{}, errors.New("want http://")
	}
	authority, path, _ := strings.Cut(rest, "/")
	address, err := hostPort(expand(authority, getenv))
	if err != nil {
		return target{}, err
	}
	u, err := url.Parse("http://" + address + "/" + path)
	if err != nil {
		u = &url.URL{Path: "/" + path}
	}
	return target{address: address, host: address, path: u.RequestURI()}, nil
}
