package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lameduck-io/lameduck/internal/config"
)

// Each key of the file is given values that are too small, too large, negative, overflowing and
// malformed. The program refuses a value with an error that names the key, or it works.
// testdata/values.txt lists which, and TestTheChartRefusesWhatTheCoordinatorRefuses in
// test/e2e/install compares the chart with it. UPDATE=1 writes the list: read what has changed.
func TestEachValueOfEachKey(t *testing.T) {
	const golden = "testdata/values.txt"
	var got []string
	var walk func(path string, of reflect.Type)
	walk = func(path string, of reflect.Type) {
		values := []string{`""`, `" "`, `"a b"`, `"a\x1bb"`, "A_b", strings.Repeat("a", 300), "5", "null", "{}", "[]"}
		switch {
		case of == reflect.TypeFor[config.Duration]():
			values = []string{"-1s", "0s", "1ns", "150ms", "1500ms", "1s", "5s", "10m", "2h", "24h", "876000h",
				"999999h", "3000000h", "5", "soon", `""`, "null", "[]"}
		case of.Kind() == reflect.Struct:
			for i := range of.NumField() {
				key, _, _ := strings.Cut(of.Field(i).Tag.Get("json"), ",")
				walk(path+"."+key, of.Field(i).Type)
			}
			return
		case of == reflect.TypeFor[int]():
			values = []string{"-9223372036854775808", "-1", "0", "1", "9000", "10250", "65536", "2147483647",
				"9223372036854775807", "1e30", "1.5", `"5"`, "many", "[]"}
		case of.Kind() == reflect.Bool:
			values = []string{"true", `"yes please"`, "1", "[]"}
		case of.Kind() == reflect.Slice:
			values = []string{"[]", `[""]`, `["a b"]`, "[A_b]", "[a, a]", "a", "[{}]", "[null]"}
		}
		keys := strings.Split(path, ".")
		for _, value := range values {
			text := value
			for _, key := range slices.Backward(keys[1:]) {
				text = "{" + key + ": " + text + "}"
			}
			args := append(file(t, head+keys[0]+": "+text+"\n"), "--namespace=lameduck-system", "--replica=r")
			_, err := parse(args, func(string) string { return "" }, io.Discard)
			verdict := "works"
			if err != nil {
				verdict = "refused"
				plain := strings.ToLower(strings.NewReplacer(" ", "", "-", "").Replace(err.Error()))
				if !errors.Is(err, errUsage) || !strings.Contains(plain, strings.ToLower(keys[len(keys)-1])) {
					t.Errorf("%s: %s: %v, which does not name the key", path, value, err)
				}
			}
			if len(value) > 100 {
				value = "a..."
			}
			got = append(got, fmt.Sprintf("%-8s %s: %s", verdict, path, value))
		}
	}
	of := reflect.TypeFor[configuration]()
	for i := range of.NumField() {
		if key := of.Field(i).Tag.Get("json"); key != "apiVersion" && key != "kind" {
			walk(key, of.Field(i).Type)
		}
	}
	text := strings.Join(got, "\n") + "\n"
	if os.Getenv("UPDATE") == "1" {
		if err := os.WriteFile(golden, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), got); diff != "" && text != string(want) {
		t.Error(diff)
	}
}
