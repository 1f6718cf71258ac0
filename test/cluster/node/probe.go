package node

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/lameduck-io/lameduck/test/cluster/internal/process"
)

// httpClient connects as the kubelet does: from the node's address, with a connection per request.
type httpClient struct {
	client *http.Client
	node   netip.Addr
}

func newHTTPClient(node netip.Addr) *httpClient {
	h := &httpClient{node: node}
	h.client = &http.Client{
		Transport: &http.Transport{
			DialContext:        h.dial,
			TLSClientConfig:    &tls.Config{InsecureSkipVerify: true}, // as the kubelet
			DisableKeepAlives:  true,
			DisableCompression: true,
		},
		// A redirect is an answer below 400.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return h
}

// dial connects from the node's address, or from loopback to loopback.
func (h *httpClient) dial(ctx context.Context, network, address string) (net.Conn, error) {
	dialer := net.Dialer{}
	if to, err := netip.ParseAddrPort(address); err == nil && !to.Addr().IsLoopback() && to.Addr().Is4() {
		dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(h.node, 0))
	}
	conn, err := dialer.DialContext(ctx, network, address)
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetLinger(1) // few ports wait, as with the kubelet's probes
	}
	return conn, err
}

// get is the httpGet of a probe or a hook.
func (c *container) get(ctx context.Context, action *v1.HTTPGetAction, agent string) (status int, err error) {
	port, err := c.port(action.Port)
	if err != nil {
		return 0, err
	}
	host := action.Host
	if host == "" {
		host = c.pod.ip()
	}
	u, err := url.Parse(action.Path)
	if err != nil {
		u = &url.URL{Path: action.Path}
	}
	u.Scheme = strings.ToLower(string(action.Scheme))
	if u.Scheme == "" {
		u.Scheme = "http"
	}
	u.Host = net.JoinHostPort(host, strconv.Itoa(port))
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return 0, err
	}
	request.Header.Set("User-Agent", agent)
	request.Header.Set("Accept", "*/*")
	for _, header := range action.HTTPHeaders {
		if strings.EqualFold(header.Name, "Host") {
			request.Host = header.Value
			continue
		}
		request.Header.Set(header.Name, header.Value)
	}
	response, err := c.pod.node.http.client.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	io.Copy(io.Discard, io.LimitReader(response.Body, 10<<10))
	return response.StatusCode, nil
}

// port is the number of a port that may be given by name.
func (c *container) port(port intstr.IntOrString) (int, error) {
	if port.Type == intstr.Int {
		return port.IntValue(), nil
	}
	for _, p := range c.spec.Ports {
		if p.Name == port.StrVal {
			return int(p.ContainerPort), nil
		}
	}
	if number, err := strconv.Atoi(port.StrVal); err == nil {
		return number, nil
	}
	return 0, fmt.Errorf("container %q has no port %q", c.spec.Name, port.StrVal)
}

// command runs a program beside the container, in its environment and group of files, and kills it
// when ctx ends.
func (c *container) runBeside(ctx context.Context, argv []string) error {
	env, err := c.environment()
	if err != nil {
		return err
	}
	cmd, err := c.exec(argv, env)
	if err != nil {
		return err
	}
	log, err := os.OpenFile(c.pod.node.logPath(c.pod.uid, c.spec.Name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	proc, err := process.Start(cmd)
	if err != nil {
		return err
	}
	select {
	case <-proc.Done():
	case <-ctx.Done():
		proc.Kill()
		return context.Cause(ctx)
	}
	if code, _, _ := proc.Exit(); code != 0 {
		return fmt.Errorf("%s: exit code %d", argv[0], code)
	}
	return nil
}

// hook runs a lifecycle hook. The status of an HTTP answer means nothing, and there is no timeout,
// as with the kubelet.
func (c *container) hook(ctx context.Context, hook *v1.LifecycleHandler) error {
	switch {
	case hook.Exec != nil:
		return c.runBeside(ctx, hook.Exec.Command)
	case hook.HTTPGet != nil:
		_, err := c.get(ctx, hook.HTTPGet, "kube-lifecycle/stand-in")
		return err
	case hook.Sleep != nil:
		select {
		case <-time.After(time.Duration(hook.Sleep.Seconds) * time.Second):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	default:
		return errors.New("a hook without action, or with tcpSocket, which the kubelet does not run")
	}
}

// postStart runs the hook, if any, and shows the container as running. It reports false if the
// container must not live on.
func (c *container) postStart(ctx context.Context, began time.Time) bool {
	if c.spec.Lifecycle == nil || c.spec.Lifecycle.PostStart == nil {
		return true
	}
	if err := c.hook(ctx, c.spec.Lifecycle.PostStart); err != nil {
		if ctx.Err() == nil {
			c.pod.warn("FailedPostStartHook", "PostStartHook failed")
			c.restart(nil, "postStart hook: "+err.Error())
		}
		return false
	}
	c.showRunning(began)
	return true
}

// probe runs the probes of a running container until ctx ends.
func (c *container) probe(ctx context.Context, began time.Time) {
	if c.spec.StartupProbe != nil {
		passed := false
		c.probeLoop(ctx, began, "Startup", c.spec.StartupProbe, func(ok bool) bool {
			if passed = ok; !ok {
				c.restart(c.spec.StartupProbe.TerminationGracePeriodSeconds, "startup probe")
			}
			return false
		})
		if !passed {
			return
		}
	}
	c.change(func() { c.started = true })
	select {
	case <-c.up:
	default:
		close(c.up) // only this function does, and only once at a time
	}
	liveness := make(chan struct{})
	go func() {
		defer close(liveness)
		if c.spec.LivenessProbe == nil {
			return
		}
		c.probeLoop(ctx, began, "Liveness", c.spec.LivenessProbe, func(ok bool) bool {
			if !ok {
				c.restart(c.spec.LivenessProbe.TerminationGracePeriodSeconds, "liveness probe")
			}
			return ok
		})
	}()
	if c.spec.ReadinessProbe != nil {
		c.probeLoop(ctx, began, "Readiness", c.spec.ReadinessProbe, func(ok bool) bool {
			c.change(func() { c.probed = ok })
			return true
		})
	}
	<-liveness
}

// restart asks for a restart, unless the pod stops anyway.
func (c *container) restart(grace *int64, why string) {
	if c.pod.isStopping() {
		return
	}
	c.event(Unhealthy, why)
	c.unhealthy <- grace // of size 1, emptied at the start, and this is the only one
}

// probeLoop probes until ctx ends or set returns false, and calls set when a threshold is reached
// for the first time and whenever the verdict changes after that. Startup and liveness end when the
// pod stops; readiness goes on.
func (c *container) probeLoop(ctx context.Context, began time.Time, kind string, probe *v1.Probe,
	set func(ok bool) bool) {
	var stopping <-chan struct{}
	if kind != "Readiness" {
		stopping = c.pod.stopping
	}
	delay := max(c.pod.node.options.FirstProbe, time.Duration(probe.InitialDelaySeconds)*time.Second)
	timer := time.NewTimer(time.Until(began.Add(delay)))
	defer timer.Stop()
	period := time.Duration(max(probe.PeriodSeconds, 1)) * time.Second
	var last, known, verdict bool
	run := int32(0)
	for {
		select {
		case <-timer.C:
		case <-stopping:
			return
		case <-ctx.Done():
			return
		}
		timer.Reset(period)
		err := c.probeOnce(ctx, probe)
		if ctx.Err() != nil {
			return
		}
		ok := err == nil
		if run == 0 || ok != last {
			last, run = ok, 0
			if !ok {
				c.pod.warn("Unhealthy", fmt.Sprintf("%s probe failed: %v", kind, err))
			}
		}
		run++
		if ok && run < probe.SuccessThreshold || !ok && run < probe.FailureThreshold {
			continue
		}
		if known && verdict == ok {
			continue
		}
		known, verdict = true, ok
		if !set(ok) {
			return
		}
	}
}

// probeOnce runs a probe one time. nil is success.
func (c *container) probeOnce(ctx context.Context, probe *v1.Probe) error {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(max(probe.TimeoutSeconds, 1))*time.Second)
	defer cancel()
	switch {
	case probe.HTTPGet != nil:
		status, err := c.get(ctx, probe.HTTPGet, "kube-probe/stand-in")
		if err == nil && (status < 200 || status >= 400) {
			err = fmt.Errorf("HTTP status %d", status)
		}
		return err
	case probe.TCPSocket != nil:
		port, err := c.port(probe.TCPSocket.Port)
		if err != nil {
			return err
		}
		host := probe.TCPSocket.Host
		if host == "" {
			host = c.pod.ip()
		}
		conn, err := c.pod.node.http.dial(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil {
			return err
		}
		return conn.Close()
	case probe.Exec != nil:
		return c.runBeside(ctx, probe.Exec.Command)
	default:
		return errors.New("this node has no gRPC probes")
	}
}
