package stage

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/cri-streaming/pkg/streaming/portforward"

	"github.com/lameduck-io/lameduck/test/cluster"
)

// ServeKubelet serves the part of a kubelet that the stand-in of a node lacks, where the API server
// looks for it, until ctx ends: it forwards ports of pods, with the kubelet's own code, which
// kubectl lameduck needs.
func ServeKubelet(ctx context.Context, kube kubernetes.Interface) error {
	ca, err := cluster.NewCA()
	if err != nil {
		return err
	}
	cert, key, err := ca.Issue("node-1")
	if err != nil {
		return err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return err
	}
	listener, err := tls.Listen("tcp", ":10250", &tls.Config{Certificates: []tls.Certificate{pair}})
	if err != nil {
		return fmt.Errorf("serve as kubelet: %w", err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		parts := strings.Split(r.URL.Path, "/") // /portForward/{namespace}/{pod}
		if len(parts) < 4 || parts[1] != "portForward" {
			http.NotFound(w, r)
			return
		}
		options, err := portforward.NewV4Options(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		portforward.ServePortForward(w, r, kubelet{kube, parts[2]}, parts[3], "", options, time.Hour, 10*time.Second,
			portforward.SupportedProtocols)
	})}
	context.AfterFunc(ctx, func() { server.Close() })
	go func() { _ = server.Serve(listener) }()
	return nil
}

// kubelet forwards ports of the pods of a namespace. All pods have the loopback address of the
// stage, and one of their own.
type kubelet struct {
	kube      kubernetes.Interface
	namespace string
}

func (k kubelet) PortForward(ctx context.Context, name, _ string, port int32, stream io.ReadWriteCloser) error {
	conn, err := net.Dial("tcp", fmt.Sprint("127.0.0.1:", port))
	if err != nil {
		pod, missing := k.kube.CoreV1().Pods(k.namespace).Get(ctx, name, metav1.GetOptions{})
		if missing != nil {
			return missing
		}
		conn, err = net.Dial("tcp", net.JoinHostPort(pod.Status.PodIP, fmt.Sprint(port)))
	}
	if err != nil {
		return err
	}
	var both sync.WaitGroup
	both.Go(func() {
		_, _ = io.Copy(conn, stream)
		conn.Close()
	})
	both.Go(func() {
		_, _ = io.Copy(stream, conn)
		stream.Close()
	})
	both.Wait()
	return nil
}
