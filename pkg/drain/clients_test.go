package drain

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// Clients repeat a request that was answered with 429 and Retry-After so many times: client-go each
// request ten times (k8s.io/client-go/rest, WithRetry), Python's kubernetes three times and only
// methods that are idempotent, so DELETE but not the POST of an eviction (urllib3 2, Retry.DEFAULT
// and Retry.DEFAULT_ALLOWED_METHODS), Node's @kubernetes/client-node none. The last two are the
// others here.
// docs/faq.md has the figures that this test prints.
func TestClientsThatRepeatRequests(t *testing.T) {
	clients := []struct {
		name    string
		repeats int
	}{{"client-go", 10}, {"Python, DELETE", 3}, {"others", 0}}
	var got strings.Builder
	for _, idle := range []time.Duration{1500 * time.Millisecond, 3 * time.Second, 9 * time.Second,
		time.Minute} {
		fmt.Fprintf(&got, "\n%5s", idle)
		for _, c := range clients {
			fmt.Fprintf(&got, " | %s: %s", c.name, fare(DefaultTimes(), idle, c.repeats))
		}
	}
	t.Log(got.String())
	const want = `
 1.5s | client-go: deleted after 1.5s | Python, DELETE: deleted after 1.5s | others: deleted after 1.5s
   3s | client-go: deleted after 3s | Python, DELETE: deleted after 3s | others: 429 after 2s
   9s | client-go: deleted after 9s | Python, DELETE: deleted after 9s | others: 429 after 2s
 1m0s | client-go: deleted after 30s | Python, DELETE: 429 after 11s | others: 429 after 2s`
	if got.String() != want {
		t.Errorf("got%s\nwant%s", got.String(), want)
	}
}

// fare returns how the deletion of a pod ends for a client, if its gateways need idle.
func fare(times Times, idle time.Duration, repeats int) string {
	ends := min(idle, times.Deadline)
	elapsed := time.Duration(0)
	for n := 0; ; n++ {
		if elapsed = min(elapsed+times.Hold, max(elapsed, ends)); elapsed >= ends {
			return fmt.Sprint("deleted after ", elapsed)
		}
		if n == repeats {
			return fmt.Sprint("429 after ", elapsed)
		}
		elapsed += RetryAfter(elapsed, true, times.Deadline-elapsed)
	}
}
