package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/cert"
	"sigs.k8s.io/controller-runtime/pkg/certwatcher"

	"github.com/lameduck-io/lameduck/internal/certs"
	"github.com/lameduck-io/lameduck/internal/serve"
	"github.com/lameduck-io/lameduck/pkg/admission"
)

// servingTLS holds this replica's certificate and the admission secret.
type servingTLS struct {
	door        *admission.SecretPath
	certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	// unasked reports whether the webhook configuration does not exist. Nil: nothing reads it.
	unasked func() bool
	// trusted returns the CAs of the certificates of all replicas.
	trusted func() (*x509.CertPool, error)
	// ready returns why there is no certificate yet, or nil.
	ready func() error
	run   func(context.Context) error
}

// newServingTLS reads the certificate and the secret from the files that the configuration names.
// If it names no file for one of them, a [certs.Keeper] makes that one.
func newServingTLS(o options, kube kubernetes.Interface, metrics *admission.Metrics, registry *prometheus.Registry,
	log *slog.Logger) (*servingTLS, error) {
	conf := o.Certificates
	p := &servingTLS{ready: func() error { return nil }}
	tasks := []serve.Task{}
	made := certs.Options{
		Kube: kube, Namespace: o.namespace, Secret: conf.Secret, ConfigMap: conf.ConfigMap,
		WebhookConfiguration: conf.WebhookConfiguration,
		// The wildcard covers every Service of the namespace: one for each entry of the webhook
		// configuration, and the one that agents connect to.
		Names: append([]string{"*." + o.namespace + ".svc"}, conf.Names...),
		Times: certs.Times{RotateEvery: conf.RotateEvery.Duration, Overlap: conf.Overlap.Duration}, Log: log,
	}
	var err error
	if conf.AdmissionSecretFile != "" {
		if p.door, err = admission.OpenSecretPath(conf.AdmissionSecretFile, log, metrics); err != nil {
			return nil, err
		}
	} else {
		p.door = admission.NewSecretPath(log, metrics)
		made.AdmitPath, made.MutatePath = admission.Path, admission.MutatePath
		made.Let = func(secrets []string) {
			if p.door.Set(secrets) {
				log.Info("admission secrets changed", "number", len(secrets))
			}
		}
	}
	made.Bundle = conf.Dir == ""
	if !made.Bundle {
		// cert-manager writes this file. Agents cannot mount a Secret of another namespace, and the
		// Secret of the CA also contains its key. So the CA is published for them in a ConfigMap.
		made.CA = func() ([]byte, error) {
			text, err := os.ReadFile(filepath.Join(conf.Dir, certs.CAKey))
			if errors.Is(err, fs.ErrNotExist) {
				return nil, nil
			}
			return text, err
		}
	}
	keeper := certs.New(made)
	p.trusted = func() (*x509.CertPool, error) { return cert.NewPoolFromBytes(keeper.Trusted()) }
	if conf.Dir != "" {
		watcher, err := certwatcher.New(filepath.Join(conf.Dir, "tls.crt"), filepath.Join(conf.Dir, "tls.key"))
		if err != nil {
			return nil, fmt.Errorf("certificate in %s: %w", conf.Dir, err)
		}
		p.certificate = watcher.GetCertificate
		p.trusted = func() (*x509.CertPool, error) {
			text, err := made.CA()
			if err == nil && len(text) == 0 {
				return nil, nil // signed by a CA of the system
			}
			if err != nil {
				return nil, err
			}
			return cert.NewPoolFromBytes(text)
		}
		tasks = append(tasks, serve.Task{Name: "certificate", Run: watcher.Start})
	} else {
		p.certificate = keeper.GetCertificate
	}
	if made.Bundle || made.AdmitPath != "" {
		p.ready = keeper.Ready
		p.unasked = func() bool { return keeper.Entries() == 0 }
		registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "lameduck_webhook_entries",
			Help: "Entries of the webhook configuration; 0 if it does not exist, NaN until it was read.",
		}, func() float64 {
			if n := keeper.Entries(); n >= 0 {
				return float64(n)
			}
			return math.NaN()
		}))
		tasks = append(tasks, serve.Task{Name: "keeper", Run: keeper.Run})
	}
	tasks = append(tasks, serve.Task{Name: "door", Run: p.door.Run})
	p.run = func(ctx context.Context) error { return serve.All(ctx, tasks...) }
	registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "lameduck_certificate_expiry_timestamp_seconds",
		Help: "Expiry of the serving certificate, as Unix time in seconds; 0 while there is none.",
	}, func() float64 { return expiry(p.certificate) }))
	return p, nil
}

func expiry(certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)) float64 {
	pair, err := certificate(nil)
	if err != nil || pair == nil || pair.Leaf == nil {
		return 0
	}
	return float64(pair.Leaf.NotAfter.UnixNano()) / float64(time.Second)
}
