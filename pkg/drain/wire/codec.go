package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
)

// Drains are several drains in one line, the same for all agents that receive them. Each drain is a
// string instead of an object, which takes a fifth of the time to decode.
type Drains struct {
	// Revision is what [drain.UpTo] names once the agent has processed all of these.
	Revision uint64 `json:"revision"`
	// Since is when the first of them began.
	Since time.Time `json:"since"`
	// Pods are "number millis uid namespace name": millis is how long after Since the drain began.
	Pods []string `json:"pods"`
}

// NewDrains returns the encoding of open, which must not be empty.
func NewDrains(revision uint64, open []drain.Open) *Drains {
	d := &Drains{Revision: revision, Since: open[0].Since, Pods: make([]string, len(open))}
	for _, o := range open {
		if o.Since.Before(d.Since) {
			d.Since = o.Since
		}
	}
	for i, o := range open {
		d.Pods[i] = fmt.Sprintf("%d %d %s %s %s", o.Number, o.Since.Sub(d.Since).Milliseconds(), o.Pod.UID,
			o.Pod.Namespace, o.Pod.Name)
	}
	return d
}

// Open returns the i-th drain.
func (d *Drains) Open(i int) (drain.Open, error) {
	number, rest, _ := strings.Cut(d.Pods[i], " ")
	millis, rest, _ := strings.Cut(rest, " ")
	uid, rest, _ := strings.Cut(rest, " ")
	namespace, name, whole := strings.Cut(rest, " ")
	n, err := strconv.ParseUint(number, 10, 64)
	after, errAfter := strconv.ParseUint(millis, 10, 32)
	if !whole || err != nil || errAfter != nil || uid == "" {
		return drain.Open{}, fmt.Errorf("pods[%d]: %.200q is not a drain", i, d.Pods[i])
	}
	return drain.Open{Pod: drain.Pod{Namespace: namespace, Name: name, UID: drain.UID(uid)}, Number: n,
		Since: d.Since.Add(time.Duration(after) * time.Millisecond)}, nil
}

// Releases are drains that have ended in the same way.
type Releases struct {
	UIDs []drain.UID `json:"uids"`
	// Terminating and Gate are as in [drain.Release].
	Terminating bool       `json:"terminating"`
	Gate        drain.Gate `json:"gate,omitempty"`
}

// NewReleases returns the encoding of released.
func NewReleases(released []drain.Release) (all []*Releases) {
	of := map[drain.Release]*Releases{}
	for _, r := range released {
		alike := drain.Release{Terminating: r.Terminating, Gate: r.Gate}
		if of[alike] == nil {
			of[alike] = &Releases{Terminating: r.Terminating, Gate: r.Gate}
			all = append(all, of[alike])
		}
		of[alike].UIDs = append(of[alike].UIDs, r.UID)
	}
	return all
}

// Append appends v, a Message, Reports or the like, as one line. If v cannot be encoded, nothing is
// appended. Of the types here, that happens only with a time after the year 9999.
func Append(b []byte, v any) []byte {
	text, err := json.Marshal(v)
	if err != nil {
		return b
	}
	return append(append(b, text...), '\n')
}

// Shared returns lines that are the same for several agents: messages without their times. See
// [AppendShared].
func Shared(messages ...Message) (lines []byte) {
	for _, m := range messages {
		m.At = 0
		lines = Append(lines, m)
	}
	return lines
}

// AppendShared appends lines, which Shared has returned, with at as the time of each message.
func AppendShared(b []byte, at int64, lines []byte) []byte {
	for line := range bytes.Lines(lines) {
		b = strconv.AppendInt(append(b, `{"at":`...), at, 10)
		b = append(append(b, ','), line[1:]...)
	}
	return b
}
