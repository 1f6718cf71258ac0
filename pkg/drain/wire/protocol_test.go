package wire

import (
	"encoding/json"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// An agent can be written from docs/protocol.md alone: its examples are messages, and there is one
// of each key.
func TestProtocolDocument(t *testing.T) {
	text, err := os.ReadFile("../../../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	types := map[string]func() any{
		"Message": func() any { return new(Message) }, "Declaration": func() any { return new(Declaration) },
		"Declared": func() any { return new(Declared) }, "Reports": func() any { return new(Reports) },
		"Leave": func() any { return new(Leave) }, "Health": func() any { return new(Health) },
		"Barrier": func() any { return new(BarrierRequest) }, "Passed": func() any { return new(BarrierStatus) },
		"Error": func() any { return new(Error) },
	}
	examples := regexp.MustCompile("(?ms)^```json (\\w+)$\n(.*?)^```$")
	shown := map[string]map[string]bool{}
	for _, block := range examples.FindAllStringSubmatch(string(text), -1) {
		name := block[1]
		if types[name] == nil {
			t.Errorf("no message is a %q", name)
			continue
		}
		if shown[name] == nil {
			shown[name] = map[string]bool{}
		}
		for line := range strings.Lines(block[2]) {
			decoder := json.NewDecoder(strings.NewReader(line))
			decoder.DisallowUnknownFields()
			if err := decoder.Decode(types[name]()); err != nil {
				t.Errorf("%s %s: %v", name, line, err)
			}
			var keys any
			if err := json.Unmarshal([]byte(line), &keys); err == nil {
				collect(keys, shown[name])
			}
		}
	}
	for name, message := range types {
		want := map[string]bool{}
		keysOf(reflect.TypeOf(message()), want)
		delete(want, "since") // of a report: it is not read
		for key := range want {
			if !shown[name][key] {
				t.Errorf("no example of a %s has the key %q", name, key)
			}
		}
	}
}

// collect adds the keys of all objects in a value.
func collect(value any, keys map[string]bool) {
	switch v := value.(type) {
	case map[string]any:
		for key, of := range v {
			keys[key] = true
			collect(of, keys)
		}
	case []any:
		for _, of := range v {
			collect(of, keys)
		}
	}
}

// keysOf adds the keys that a type and what it is made of have as JSON.
func keysOf(of reflect.Type, keys map[string]bool) {
	for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice {
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct || !strings.Contains(of.PkgPath(), "lameduck") {
		return
	}
	for i := range of.NumField() {
		field := of.Field(i)
		key, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch {
		case field.Anonymous:
			keysOf(field.Type, keys)
		case key != "" && key != "-":
			keys[key] = true
			keysOf(field.Type, keys)
		}
	}
}
