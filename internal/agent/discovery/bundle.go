package discovery

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/lameduck-io/lameduck/internal/cli"
	"github.com/lameduck-io/lameduck/internal/watch"
	"github.com/lameduck-io/lameduck/pkg/gateway"
)

// dialTimeout bounds the TCP and the TLS handshake with a coordinator together.
const dialTimeout = 5 * time.Second

// caKey is the key of the certificates in the ConfigMap.
const caKey = "ca.crt"

// Bundle is the CA bundle that the coordinators' certificates are checked against. It may change
// while the agent runs: a connection is checked against the certificates that are known when it is
// made.
type Bundle struct {
	conf Config
	log  *slog.Logger

	mu   sync.Mutex
	text string
	pool *x509.CertPool
}

// NewBundle reads the file that conf names, if it names one. A ConfigMap is read by Run.
func NewBundle(conf Config, log *slog.Logger) (*Bundle, error) {
	r := &Bundle{conf: conf, log: log}
	if conf.CAFile == "" {
		return r, nil
	}
	if err := r.readFile(); err != nil {
		return nil, fmt.Errorf("%w: %w", cli.ErrUsage, err)
	}
	return r, nil
}

func (r *Bundle) readFile() error {
	pem, err := os.ReadFile(r.conf.CAFile)
	if err != nil {
		return fmt.Errorf("coordinators.caFile %q: %w", r.conf.CAFile, err)
	}
	if !r.set(string(pem)) {
		return fmt.Errorf("coordinators.caFile %q: no certificate in it", r.conf.CAFile)
	}
	return nil
}

// set replaces the certificates. If text has none, it changes nothing and returns false.
func (r *Bundle) set(text string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if text == r.text && r.pool != nil {
		return true
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(text)) {
		return false
	}
	r.text, r.pool = text, pool
	return true
}

// Run watches the ConfigMap until ctx is done. Without one it only waits.
func (r *Bundle) Run(ctx context.Context, kube kubernetes.Interface) error {
	if r.conf.CAConfigMap == "" {
		<-ctx.Done()
		return nil
	}
	namespace, name, err := gateway.ParseService(r.conf.CAConfigMap)
	if err != nil {
		return err
	}
	w, err := watch.New(kube, watch.Options[*corev1.ConfigMap]{
		Informer: func(f informers.SharedInformerFactory) toolscache.SharedIndexInformer {
			return f.Core().V1().ConfigMaps().Informer()
		},
		Namespace: namespace, Fields: fields.OneTermEqualSelector("metadata.name", name).String(),
		Changed: func(_, is *corev1.ConfigMap) {
			if is != nil && !r.set(is.Data[caKey]) {
				r.log.Warn("no certificate of coordinators yet", "configMap", r.conf.CAConfigMap)
			}
		},
	})
	if err != nil {
		return err
	}
	return w.Run(ctx)
}

// dial connects to a coordinator.
func (r *Bundle) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if r.conf.CAFile != "" {
		if err := r.readFile(); err != nil {
			r.log.Debug("read CA bundle: the former one stays in use", "error", err)
		}
	}
	r.mu.Lock()
	pool := r.pool
	r.mu.Unlock()
	if pool == nil {
		return nil, fmt.Errorf("no CA bundle for coordinators yet: ConfigMap %s", r.conf.CAConfigMap)
	}
	secure := tls.Dialer{NetDialer: &net.Dialer{Timeout: dialTimeout}, Config: &tls.Config{MinVersion: tls.VersionTLS12,
		RootCAs: pool, ServerName: r.conf.ServerName, NextProtos: []string{"http/1.1"}}}
	return secure.DialContext(ctx, network, address)
}
