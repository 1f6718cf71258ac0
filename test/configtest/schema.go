// Package configtest keeps the JSON schemas of configuration files equal to the Go types that they
// are read into. Only tests import it.
package configtest

import (
	"bytes"
	"encoding"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/invopop/jsonschema"

	"github.com/lameduck-io/lameduck/internal/config"
)

// Check compares the schema of the type of value with the committed one, file. value has the
// defaults: keys that it leaves out have none. With UPDATE=1 in the environment it writes the file
// instead.
func Check(t *testing.T, value any, kind, file string) {
	t.Helper()
	text, err := json.MarshalIndent(Schema(t, value, kind), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	same(t, file, append(text, '\n'))
}

// CheckProperty compares schema with that of one property of the committed file.
func CheckProperty(t *testing.T, schema *jsonschema.Schema, property, file string) {
	t.Helper()
	committed, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.MarshalIndent(schema, "    ", "  ")
	if err != nil {
		t.Fatal(err)
	}
	begin := []byte("\n    \"" + property + "\": ")
	before, rest, found := bytes.Cut(committed, append(begin, '{'))
	_, after, closed := bytes.Cut(rest, []byte("\n    }"))
	if !found || !closed {
		t.Fatalf("%s has no property %s", file, property)
	}
	same(t, file, slices.Concat(before, begin, text, after))
}

func same(t *testing.T, file string, text []byte) {
	t.Helper()
	if os.Getenv("UPDATE") == "1" {
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if committed, err := os.ReadFile(file); err != nil || !bytes.Equal(committed, text) {
		t.Errorf("%s is not what the Go types say (%v): run this test with UPDATE=1", file, err)
	}
}

// Schema returns the schema of the type of value, with the values of value as defaults. It fails
// the test if a key has no comment: that of the field, or of the struct that it points to.
func Schema(t *testing.T, value any, kind string) *jsonschema.Schema {
	t.Helper()
	docs := map[string]map[string]string{} // by package
	reflector := jsonschema.Reflector{
		Anonymous: true, DoNotReference: true,
		Mapper: func(of reflect.Type) *jsonschema.Schema {
			switch {
			case of == reflect.TypeFor[config.Duration]():
				return &jsonschema.Schema{Type: "string", Pattern: `^([0-9]{1,6}(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+$|^0$`}
			case of == reflect.TypeFor[json.RawMessage]():
				return &jsonschema.Schema{Type: "object"}
			case reflect.PointerTo(of).Implements(reflect.TypeFor[encoding.TextUnmarshaler]()):
				return &jsonschema.Schema{Type: "string"}
			}
			return nil
		},
		LookupComment: func(of reflect.Type, field string) string {
			if field == "" {
				return ""
			}
			if docs[of.PkgPath()] == nil {
				docs[of.PkgPath()] = comments(t, of.PkgPath())
			}
			text := docs[of.PkgPath()][of.Name()+"."+field]
			if f, ok := of.FieldByName(field); ok && text == "" && f.Type.Kind() == reflect.Pointer {
				text = comments(t, f.Type.Elem().PkgPath())[f.Type.Elem().Name()]
			}
			if text == "" {
				t.Errorf("%s.%s has no comment", of.Name(), field)
			}
			return text
		},
	}
	schema := reflector.Reflect(value)
	ranges(schema, reflect.TypeOf(value))
	schema.Title = kind
	for key, of := range map[string]string{"apiVersion": config.APIVersion, "kind": kind} {
		if property, ok := schema.Properties.Get(key); ok {
			property.Const = of
		}
	}
	// Everything else has a default, or the program says that it is missing and why.
	optional(schema)
	schema.Required = []string{"apiVersion", "kind"}
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	var values any
	if err := json.Unmarshal(text, &values); err != nil {
		t.Fatal(err)
	}
	fill(schema, values)
	return schema
}

// ranges says which values a field with a tag range may have ([config.CheckRanges]).
func ranges(s *jsonschema.Schema, of reflect.Type) {
	for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice {
		if of.Kind() == reflect.Slice {
			s = s.Items
		}
		of = of.Elem()
	}
	if s == nil || of.Kind() != reflect.Struct || s.Properties.Len() == 0 {
		return
	}
	for i := range of.NumField() {
		field := of.Field(i)
		key, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		property, ok := s.Properties.Get(key)
		if !ok {
			continue
		}
		from, to, ok := strings.Cut(field.Tag.Get("range"), "..")
		if ok && property.Type == "integer" {
			property.Minimum, property.Maximum = json.Number(from), json.Number(to)
			if strings.Contains(field.Tag.Get("json"), ",omitempty") {
				property.Minimum = "0" // its default
			}
		} else if ok {
			property.Description += fmt.Sprintf(" %s to %s.", from, to)
		}
		ranges(property, field.Type)
	}
}

// fill sets the defaults of keys that have no keys themselves.
func fill(s *jsonschema.Schema, value any) {
	if s.Properties.Len() == 0 {
		if s.Const == nil && s.Type != "object" {
			s.Default = value
		}
		return
	}
	values, _ := value.(map[string]any)
	for p := s.Properties.Oldest(); p != nil; p = p.Next() {
		fill(p.Value, values[p.Key])
	}
}

func optional(s *jsonschema.Schema) {
	s.Required = nil
	if s.Items != nil {
		optional(s.Items)
	}
	for p := s.Properties.Oldest(); p != nil; p = p.Next() {
		optional(p.Value)
	}
}

// comments maps Type to its comment and Type.Field to the field's, on one line, for the types of a
// package of this module.
func comments(t *testing.T, path string) map[string]string {
	t.Helper()
	dir, err := exec.Command("go", "list", "-f", "{{.Dir}}", path).Output()
	if err != nil {
		t.Fatalf("go list %s: %v", path, err)
	}
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	docs := map[string]string{}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if decl, ok := n.(*ast.GenDecl); ok && len(decl.Specs) == 1 {
				if spec, ok := decl.Specs[0].(*ast.TypeSpec); ok {
					docs[spec.Name.Name] = strings.Join(strings.Fields(decl.Doc.Text()), " ")
				}
			}
			spec, ok := n.(*ast.TypeSpec)
			if !ok {
				return true
			}
			if s, ok := spec.Type.(*ast.StructType); ok {
				for _, field := range s.Fields.List {
					for _, name := range field.Names {
						docs[spec.Name.Name+"."+name.Name] = strings.Join(strings.Fields(field.Doc.Text()), " ")
					}
				}
			}
			return true
		})
	}
	return docs
}
