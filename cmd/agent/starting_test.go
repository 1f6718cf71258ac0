package main

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// unstarted is a gateway that does not answer: because it does not run, unless it hangs.
type unstarted struct {
	hangs    bool
	lastFile []health.Key
	prepared []health.Key
}

var errAway = errors.New("away")

func (*unstarted) Apply(context.Context, []health.Op) error { return errAway }
func (*unstarted) Observe(context.Context, []health.Key) (health.Observation, error) {
	return health.Observation{}, errAway
}
func (u *unstarted) Owned(context.Context) ([]health.Key, error) { return u.lastFile, errAway }
func (u *unstarted) Stopped(context.Context) bool                { return !u.hangs }
func (u *unstarted) Prepare(keys []health.Key) error             { u.prepared = keys; return nil }

// A gateway that starts too early is ready without its targets. One that waits for an agent in
// trouble is not there at all.
func TestWhenAGatewayMayStart(t *testing.T) {
	web := health.Key{Pool: "web", Target: health.Target{UID: "a", Addr: netip.MustParseAddrPort("10.0.0.1:80")}}
	never := time.Hour
	for name, c := range map[string]struct {
		gateway unstarted
		// synced is when EndpointSlices are known, starts when the gateway may start.
		synced, starts time.Duration
	}{
		"a new pod":                            {unstarted{}, time.Second, time.Second},
		"a new pod; the API server is away":    {unstarted{}, never, never},
		"a new pod; the API server comes back": {unstarted{}, time.Minute, time.Minute},
		"it has run":                           {unstarted{lastFile: []health.Key{web}}, time.Second, time.Second},
		"it has run; the API server is away":   {unstarted{lastFile: []health.Key{web}}, never, lastFileAfter},
		"it runs":                              {unstarted{hangs: true}, time.Second, 0},
		"it runs; the API server is away":      {unstarted{hangs: true}, never, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				set, known := health.New(health.Options{}), make(chan struct{})
				close(known)
				d := gateway.NewDirector(&c.gateway, set, slog.New(slog.DiscardHandler), gateway.Hooks{})
				d.Starter = &c.gateway
				s := &starting{director: d, checks: known, log: d.Log}
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error)
				go func() { ended <- s.run(ctx) }()
				end := sync.OnceFunc(func() { cancel(); <-ended })
				defer end()
				began := time.Now()
				for time.Since(began) < 2*time.Minute {
					synctest.Wait()
					after := time.Since(began)
					if after == c.synced {
						set.Change(time.Now(), "web", []health.Change{{
							Endpoint: health.Endpoint{Target: web.Target, Routable: true}}})
						set.Synced()
						d.Wake()
						synctest.Wait()
					}
					if may := s.missing() == ""; may != (after >= c.starts) {
						t.Fatalf("it may start: %t, after %s", may, after)
					}
					time.Sleep(time.Second)
				}
				end()
				if c.synced == never || c.gateway.hangs {
					if len(c.gateway.prepared) > 0 {
						t.Error("it is prepared")
					}
				} else if len(c.gateway.prepared) != 1 || c.gateway.prepared[0] != web {
					t.Errorf("it starts with %v, want %s", c.gateway.prepared, web)
				}
			})
		})
	}
}
