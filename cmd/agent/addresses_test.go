package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

func TestAddressesAreKept(t *testing.T) {
	dir := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	a := rememberIn(dir, log)
	if got := a.read(); got != nil {
		t.Errorf("a new folder has %q", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- a.run(ctx) }()
	want := []string{"https://10.0.0.1:9444", "https://[fd00::1]:9444"}
	a.set(want[:1])
	a.set(want)
	a.set(nil) // no coordinator is nothing to come back to
	for end := time.Now().Add(10 * time.Second); !slices.Equal(rememberIn(dir, log).read(), want); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("kept are %q", rememberIn(dir, log).read())
		}
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("ends with %v", err)
	}

	if err := os.WriteFile(filepath.Join(dir, addressesName), []byte(`["https://10.`), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := rememberIn(dir, log).read(); got != nil {
		t.Errorf("half a file is %q", got)
	}
	nowhere := rememberIn("", log)
	nowhere.set(want)
	if got := nowhere.read(); got != nil {
		t.Errorf("without a folder %q are kept", got)
	}
}

// An agent that starts while it cannot ask the API server finds the coordinators where they were: it is waited for, and lets go as soon as it
// knows what EndpointSlices say. Coordinators that it does not find give it up after 5 s, while its gateway routes.
func TestCoordinatorsAreFoundWithoutTheAPIServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, time.Minute)
	w.stop()
	config, err := os.ReadFile(filepath.Join(w.dir, "agent.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	w.write("agent.yaml", strings.Replace(string(config), `addresses: ["https://`+w.boss.address+`"]`, "service: shop/coordinators", 1))
	w.write(addressesName, `["https://`+w.boss.address+`"]`)
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
		t.Errorf("it says %s, and has nobody to ask which targets the pod has", got)
	}
	w.api.up()
	w.until("the pod is idle", func() bool { return w.boss.heard(w.pods[0]) == drain.Idle })
	w.mustServe(w.pods[0])
}
