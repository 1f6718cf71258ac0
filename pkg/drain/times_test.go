package drain

import (
	"testing"
	"time"
)

// The table "Longer times" of docs/configuration.md.
func TestTheLongestDeadlines(t *testing.T) {
	for hold, longest := range map[time.Duration]time.Duration{2: 41, 3: 63, 4: 89, 5: 108} {
		times := DefaultTimes()
		times.Hold, times.Webhook, times.Deadline = hold*time.Second, (hold+2)*time.Second, longest*time.Second
		times.IdleBound = times.Deadline
		if err := times.Check(); err != nil {
			t.Errorf("hold %d s: %v", hold, err)
		}
		if times.Deadline += time.Second; times.Check() == nil {
			t.Errorf("hold %d s: a deadline of %s is good, too", hold, times.Deadline)
		}
	}
}
