package dashboard

import (
	"net/http"
	"time"

	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
)

const (
	// coverageEvery is how long an answer is reused, because a large cluster has thousands of
	// Services to read.
	coverageEvery = 10 * time.Second
	// maxGaps bounds the consumers that an answer lists.
	maxGaps = 200
)

// coverage returns the uncovered consumers of all Services.
func (d *Dashboard) coverage(_ http.ResponseWriter, r *http.Request) (any, error) {
	d.gaps.Lock()
	defer d.gaps.Unlock()
	if time.Since(d.gaps.At) < coverageEvery {
		return d.gaps.Coverage, nil
	}
	var sum coverage.Summary
	var err error
	if d.Summary != nil {
		sum, err = d.Summary(r.Context())
	}
	if r.Context().Err() != nil {
		return nil, r.Context().Err()
	}
	is := api.Coverage{At: time.Now(), Services: sum.Services, Whole: sum.Whole, Possible: sum.Possible,
		Uncovered: len(sum.Gaps), Items: []api.Consumer{}}
	if err != nil {
		is.Error = err.Error()
	}
	for _, c := range sum.Gaps[:min(len(sum.Gaps), maxGaps)] {
		is.Items = append(is.Items, consumerOf(c))
	}
	d.gaps.Coverage = is
	return is, nil
}

func consumerOf(c coverage.Consumer) api.Consumer {
	return api.Consumer{Service: c.Service.String(), Name: c.Name, Kind: c.Kind, State: string(c.State), Why: c.Why}
}
