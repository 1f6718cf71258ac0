// Package traefik observes a Traefik v3 by its API, from the pod that it runs in.
//
// /api/rawdata is a snapshot of all services. A server that no service lists is Removed. So is a
// fenced server, Traefik's term for a server whose endpoint is terminating, unless the service is
// sticky: cookies still reach a fenced server. A server that failed its health check is not
// Removed, because it may recover. Traefik is one process, which replaces its routers and its API
// together within some milliseconds. After a start its API lists only services of its own until a
// provider has delivered. It applies a provider's changes at most once in each
// providersThrottleDuration (2 s).
//
// Traefik does not count requests by server. Idle is read from the sockets. A connection to a
// server with the scheme http counts as idle when nothing has passed on it for a second, after an
// answer or before the first request. A connection that speaks HTTP/2, TLS or TCP counts until it
// is closed, because the bytes on it are no evidence about requests.
//
// Not seen: responses and uploads that pause for longer than a second, such as server-sent events
// and WebSockets, which count as idle then; requests that Traefik has read and not sent yet, in the
// middlewares buffering, retry and forwardAuth for example; UDP services; and servers that are a
// name or the address of a Service (nativeLB).
package traefik

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/gateway/poll"
	"github.com/lameduck-io/lameduck/pkg/health"
)

const (
	// settle is how long the entry points may take to apply the routers that the API already shows.
	settle = 100 * time.Millisecond
	// quiet is the silence after which a connection with plain HTTP/1.1 counts as idle.
	quiet = time.Second
	// delivery is how long after its start the providers of a Traefik may not have delivered yet.
	delivery = 30 * time.Second
	// remember is how long the quiet time of a removed server is kept: longer than Traefik keeps
	// connections to the server (90 s).
	remember = 2 * time.Minute
)

// Config configures the agent of one Traefik. The agent runs in Traefik's pod.
type Config struct{ poll.Config }

// Name implements gateway.Kind.
func (*Config) Name() string { return "traefik" }

// Observe implements gateway.ObservedKind.
func (c *Config) Observe(log *slog.Logger) gateway.Observed {
	return c.Poll((&reader{seen: map[netip.AddrPort]seen{}}).read, settle, log)
}

// reader remembers the quiet time of each server, which depends on its protocol.
type reader struct{ seen map[netip.AddrPort]seen }

type seen struct {
	quiet time.Duration
	at    time.Time
}

type service struct {
	LoadBalancer *struct {
		Sticky *struct {
			Cookie *struct{} `json:"cookie"`
		} `json:"sticky"`
		Servers []struct {
			URL     string `json:"url"`
			Address string `json:"address"` // TCP
			Fenced  bool   `json:"fenced"`
		} `json:"servers"`
	} `json:"loadBalancer"`
}

// read implements poll.Read.
func (r *reader) read(get func(path string, into any) error) ([]poll.Host, error) {
	var raw struct {
		Services    map[string]service `json:"services"`
		TCPServices map[string]service `json:"tcpServices"`
	}
	if err := get("/api/rawdata", &raw); err != nil {
		return nil, err
	}
	if _, ok := raw.Services["api@internal"]; !ok {
		return nil, errors.New("/api/rawdata does not list the service api@internal: this is not Traefik's API")
	}
	now := time.Now()
	names := slices.AppendSeq(slices.Collect(maps.Keys(raw.Services)), maps.Keys(raw.TCPServices))
	if !slices.ContainsFunc(names, func(name string) bool { return !strings.HasSuffix(name, "@internal") }) {
		var is struct {
			Started time.Time `json:"startDate"`
		}
		if err := get("/api/version", &is); err != nil {
			return nil, err
		}
		if up := now.Sub(is.Started); up < delivery {
			return nil, fmt.Errorf("Traefik was started %s ago, and lists no service but its own: its providers may "+
				"not have delivered: %w", up.Truncate(time.Millisecond), poll.ErrNotStarted)
		}
	}
	hosts := []poll.Host{}
	for _, services := range []map[string]service{raw.Services, raw.TCPServices} {
		for _, s := range services {
			if s.LoadBalancer == nil {
				continue // it refers to services that are listed
			}
			for _, server := range s.LoadBalancer.Servers {
				target, wait, ok := parse(server.URL, server.Address)
				if !ok {
					hosts = append(hosts, poll.Host{Name: server.URL + server.Address})
					continue
				}
				state := health.Routing
				if sticky := s.LoadBalancer.Sticky; server.Fenced && (sticky == nil || sticky.Cookie == nil) {
					state = health.Removed
				}
				hosts = append(hosts, poll.Host{Target: target, State: state, Quiet: wait})
				if was, ok := r.seen[target]; ok && was.at.Equal(now) {
					wait = min(wait, was.quiet)
				}
				r.seen[target] = seen{wait, now}
			}
		}
	}
	for target, was := range r.seen {
		switch {
		case now.Sub(was.at) > remember:
			delete(r.seen, target)
		case !was.at.Equal(now):
			hosts = append(hosts, poll.Host{Target: target, State: health.Removed, Quiet: was.quiet})
		}
	}
	return hosts, nil
}

// parse returns the address of a server, and the silence after which a connection to it counts as
// idle. 0: a connection counts until it is closed.
func parse(link, address string) (target netip.AddrPort, wait time.Duration, ok bool) {
	if address != "" {
		target, err := netip.ParseAddrPort(address)
		return unmapped(target), 0, err == nil
	}
	u, err := url.Parse(link)
	if err != nil {
		return target, 0, false
	}
	port := u.Port()
	if port == "" {
		port = map[bool]string{true: "443", false: "80"}[strings.EqualFold(u.Scheme, "https")]
	}
	target, err = netip.ParseAddrPort(net.JoinHostPort(u.Hostname(), port))
	if u.Scheme == "http" {
		wait = quiet
	}
	return unmapped(target), wait, err == nil
}

func unmapped(t netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(t.Addr().Unmap(), t.Port()) }
