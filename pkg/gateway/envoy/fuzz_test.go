package envoy

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/lameduck-io/lameduck/pkg/health"
)

// FuzzRead reads what an Envoy may answer. Whatever it says, a host that is out of nothing is
// Routing: anything else would let a deletion go on.
func FuzzRead(f *testing.F) {
	f.Add(`{"state":"LIVE","uptime_current_epoch":"9s","command_line_options":{"restart_epoch":0}}`,
		`{"cluster_statuses":[{"name":"web","host_statuses":[{"address":{"socket_address":{"address":"10.0.0.1",`+
			`"port_value":80}},"stats":[{"name":"rq_active","value":"1"},{"name":"rq_pending_active"}],`+
			`"health_status":{"eds_health_status":"DRAINING"}}]}]}`,
		`{"configs":[{"cluster":{"name":"web","common_lb_config":{"healthy_panic_threshold":{"value":0}}}}]}`)
	f.Add(`{"state":"LIVE"}`, `{"cluster_statuses":[{"host_statuses":[{"address":{"socket_address":`+
		`{"address":"::ffff:10.0.0.1","port_value":65535}},"health_status":{"failed_active_health_check":true}}]}]}`,
		`{}`)
	f.Fuzz(func(t *testing.T, info, clusters, dump string) {
		asked := 0
		hosts, err := (&reader{}).read(func(path string, into any) error {
			asked++
			switch {
			case path == "/server_info":
				return json.Unmarshal([]byte(info), into)
			case strings.HasPrefix(path, "/clusters"):
				return json.Unmarshal([]byte(clusters), into)
			}
			return json.Unmarshal([]byte(dump), into)
		})
		if err != nil {
			if hosts != nil {
				t.Fatalf("%v with the error %v", hosts, err)
			}
			return
		}
		for _, h := range hosts {
			if !h.Target.IsValid() && h.State == health.Unknown {
				continue // it has a name
			}
			if !h.Target.IsValid() || h.Target.Addr().Is4In6() || h.State < health.Routing || h.State > health.Removed {
				t.Fatalf("%+v", h)
			}
			if asked == 2 && h.State != health.Routing {
				t.Fatalf("%+v, although no host is out", h)
			}
		}
	})
}
