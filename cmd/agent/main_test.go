package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/agent/source"
	"github.com/lameduck-io/lameduck/internal/kubeclient"
)

// Before an expired exclusion ends, the agent lists the EndpointSlices of each of its namespaces.
// With client-go's own limit that never succeeded for more than 60 of them.
func TestManyNamespacesAreListedInTime(t *testing.T) {
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1"}`)
	}))
	defer api.Close()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, fmt.Appendf(nil, "apiVersion: v1\nkind: Config\ncurrent-context: x\n"+
		"contexts: [{name: x, context: {cluster: x}}]\nclusters: [{name: x, cluster: {server: '%s'}}]\n", api.URL),
		0o600); err != nil {
		t.Fatal(err)
	}
	kube, _, err := kubeclient.New(path, "lameduck-agent")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), source.FreshTimeout)
	defer cancel()
	for n := range 200 {
		if _, err := kube.DiscoveryV1().EndpointSlices(fmt.Sprint("shop-", n)).List(ctx,
			metav1.ListOptions{}); err != nil {
			t.Fatalf("the list of namespace %d: %v", n, err)
		}
	}
}
