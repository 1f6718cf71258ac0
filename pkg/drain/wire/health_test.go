package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// unwell is a Service with a name as long as may be, and as many targets as are named.
func unwell(n, size int) ServiceHealth {
	name := fmt.Sprintf("s%d-%s", n, strings.Repeat("x", size))
	s := ServiceHealth{Service: drain.Service{Namespace: "shop", Name: name[:min(len(name), MaxName)]},
		TargetCounts: TargetCounts{Usable: 3, Unhealthy: 9}, Checked: true}
	for i := range MaxHealthTargets {
		s.Targets = append(s.Targets, TargetHealth{
			Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(n), byte(i)}), 8080),
			Pod:     "shop/" + name[:min(len(name), MaxName)], Why: "unhealthy", Last: "http failure: 503",
			Since: since,
		})
	}
	return s
}

// Law: whatever a summary becomes, and however often a coordinator is told, in the end it knows
// what the summary says; no message is larger than may be, none is refused, and then there is
// nothing more to tell.
func TestATellerTellsEverything(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var teller Teller
	knows := map[drain.Service]ServiceHealth{}
	var all TargetCounts
	messages := 0
	for round := range 60 {
		sum := Summary{Services: 200, All: TargetCounts{Usable: round / 2}}
		for n := range 60 {
			if s := unwell(n, n%3*100); random.IntN(3) > 0 {
				s.Usable = random.IntN(2)
				sum.Told = append(sum.Told, s)
			}
		}
		complete := false
		for range random.IntN(40) {
			h, some := teller.Next(7, sum)
			if complete = !some; complete {
				break
			}
			messages++
			line := AppendHealth(nil, h)
			if !IsHealth(line) || len(line) > MaxHealth || line[len(line)-1] != '\n' {
				t.Fatalf("a line of %d bytes: %.60q", len(line), line)
			}
			got, err := ParseHealth(line)
			if err != nil {
				t.Fatal(err)
			}
			if again := AppendHealth(nil, got); !bytes.Equal(line, again) {
				t.Fatalf("written\n%s, read as\n%s", line, again)
			}
			if got.First != (messages == 1) {
				t.Fatalf("message %d: first %t", messages, got.First)
			}
			for _, s := range got.Gone {
				delete(knows, s)
			}
			for _, s := range got.Changed {
				knows[s.Service] = s
			}
			all = got.All
		}
		if !complete {
			continue // it was told of too seldom: the next round goes on
		}
		want := map[drain.Service]ServiceHealth{}
		for _, s := range sum.Told {
			want[s.Service] = s
		}
		if !reflect.DeepEqual(want, knows) || all != sum.All {
			t.Fatalf("round %d: said %d Services and %+v, known are %d and %+v", round, len(want), sum.All, len(knows),
				all)
		}
	}
	if messages < 100 {
		t.Errorf("%d messages test nothing", messages)
	}
}

// A summary that has changed back while it was told is told to the end, and costs one message for
// each look at most.
func TestATellerSaysOnlyWhatIsNew(t *testing.T) {
	var teller Teller
	sum := Summary{Services: 2, Told: []ServiceHealth{unwell(1, 0), unwell(2, 0)}}
	if h, some := teller.Next(1, sum); !some || !h.First || len(h.Changed) != 2 {
		t.Errorf("at first %+v", h)
	}
	if h, some := teller.Next(1, sum); some {
		t.Errorf("the same again: %+v", h)
	}
	sum.Told = slices.Clone(sum.Told)
	sum.Told[1].Unhealthy = 8
	if h, some := teller.Next(1, sum); !some || h.First || len(h.Changed) != 1 || h.Changed[0].Unhealthy != 8 {
		t.Errorf("one has changed: %+v", h)
	}
	sum.Told = sum.Told[1:]
	if h, some := teller.Next(1, sum); !some || len(h.Changed) != 0 || len(h.Gone) != 1 ||
		h.Gone[0] != unwell(1, 0).Service {
		t.Errorf("one has gone: %+v", h)
	}
	sum.All.Usable++
	if h, some := teller.Next(1, sum); !some || len(h.Changed)+len(h.Gone) != 0 || h.All.Usable != 1 {
		t.Errorf("only the sum has changed: %+v", h)
	}
}

// The texts are the agent's, and some of them its backends': none ends a line of an operator's
// terminal, or does more there.
func TestHealthIsPrintable(t *testing.T) {
	h, err := ParseHealth([]byte(`{"health":{"session":1,"changed":[{"service":{"namespace":"a","name":"b"},"targets":[
		{"address":"10.0.0.1:80","pod":"a/p\u001b[2J","why":"\u202eno","last":"one\ntwo"}]}]}}`))
	if err != nil {
		t.Fatal(err)
	}
	if got := h.Changed[0].Targets[0]; got.Pod != "a/p?[2J" || got.Why != "?no" || got.Last != "one?two" {
		t.Errorf("%q", got)
	}
}

func TestHealthThatIsRefused(t *testing.T) {
	long := strings.Repeat("x", MaxName+1)
	many := func(n int, text string) string { return strings.Repeat(text+",", n-1) + text }
	for body, want := range map[string]string{
		`{"health":{"session":1`: "unexpected end", `{"health":[]}`: "cannot unmarshal",
		`{"health":{"services":-1}}`:                                                       "negative",
		`{"health":{"all":{"usable":-1}}}`:                                                 "negative",
		`{"health":{"changed":[{"service":{"namespace":"a"}}]}}`:                           "changed[0].service",
		`{"health":{"changed":[{"service":{"namespace":"a","name":"` + long + `"}}]}}`:     "changed[0].service",
		`{"health":{"changed":[{"service":{"namespace":"a","name":"b"},"unhealthy":-2}]}}`: "changed[0]: a count",
		`{"health":{"changed":[{"service":{"namespace":"a","name":"b"},"targets":[` + many(6,
			`{"address":"1.2.3.4:5"}`) + `]}]}}`: "targets: 6 are more than 5",
		`{"health":{"changed":[{"service":{"namespace":"a","name":"b"},"targets":[{"address":"x"}]}]}}`:                              "not an ip:port",
		`{"health":{"changed":[{"service":{"namespace":"a","name":"b"},"targets":[{"address":"1.2.3.4:5","why":"` + long + `"}]}]}}`: "targets[0]: a text",
		`{"health":{"changed":[{"service":{"namespace":"a","name":"b"},"targets":[{"address":"[fe80::1%` + long + `]:5"}]}]}}`:       "targets[0].address: no endpoint has a zone",
		`{"health":{"gone":[` + many(MaxHealthServices+1,
			`{"namespace":"a","name":"b"}`) + `]}}`: "are more than 128",
		`{"health":{"x":"` + strings.Repeat("x", MaxHealth) + `"}}`: "are more than 16384",
	} {
		if _, err := ParseHealth([]byte(body)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: %v, want %q", body, err, want)
		}
	}
	// What newer agents add is ignored.
	if h, err := ParseHealth([]byte(`{"health":{"session":1,"new":{},"changed":[{"service":{"namespace":"a","name":"b"},"slow":3}]},"new":1}`)); err != nil || len(h.Changed) != 1 {
		t.Errorf("%+v, %v", h, err)
	}
	// A line of reports never looks like one.
	if IsHealth(Append(nil, Reports{Boot: `{"health":`})) {
		t.Error("reports are taken for health")
	}
}

// Whatever is read is within what one agent may take, and is written again as it was read.
func FuzzHealth(f *testing.F) {
	var teller Teller
	h, _ := teller.Next(7, Summary{Services: 3,
		Told: []ServiceHealth{unwell(1, 3), {Service: drain.Service{Namespace: "a", Name: "b"}, FailingOpen: true}}})
	f.Add(AppendHealth(nil, h))
	f.Add([]byte(`{"health":{"session":1,"first":true,"services":2,"all":{"usable":1},"gone":[{"namespace":"a","name":"b"}]}}`))
	f.Add([]byte(`{"health":{"changed":[{"service":{"namespace":"a","name":"b"},"targets":[{"address":"[::1]:80","since":"2026-01-02T03:04:05Z"}]}]}}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		h, err := ParseHealth(line)
		if err != nil {
			return
		}
		if h.Services < 0 || len(h.Changed) > MaxHealthServices || len(h.Gone) > MaxHealthServices {
			t.Fatalf("%+v", h)
		}
		size := 0
		for _, s := range h.Changed {
			if len(s.Targets) > MaxHealthTargets || min(s.Usable, s.Unknown, s.Unhealthy, s.Excluded, s.Doubtful) < 0 ||
				s.Service.Name == "" || s.Service.Namespace == "" {
				t.Fatalf("%+v", s)
			}
			size += s.Size()
		}
		if size > 200*len(line)+1000 {
			t.Fatalf("%d bytes from %d", size, len(line))
		}
		text, err := json.Marshal(h)
		if err != nil {
			return // a year beyond 9999
		}
		again, err := ParseHealth(AppendHealth(nil, h))
		if err != nil && len(text) < MaxHealth/2 {
			t.Fatal(err)
		}
		if twice, _ := json.Marshal(again); err == nil && !bytes.Equal(text, twice) {
			t.Fatalf("read as %s, then as %s", text, twice)
		}
	})
}

// Agents without health do not offer it, and the offers of others have not changed.
func TestFeaturesAreThoseOfThisCode(t *testing.T) {
	want := map[string]bool{FeatureLeave: true, FeatureBarrier: true, FeatureHealth: true}
	got := map[string]bool{}
	for _, f := range Features() {
		got[f] = true
	}
	if !maps.Equal(got, want) {
		t.Errorf("features %v", got)
	}
	if slices.Contains(NewOffer("b").Without(FeatureHealth).Features, FeatureHealth) {
		t.Error("it is offered")
	}
}
