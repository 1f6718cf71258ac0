package apiserver_test

import (
	"context"
	"flag"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

func TestMain(m *testing.M) {
	// Most of a test is waiting. Set before the command line is read, which may say otherwise.
	if err := flag.Set("test.parallel", "16"); err != nil {
		panic(err)
	}
	cluster.Main(m)
}

// scene is a namespace for one test, with the clients that act in it.
type scene struct {
	t         *testing.T
	ctx       context.Context // ends well before the test binary does
	cluster   *cluster.Cluster
	client    kubernetes.Interface
	namespace string
}

func newScene(t *testing.T) *scene {
	t.Helper()
	s := &scene{t: t, cluster: cluster.Shared(t)}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	s.ctx = ctx
	var err error
	if s.client, err = kubernetes.NewForConfig(s.cluster.Config()); err != nil {
		t.Fatal(err)
	}
	s.namespace = harness.Namespace(t, s.client, "test-", nil)
	return s
}
