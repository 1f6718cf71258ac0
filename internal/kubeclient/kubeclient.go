// Package kubeclient makes the API server's client of a process in the cluster.
package kubeclient

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/internal/signal"
)

// New returns a client named userAgent, and the configuration for others: that of kubeconfig, a
// file, or of the service account of this pod if that is empty. Call it before any other client is
// made: a connection on which nothing has arrived for 10 s is asked for a sign of life, and given
// up after another 10 s. With the defaults of Kubernetes, requests to an API server whose machine
// is gone wait for 45 s. Watches that are refused are tried again, see patient.
func New(kubeconfig, userAgent string) (kubernetes.Interface, *rest.Config, error) {
	for _, name := range []string{"HTTP2_READ_IDLE_TIMEOUT_SECONDS", "HTTP2_PING_TIMEOUT_SECONDS"} {
		// k8s.io/apimachinery/pkg/util/net reads both from the environment alone.
		if err := os.Setenv(name, cmp.Or(os.Getenv(name), "10")); err != nil {
			return nil, nil, err
		}
	}
	var config *rest.Config
	var err error
	if kubeconfig == "" {
		config, err = rest.InClusterConfig()
	} else {
		config, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, nil, fmt.Errorf("%w: --kubeconfig %q: not in a cluster, so it is needed", cli.ErrUsage, kubeconfig)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("reach the API server (--kubeconfig %q): %w", kubeconfig, err)
	}
	// With client-go's 5 requests a second, source.Endpoints.Fresh fails for over 60 namespaces.
	// When a coordinator starts, a thousand agents may come at once, with a token each.
	config.QPS, config.Burst = 500, 1000
	config.UserAgent = userAgent
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return patient{next} })
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, nil, fmt.Errorf("client for the API server: %w", err)
	}
	return kube, config, nil
}

const (
	// againAfter and againSpread are the pause before a watch that found no API server is tried
	// again: at least the first, and at most the sum.
	againAfter  = time.Second
	againSpread = 4 * time.Second
	// againMost is how long it is tried until the caller sees the failure. After 2 minutes without
	// one, client-go's pauses are short again.
	againMost = 150 * time.Second
)

// patient tries watches again that find no API server. client-go's informers pause for up to a
// minute after some failures. A gateway whose agent hears of endpoints that late sends requests to
// old ones, or to none.
type patient struct{ next http.RoundTripper }

func (p patient) RoundTrip(r *http.Request) (*http.Response, error) {
	began, said := time.Now(), false
	for {
		answer, err := p.next.RoundTrip(r)
		if !utilnet.IsConnectionRefused(err) || r.URL.Query().Get("watch") == "" || time.Since(began) >= againMost {
			return answer, err
		}
		if !said {
			klog.FromContext(r.Context()).Info("the API server does not answer, a watch is tried again every 1 to 5 s",
				"url", r.URL.Redacted(), "error", err.Error())
			said = true
		}
		if !signal.Sleep(r.Context(), againAfter+rand.N(againSpread)) {
			return answer, err
		}
	}
}

// WrappedRoundTripper is for client-go, which looks for the transport.
func (p patient) WrappedRoundTripper() http.RoundTripper { return p.next }
