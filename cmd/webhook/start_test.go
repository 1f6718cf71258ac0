package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/agenttest"
	"github.com/lameduck-io/lameduck/test/planes"
)

// A replica that starts while the API server is away waits for it. If it ended, the kubelet would
// start it again with longer and longer pauses, and deletions would continue without review for
// minutes after the API server is back.
func TestItStartsBeforeTheAPIServer(t *testing.T) {
	probes, kubeconfig := planes.FreeAddress(t), filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: 'https://%s'}}]
users: [{name: u, user: {token: t}}]
`, planes.FreeAddress(t)), 0o600); err != nil {
		t.Fatal(err)
	}
	config := file(t, head+fmt.Sprintf(`addresses:
  {admission: '127.0.0.1:0', agents: '127.0.0.1:0', metrics: '127.0.0.1:0', probes: '%s', dashboard: ''}
times: {shutdownDelay: 0s}
`, probes))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	var out agenttest.Log
	go func() {
		ended <- run(ctx, append(config, "--kubeconfig", kubeconfig), env, &out, &out)
	}()
	ask := func(path string) (int, string) {
		response, err := http.Get("http://" + probes + path)
		if err != nil {
			return 0, err.Error()
		}
		defer response.Body.Close()
		text, _ := io.ReadAll(response.Body)
		return response.StatusCode, string(text)
	}
	over := time.After(30 * time.Second)
	for tick := time.Tick(50 * time.Millisecond); ; <-tick {
		select {
		case err := <-ended:
			t.Fatalf("it ended: %v\n%s", err, &out)
		case <-over:
			t.Fatal("its probes are not served")
		default:
		}
		if code, _ := ask("/livez"); code == http.StatusOK {
			break
		}
	}
	if code, text := ask("/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("/readyz: %d %s", code, text)
	}
	planes.Until(t, "the log says why", func() bool { return strings.Contains(out.String(), "connection refused") })
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
