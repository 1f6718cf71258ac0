package main

import (
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// rounds is how often what is compared is measured, in turns.
const rounds = 15

// median returns the middle of values, which must not be empty.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// ratio runs what and floor in turns and returns the median of what took, by the floor beside it.
// Each returns how long its work took.
func ratio(what, floor func() time.Duration) float64 {
	what()
	floor()
	var ratios []float64
	for range rounds {
		f := floor()
		w := what()
		ratios = append(ratios, float64(w)/float64(f))
	}
	return median(ratios)
}

// onCPU returns how much CPU time f takes, which must not leave its goroutine. Beside other
// programs the clock on the wall measures them as well.
func onCPU(f func()) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var began, ended unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &began); err != nil {
		panic(err) // it is always there
	}
	f()
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ended); err != nil {
		panic(err)
	}
	return time.Duration(ended.Nano() - began.Nano())
}
