package discovery

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/lameduck-io/lameduck/test/agenttest"
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
	for end := time.Now().Add(10 * time.Second); !slices.Equal(rememberIn(dir, log).read(),
		want); time.Sleep(time.Millisecond) {
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

// A full volume may have room later.
func TestAddressesAreStoredOnceTheyCanBe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "later")
		a := rememberIn(dir, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- a.run(ctx) }()
		want := []string{"https://10.0.0.1:9444"}
		a.set(want)
		synctest.Wait()
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * storeAgain)
		if got := a.read(); !slices.Equal(got, want) {
			t.Errorf("stored are %q", got)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestCoordinatorsAreFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kube := fake.NewClientset(agenttest.Slice("coord-1", "lameduck", "agents", "10.1.0.1@x"))
		var mu sync.Mutex
		var replicas []string
		expect := func(want ...string) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(replicas, want) {
				t.Fatalf("coordinators are %v, want %v", replicas, want)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			ended <- Follow(ctx, kube, Config{Service: "lameduck/agents", Port: "http"}, "", func(addresses []string) {
				mu.Lock()
				defer mu.Unlock()
				replicas = addresses
			}, slog.New(slog.DiscardHandler))
		}()
		time.Sleep(time.Second)
		expect("https://10.1.0.1:80")
		slicesOf := kube.DiscoveryV1().EndpointSlices("lameduck")
		if _, err := slicesOf.Create(ctx, agenttest.Slice("coord-2", "lameduck", "other", "10.1.0.2@y"),
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		expect("https://10.1.0.1:80")
		for _, change := range []struct {
			name, service, address string
			want                   []string
		}{
			{"coord-2", "agents", "10.1.0.2@y", []string{"https://10.1.0.1:80", "https://10.1.0.2:80"}},
			{"coord-1", "former", "10.1.0.1@x", []string{"https://10.1.0.2:80"}},
		} {
			if _, err := slicesOf.Update(ctx, agenttest.Slice(change.name, "lameduck", change.service, change.address),
				metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			expect(change.want...)
		}
		// A dual-stack Service lists each pod in two EndpointSlices.
		six := agenttest.Slice("coord-6", "lameduck", "agents", "fd00::2@y", "fd00::3@z", "fd00::4")
		six.AddressType = discovery.AddressTypeIPv6
		if _, err := slicesOf.Create(ctx, six, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		expect("https://10.1.0.2:80", "https://[fd00::3]:80", "https://[fd00::4]:80")
		if err := slicesOf.Delete(ctx, "coord-2", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		expect("https://[fd00::2]:80", "https://[fd00::3]:80", "https://[fd00::4]:80")
		cancel()
		if err := <-ended; err != nil {
			t.Fatalf("Follow returns %v", err)
		}
	})
}
