//go:build e2e && long

package nodes

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

// upstream are the names of end-to-end tests of Kubernetes about how pods end, one in a line.
//
//go:embed upstream.txt
var upstream string

const (
	leastUpstream = 60
	lanes         = 8 // processes that run tests at the same time, except those that are [Serial]
)

// everywhere makes each new namespace one that has Lameduck.
const everywhere = `
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicy
metadata: {name: enforce}
spec:
  failurePolicy: Fail
  reinvocationPolicy: Never
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [namespaces]}]
  mutations:
  - patchType: ApplyConfiguration
    applyConfiguration:
      expression: 'Object{metadata: Object.metadata{labels: {"lameduck.io/mode": "enforce"}}}'
---
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingAdmissionPolicyBinding
metadata: {name: enforce}
spec: {policyName: enforce}
`

// TestUpstream runs the same tests on nodes without Lameduck and on nodes where each namespace of a
// test has it. A test that passes without has to pass with it. ONLY is a regular expression for
// names.
func TestUpstream(t *testing.T) {
	cluster.Entered(t)
	programs, err := cluster.BuildUpstream(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	only := regexp.MustCompile(os.Getenv("ONLY"))
	names := slices.DeleteFunc(strings.Split(strings.TrimSpace(upstream), "\n"), func(name string) bool {
		return !only.MatchString(name)
	})
	var stock, with map[string]spec
	t.Run("stock", func(t *testing.T) {
		stock = newNodes(t, 3, machine.Options{Images: upstreamImages(t, programs)}).runUpstream(t, programs, names)
	})
	t.Run("lameduck", func(t *testing.T) {
		l := newNodes(t, 3, machine.Options{Images: upstreamImages(t, programs)})
		l.install(t)
		l.addWebhooks(t)
		l.applyText(t, everywhere)
		l.Await(t, time.Minute, "new namespaces have Lameduck", func() error {
			ns, err := l.Kube.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
				Name: "try"}}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if err == nil && ns.Labels["lameduck.io/mode"] != "enforce" {
				err = fmt.Errorf("labels %v", ns.Labels)
			}
			return err
		})
		with = l.runUpstream(t, programs, names)
		reasons, hooks := l.reasons(t), 0.0
		for _, m := range l.Set.Machines {
			hooks += l.waited(t, m.Name)
		}
		t.Logf("deletions by reason %v; the agents answered %.0f hooks", reasons, hooks)
		if len(reasons) == 0 || hooks == 0 {
			t.Error("no deletion was reviewed, or no hook answered: nothing was compared")
		}
	})
	same := 0
	for _, name := range names {
		a, b := stock[name], with[name]
		t.Logf("%6.1f s %6.1f s  %s", a.RunTime.Seconds(), b.RunTime.Seconds(), name)
		switch {
		case a.State != succeeded:
			t.Errorf("%s does not pass without Lameduck, so take it off the list: %q %s", name, a.State,
				a.Failure.Message)
		case b.State != succeeded:
			t.Errorf("%s passes without Lameduck; with it: %q %s", name, b.State, b.Failure.Message)
		default:
			same++
		}
	}
	t.Logf("%d of %d tests pass without Lameduck and with it", same, len(names))
	if same < leastUpstream && os.Getenv("ONLY") == "" {
		t.Errorf("%d tests pass without Lameduck and with it, want %d", same, leastUpstream)
	}
}

// upstreamImages are those that the tests ask for, by their names: agnhost, with the commands of
// BusyBox and curl, as in the image that is agnhost's base.
func upstreamImages(t *testing.T, programs cluster.Binaries) []machine.Image {
	t.Helper()
	image := machine.Image{Program: programs.Path("agnhost"), Args: []string{"pause"}, Links: map[string]string{
		// StatefulSets are probed for this file, and it is moved to /tmp to break them.
		"localhost.crt": "/etc/hostname", "tmp": "/dev/shm",
	}}
	busybox := harness.Program(t, "busybox", "make busybox")
	for _, program := range []string{busybox, harness.Program(t, "curl", "make curl")} {
		image.Libraries = append(image.Libraries, program)
		if libraries, err := machine.Libraries(t.Context(), program); err == nil { // one is not linked statically
			image.Libraries = append(image.Libraries, libraries...)
		}
	}
	slices.Sort(image.Libraries)
	image.Libraries = slices.Compact(image.Libraries)
	commands, err := exec.CommandContext(t.Context(), busybox, "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	for name := range strings.FieldsSeq(string(commands)) {
		if path := "bin/" + name; "/"+path != busybox {
			image.Links[path] = busybox
		}
	}
	list, err := exec.CommandContext(t.Context(), programs.Path("e2e.test"), "--list-images").Output()
	if err != nil {
		t.Fatal(err)
	}
	var images []machine.Image
	for name := range strings.FieldsSeq(string(list)) {
		base, _, _ := strings.Cut(filepath.Base(name), ":")
		if strings.HasPrefix(name, "registry.k8s.io/") &&
			slices.Contains([]string{"agnhost", "busybox", "nginx", "pause"}, base) {
			image.Name = name
			images = append(images, image)
		}
	}
	return images
}

// spec is what Ginkgo reports of a test.
type spec struct {
	ContainerHierarchyTexts           []string
	LeafNodeType, LeafNodeText, State string
	RunTime                           time.Duration
	Failure                           struct{ Message string }
}

const succeeded = "passed"

// runUpstream runs tests, and returns what became of each.
func (l *lab) runUpstream(t *testing.T, programs cluster.Binaries, names []string) map[string]spec {
	t.Helper()
	began := time.Now()
	work := map[string][]string{}
	for i, name := range names {
		lane := fmt.Sprint("lane-", i%lanes)
		if strings.Contains(name, "[Serial]") {
			lane = "serial"
		}
		work[lane] = append(work[lane], name)
	}
	serial := work["serial"]
	delete(work, "serial")
	var mu sync.Mutex
	specs := map[string]spec{}
	run := func(lane string, names []string) {
		got, err := l.runLane(t, programs, lane, names)
		if err != nil {
			t.Error(err)
		}
		mu.Lock()
		defer mu.Unlock()
		maps.Copy(specs, got)
	}
	var wg sync.WaitGroup
	for lane, names := range work {
		wg.Go(func() { run(lane, names) })
	}
	wg.Wait()
	if len(serial) > 0 {
		run("serial", serial)
	}
	t.Logf("%d tests in %s", len(names), time.Since(began).Round(time.Second))
	return specs
}

// runLane runs tests one after another.
func (l *lab) runLane(t *testing.T, programs cluster.Binaries, lane string, names []string) (map[string]spec, error) {
	path := filepath.Join(l.LogDir(), "upstream-"+lane)
	log, err := os.Create(path + ".log")
	if err != nil {
		return nil, err
	}
	defer log.Close()
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = regexp.QuoteMeta(name)
	}
	cmd := exec.CommandContext(t.Context(), programs.Path("e2e.test"), "--kubeconfig="+l.Kubeconfig(),
		"--kubectl-path="+l.Binaries().Path("kubectl"), "--provider=skeleton", "--dump-logs-on-failure=false",
		"--ginkgo.timeout=3h", "--ginkgo.json-report="+path+".json",
		"--ginkgo.focus=(?:"+strings.Join(quoted, "|")+")$")
	cmd.Stdout, cmd.Stderr = log, log
	ran := cmd.Run() // fails if a test does: the report says which
	text, err := os.ReadFile(path + ".json")
	if err != nil {
		return nil, fmt.Errorf("%s: %w (%v)", lane, err, ran)
	}
	var reports []struct{ SpecReports []spec }
	if err := json.Unmarshal(text, &reports); err != nil {
		return nil, fmt.Errorf("%s: %w", lane, err)
	}
	specs := map[string]spec{}
	for _, s := range reports[0].SpecReports {
		name := strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
		switch {
		case s.LeafNodeType == "It" && slices.Contains(names, name):
			specs[name] = s
		case s.LeafNodeType != "It" && s.State != succeeded:
			err = fmt.Errorf("%s: %s %s: %s", lane, s.LeafNodeType, s.State, s.Failure.Message)
		}
	}
	return specs, err
}

// reasons counts the answers of all coordinators to deletions and evictions, by reason.
func (l *lab) reasons(t *testing.T) map[string]float64 {
	t.Helper()
	pods, err := l.Kube.CoreV1().Pods(system).List(t.Context(), metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/component=webhook"})
	if err != nil {
		t.Fatal(err)
	}
	reasons := map[string]float64{}
	for _, p := range pods.Items {
		response, err := http.Get("http://" + net.JoinHostPort(p.Status.PodIP, "8080") + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range answered.FindAllStringSubmatch(string(text), -1) {
			if n, _ := strconv.ParseFloat(found[2], 64); n > 0 {
				reasons[found[1]] += n
			}
		}
	}
	return reasons
}

var answered = regexp.MustCompile(`(?m)^lameduck_admission_answers_total{.*reason="(\w+)".*} (\S+)$`)
