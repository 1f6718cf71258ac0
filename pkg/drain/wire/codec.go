package wire

import (
	"encoding/json"
	"reflect"
	"strconv"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// What each agent is told of each drain, and says of it, is written and read by hand: with a
// thousand agents it is most of what a coordinator does. The hand only knows what [encoding/json]
// writes for fields that it knows, in their order. Whatever else there is, on either side,
// encoding/json does: a field that was added, another order, an escaped letter. So both always
// agree, which the tests fuzz.

// AppendMessage appends m as one line.
func AppendMessage(b []byte, m Message) []byte {
	if out, ok := appendMessage(b, m); ok {
		return out
	}
	return appendJSON(b, m)
}

// Told returns a Message of type drain without its time: what all agents are told of a drain is
// written once. See [AppendTold].
func Told(d drain.Open) []byte { return AppendMessage(nil, Message{Type: TypeDrain, Drain: &d})[1:] }

// AppendTold appends the line of a message that Told wrote, at is its time, which must not be 0.
func AppendTold(b []byte, at int64, told []byte) []byte {
	b = strconv.AppendInt(append(b, `{"at":`...), at, 10)
	return append(append(b, ','), told...)
}

func appendMessage(b []byte, m Message) ([]byte, bool) {
	b = append(b, '{')
	if m.At != 0 {
		b = append(b, `"at":`...)
		b = strconv.AppendInt(b, m.At, 10)
		b = append(b, ',')
	}
	b = append(b, `"type":`...)
	b, ok := appendString(b, string(m.Type))
	if !ok {
		return b, false
	}
	if d := m.Drain; d != nil {
		b = append(b, `,"drain":`...)
		if b, ok = appendOpen(b, *d); !ok {
			return b, false
		}
	}
	if r := m.Release; r != nil {
		if (*r != drain.Release{UID: r.UID, Terminating: r.Terminating}) {
			return b, false
		}
		b = append(b, `,"release":{"uid":`...)
		if b, ok = appendString(b, string(r.UID)); !ok {
			return b, false
		}
		b = append(b, `,"terminating":`...)
		b = strconv.AppendBool(b, r.Terminating)
		b = append(b, '}')
	}
	m.At, m.Type, m.Drain, m.Release = 0, "", nil, nil
	return append(b, '}', '\n'), reflect.ValueOf(&m).Elem().IsZero()
}

func appendOpen(b []byte, d drain.Open) (_ []byte, ok bool) {
	if (d != drain.Open{Pod: drain.Pod{Namespace: d.Pod.Namespace, Name: d.Pod.Name, UID: d.Pod.UID}, Since: d.Since,
		Number: d.Number}) {
		return b, false
	}
	b = append(b, `{"pod":{"namespace":`...)
	if b, ok = appendString(b, d.Pod.Namespace); !ok {
		return b, false
	}
	b = append(b, `,"name":`...)
	if b, ok = appendString(b, d.Pod.Name); !ok {
		return b, false
	}
	b = append(b, `,"uid":`...)
	if b, ok = appendString(b, string(d.Pod.UID)); !ok {
		return b, false
	}
	b = append(b, `},"since":"`...)
	b, err := d.Since.AppendText(b)
	if err != nil {
		return b, false
	}
	b = append(b, '"')
	if d.Number != 0 {
		b = append(b, `,"number":`...)
		b = strconv.AppendUint(b, d.Number, 10)
	}
	return append(b, '}'), true
}

// ParseMessage reads one line.
func ParseMessage(line []byte, m *Message) error {
	s := scanner{rest: line}
	var got Message
	if s.message(&got) && s.end() {
		*m = got
		return nil
	}
	return json.Unmarshal(line, m)
}

func (s *scanner) message(m *Message) bool {
	s.word("{")
	if s.has(`"at":`) {
		m.At = int64(s.number())
		s.word(",")
	}
	s.word(`"type":`)
	m.Type = Type(s.text())
	switch {
	case s.has(`,"drain":{"pod":{"namespace":`):
		m.Drain = new(drain.Open)
		m.Drain.Pod.Namespace = string(s.text())
		s.word(`,"name":`)
		m.Drain.Pod.Name = string(s.text())
		s.word(`,"uid":`)
		m.Drain.Pod.UID = drain.UID(s.text())
		s.word(`},"since":`)
		s.value(&m.Drain.Since)
		if s.has(`,"number":`) {
			m.Drain.Number = s.number()
		}
		s.word("}")
	case s.has(`,"release":{"uid":`):
		m.Release = new(drain.Release)
		m.Release.UID = drain.UID(s.text())
		s.word(`,"terminating":`)
		m.Release.Terminating = s.bool()
		s.word("}")
	}
	s.word("}")
	return !s.failed
}

// AppendReports appends said as one line.
func AppendReports(b []byte, said Reports) []byte {
	if out, ok := appendReports(b, said); ok {
		return out
	}
	return appendJSON(b, said)
}

func appendReports(b []byte, said Reports) (_ []byte, ok bool) {
	b = append(b, `{"session":`...)
	b = strconv.AppendUint(b, said.Session, 10)
	if said.At != 0 {
		b = append(b, `,"at":`...)
		b = strconv.AppendInt(b, said.At, 10)
	}
	b = append(b, `,"boot":`...)
	if b, ok = appendString(b, said.Boot); !ok || said.Reports == nil {
		return b, false
	}
	b = append(b, `,"reports":[`...)
	for i, r := range said.Reports {
		if i > 0 {
			b = append(b, ',')
		}
		if b, ok = appendReport(b, r); !ok {
			return b, false
		}
	}
	said.Session, said.At, said.Boot, said.Reports = 0, 0, "", nil
	return append(b, ']', '}', '\n'), reflect.ValueOf(&said).Elem().IsZero()
}

func appendReport(b []byte, r drain.Report) (_ []byte, ok bool) {
	if (r != drain.Report{UID: r.UID, Generation: r.Generation, State: r.State, Proof: r.Proof, Number: r.Number}) {
		return b, false
	}
	b = append(b, `{"uid":`...)
	if b, ok = appendString(b, string(r.UID)); !ok {
		return b, false
	}
	if r.Generation != "" {
		b = append(b, `,"generation":`...)
		if b, ok = appendString(b, r.Generation); !ok {
			return b, false
		}
	}
	b = append(b, `,"state":"`...)
	b = append(b, r.State.String()...)
	b = append(b, `","proof":"`...)
	b = append(b, r.Proof.String()...)
	b = append(b, `","number":`...)
	b = strconv.AppendUint(b, r.Number, 10)
	return append(b, '}'), true
}

// ParseReports reads one line, or the body of a post.
func ParseReports(line []byte, said *Reports) error {
	s := scanner{rest: line}
	var got Reports
	if s.reports(&got) && s.end() {
		*said = got
		return nil
	}
	return json.Unmarshal(line, said)
}

func (s *scanner) reports(said *Reports) bool {
	s.word(`{"session":`)
	said.Session = s.number()
	if s.has(`,"at":`) {
		said.At = int64(s.number())
	}
	s.word(`,"boot":`)
	said.Boot = string(s.text())
	s.word(`,"reports":[`)
	if s.failed {
		return false
	}
	// A guess from what one takes, never more than there can be.
	said.Reports = make([]drain.Report, 0, len(s.rest)/120+1)
	for !s.failed && !s.has("]") {
		if len(said.Reports) > 0 {
			s.word(",")
		}
		var r drain.Report
		s.word(`{"uid":`)
		r.UID = drain.UID(s.text())
		if s.has(`,"generation":`) {
			r.Generation = string(s.text())
		}
		s.word(`,"state":`)
		s.failed = s.failed || r.State.UnmarshalText(s.text()) != nil
		s.word(`,"proof":`)
		s.failed = s.failed || r.Proof.UnmarshalText(s.text()) != nil
		s.word(`,"number":`)
		r.Number = s.number()
		s.word("}")
		said.Reports = append(said.Reports, r)
	}
	s.word("}")
	return !s.failed
}

// appendJSON appends what an [json.Encoder] writes. Nothing that is sent here cannot be written but
// a time beyond the year 9999, which nobody's clock shows; nothing is appended then.
func appendJSON(b []byte, v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		return b
	}
	return append(append(b, text...), '\n')
}

// appendString appends s in quotes, if no letter of it needs to be escaped.
func appendString(b []byte, s string) ([]byte, bool) {
	for i := range len(s) {
		if !plain(s[i]) {
			return b, false
		}
	}
	b = append(b, '"')
	b = append(b, s...)
	return append(b, '"'), true
}

// plain says whether encoding/json writes c as it is, whatever follows.
func plain(c byte) bool {
	return ' ' <= c && c < 0x7f && c != '"' && c != '\\' && c != '<' && c != '>' && c != '&'
}

// scanner reads what the functions above write. At anything else it fails.
type scanner struct {
	rest   []byte
	failed bool
}

// has takes word if it comes next.
func (s *scanner) has(word string) bool {
	if len(s.rest) < len(word) || string(s.rest[:len(word)]) != word {
		return false
	}
	s.rest = s.rest[len(word):]
	return true
}

func (s *scanner) word(word string) {
	if !s.has(word) {
		s.failed = true
	}
}

// end says whether nothing comes any more but the end of the line.
func (s *scanner) end() bool {
	s.has("\n")
	return !s.failed && len(s.rest) == 0
}

// text takes a string, which is overwritten when its line is.
func (s *scanner) text() []byte {
	if len(s.rest) == 0 || s.rest[0] != '"' {
		s.failed = true
		return nil
	}
	for i := 1; i < len(s.rest); i++ {
		if c := s.rest[i]; c == '"' {
			text := s.rest[1:i]
			s.rest = s.rest[i+1:]
			return text
		} else if !plain(c) {
			break
		}
	}
	s.failed = true
	return nil
}

// number takes a number without sign, small enough for every integer.
func (s *scanner) number() (n uint64) {
	i := 0
	for ; i < len(s.rest) && i < 18 && '0' <= s.rest[i] && s.rest[i] <= '9'; i++ {
		n = 10*n + uint64(s.rest[i]-'0')
	}
	if i == 0 || i > 1 && s.rest[0] == '0' {
		s.failed = true
	}
	s.rest = s.rest[i:]
	return n
}

func (s *scanner) bool() bool {
	if s.has("true") {
		return true
	}
	s.word("false")
	return false
}

func (s *scanner) value(into interface{ UnmarshalText([]byte) error }) {
	text := s.text()
	s.failed = s.failed || into.UnmarshalText(text) != nil
}
