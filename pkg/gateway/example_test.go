package gateway_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/lameduck-io/lameduck/pkg/gateway"
	"github.com/lameduck-io/lameduck/pkg/health"
)

// table is the least that a directed gateway can be: a table of what it routes.
type table map[health.Key]bool

func (t table) Apply(_ context.Context, ops []health.Op) error {
	for _, op := range ops {
		t[op.Key] = op.Want == health.WantRouted
	}
	return nil
}

func (t table) Observe(_ context.Context, keys []health.Key) (health.Observation, error) {
	o := health.Observation{Generation: "1", At: time.Now(), Seen: map[health.Key]health.Seen{}}
	for _, k := range keys {
		routed, present := t[k]
		o.Seen[k] = health.Seen{Present: present, Routed: routed}
	}
	return o, nil
}

func (t table) Owned(context.Context) ([]health.Key, error) { return nil, nil }
func (t table) Stopped(context.Context) bool                { return false }

// A Director makes a gateway do what a set wants, and tells the set what the gateway does.
func ExampleDirector() {
	ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
	defer stop()
	set := health.New(health.Options{})
	target := health.Target{UID: "a", Addr: netip.MustParseAddrPort("10.0.0.1:80")}
	set.Change(time.Now(), "web", []health.Change{{Endpoint: health.Endpoint{Target: target, Routable: true}}})
	set.Synced()
	var d *gateway.Director
	d = gateway.NewDirector(table{}, set, slog.New(slog.DiscardHandler), gateway.Hooks{
		Followed: func(gateway.Progress) {
			if d.Programmed() {
				stop()
			}
		},
	})
	_ = d.Run(ctx)
	fmt.Println(set.Counts()["web"].Routed, "of", set.Counts()["web"].Claimed, "routed")
	// Output:
	// 1 of 1 routed
}
