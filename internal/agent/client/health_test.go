package client

import (
	"bufio"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// A coordinator of the last release takes a line that is no report for a fault, and ends the
// stream: it must get none. One that names the feature gets what is new, at most once a second, and
// reports as ever.
func TestHealthIsToldToThoseWhoTakeIt(t *testing.T) {
	for name, c := range map[string]struct {
		features string
		want     int
	}{
		"a coordinator that knows it": {`["leave","health"]`, 4}, "one of the last release": {`["leave","barrier"]`, 0},
		"one that names nothing": {`[]`, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScript(t)
				type line struct {
					at   time.Duration
					text string
				}
				var said []line
				began := time.Now()
				s.upgraded = func(s *fakeStream, from *bufio.Reader) {
					s.say(strings.Replace(hello, `"holder"`, `"features":`+c.features+`,"holder"`, 1))
					s.say(drainLine("a") + "\n" + `{"type":"synced"}`)
					go func() {
						for range 4 {
							time.Sleep(2 * time.Second)
							s.say(`{"type":"heartbeat"}`)
						}
					}()
					for {
						text, err := from.ReadString('\n')
						if err != nil {
							return
						}
						said = append(said, line{time.Since(began), text})
					}
				}
				// It changes four times a second.
				sum := func() *wire.Summary {
					n := int(min(time.Since(began), 4*time.Second) / (250 * time.Millisecond))
					return &wire.Summary{Services: 1,
						Told: []wire.ServiceHealth{{Service: drain.Service{Namespace: "shop", Name: "web"},
							TargetCounts: wire.TargetCounts{Usable: n}}}}
				}
				runWith(t, func(c *Client) { c.Health = sum }, s)
				time.Sleep(10 * time.Second)
				synctest.Wait()
				told, reports := 0, 0
				for _, l := range said {
					if !wire.IsHealth([]byte(l.text)) {
						reports++
						continue
					}
					told++
					h, err := wire.ParseHealth([]byte(l.text))
					if err != nil || h.Session != 7 || h.First != (told == 1) || len(h.Changed) != 1 ||
						l.at != time.Duration(told)*time.Second {
						t.Errorf("at %s: %+v, %v", l.at, h, err)
					}
				}
				if told != c.want || reports < 2 || s.streams() != 1 {
					t.Errorf("told %d times, want %d; %d reports in %d streams", told, c.want, reports, s.streams())
				}
			})
		})
	}
}
