// Package config reads the configuration files of Lameduck's programs: YAML of one version and
// kind, strict, in which ${NAME} is replaced by the environment. What the keys mean is said where
// they are declared; schemas/*.json are made from that.
package config

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// APIVersion is what every file must say.
const APIVersion = "lameduck.io/v1alpha1"

// reference is a ${NAME} in a file. A $ in any other place is not a reference, but for example part
// of a regular expression of HAProxy for example.
var reference = regexp.MustCompile(`\$\{([A-Za-z_][A-Za-z0-9_]*)\}`)

// Read decodes a file into value, which holds the defaults. Unknown keys, keys given twice and
// environment variables that are not set, or empty, are errors. [Unread] says which durations are
// none.
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
	var fields map[string]any
	if err != nil && yaml.Unmarshal([]byte(expanded), &fields) == nil {
		all := func(inner any) any { return inner }
		if key, why := undecodable(fields, all, reflect.TypeOf(value).Elem()); key != "" {
			return fmt.Errorf("%s: %w", key, why)
		}
	}
	return err
}

// undecodable returns the key of the first value that cannot be decoded, and why: the error of a
// type that decodes itself does not name it. whole puts a value where content is in a file, which
// is of the type file.
func undecodable(content any, whole func(any) any, file reflect.Type) (key string, why error) {
	fields, _ := content.(map[string]any)
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		with := func(value any) any { return whole(map[string]any{key: value}) }
		text, err := json.Marshal(with(fields[key]))
		if err == nil {
			err = json.Unmarshal(text, reflect.New(file).Interface())
		}
		if err != nil {
			if inner, why := undecodable(fields[key], with, file); inner != "" {
				return key + "." + inner, why
			}
			return key, err
		}
	}
	return "", nil
}

// jsonTypes are the names of types as a file's author knows them.
var jsonTypes = map[reflect.Kind]string{reflect.Struct: "object", reflect.Map: "object", reflect.Slice: "array"}

// Print returns value as a file that Read reads.
func Print(value any) (string, error) {
	text, err := yaml.Marshal(value)
	return string(text), err
}

// Unread returns why durations below value could not be read, each with its key.
func Unread(value any) (errs []error) {
	walk("", reflect.ValueOf(value), "", func(key string, v reflect.Value, _ string) {
		if d, ok := v.Interface().(Duration); ok && d.Err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, d.Err))
		}
	})
	return errs
}

// CheckRanges calls must for each key below value whose field has a tag such as `range:"1s..10m"`,
// with the message for the case that the value is not within it. A tag of whole numbers is for an
// int, one of durations for a [Duration]. A key with omitempty may also be 0, which is its default.
// No text may have control characters, and each duration must have been read.
func CheckRanges(value any, must func(ok bool, format string, args ...any)) {
	for _, err := range Unread(value) {
		must(false, "%w", err)
	}
	walk("", reflect.ValueOf(value), "", func(key string, v reflect.Value, tag string) {
		if v.Kind() == reflect.String {
			must(!strings.ContainsFunc(v.String(), unicode.IsControl), "%s %q: has control characters", key, v)
		}
		from, to, ok := strings.Cut(reflect.StructTag(tag).Get("range"), "..")
		if !ok || v.IsZero() && strings.Contains(reflect.StructTag(tag).Get("json"), ",omitempty") {
			return
		}
		within := false
		switch value := v.Interface().(type) {
		case int:
			least, err1 := strconv.Atoi(from)
			most, err2 := strconv.Atoi(to)
			within = err1 == nil && err2 == nil && least <= value && value <= most
		case Duration:
			least, err1 := time.ParseDuration(from)
			most, err2 := time.ParseDuration(to)
			within = err1 == nil && err2 == nil && least <= value.Duration && value.Duration <= most ||
				value.Err != nil // said already
		}
		must(within, "%s %v: must be %s to %s", key, v.Interface(), from, to)
	})
}

// walk calls f for v and all that is below it, with its key in the file, such as barrier.port, and
// the tag of its field.
func walk(key string, v reflect.Value, tag string, f func(key string, v reflect.Value, tag string)) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			walk(key, v.Elem(), tag, f)
		}
		return
	case reflect.Slice:
		for i := range v.Len() {
			walk(fmt.Sprintf("%s[%d]", key, i), v.Index(i), "", f)
		}
	case reflect.Struct:
		if _, ok := v.Interface().(Duration); ok {
			break
		}
		for i := range v.NumField() {
			tag := v.Type().Field(i).Tag
			name, _, _ := strings.Cut(tag.Get("json"), ",")
			inner := strings.Trim(key+"."+name, ".") // an embedded struct has no name
			walk(inner, v.Field(i), string(tag), f)
		}
	}
	f(key, v, tag)
}

// Duration is a time.Duration that is written as "1.5s". Err is why it could not be read.
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
