package drain

import (
	"errors"
	"fmt"
	"time"
)

// RequestLimit is how long the API server lets one DELETE or eviction take
// (k8s.io/apiserver/internal/endpoints/handlers/rest.go, requestTimeoutUpperBound).
const RequestLimit = 34 * time.Second

// answerMargin is what a hold leaves of the webhook's time for the answer to arrive. The API server
// rounds ?timeout= up.
const answerMargin = 1500 * time.Millisecond

// Times are the durations of the protocol. The zero value is not usable; start from DefaultTimes.
type Times struct {
	// Webhook is timeoutSeconds in the webhook configuration.
	Webhook time.Duration
	// Hold is how long one admission call waits at most.
	Hold time.Duration
	// Deadline is how long a drain waits at most, from the start of its clock. A drain that
	// continues an earlier one waits for at least 3/4 of Hold.
	Deadline time.Duration
	// IdleBound is how long a drain waits for Idle after every agent that must acknowledge has
	// reported Removed.
	IdleBound time.Duration
	// Heartbeat is the interval of heartbeats on a stream. Away is how long a stream may be silent
	// before the other side counts as lost.
	Heartbeat, Away time.Duration
	// Expiry is how long an exclusion stands without renewal. Renewal is how often it is renewed at
	// least, Freshness how old a report may be to count.
	Expiry, Renewal, Freshness time.Duration
	// Abandon is how long after the last answered call a drain is checked by a live read of its
	// pod.
	Abandon time.Duration
	// Memory is how long the UID of a deleted pod and the time that a drain has used are
	// remembered.
	Memory time.Duration
}

// DefaultTimes returns the times that Lameduck is tested with.
func DefaultTimes() Times {
	return Times{
		Webhook: 4 * time.Second, Hold: 2 * time.Second, Deadline: 30 * time.Second, IdleBound: 10 * time.Second,
		Heartbeat: 2 * time.Second, Away: 5 * time.Second,
		Expiry: 60 * time.Second, Renewal: 10 * time.Second, Freshness: 15 * time.Second,
		Abandon: 45 * time.Second, Memory: 10 * time.Minute,
	}
}

// Check returns an error that names every violated relation between the times.
func (t Times) Check() error {
	var errs []error
	must := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	must(t.Hold > 0, "hold %s must be positive", t.Hold)
	must(t.Webhook > t.Hold+answerMargin, "webhook timeout %s must be more than hold %s + %s", t.Webhook, t.Hold,
		answerMargin)
	must(t.Webhook <= 30*time.Second, "webhook timeout %s must be at most 30s, the API server's limit", t.Webhook)
	must(t.Deadline >= t.Hold, "deadline %s must be at least hold %s", t.Deadline, t.Hold)
	reach := t.Reach()
	must(reach >= t.Deadline+5*time.Second,
		"deadline %s + 5s must be within what one client call waits, %s (11 holds and ten Retry-After): lengthen "+
			"hold or shorten deadline", t.Deadline, reach)
	must(t.IdleBound > 0 && t.IdleBound <= t.Deadline, "idle bound %s must be positive and at most the deadline %s",
		t.IdleBound, t.Deadline)
	must(t.Heartbeat > 0 && 2*t.Heartbeat < t.Away, "heartbeat %s must be positive and less than half of away %s",
		t.Heartbeat, t.Away)
	must(t.Renewal > 0 && t.Renewal < t.Freshness, "renewal %s must be positive and less than freshness %s", t.Renewal,
		t.Freshness)
	must(t.Expiry-t.Freshness >= RequestLimit+10*time.Second,
		"expiry %s - freshness %s must be at least %s + 10s: an allow may be carried out that late", t.Expiry,
		t.Freshness, RequestLimit)
	must(t.Abandon > RequestLimit, "abandon %s must be more than %s, which the API server gives one request", t.Abandon,
		RequestLimit)
	must(t.Memory > t.Abandon, "memory %s must be more than abandon %s", t.Memory, t.Abandon)
	return errors.Join(errs...)
}

// Reach is how long one call of client-go waits if each of its requests is held and denied.
// client-go follows Retry-After ten times, so the call makes 11 requests.
func (t Times) Reach() time.Duration {
	elapsed := t.Hold
	for range 10 {
		elapsed += RetryAfter(elapsed, true, 0) + t.Hold
	}
	return elapsed
}

// HoldUntil returns when to answer a call that arrived at now, if the API server waits for timeout:
// after Hold, or 1.5 s before the timeout if that is earlier. A timeout of 0 means unknown.
func (t Times) HoldUntil(now time.Time, timeout time.Duration) time.Time {
	hold := t.Hold
	if timeout > 0 {
		hold = max(0, min(hold, timeout-answerMargin))
	}
	return now.Add(hold)
}

// RetryAfter returns how long a denied caller must wait: 1 to 20 whole seconds. It is 15 % of the
// elapsed time, rounded down, if the call was held, and otherwise 60 %, rounded to the nearest
// second. remaining is the time until the deadline, if positive. The wait is then at most
// remaining, rounded up: a retry just before the deadline would waste one of the ten that client-go
// makes.
func RetryAfter(elapsed time.Duration, held bool, remaining time.Duration) time.Duration {
	wait := (elapsed * 60 / 100).Round(time.Second)
	if held {
		wait = (elapsed * 15 / 100).Truncate(time.Second)
	}
	if remaining > 0 {
		wait = min(wait, (remaining + time.Second - 1).Truncate(time.Second))
	}
	return min(max(wait, time.Second), 20*time.Second)
}
