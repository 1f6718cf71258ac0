package main

import (
	"reflect"
	"testing"

	"github.com/lameduck-io/lameduck/internal/config"
)

// FuzzConfiguration reads files that users may write. One that is accepted is the same once it was
// printed and read again, so that --print-config can be trusted.
func FuzzConfiguration(f *testing.F) {
	f.Add([]byte("apiVersion: lameduck.io/v1alpha1\nkind: CoordinatorConfiguration\n" +
		"times: {hold: 2s, deadline: 40s}\n" +
		"gateways:\n- {name: a, kind: traefik, namespace: b, selector: 'c=d', services: [e/f]}\n"))
	f.Fuzz(func(t *testing.T, content []byte) {
		read := func(content []byte) (c configuration, ok bool) {
			o := options{configuration: defaults()}
			err := config.Read(content, func(string) string { return "x" }, &o.configuration)
			return o.configuration, err == nil && len(config.Unread(o.configuration)) == 0
		}
		first, ok := read(content)
		if !ok {
			return
		}
		text, err := config.Print(first)
		if err != nil {
			t.Fatal(err)
		}
		if again, ok := read([]byte(text)); !ok || !reflect.DeepEqual(first, again) {
			t.Fatalf("%+v\nis again\n%+v, accepted: %t", first, again, ok)
		}
	})
}
