package main

import (
	"reflect"
	"testing"

	"github.com/lameduck-io/lameduck/internal/config"
)

// FuzzConfiguration reads files that users may write. One that is accepted is the same once it was
// printed and read again, so that --print-config can be trusted.
func FuzzConfiguration(f *testing.F) {
	f.Add([]byte("apiVersion: lameduck.io/v1alpha1\nkind: AgentConfiguration\ngateway:\n  kubeProxy: {}\n" +
		"waitAddresses: ['127.0.0.1:9447']\nhealthTimeout: 90s\n"))
	f.Add([]byte("apiVersion: lameduck.io/v1alpha1\nkind: AgentConfiguration\ncoordinators: " +
		"{namespace: a, service: b}\ngateway:\n" +
		"  envoy: {population: a/b, admin: 'http://127.0.0.1:19000', services: [a/b]}\n"))
	f.Fuzz(func(t *testing.T, content []byte) {
		getenv := func(name string) string { return "value of " + name }
		var first, again file
		if _, err := first.read(content, getenv); err != nil {
			return
		}
		text, err := config.Print(first)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := again.read([]byte(text), getenv); err != nil {
			t.Fatalf("%v in what was printed:\n%s", err, text)
		}
		if !reflect.DeepEqual(first, again) {
			t.Fatalf("%+v\nis again\n%+v", first, again)
		}
	})
}
