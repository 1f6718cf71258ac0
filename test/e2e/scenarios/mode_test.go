package scenarios

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// A label counts for the next call about each pod. A deletion that waits for a silent agent
// continues when an operator changes the mode of its namespace or of the pod, and long before its
// deadline.
func TestAModeThatChangesEndsAWait(t *testing.T) {
	// Not parallel with other tests: every pod waits for an agent that does not answer.
	s := open(t)
	harness.SilentAgent(t, s, harness.Namespace(t, s.Kube, "mode-agent", nil))
	for _, c := range []struct {
		of, mode, reason string
	}{
		{"namespace", "observe", "Observed"},
		{"namespace", "off", ""}, // the API server does not ask
		{"pod", "observe", "Observed"},
		{"pod", "off", "ModeOff"},
	} {
		t.Run(c.of+" "+c.mode, func(t *testing.T) {
			t.Parallel()
			ns := harness.Namespace(t, s.Kube, "mode-"+c.of+"-"+c.mode,
				map[string]string{"lameduck.io/mode": "enforce"})
			pod := s.PaperPods(t, ns, 2)[0]
			pods := s.Kube.CoreV1().Pods(ns)
			deleted := make(chan error, 1)
			go func() { deleted <- pods.Delete(t.Context(), pod.Name, metav1.DeleteOptions{}) }()
			harness.Until(t, deadline/2, "the deletion waits", func() bool { return waitsFor(t, s, string(pod.UID)) })
			label := fmt.Appendf(nil, `{"metadata":{"labels":{"lameduck.io/mode":%q}}}`, c.mode)
			var err error
			if c.of == "pod" {
				_, err = pods.Patch(t.Context(), pod.Name, types.MergePatchType, label, metav1.PatchOptions{})
			} else {
				_, err = s.Kube.CoreV1().Namespaces().Patch(t.Context(), ns, types.MergePatchType, label,
					metav1.PatchOptions{})
			}
			if err != nil {
				t.Fatal(err)
			}
			changed := time.Now()
			if err := <-deleted; err != nil {
				t.Fatal(err)
			}
			took := time.Since(changed)
			t.Logf("the deletion continued %s after the change", took)
			if took > deadline/3 {
				t.Errorf("the deletion continued only %s after the change", took)
			}
			reason := ""
			for _, a := range answers(t, s, ns) {
				reason = a.Reason
			}
			if reason != c.reason {
				t.Errorf("allowed for %q, want %q", reason, c.reason)
			}
		})
	}
}

// waitsFor reports whether a coordinator has opened a drain of the pod.
func waitsFor(t *testing.T, s *stage.Stage, uid string) bool {
	t.Helper()
	log, err := s.Logs(t.Context(), stage.System, "app.kubernetes.io/component=webhook", "webhook")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(log) {
		if l, ok := parseLogged(line); ok && l.Msg == "drain" && l.Phase == "Unrouting" && l.UID == uid {
			return true
		}
	}
	return false
}
