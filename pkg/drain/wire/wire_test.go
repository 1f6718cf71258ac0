package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

var since = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// golden are the messages of each file in testdata/v1, as today's types hold them. The files are
// what the first release writes, to agents, coordinators and other replicas. They are never
// changed: a change of the protocol adds a folder.
var golden = map[string][]any{
	"stream.jsonl": {
		&Message{Type: TypeHello, Hello: &Hello{
			Protocol: 1, Features: []string{}, Holder: drain.Holder{Replica: "lameduck-webhook-0", Epoch: "e1"},
			Session: 7, AwayMillis: 5000, ExpiryMillis: 60000, RenewalMillis: 10000,
		}},
		&Message{Type: TypeDrains, Drains: &Drains{Revision: 12, Since: since.Add(123456789),
			Pods: []string{"3 0 4d1c shop web-1", "4 17 4d1d shop web-2"}}},
		&Message{Type: TypeSynced},
		&Message{Type: TypeSynced, Declared: 1},
		&Message{Type: TypeReleases, Releases: &Releases{UIDs: []drain.UID{"4d1c"}, Terminating: true}},
		&Message{Type: TypeReleases, Releases: &Releases{UIDs: []drain.UID{"4d1d", "4d1e"}}},
		&Message{Type: TypeHeartbeat},
	},
	"declaration.json": {&Declaration{Session: 7, Gateway: "haproxy", Routes: []drain.Route{
		{Service: drain.Service{Namespace: "shop", Name: "web"}, Via: drain.Endpoints, Kind: drain.Directed},
		{Service: drain.Service{Namespace: "shop", Name: "db"}, Via: drain.ClusterIP, Kind: drain.Observed},
		{Service: drain.Service{Namespace: "shop", Name: "old"}, Via: drain.DNS, Kind: drain.Observed},
	}}},
	"declared.json": {&Declared{Declared: 1}, &Declared{Declared: 2, Refused: []string{"bank"}}},
	"reports.json": {&Reports{Session: 7, Boot: "b1", UpTo: &drain.UpTo{Revision: 12, State: drain.Idle,
		Generation: "3"}}, &Reports{Session: 7, Boot: "b1", Reports: []drain.Report{
		{UID: "4d1c", Generation: "3", State: drain.Idle, Number: 1},
		{UID: "4d1d", State: drain.Removed, Number: 2},
		{UID: "4d1e", State: drain.Removed, Number: 3},
		{UID: "4d1f", State: drain.Kept, Number: 4},
		{UID: "4d20", State: drain.Routing, Number: 5},
		{UID: "4d21", State: drain.StateUnknown, Number: 6},
	}}},
	"leave.json": {&Leave{Session: 7, Boot: "b1"}},
	"barrier.jsonl": {
		&Message{Type: TypeWatch, Watch: &drain.Watch{Pod: drain.Pod{Namespace: "shop", Name: "web-1", UID: "4d1c"},
			Since: since, Deadline: since.Add(30 * time.Second), Number: 9, Observe: true, Listed: true,
			Targets: []netip.AddrPort{netip.MustParseAddrPort("10.1.0.7:0")}}},
		&Message{Type: TypeReleases, Releases: &Releases{UIDs: []drain.UID{"4d1c"}, Terminating: true,
			Gate: drain.AtBarrier}},
		&Message{Type: TypeRefused, At: 5, Refused: &Error{Error: "the right to acknowledge was withdrawn"}},
		&Reports{Session: 7, Boot: "b1", At: 5, Reports: []drain.Report{{UID: "4d1c", State: drain.Kept, Number: 9,
			Gate: drain.AtBarrier, NoConnections: true, HasSent: true, InFlight: true}}},
		&BarrierRequest{Session: 7, Pod: drain.Pod{Namespace: "shop", Name: "web-1", UID: "4d1c"}, Since: since,
			BoundMillis: 29750, ElapsedMillis: 40, Terminating: true,
			Targets: []netip.AddrPort{netip.MustParseAddrPort("10.1.0.7:0")}},
		&BarrierStatus{Reason: "Deadline", Waiting: []string{"lameduck-node/lameduck-node-x (routing)"}, Cut: true,
			IdleBoundMillis: 25000, AtMostMillis: 60000, QuietMillis: 40000},
		&BarrierStatus{Terminating: true, GraceMillis: 60000, Waiting: []string{}},
	},
	"health.json": {&Health{Session: 7, First: true, Services: 2,
		All: TargetCounts{Usable: 4, Unknown: 1, Unhealthy: 1, Excluded: 2, Doubtful: 3},
		Changed: []ServiceHealth{{Service: drain.Service{Namespace: "shop", Name: "web"},
			TargetCounts: TargetCounts{Usable: 4, Unhealthy: 1}, FailingOpen: true, Checked: true,
			Targets: []TargetHealth{{Address: netip.MustParseAddrPort("10.1.0.7:80"), Pod: "shop/web-1",
				Why: "unhealthy", Last: "503", Since: since}}}},
		Gone: []drain.Service{{Namespace: "shop", Name: "old"}}}},
	"replicas.jsonl": {
		&Claim{Operation: "evict", Pod: drain.Pod{Namespace: "shop", Name: "web-1", UID: "4d1c"}, ElapsedMillis: 40,
			OnlyAsked: true},
		&Claimed{Verdict: VerdictDeny, Reason: "TooManyHolds", Message: "64 calls are held", Budget: "web",
			ElapsedMillis: 40, AskedMillis: -1},
		&Claimed{Verdict: VerdictDrain, Queued: true, Hold: true, AskedMillis: 12},
		&Replica{Ready: true, Expected: 3, Missing: 1, Shared: drain.Shared{
			Drains: []drain.Claim{{Pod: drain.Pod{Namespace: "shop", Name: "web-1", UID: "4d1c"}, ElapsedMillis: 40,
				Services: []drain.Service{{Namespace: "shop", Name: "web"}}, Queued: true}},
			Silent: []drain.Silence{{Agent: "4d21", Strikes: 3, SinceMillis: 90000, LastMillis: 10, Met: true}}}},
	},
	"error.json": {&Error{Error: "the session is not this agent's present one on this replica: open a new stream"}},
}

// Without this, an agent or a replica of the last release does not understand the coordinator of
// this one, or the reverse, in the middle of an upgrade: what was written then is read today, with
// and without fields that are not known, and what is written today holds everything that was
// written then, under the same names and in the same form.
func TestTheFirstReleaseIsUnderstoodAndUnderstands(t *testing.T) {
	files, err := filepath.Glob("testdata/v1/*")
	if err != nil || len(files) != len(golden) {
		t.Fatalf("%d files, %d of them known: %v", len(files), len(golden), err)
	}
	for file, messages := range golden {
		text, err := os.ReadFile("testdata/v1/" + file)
		if err != nil {
			t.Fatal(err)
		}
		lines := bytes.Split(bytes.TrimSpace(text), []byte("\n"))
		if len(lines) != len(messages) {
			t.Fatalf("%s: %d lines, %d messages", file, len(lines), len(messages))
		}
		for i, line := range lines {
			want := messages[i]
			var then any
			if err := json.Unmarshal(line, &then); err != nil {
				t.Fatalf("%s:%d: %v", file, i+1, err)
			}
			strange, err := json.Marshal(withUnknown(then))
			if err != nil {
				t.Fatal(err)
			}
			for _, written := range [][]byte{line, strange} {
				got := fresh(want)
				if err := json.Unmarshal(written, got); err != nil {
					t.Errorf("%s:%d: %s: %v", file, i+1, written, err)
				} else if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.AddrPort{})); diff != "" {
					t.Errorf("%s:%d: %s is read as (-want +got):\n%s", file, i+1, written, diff)
				}
			}
			today, err := json.Marshal(want)
			if err != nil {
				t.Fatal(err)
			}
			var now any
			if err := json.Unmarshal(today, &now); err != nil {
				t.Fatal(err)
			}
			if missing := lacks(now, then, "$"); missing != "" {
				t.Errorf("%s:%d: today's %s lacks or changes %s", file, i+1, today, missing)
			}
		}
	}
}

// fresh returns a zero value of the type that like points to.
func fresh(like any) any {
	switch like.(type) {
	case *Message:
		return &Message{}
	case *Declaration:
		return &Declaration{}
	case *Declared:
		return &Declared{}
	case *Reports:
		return &Reports{}
	case *Leave:
		return &Leave{}
	case *BarrierRequest:
		return &BarrierRequest{}
	case *BarrierStatus:
		return &BarrierStatus{}
	case *Health:
		return &Health{}
	case *Claim:
		return &Claim{}
	case *Claimed:
		return &Claimed{}
	case *Replica:
		return &Replica{}
	case *Error:
		return &Error{}
	default:
		panic(fmt.Sprintf("no value of type %T can be made", like))
	}
}

// withUnknown adds an unknown field to every object.
func withUnknown(v any) any {
	switch v := v.(type) {
	case map[string]any:
		all := map[string]any{"unknown": map[string]any{"a": 1}, "unknownToo": []any{"b"}}
		for key, value := range v {
			all[key] = withUnknown(value)
		}
		return all
	case []any:
		var all []any
		for _, value := range v {
			all = append(all, withUnknown(value))
		}
		if all == nil {
			all = []any{}
		}
		return all
	default:
		return v
	}
}

// lacks returns the first thing in then that is not in now, or is different there.
func lacks(now, then any, path string) string {
	switch then := then.(type) {
	case map[string]any:
		have, ok := now.(map[string]any)
		if !ok {
			return path
		}
		for key, value := range then {
			if _, ok := have[key]; !ok {
				return path + "." + key
			}
			if missing := lacks(have[key], value, path+"."+key); missing != "" {
				return missing
			}
		}
	case []any:
		have, ok := now.([]any)
		if !ok || len(have) != len(then) {
			return path
		}
		for i, value := range then {
			if missing := lacks(have[i], value, path+"[]"); missing != "" {
				return missing
			}
		}
	default:
		if now != then {
			return path
		}
	}
	return ""
}

func TestAgentsOfOtherVersionsAreRefused(t *testing.T) {
	for offered, want := range map[string]string{
		"1":    "",
		"2,1":  "",
		"2":    `the agent speaks "2", this coordinator speaks 1`,
		"one,": `the agent speaks "one or ", this coordinator speaks 1`,
		"01":   `the agent speaks "01", this coordinator speaks 1`,
	} {
		_, err := ParseOffer(url.Values{"protocol": strings.Split(offered, ",")})
		if (err == nil) != (want == "") || err != nil && err.Error() != "protocol: "+want {
			t.Errorf("%q: %v", offered, err)
		}
	}
}

func TestOffers(t *testing.T) {
	for _, o := range []Offer{NewOffer("boot"), NewOffer(""),
		{Features: []string{"a&b", "ä"}, Boot: "=", Build: "v1, commit &"}} {
		q, err := url.ParseQuery(o.Query())
		if err != nil {
			t.Fatal(err)
		}
		if got, err := ParseOffer(q); err != nil || !slices.Equal(got.Features, o.Features) ||
			got.Boot != o.Boot || got.Build != o.Build {
			t.Errorf("%+v is read as %+v: %v", o, got, err)
		}
	}
	// The first query that was ever written.
	if got, err := ParseOffer(url.Values{"protocol": {"1"}}); err != nil || got.Boot != "" || len(got.Features) != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	long := strings.Repeat("x", 254)
	for query, want := range map[string]string{
		"boot=" + long:                   "boot: longer than 253 bytes",
		"build=" + long:                  "build: longer than 253 bytes",
		"feature=a&feature=" + long:      "feature: longer than 253 bytes",
		strings.Repeat("feature=a&", 65): "feature: more than 64",
	} {
		q, err := url.ParseQuery(query)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParseOffer(q); err == nil || err.Error() != want {
			t.Errorf("%.20s: %v, want %s", query, err, want)
		}
	}
}

// Whatever a peer writes is read or refused, and what is read says the same when it is written
// again.
func FuzzMessages(f *testing.F) {
	for file := range golden {
		text, err := os.ReadFile("testdata/v1/" + file)
		if err != nil {
			f.Fatal(err)
		}
		for line := range bytes.Lines(text) {
			f.Add(line)
		}
	}
	for _, message := range []any{
		&BarrierRequest{Session: 7, Pod: drain.Pod{Namespace: "shop", Name: "web-1", UID: "4d1c"},
			Targets: []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:80"),
				netip.MustParseAddrPort("[2001:db8::1%eth0]:443"), {}},
			Since: since, BoundMillis: 30000, ElapsedMillis: 100, Terminating: true},
		&BarrierStatus{Terminating: true, GraceMillis: 25000, Reason: "Deadline",
			Waiting: []string{"shop/gateway-1 (routing)"}, Cut: true, IdleBoundMillis: 1000, AtMostMillis: 2000,
			QuietMillis: 10000},
	} {
		text, err := json.Marshal(message)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, like := range []any{&Message{}, &Declaration{}, &Declared{}, &Reports{}, &Leave{}, &BarrierRequest{},
			&BarrierStatus{}, &Error{}} {
			first, second := fresh(like), fresh(like)
			if json.Unmarshal(text, first) != nil {
				continue
			}
			again, err := json.Marshal(first)
			if err != nil {
				continue // such as a year that RFC 3339 cannot write
			}
			if err := json.Unmarshal(again, second); err != nil {
				// What was left out of a route is refused when it is said as "unknown".
				if _, ok := like.(*Declaration); ok && bytes.Contains(again, []byte("unknown")) {
					continue
				}
				t.Fatalf("%s is read, and its own %s is not: %v", text, again, err)
			}
			third, err := json.Marshal(second)
			if err != nil || !bytes.Equal(again, third) {
				t.Fatalf("%s becomes %s, and then %s: %v", text, again, third, err)
			}
		}
	})
}

// Whatever query a stream is opened with is refused by name, or says the same when it is written
// again.
func FuzzOffer(f *testing.F) {
	for _, query := range []string{"protocol=1&feature=leave&boot=a", "", "protocol=2&protocol=1",
		"feature=%20&feature=", "boot=a&boot=b", NewOffer("x").Query()} {
		f.Add(query)
	}
	f.Fuzz(func(t *testing.T, query string) {
		q, err := url.ParseQuery(query)
		if err != nil {
			return
		}
		offer, err := ParseOffer(q)
		if err != nil {
			named := func(key string) bool { return strings.HasPrefix(err.Error(), key+": ") }
			if !slices.ContainsFunc([]string{queryProtocol, queryFeature, queryBoot, queryBuild}, named) {
				t.Fatalf("%q: %v names nothing", query, err)
			}
			return
		}
		q, err = url.ParseQuery(offer.Query())
		if err != nil {
			t.Fatal(err)
		}
		if again, err := ParseOffer(q); err != nil || again.Boot != offer.Boot ||
			!slices.Equal(again.Features, offer.Features) {
			t.Fatalf("%q is %+v, and then %+v: %v", query, offer, again, err)
		}
	})
}
