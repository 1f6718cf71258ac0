package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/target"
)

// Agents report the health of their targets for operators; nothing is decided by it. These reports
// must therefore never delay other messages. They have few and short lines of their own between
// those of Reports. A line that cannot be read is ignored and does not end the stream.

// FeatureHealth: the coordinator accepts Health. Agents that check no health do not offer it.
const FeatureHealth = "health"

// Limits of what an agent reports. An agent that has more reports unhealthy Services first.
const (
	// MaxHealth bounds one message, in bytes, and MaxHealthKept all current reports of one agent,
	// by [ServiceHealth.Size].
	MaxHealth     = 16 << 10
	MaxHealthKept = 32 << 10
	// MaxHealthServices bounds the reported Services, MaxHealthTargets the targets that each of
	// them names.
	MaxHealthServices = 128
	MaxHealthTargets  = 5
	// maxHealthWord bounds why and last, in bytes each.
	maxHealthWord = 100
)

// Health is the part of an agent's health report that has changed on this session.
type Health struct {
	Session uint64 `json:"session"`
	// First: this message replaces all earlier ones.
	First bool `json:"first,omitempty"`
	// Services is the number of Services that the gateway routes. All counts the targets of all of
	// them, including Services that are not listed.
	Services int          `json:"services"`
	All      TargetCounts `json:"all"`
	// Changed are the Services with changes. Gone are those that the agent no longer lists.
	Changed []ServiceHealth `json:"changed,omitempty"`
	Gone    []drain.Service `json:"gone,omitempty"`
}

// TargetCounts count the targets that EndpointSlices want traffic for. Each is counted once.
type TargetCounts struct {
	// Usable targets pass their checks. Unknown targets have no verdict yet, or no check: they are
	// usable too.
	Usable  int `json:"usable"`
	Unknown int `json:"unknown"`
	// Unhealthy targets fail their checks.
	Unhealthy int `json:"unhealthy"`
	// Excluded targets belong to pods that a coordinator has excluded.
	Excluded int `json:"excluded"`
	// Doubtful targets have no traffic because the agent cannot decide yet whether they may have
	// any: it has just started, or its coordinators were away.
	Doubtful int `json:"doubtful,omitempty"`
}

// ServiceHealth is the health of the targets of one Service, over all of its ports, as one gateway
// sees it.
type ServiceHealth struct {
	Service drain.Service `json:"service"`
	TargetCounts
	// FailingOpen: too few of a port's targets are usable, so that all of them have traffic.
	FailingOpen bool `json:"failingOpen,omitempty"`
	// Checked: at least one target was ever checked.
	Checked bool `json:"checked,omitempty"`
	// Targets are the first of those that are unhealthy.
	Targets []TargetHealth `json:"targets,omitempty"`
}

// TargetHealth is one target that is unhealthy.
type TargetHealth struct {
	Address netip.AddrPort `json:"address"`
	// Pod is namespace/name. Empty: it is not known.
	Pod string `json:"pod,omitempty"`
	// Why is the reason why the target has traffic or none. Last is the result of its last check.
	// Both are texts of the agent.
	Why  string `json:"why"`
	Last string `json:"last,omitempty"`
	// Since is when it became unhealthy.
	Since time.Time `json:"since,omitzero"`
}

// Summary is an agent's complete health report, within the limits.
type Summary struct {
	Services int
	All      TargetCounts
	Told     []ServiceHealth
}

// Trouble reports whether an operator should look at the Service.
func (s ServiceHealth) Trouble() bool { return s.FailingOpen || s.Unhealthy > 0 || s.Doubtful > 0 }

// Size returns about how many bytes of memory s takes.
func (s ServiceHealth) Size() int {
	n := 200 + len(s.Service.Namespace) + len(s.Service.Name)
	for _, t := range s.Targets {
		n += 120 + len(t.Pod) + len(t.Why) + len(t.Last)
	}
	return n
}

// healthPrefix begins a line of Health, and no line of Reports.
const healthPrefix = `{"health":`

// healthLine is the line of a stream.
type healthLine struct {
	Health Health `json:"health"`
}

// AppendHealth appends h as one line.
func AppendHealth(b []byte, h Health) []byte { return Append(b, healthLine{h}) }

// IsHealth reports whether [AppendHealth] has written a line.
func IsHealth(line []byte) bool { return bytes.HasPrefix(line, []byte(healthPrefix)) }

// ParseHealth reads one line of [AppendHealth], and [Health.Check]s it.
func ParseHealth(line []byte) (Health, error) {
	if len(line) > MaxHealth {
		return Health{}, fmt.Errorf("health: %d bytes are more than %d", len(line), MaxHealth)
	}
	var l healthLine
	if err := json.Unmarshal(line, &l); err != nil {
		return Health{}, fmt.Errorf("health: %w", err)
	}
	for _, s := range l.Health.Changed {
		for i := range s.Targets {
			t := &s.Targets[i]
			t.Pod, t.Why, t.Last = target.Printable(t.Pod), target.Printable(t.Why), target.Printable(t.Last)
		}
	}
	return l.Health, l.Health.Check()
}

// Check returns an error that names what is out of bounds.
func (h Health) Check() error {
	if len(h.Changed) > MaxHealthServices || len(h.Gone) > MaxHealthServices {
		return fmt.Errorf("health: %d and %d Services are more than %d", len(h.Changed), len(h.Gone), MaxHealthServices)
	}
	if h.Services < 0 || h.All.negative() {
		return fmt.Errorf("health: a count is negative")
	}
	for i, s := range h.Changed {
		switch {
		case s.Service.Namespace == "" || s.Service.Name == "" ||
			max(len(s.Service.Namespace), len(s.Service.Name)) > MaxName:
			return fmt.Errorf("health: changed[%d].service: a name is empty, or longer than %d bytes", i, MaxName)
		case s.negative():
			return fmt.Errorf("health: changed[%d]: a count is negative", i)
		case len(s.Targets) > MaxHealthTargets:
			return fmt.Errorf("health: changed[%d].targets: %d are more than %d", i, len(s.Targets), MaxHealthTargets)
		}
		for j, t := range s.Targets {
			if t.Address.Addr().Zone() != "" {
				return fmt.Errorf("health: changed[%d].targets[%d].address: no endpoint has a zone", i, j)
			}
			if len(t.Pod) > 2*MaxName+1 || max(len(t.Why), len(t.Last)) > maxHealthWord {
				return fmt.Errorf("health: changed[%d].targets[%d]: a text is too long", i, j)
			}
		}
	}
	return nil
}

func (c TargetCounts) negative() bool {
	return min(c.Usable, c.Unknown, c.Unhealthy, c.Excluded, c.Doubtful) < 0
}

// Teller computes the changes of a summary for one coordinator, on one session. The zero value has
// sent nothing. Not safe for concurrent use.
type Teller struct {
	told map[drain.Service][]byte
	// services and all are the values that were sent last.
	services int
	all      TargetCounts
	begun    bool
}

// Next returns the changes of s that were not sent yet, as many as one message holds, and whether
// there are any. Call it again until there are none.
func (t *Teller) Next(session uint64, s Summary) (h Health, some bool) {
	h = Health{Session: session, First: !t.begun, Services: s.Services, All: s.All}
	some = h.First || t.services != s.Services || t.all != s.All
	if h.First {
		t.told = map[drain.Service][]byte{}
	}
	t.begun, t.services, t.all = true, s.Services, s.All
	room := MaxHealth - 512
	now := make(map[drain.Service]bool, len(s.Told))
	for _, of := range s.Told {
		now[of.Service] = true
	}
	for name := range t.told {
		if size := len(name.Namespace) + len(name.Name) + 40; !now[name] && room >= size &&
			len(h.Gone) < MaxHealthServices {
			room -= size
			h.Gone = append(h.Gone, name)
			delete(t.told, name)
		}
	}
	for _, of := range s.Told {
		text := string(Append(nil, of))
		if string(t.told[of.Service]) == text || len(text) > room || len(h.Changed) == MaxHealthServices {
			continue
		}
		room -= len(text)
		h.Changed = append(h.Changed, of)
		t.told[of.Service] = []byte(text)
	}
	return h, some || len(h.Changed)+len(h.Gone) > 0
}
