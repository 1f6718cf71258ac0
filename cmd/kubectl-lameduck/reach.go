package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/lameduck-io/lameduck/internal/check"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/podfacts"
)

// mostAnswer bounds an answer, in bytes.
const mostAnswer = 32 << 20

// replica is one coordinator, with the connection to it.
type replica struct {
	name  string
	pod   *corev1.Pod
	ready bool
	http  *http.Client
	// dial opens a connection to a port of the pod.
	dial  func(ctx context.Context, port int) (net.Conn, error)
	close func()
}

type replicas []*replica

func (all replicas) close() {
	for _, r := range all {
		r.close()
	}
}

// list returns the coordinators' pods, in the order of their names.
func list(ctx context.Context, o options, kube kubernetes.Interface) ([]corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	pods, err := kube.CoreV1().Pods(o.system).List(ctx, metav1.ListOptions{LabelSelector: o.selector})
	switch {
	case apierrors.IsForbidden(err):
		return nil, fmt.Errorf("you may not list pods in namespace %s, where Lameduck's coordinators are: %w", o.system,
			err)
	case err != nil:
		return nil, fmt.Errorf("list Lameduck's coordinators in namespace %s: %w", o.system, err)
	}
	slices.SortFunc(pods.Items, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return pods.Items, nil
}

// find returns the coordinators whose pods have not ended. It does not connect to them. It returns
// an error if the caller may not list pods, or if no coordinator is installed or running.
func find(ctx context.Context, o options, kube kubernetes.Interface) (replicas, error) {
	pods, err := list(ctx, o, kube)
	if err != nil {
		return nil, err
	}
	var all replicas
	var why []string
	for _, pod := range pods {
		phase := pod.Status.Phase
		if phase != corev1.PodRunning {
			why = append(why, pod.Name+": "+check.Why(&pod))
		}
		// After the shutdown of a node, pods that have ended stay listed.
		if phase != corev1.PodSucceeded && phase != corev1.PodFailed {
			all = append(all, reach(o, kube, &pod))
		}
	}
	switch {
	case len(pods) == 0:
		return nil, fmt.Errorf("Lameduck is not installed in namespace %s: no pod has the labels %s "+
			"(--lameduck-namespace, --lameduck-selector)", o.system, o.selector)
	case len(why) == len(pods):
		return nil, fmt.Errorf("none of the %d pods of Lameduck's coordinators in namespace %s is running: %s",
			len(pods), o.system, strings.Join(why, "; "))
	}
	return all, nil
}

// reach returns a replica whose requests go through the API server and the kubelet to the loopback
// address of the pod.
func reach(o options, kube kubernetes.Interface, pod *corev1.Pod) *replica {
	r := &replica{name: pod.Name, pod: pod, ready: podfacts.Ready(pod)}
	port := cmp.Or(o.port, portOf(pod, api.PortName, api.Port))
	url := kube.CoreV1().RESTClient().Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource(
		"portforward").URL()
	dial := func() (httpstream.Connection, error) {
		transport, upgrader, err := spdy.RoundTripperFor(o.config)
		if err != nil {
			return nil, err
		}
		older := spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport, Timeout: o.timeout},
			http.MethodPost, url)
		newer, err := portforward.NewSPDYOverWebsocketDialerForStreaming(url, o.config)
		if err != nil {
			return nil, err
		}
		// As kubectl does: by WebSocket, and by SPDY if a proxy or an older API server does not
		// support WebSocket.
		conn, _, err := portforward.NewFallbackDialerForStreaming(newer, older, func(err error) bool {
			return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
		}).Dial(portforward.PortForwardProtocolV1Name)
		return conn, err
	}
	transport := &http.Transport{DisableCompression: true}
	r.dial = func(ctx context.Context, port int) (net.Conn, error) { return forward(ctx, dial, port) }
	transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return r.dial(ctx, port) }
	r.http, r.close = &http.Client{Transport: transport}, transport.CloseIdleConnections
	return r
}

// portOf returns the container port of a pod with that name, or other if it has none.
func portOf(pod *corev1.Pod, name string, other int) int {
	for _, c := range pod.Spec.Containers {
		for _, p := range c.Ports {
			if p.Name == name {
				return int(p.ContainerPort)
			}
		}
	}
	return other
}

// forward opens a connection to a port of the pod that dial connects to. It does not listen on this
// machine, because other users of the machine could then connect too.
func forward(ctx context.Context, dial func() (httpstream.Connection, error), port int) (net.Conn, error) {
	type opened struct {
		conn net.Conn
		err  error
	}
	done := make(chan opened, 1)
	go func() {
		of, err := dial()
		if err != nil {
			done <- opened{err: err}
			return
		}
		conn, err := streams(of, port)
		if err != nil {
			_ = of.Close()
			err = fmt.Errorf("open a stream to the pod: %w", err)
		}
		done <- opened{conn, err}
	}()
	select {
	case o := <-done:
		return o.conn, o.err
	case <-ctx.Done():
		return nil, ctx.Err() // what is being opened ends with the program
	}
}

func streams(of httpstream.Connection, port int) (net.Conn, error) {
	headers := http.Header{}
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	headers.Set(corev1.PortHeader, strconv.Itoa(port))
	headers.Set(corev1.PortForwardRequestIDHeader, "1")
	errorStream, err := of.CreateStream(headers)
	if err != nil {
		return nil, err
	}
	errorStream.Close() // nothing is written to it
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := of.CreateStream(headers)
	if err != nil {
		return nil, err
	}
	c := &forwarded{Stream: data, of: of, failed: make(chan error, 1)}
	go func() {
		text, _ := io.ReadAll(errorStream)
		if len(text) > 0 {
			c.failed <- errors.New(strings.TrimSpace(string(text)))
			_ = data.Reset() // the reader then asks why
		}
		close(c.failed)
	}()
	return c, nil
}

// forwarded is a connection to a pod's port. It has no deadlines: net/http closes it.
type forwarded struct {
	httpstream.Stream
	of     httpstream.Connection
	failed chan error
}

func (f *forwarded) Read(into []byte) (int, error) {
	n, err := f.Stream.Read(into)
	if err != nil {
		select {
		case why := <-f.failed:
			if why != nil {
				err = why
			}
		case <-time.After(100 * time.Millisecond): // it comes on a stream of its own
		}
	}
	return n, err
}

func (f *forwarded) Close() error { return f.of.Close() }

func (*forwarded) LocalAddr() net.Addr              { return &net.TCPAddr{} }
func (*forwarded) RemoteAddr() net.Addr             { return &net.TCPAddr{} }
func (*forwarded) SetDeadline(time.Time) error      { return nil }
func (*forwarded) SetReadDeadline(time.Time) error  { return nil }
func (*forwarded) SetWriteDeadline(time.Time) error { return nil }

// errNotFound is the error for a pod that a coordinator does not know.
var errNotFound = errors.New("not found")

// get sends a GET request to the coordinator and decodes the JSON answer into into. Its error wraps
// errNotFound if explain's pod does not exist.
func (r *replica) get(ctx context.Context, path string, into any) error {
	if r.pod.Status.Phase != corev1.PodRunning {
		return fmt.Errorf("coordinator %s does not run: %s", r.name, check.Why(r.pod))
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+path, nil)
	if err != nil {
		return err
	}
	response, err := r.http.Do(request)
	if err != nil {
		return r.fault(err)
	}
	defer response.Body.Close()
	body := json.NewDecoder(io.LimitReader(response.Body, mostAnswer))
	if response.StatusCode == http.StatusOK {
		if err := body.Decode(into); err != nil {
			return fmt.Errorf("read the answer of coordinator %s: %w", r.name, err)
		}
		return nil
	}
	said := api.Error{Error: response.Status}
	_ = body.Decode(&said)
	if response.StatusCode == http.StatusNotFound && strings.HasPrefix(path, api.ExplainPath) {
		return fmt.Errorf("%w: %s", errNotFound, said.Error)
	}
	return fmt.Errorf("coordinator %s: %s", r.name, said.Error)
}

// fault returns err with the likely reason why the coordinator could not be reached, so that
// operators know what to do.
func (r *replica) fault(err error) error {
	text := err.Error()
	switch {
	case apierrors.IsForbidden(err) || strings.Contains(text, "forbidden"):
		return fmt.Errorf("you may not forward ports to the coordinators' pods (create and get pods/portforward): %w",
			err)
	case strings.Contains(text, "error dialing backend"), strings.Contains(text, "proxy error"):
		return fmt.Errorf("coordinator %s runs, and the API server does not reach the kubelet of its node (port "+
			"10250): %w", r.name, err)
	case strings.Contains(text, "connection refused"):
		return fmt.Errorf("coordinator %s serves nothing on its loopback address: its addresses.dashboard "+
			"is another (--lameduck-port), or it is older than this: %w", r.name, err)
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("coordinator %s did not answer in time (--timeout): it is overloaded or stuck, or its node "+
			"is away: %w", r.name, err)
	default:
		return fmt.Errorf("reach coordinator %s: %w", r.name, err)
	}
}

type answer[T any] struct {
	replica *replica
	said    T
	err     error
	// at is halfway between request and answer, by this machine's clock.
	at time.Time
}

// ask sends the same request to all coordinators simultaneously, and returns their answers in the
// order of their names. If none has answered, it returns the error of the first.
func ask[T any](ctx context.Context, o options, all replicas, path string) ([]answer[T], error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	answers := make([]answer[T], len(all))
	var asked sync.WaitGroup
	for i, r := range all {
		asked.Go(func() {
			began := time.Now()
			answers[i].replica = r
			answers[i].err = r.get(ctx, path, &answers[i].said)
			answers[i].at = began.Add(time.Since(began) / 2)
		})
	}
	asked.Wait()
	for _, a := range answers {
		if a.err == nil {
			return answers, nil
		}
	}
	if len(answers) == 0 {
		return nil, errors.New("no coordinator runs")
	}
	return answers, answers[0].err
}

// complain prints a warning for each coordinator that did not answer.
func complain[T any](answers []answer[T], stderr io.Writer) {
	for _, a := range answers {
		if a.err != nil {
			fmt.Fprintln(stderr, "warning:", a.err)
		}
	}
}
