package wire

import (
	"encoding/json"
	"math"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

var codecNames = []string{"", "web-1", "7f3a-0", `a"b`, `a\b`, "a<b>&c", "é", "\x00", "\x7f", "\u2028", "\xff", "a b"}

var codecTimes = []time.Time{
	{}, time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), time.Date(2026, 1, 2, 3, 4, 5, 123456789, time.UTC),
	time.Date(2026, 1, 2, 3, 4, 5, 120000000, time.FixedZone("", 5*3600+1800)),
}

// encoded is what encoding/json writes on a line.
func encoded(t *testing.T, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(text) + "\n"
}

func TestMessagesAreWrittenAsEncodingJSONDoes(t *testing.T) {
	messages := []Message{
		{}, {At: 1, Type: TypeHeartbeat}, {At: math.MaxInt64, Type: TypeSynced}, {At: -1, Type: "<new>"},
		{At: 1, Type: TypeHello, Hello: &Hello{Protocol: 1, Features: []string{"a"}, Session: 7}},
		{Type: TypeRelease, Release: &drain.Release{}, Drain: &drain.Open{}},
	}
	for _, name := range codecNames {
		messages = append(messages, Message{At: 3, Type: TypeRelease,
			Release: &drain.Release{UID: drain.UID(name), Terminating: true}})
		for _, at := range codecTimes {
			for i := range 3 {
				pod := [3]string{"x", "y", "z"}
				pod[i] = name
				messages = append(messages, Message{At: 9, Type: TypeDrain, Drain: &drain.Open{
					Pod: drain.Pod{Namespace: pod[0], Name: pod[1], UID: drain.UID(pod[2])}, Since: at,
					Number: uint64(i),
				}})
			}
		}
	}
	for _, m := range messages {
		want := encoded(t, m)
		if got := string(AppendMessage([]byte("before"), m)); got != "before"+want {
			t.Errorf("written\n%s, encoding/json\n%s", got, want)
		}
		checkMessage(t, []byte(want))
	}
}

func TestReportsAreWrittenAsEncodingJSONDoes(t *testing.T) {
	all := []Reports{{}, {Session: math.MaxUint64, At: -1, Boot: "b", Reports: []drain.Report{}}}
	for _, name := range codecNames {
		r := drain.Report{UID: drain.UID(name), Generation: name, State: drain.Idle, Proof: drain.Runtime, Number: 4}
		all = append(all, Reports{Session: 7, At: 3, Boot: name,
			Reports: []drain.Report{r, {UID: "2", State: 9, Proof: 9}, r}})
	}
	for _, said := range all {
		want := encoded(t, said)
		if got := string(AppendReports([]byte("before"), said)); got != "before"+want {
			t.Errorf("written\n%s, encoding/json\n%s", got, want)
		}
		checkReports(t, []byte(want))
	}
}

// Without this the hand could forget every field that is added from now on.
func TestFieldsThatTheHandDoesNotKnowAreWritten(t *testing.T) {
	var m Message
	fill(reflect.ValueOf(&m).Elem())
	if got, want := string(AppendMessage(nil, m)), encoded(t, m); got != want {
		t.Errorf("written\n%s, encoding/json\n%s", got, want)
	}
	m.Hello = nil
	if got, want := string(AppendMessage(nil, m)), encoded(t, m); got != want {
		t.Errorf("written\n%s, encoding/json\n%s", got, want)
	}
	var said Reports
	fill(reflect.ValueOf(&said).Elem())
	if got, want := string(AppendReports(nil, said)), encoded(t, said); got != want {
		t.Errorf("written\n%s, encoding/json\n%s", got, want)
	}
}

// fill sets every field below v to something.
func fill(v reflect.Value) {
	if at, ok := v.Addr().Interface().(*time.Time); ok {
		*at = codecTimes[2]
		return
	}
	if target, ok := v.Addr().Interface().(*netip.AddrPort); ok {
		*target = netip.MustParseAddrPort("10.1.0.7:80")
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	default:
		if v.CanInt() {
			v.SetInt(1)
		} else {
			v.SetUint(1)
		}
	}
}

// Most of what is written must be read by the hand, or there is no use in it.
func TestTheHandReadsWhatItWrites(t *testing.T) {
	for _, m := range []Message{
		{At: 1, Type: TypeHeartbeat}, {Type: TypeSynced},
		{At: 3, Type: TypeRelease, Release: &drain.Release{UID: "u", Terminating: true}},
		{At: 2, Type: TypeDrain, Drain: &drain.Open{Pod: drain.Pod{Namespace: "a", Name: "b", UID: "c"},
			Since: codecTimes[2], Number: 3}},
	} {
		var got Message
		if s := (scanner{rest: AppendMessage(nil, m)}); !s.message(&got) || !s.end() {
			t.Errorf("%+v is not read", m)
		}
	}
	said := Reports{Session: 1, At: 2, Boot: "b",
		Reports: []drain.Report{{UID: "u", Generation: "g"}, {UID: "v", Number: 3}}}
	var got Reports
	if s := (scanner{rest: AppendReports(nil, said)}); !s.reports(&got) || !s.end() {
		t.Errorf("%+v is not read", said)
	}
}

func checkMessage(t *testing.T, line []byte) {
	t.Helper()
	var got, want Message
	gotErr, wantErr := ParseMessage(line, &got), json.Unmarshal(line, &want)
	if (gotErr == nil) != (wantErr == nil) {
		t.Fatalf("%q: %v, encoding/json: %v", line, gotErr, wantErr)
	}
	if diff := cmp.Diff(want, got); diff != "" && wantErr == nil {
		t.Fatalf("%q: (-encoding/json +got)\n%s", line, diff)
	}
}

func checkReports(t *testing.T, line []byte) {
	t.Helper()
	var got, want Reports
	gotErr, wantErr := ParseReports(line, &got), json.Unmarshal(line, &want)
	if (gotErr == nil) != (wantErr == nil) {
		t.Fatalf("%q: %v, encoding/json: %v", line, gotErr, wantErr)
	}
	if diff := cmp.Diff(want, got); diff != "" && wantErr == nil {
		t.Fatalf("%q: (-encoding/json +got)\n%s", line, diff)
	}
}

func FuzzMessage(f *testing.F) {
	f.Add(string(AppendMessage(nil, Message{At: 1, Type: TypeHeartbeat})))
	f.Add(string(AppendMessage(nil, Message{At: 3, Type: TypeRelease,
		Release: &drain.Release{UID: "u", Terminating: true}})))
	f.Add(string(AppendMessage(nil, Message{At: 2, Type: TypeDrain, Drain: &drain.Open{
		Pod: drain.Pod{Namespace: "a", Name: "b", UID: "c"}, Since: codecTimes[3], Number: 3,
	}})))
	f.Add(`{"type":"drain","drain":{"pod":{"namespace":"a","name":"b","uid":"c"},"since":"2026-01-02T03:04:05Z","number":01}}`)
	f.Fuzz(func(t *testing.T, line string) {
		checkMessage(t, []byte(line))
		var m Message
		if json.Unmarshal([]byte(line), &m) == nil {
			if got, want := string(AppendMessage(nil, m)), encoded(t, m); got != want {
				t.Fatalf("written %q, encoding/json %q", got, want)
			}
		}
	})
}

func FuzzReports(f *testing.F) {
	f.Add(string(AppendReports(nil, Reports{Session: 1, At: 2,
		Boot: "b", Reports: []drain.Report{{UID: "u", Generation: "g"}, {UID: "v", Number: 3}}})))
	f.Add(`{"session":1,"boot":"b","reports":[,]}`)
	f.Add(strings.Repeat(`{"session":1,"boot":"b","reports":[]}`, 2))
	f.Fuzz(func(t *testing.T, line string) {
		checkReports(t, []byte(line))
		var said Reports
		if json.Unmarshal([]byte(line), &said) == nil {
			if got, want := string(AppendReports(nil, said)), encoded(t, said); got != want {
				t.Fatalf("written %q, encoding/json %q", got, want)
			}
		}
	})
}

// What is written once for all is what would be written for each.
func TestToldIsTheMessage(t *testing.T) {
	for _, name := range []string{"web-1", "with \"quotes\" <and> more"} {
		d := drain.Open{Pod: drain.Pod{Namespace: "shop", Name: name, UID: "u"},
			Since: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC), Number: 7}
		want := AppendMessage(nil, Message{At: 20117, Type: TypeDrain, Drain: &d})
		if got := AppendTold(nil, 20117, Told(d)); string(got) != string(want) {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
