package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/lameduck-io/lameduck/internal/identity"
	"github.com/lameduck-io/lameduck/internal/peers"
	"github.com/lameduck-io/lameduck/internal/podfacts"
)

// ordinalLabel is the label for the ordinal of a replica's pod: the number of its entry in the
// webhook configuration.
const ordinalLabel = "lameduck.io/ordinal"

const (
	// peerConnect bounds the time to connect to another replica. peerConns bounds the unused
	// connections that are kept to it.
	peerConnect = 500 * time.Millisecond
	peerConns   = 100
)

// replicas are the other replicas of the coordinator. They are found by their pods.
type replicas struct {
	*peers.Peers
	namespace string
	who       *identity.Kubernetes
	// port is the port of the API for agents, through which replicas also call each other.
	port string
}

// newReplicas returns an empty set of replicas, which the watch of pods fills. Without a token file
// it stays empty.
func newReplicas(o options, who *identity.Kubernetes, certificates *servingTLS, log *slog.Logger) (*replicas, error) {
	token := func() (string, error) {
		text, err := os.ReadFile(o.tokenFile)
		return strings.TrimSpace(string(text)), err
	}
	if o.tokenFile != "" {
		first, err := token()
		if err == nil {
			who.Replicas, err = identity.Subject(first)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: --token-file %q: %w", errUsage, o.tokenFile, err)
		}
	}
	_, port, err := net.SplitHostPort(o.Addresses.Agents)
	if err != nil {
		return nil, fmt.Errorf("%w: addresses.agents %q: %w", errUsage, o.Addresses.Agents, err)
	}
	dialer := &net.Dialer{Timeout: peerConnect}
	client := &http.Client{Transport: &http.Transport{
		DialTLSContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			roots, err := certificates.trusted()
			if err != nil {
				return nil, fmt.Errorf("CA of the coordinators' certificates: %w", err)
			}
			secure := tls.Dialer{NetDialer: dialer, Config: &tls.Config{
				MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: "lameduck-agents." + o.namespace + ".svc",
				NextProtos: []string{"http/1.1"},
			}}
			return secure.DialContext(ctx, network, address)
		},
		MaxIdleConnsPerHost: peerConns, IdleConnTimeout: time.Minute,
	}}
	return &replicas{
		Peers: peers.New(o.ordinal, o.replica, client, token, log), namespace: o.namespace, who: who, port: port,
	}, nil
}

// set records a pod if it is the pod of another replica.
func (r *replicas) set(p *corev1.Pod) {
	if p.Namespace != r.namespace || p.Name == r.Name {
		return
	}
	ordinal, err := strconv.Atoi(p.Labels[ordinalLabel])
	over := p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
	if err != nil || over || p.Status.PodIP == "" ||
		identity.Username(p.Namespace, p.Spec.ServiceAccountName) != r.who.Replicas {
		r.gone(p)
		return
	}
	r.Set(peers.Peer{Ordinal: ordinal, Name: p.Name, URL: "https://" + net.JoinHostPort(p.Status.PodIP, r.port),
		Ready: podfacts.Ready(p)})
}

func (r *replicas) gone(p *corev1.Pod) {
	if p.Namespace == r.namespace {
		r.Remove(p.Name)
	}
}
