package dashboard

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// In mode observe a rolling update is not held, and afterwards it is said what it would have waited
// for: requests take 1.5 s, so pods had some in flight. The pods run on for 3 s: the end of a pod
// would end its requests perhaps before the gateway is read.
func TestReport(t *testing.T) {
	s := open(t)
	serveKubelet(t, s.Kube)
	const ns = "observed"
	harness.Namespace(t, s.Kube, ns, map[string]string{"lameduck.io/mode": "observe"})
	shop(t, s, ns, 1500*time.Millisecond, 3)
	if _, err := s.Restart(t.Context(), ns, "web"); err != nil {
		t.Fatal(err)
	}
	admin := s.Cluster.Kubeconfig()
	var is struct {
		Items []struct {
			Namespace                       string
			Deletions, InFlight, Unmeasured int
			WaitSeconds                     []float64
		}
	}
	harness.Await(t, 40*time.Second, "four deletions are measured", func() error {
		out, errs, err := plugin(t, admin, "report", "-n", ns, "-o", "json")
		if err != nil {
			t.Fatal(err, errs)
		}
		if err := json.Unmarshal([]byte(out), &is); err != nil {
			t.Fatal(err)
		}
		if len(is.Items) != 1 || is.Items[0].Deletions+is.Items[0].Unmeasured < 4 {
			return errNotYet(out)
		}
		return nil
	})
	one := is.Items[0]
	if one.Deletions != 4 || one.InFlight == 0 || one.Unmeasured != 0 {
		t.Errorf("%+v, want four deletions, some with requests in flight", one)
	}
	for _, took := range one.WaitSeconds {
		if took <= 0 || took > 12 {
			t.Errorf("a wait of %.3f s", took)
		}
	}
	out, _, err := plugin(t, admin, "report", "-n", ns)
	if err != nil || !strings.Contains(out, "with enforcement 4 deletions would have waited") {
		t.Errorf("%v: %s", err, out)
	}
	t.Log(out)
}

// errNotYet is what was said so far.
type errNotYet string

func (e errNotYet) Error() string { return string(e) }
