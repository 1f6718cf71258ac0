package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// An agent that starts while it cannot ask the API server finds the coordinators where they were:
// it is waited for, and lets go as soon as it knows what EndpointSlices say. Coordinators that it
// does not find give it up after 5 s, while its gateway routes.
func TestCoordinatorsAreFoundWithoutTheAPIServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, time.Minute)
	w.stop()
	config, err := os.ReadFile(filepath.Join(w.dir, "agent.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	w.write("agent.yaml", strings.Replace(string(config), `addresses: ["https://`+w.boss.address+`"]`,
		"service: shop/coordinators", 1))
	w.write("coordinators.json", `["https://`+w.boss.address+`"]`)
	w.api.down()
	w.live()
	w.boss.drain(w.pods[0])
	w.until("the coordinator hears of the pod", func() bool {
		w.boss.mu.Lock()
		defer w.boss.mu.Unlock()
		_, said := w.boss.said[drain.UID(w.pods[0])]
		return said
	})
	if got := w.boss.heard(w.pods[0]); got >= drain.Removed {
		t.Errorf("it reports %s without an API server that knows which targets the pod has", got)
	}
	w.api.up()
	w.until("the pod is idle", func() bool { return w.boss.heard(w.pods[0]) == drain.Idle })
	w.mustServe(w.pods[0])
}
