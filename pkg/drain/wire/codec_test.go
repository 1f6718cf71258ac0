package wire

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// What many agents are sent is written once, and each reads it with its own time.
func TestSharedLinesAreTheMessages(t *testing.T) {
	open := []drain.Open{
		{Pod: drain.Pod{Namespace: "shop", Name: "web-2", UID: "4d1d"}, Number: 7,
			Since: since.Add(1500 * time.Millisecond)},
		{Pod: drain.Pod{Namespace: "shop", Name: `with "quotes" <and> more`, UID: "4d1c"}, Since: since, Number: 3},
		{Pod: drain.Pod{UID: "4d1e"}, Since: since},
	}
	released := []drain.Release{{UID: "a"}, {UID: "b", Terminating: true}, {UID: "c"},
		{UID: "d", Terminating: true, Gate: drain.AtBarrier}}
	messages := []Message{{Type: TypeDrains, Drains: NewDrains(9, open)}}
	for _, r := range NewReleases(released) {
		messages = append(messages, Message{Type: TypeReleases, Releases: r})
	}
	var got []Message
	for line := range strings.Lines(string(AppendShared(nil, 20117, Shared(messages...)))) {
		var m Message
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatal(err)
		}
		if m.At != 20117 {
			t.Errorf("at %d", m.At)
		}
		m.At = 0
		got = append(got, m)
	}
	if diff := cmp.Diff(messages, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	for i, want := range open {
		if d, err := got[0].Drains.Open(i); err != nil || d != want {
			t.Errorf("%+v is read as %+v, %v", want, d, err)
		}
	}
	want := []Releases{{UIDs: []drain.UID{"a", "c"}}, {UIDs: []drain.UID{"b"}, Terminating: true},
		{UIDs: []drain.UID{"d"}, Terminating: true, Gate: drain.AtBarrier}}
	for i, r := range want {
		if diff := cmp.Diff(r, *got[i+1].Releases); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
	}
}

func TestWhatIsNoDrainIsRefused(t *testing.T) {
	for _, text := range []string{"", "1", "1 0 uid shop", "x 0 uid shop web", "1 -1 uid shop web", "1 0  shop web",
		"1 99999999999 uid shop web"} {
		if d, err := (&Drains{Pods: []string{text}}).Open(0); err == nil {
			t.Errorf("%q is %+v", text, d)
		}
	}
}

// Whatever is said of a drain is refused, or says the same when it is written again.
func FuzzDrain(f *testing.F) {
	f.Add("3 1500 4d1c shop web-1")
	f.Add("1 0 uid  a b ")
	f.Fuzz(func(t *testing.T, text string) {
		d := Drains{Since: since, Pods: []string{text}}
		open, err := d.Open(0)
		if err != nil {
			return
		}
		again := NewDrains(1, []drain.Open{{Since: since, Pod: drain.Pod{UID: "first"}}, open})
		if got, err := again.Open(1); err != nil || got != open {
			t.Fatalf("%q is %+v, and then %+v, %v", text, open, got, err)
		}
	})
}
