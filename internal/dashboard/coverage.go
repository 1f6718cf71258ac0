package dashboard

import (
	"net/http"
	"time"

	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
)

// maxGaps bounds the consumers that an answer lists.
const maxGaps = 200

// coverage returns the uncovered consumers of all Services.
func (d *Dashboard) coverage(_ http.ResponseWriter, r *http.Request) (any, error) {
	sum, err := coverage.Summary{At: time.Now()}, error(nil)
	if d.Summary != nil {
		sum, err = d.Summary(r.Context())
	}
	is := api.Coverage{At: sum.At, Uncovered: len(sum.Gaps), Items: []api.Consumer{}}
	for class, n := range sum.Services {
		switch is.Services += n; class.State {
		case coverage.Uncovered:
		case coverage.Possible:
			is.Possible += n
		default:
			is.Whole += n
		}
	}
	if err != nil {
		is.Error = err.Error()
	}
	for _, c := range sum.Gaps[:min(len(sum.Gaps), maxGaps)] {
		is.Items = append(is.Items, consumerOf(c))
	}
	return is, nil
}

func consumerOf(c coverage.Consumer) api.Consumer {
	return api.Consumer{Service: c.Service.String(), Name: c.Name, Kind: c.Kind, State: string(c.State), Why: c.Why}
}
