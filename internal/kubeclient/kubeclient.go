// Package kubeclient makes the API server's client of a process in the cluster.
package kubeclient

import (
	"cmp"
	"errors"
	"fmt"
	"os"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/lameduck-io/lameduck/internal/cli"
)

// New returns a client named userAgent, and the configuration for others: that of kubeconfig, a
// file, or of the service account of this pod if that is empty. Call it before any other client is
// made: a connection on which nothing has arrived for 10 s is asked for a sign of life, and given
// up after another 10 s. With the defaults of Kubernetes, requests to an API server whose machine
// is gone wait for 45 s.
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
	config.QPS, config.Burst = 200, 400
	config.UserAgent = userAgent
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, nil, fmt.Errorf("client for the API server: %w", err)
	}
	return kube, config, nil
}
