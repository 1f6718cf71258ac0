package journal

import (
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// boot is read once, so that a later failure does not make the file look like one of another boot.
var boot = sync.OnceValues(func() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id)), err
})

// stampNow counts from the boot, including the time in which the machine sleeps, as expiries do.
func stampNow() Stamp {
	id, err := boot()
	var t unix.Timespec
	if err != nil || unix.ClockGettime(unix.CLOCK_BOOTTIME, &t) != nil {
		return wall()
	}
	return Stamp{Boot: id, At: time.Duration(t.Nano())}
}
