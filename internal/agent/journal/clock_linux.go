package journal

import (
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// stampNow reads both clocks. The time since boot goes on while the machine sleeps, as expiries do.
func stampNow() stamp {
	s := stamp{Wall: time.Now().Round(0)}
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	var t unix.Timespec
	if err == nil && unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) == nil {
		s.Boot, s.SinceBoot = strings.TrimSpace(string(id)), time.Duration(t.Nano())
	}
	return s
}
