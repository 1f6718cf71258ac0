package main

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
	"k8s.io/client-go/kubernetes"
	toolscache "k8s.io/client-go/tools/cache"
)

// caKey is the key of the certificates in the ConfigMap.
const caKey = "ca.crt"

// roots are those who may sign the coordinators' certificates. They change while the agent runs: a connection is checked against those that are known when
// it is made.
type roots struct {
	conf *coordinators
	log  *slog.Logger

	mu   sync.Mutex
	text string
	pool *x509.CertPool
}

// newRoots reads the file, if there is one. A ConfigMap is read by run.
func newRoots(conf *coordinators, log *slog.Logger) (*roots, error) {
	r := &roots{conf: conf, log: log}
	if conf.CAFile == "" {
		return r, nil
	}
	if err := r.readFile(); err != nil {
		return nil, fmt.Errorf("%w: %w", errUsage, err)
	}
	return r, nil
}

func (r *roots) readFile() error {
	pem, err := os.ReadFile(r.conf.CAFile)
	if err != nil {
		return fmt.Errorf("coordinators.caFile %q: %w", r.conf.CAFile, err)
	}
	if !r.set(string(pem)) {
		return fmt.Errorf("coordinators.caFile %q: no certificate in it", r.conf.CAFile)
	}
	return nil
}

// set takes in certificates. If there are none the former stay, and it reports false.
func (r *roots) set(text string) bool {
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

// run follows the ConfigMap until ctx is done. Without one it only waits.
func (r *roots) run(ctx context.Context, kube kubernetes.Interface) error {
	if r.conf.CAConfigMap == "" {
		<-ctx.Done()
		return nil
	}
	name, err := namespacedName(r.conf.CAConfigMap)
	if err != nil {
		return err
	}
	take := func(o any) {
		if m, ok := o.(*corev1.ConfigMap); ok && !r.set(m.Data[caKey]) {
			r.log.Warn("no certificate of coordinators yet", "configMap", r.conf.CAConfigMap)
		}
	}
	_, controller := toolscache.NewInformerWithOptions(toolscache.InformerOptions{
		ListerWatcher: toolscache.NewListWatchFromClient(kube.CoreV1().RESTClient(), "configmaps", name.Namespace, fields.OneTermEqualSelector("metadata.name", name.Name)),
		ObjectType:    &corev1.ConfigMap{},
		Handler:       toolscache.ResourceEventHandlerFuncs{AddFunc: take, UpdateFunc: func(_, o any) { take(o) }},
	})
	controller.RunWithContext(ctx)
	return nil
}

// dial connects to a coordinator.
func (r *roots) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if r.conf.CAFile != "" {
		if err := r.readFile(); err != nil {
			r.log.Debug("the certificates that were read before stay", "error", err)
		}
	}
	r.mu.Lock()
	pool := r.pool
	r.mu.Unlock()
	if pool == nil {
		return nil, fmt.Errorf("nobody is known yet who may sign for coordinators: ConfigMap %s", r.conf.CAConfigMap)
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout+handshakeTimeout)
	defer cancel()
	conn, err := (&net.Dialer{Timeout: connectTimeout}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	secure := tls.Client(conn, &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool, ServerName: r.conf.ServerName, NextProtos: []string{"http/1.1"}})
	if err := secure.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, err
	}
	return secure, nil
}

// handshakeTimeout bounds a TLS handshake with a coordinator.
const handshakeTimeout = 3 * time.Second
