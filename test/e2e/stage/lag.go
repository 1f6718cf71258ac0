package stage

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"time"

	"k8s.io/client-go/rest"
)

// lagging serves the API server to the ServiceAccount gateway of a namespace, and returns its URL.
// What a watch of EndpointSlices in that namespace returns arrives late by lag, the first list too
// if the watch asks for it. A list of its own is not delayed.
func (s *Stage) lagging(namespace string, lag time.Duration) (string, error) {
	const accounts = "system:serviceaccounts"
	config := s.Cluster.ConfigFor("system:serviceaccount:"+namespace+":gateway", accounts, accounts+":"+namespace)
	server, err := url.Parse(config.Host)
	if err != nil {
		return "", err
	}
	transport, err := rest.TransportFor(config)
	if err != nil {
		return "", err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("proxy of the API server: %w", err)
	}
	proxy := &http.Server{Handler: &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(server) },
		Transport:     transport,
		FlushInterval: -1,
		ModifyResponse: func(r *http.Response) error {
			asked := r.Request.URL
			if asked.Query().Has("watch") && strings.HasSuffix(asked.Path, "/"+namespace+"/endpointslices") {
				r.Body = delayed(r.Body, lag)
			}
			return nil
		},
		ErrorLog: log.New(io.Discard, "", 0), // of watches that end
	}}
	context.AfterFunc(s.running, func() { proxy.Close() })
	s.nodes.Go(func() { _ = proxy.Serve(listener) })
	return "http://" + listener.Addr().String(), nil
}

// delayed returns what body contains, each piece late by lag. body must end after the close of what
// is returned, as an answer to a request does.
func delayed(body io.ReadCloser, lag time.Duration) io.ReadCloser {
	type piece struct {
		at   time.Time
		text []byte
	}
	pieces := make(chan piece, 10_000)
	go func() {
		defer close(pieces)
		defer body.Close()
		for {
			text := make([]byte, 4<<10)
			n, err := body.Read(text)
			pieces <- piece{time.Now(), text[:n]}
			if err != nil {
				return
			}
		}
	}()
	r, w := io.Pipe()
	go func() {
		defer w.Close()
		for p := range pieces {
			time.Sleep(time.Until(p.at.Add(lag))) // the delay is what it is for
			_, _ = w.Write(p.text)                // none are kept after the close of r
		}
	}()
	return r
}
