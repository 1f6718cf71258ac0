// Package discovery finds the coordinators of an agent and makes its connections to them: by the
// endpoints of their Service, over TLS that is checked against a CA bundle, with a ServiceAccount
// token. Package client speaks the protocol on these connections.
package discovery

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/internal/agent/client"
	"github.com/lameduck-io/lameduck/internal/endpoints"
	"github.com/lameduck-io/lameduck/internal/watch"
	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// Config configures how an agent finds and verifies coordinators.
type Config struct {
	// Service is namespace/name of the headless Service in front of all replicas.
	Service string `json:"service,omitempty"`
	// Port is the name of that Service's port.
	Port string `json:"port,omitempty"`
	// Addresses are base URLs, instead of Service.
	Addresses []string `json:"addresses,omitempty"`
	// ServerName is the name in the coordinators' certificate.
	ServerName string `json:"serverName"`
	// CAFile has the certificates of the CAs that may sign the coordinators' certificates, as PEM.
	// It is read again for each connection.
	CAFile string `json:"caFile,omitempty"`
	// CAConfigMap is namespace/name of a ConfigMap that has these certificates with the key ca.crt,
	// instead of CAFile. Coordinators that make their own certificates write
	// lameduck-system/lameduck-ca.
	CAConfigMap string `json:"caConfigMap,omitempty"`
	// TokenFile has a projected service account token for the audience lameduck.io. It is read
	// again for each request.
	TokenFile string `json:"tokenFile"`
}

// Check calls must for each condition, with the message for the case that it does not hold.
func (c Config) Check(must func(ok bool, format string, args ...any)) {
	must((c.Service == "") != (len(c.Addresses) == 0),
		"coordinators: exactly one of service %q and addresses %q is needed", c.Service, c.Addresses)
	_, _, err := gateway.ParseService(c.Service)
	must(c.Service == "" || err == nil, "coordinators.service %q: must be namespace/name", c.Service)
	for i, a := range c.Addresses {
		u, err := url.Parse(a)
		must(err == nil && u.Hostname() != "" && a == "https://"+u.Host,
			"coordinators.addresses[%d] %q: must be https://host:port", i, a)
	}
	must(c.Port == "" || len(validation.IsDNS1123Label(c.Port)) == 0, "coordinators.port %q: not the name of a port",
		c.Port)
	_, err = netip.ParseAddr(c.ServerName)
	must(err == nil || len(validation.IsDNS1123Subdomain(c.ServerName)) == 0,
		"coordinators.serverName %q: required, a DNS name or an address", c.ServerName)
	must((c.CAFile == "") != (c.CAConfigMap == ""),
		"coordinators: exactly one of caFile %q and caConfigMap %q is needed", c.CAFile, c.CAConfigMap)
	_, _, err = gateway.ParseService(c.CAConfigMap)
	must(c.CAConfigMap == "" || err == nil, "coordinators.caConfigMap %q: must be namespace/name", c.CAConfigMap)
	for _, of := range []struct{ field, path string }{{"caFile", c.CAFile}, {"tokenFile", c.TokenFile}} {
		if of.field == "caFile" && of.path == "" {
			continue
		}
		_, err := os.Stat(of.path)
		must(err == nil, "coordinators.%s %q: %v", of.field, of.path, err)
	}
}

// Connect returns a client for the coordinators of conf, verified against bundle.
func Connect(conf Config, bundle *Bundle) *client.Client {
	c := client.New()
	c.HTTP = &http.Client{Transport: &http.Transport{
		DialTLSContext: bundle.dial,
		// An empty map switches HTTP/2 off: one stream is one connection.
		TLSNextProto:        map[string]func(string, *tls.Conn) http.RoundTripper{},
		MaxIdleConnsPerHost: 2,
		IdleConnTimeout:     time.Minute,
	}}
	c.Token = func() (string, error) {
		token, err := os.ReadFile(conf.TokenFile)
		return strings.TrimSpace(string(token)), err
	}
	c.Boot = rand.Text()
	c.Replicas(conf.Addresses)
	return c
}

// Follow calls tell with the base URLs of all coordinator replicas each time that they change,
// until ctx is done: one for each replica, the IPv4 address if a dual-stack Service has two. These
// include replicas that are not ready, because one that is starting or stopping has drains too. The
// first call has the addresses that an earlier process of the agent stored in dir, so that it finds
// coordinators while the API server is not available. With an empty dir none are stored. If conf
// names no Service it only waits.
func Follow(ctx context.Context, kube kubernetes.Interface, conf Config, dir string, tell func(addresses []string),
	log *slog.Logger) error {
	if conf.Service == "" {
		<-ctx.Done()
		return nil
	}
	remembered := rememberIn(dir, log)
	if last := remembered.read(); len(last) > 0 {
		tell(last)
	}
	namespace, name, err := gateway.ParseService(conf.Service)
	if err != nil {
		return err
	}
	service := types.NamespacedName{Namespace: namespace, Name: name}
	index := endpoints.NewIndex()
	index.Follow(endpoints.Port{Service: service, Name: conf.Port})
	listed := map[health.Target]bool{}
	told := func(changed []endpoints.PortChange) {
		if len(changed) == 0 {
			return
		}
		for _, c := range changed[0].Changes { // one port is followed
			if delete(listed, c.Target); !c.Unlisted {
				listed[c.Target] = true
			}
		}
		uids := map[string]health.UID{}
		for t := range listed {
			uids["https://"+t.Addr.String()] = t.UID
		}
		// With two streams to one replica, each would replace the other.
		addresses, pods := []string{}, map[health.UID]bool{}
		for _, address := range slices.Sorted(maps.Keys(uids)) {
			if uid := uids[address]; uid == "" || !pods[uid] {
				addresses, pods[uid] = append(addresses, address), true
			}
		}
		remembered.set(addresses)
		tell(addresses)
	}
	w, err := watch.New(kube, watch.Options[*discovery.EndpointSlice]{
		Informer: watch.EndpointSlices, Namespace: namespace, Labels: discovery.LabelServiceName + "=" + name,
		Changed: func(was, is *discovery.EndpointSlice) {
			if is != nil {
				told(index.Apply(time.Now(), is))
			} else {
				told(index.Delete(time.Now(), was))
			}
		},
	})
	if err != nil {
		return fmt.Errorf("find coordinators: %w", err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { _ = remembered.run(ctx) }) // it has no error
	return w.Run(ctx)
}
