// Package config reads the configuration files of Lameduck's programs: YAML of one version and
// kind, strict, in which ${NAME} is replaced by the environment. What the keys mean is said where
// they are declared; schemas/*.json are made from that.
package config

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// APIVersion is what every file must say.
const APIVersion = "lameduck.io/v1alpha1"

// reference is a ${NAME} in a file. A $ in any other place is not a reference, but for example part
// of a regular expression of HAProxy for example.
var reference = regexp.MustCompile(`\$\{([A-Za-z_][A-Za-z0-9_]*)\}`)

// Read decodes a file into value, which holds the defaults. Unknown keys, keys given twice and
// environment variables that are not set, or empty, are errors.
func Read(content []byte, getenv func(string) string, value any) error {
	var unset []string
	expanded := reference.ReplaceAllStringFunc(string(content), func(text string) string {
		name := reference.FindStringSubmatch(text)[1]
		text = getenv(name)
		if text == "" && !slices.Contains(unset, name) {
			unset = append(unset, name)
		}
		return text
	})
	if len(unset) > 0 {
		return fmt.Errorf("environment variables %q are referred to and not set", unset)
	}
	// The decoder below names the first unknown key only, and without its path.
	if asJSON, err := yaml.YAMLToJSON([]byte(expanded)); err == nil {
		scratch := reflect.New(reflect.TypeOf(value).Elem()).Interface()
		unknown, _ := kjson.UnmarshalStrict(asJSON, scratch, kjson.DisallowUnknownFields)
		if len(unknown) > 0 {
			return errors.Join(unknown...)
		}
	}
	err := yaml.UnmarshalStrict([]byte(expanded), value)
	if wrong := (*json.UnmarshalTypeError)(nil); errors.As(err, &wrong) {
		is, _, _ := strings.Cut(wrong.Value, " ")
		return fmt.Errorf("%s: is of type %s, must be of type %s", cmp.Or(wrong.Field, "the file"), is,
			cmp.Or(jsonTypes[wrong.Type.Kind()], wrong.Type.Kind().String()))
	}
	return err
}

// jsonTypes are the names of types as a file's author knows them.
var jsonTypes = map[reflect.Kind]string{reflect.Struct: "object", reflect.Map: "object", reflect.Slice: "array"}

// Print returns value as a file that Read reads.
func Print(value any) (string, error) {
	text, err := yaml.Marshal(value)
	return string(text), err
}

// Duration is a time.Duration that is written as "1.5s". What cannot be read as one is kept as Err:
// only the code that checks the file knows the key.
type Duration struct {
	time.Duration
	Err error
}

// UnmarshalJSON implements json.Unmarshaler. It never fails: see Err.
func (d *Duration) UnmarshalJSON(value []byte) error {
	var text *string
	if err := json.Unmarshal(value, &text); err != nil || text == nil {
		d.Err = fmt.Errorf("%s: must be a duration with its unit, such as 30s", value)
		return nil
	}
	d.Duration, d.Err = time.ParseDuration(*text)
	return nil
}

// MarshalText implements encoding.TextMarshaler.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }
