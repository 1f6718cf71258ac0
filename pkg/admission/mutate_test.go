package admission

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/internal/keys"
)

var testBarrier = HookOptions{Bound: 30 * time.Second, Port: 9447, Image: "lameduck/wait:dev"}

// in is a namespace where the barrier is enabled.
func in(level string) Place {
	p := Place{Name: "shop", Known: true, Labels: map[string]string{keys.Mode: keys.Enforce}}
	if level != "" {
		p.Labels[enforceLabel] = level
	}
	return p
}

// webPod is a pod with a container "web", as the API server has filled it in.
func webPod(edit ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{GenerateName: "web-", Namespace: "shop"},
		Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyAlways, TerminationGracePeriodSeconds: ptr.To(int64(30)),
			Containers: []corev1.Container{{Name: "web", Image: "web",
				Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}}},
		},
	}
	for _, e := range edit {
		e(p)
	}
	return p
}

// onOS requires nodes with such an operating system.
func onOS(operator corev1.NodeSelectorOperator, names ...string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
					{Key: corev1.LabelOSStable, Operator: operator, Values: names},
				}}},
			},
		}}
	}
}

// preStop gives the first container a hook.
func preStop(h corev1.LifecycleHandler) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PreStop: &h} }
}

// apply is what the API server does with a patch. The pod must have had nothing removed but
// annotations of ours.
func apply(t *testing.T, pod *corev1.Pod, m mutation) *corev1.Pod {
	t.Helper()
	before, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(m.patch)
	if err != nil {
		t.Fatal(err)
	}
	patch, err := jsonpatch.DecodePatch(text)
	if err != nil {
		t.Fatal(err)
	}
	if len(m.patch) == 0 {
		return pod.DeepCopy()
	}
	// Strict, as the API server is: what is not there cannot be removed, and no parent is made by
	// itself.
	after, err := patch.Apply(before)
	if err != nil {
		t.Fatalf("the API server would refuse %s: %v", text, err)
	}
	var out corev1.Pod
	if err := json.Unmarshal(after, &out); err != nil {
		t.Fatal(err)
	}
	return &out
}

// summary is what matters of a mutated pod, in lines.
func summary(p *corev1.Pod) []string {
	lines := []string{}
	for _, key := range []string{keys.BarrierID, keys.BarrierBound, keys.BarrierGrace,
		keys.BarrierUncovered} {
		if v, ok := p.Annotations[key]; ok {
			lines = append(lines, strings.TrimPrefix(key, "lameduck.io/")+"="+v)
		}
	}
	lines = append(lines, fmt.Sprintf("grace %d", *p.Spec.TerminationGracePeriodSeconds))
	for _, c := range slices.Concat(p.Spec.Containers, p.Spec.InitContainers) {
		for _, probe := range []*corev1.Probe{c.LivenessProbe, c.StartupProbe} {
			if probe != nil {
				lines = append(lines, fmt.Sprintf("probe %s: grace %d", c.Name, *probe.TerminationGracePeriodSeconds))
			}
		}
	}
	for _, c := range p.Spec.InitContainers {
		lines = append(lines, fmt.Sprintf("init %s", c.Name))
	}
	for _, c := range p.Spec.Containers {
		line := c.Name + ":"
		if c.Lifecycle != nil && c.Lifecycle.PreStop != nil {
			switch h := c.Lifecycle.PreStop; {
			case h.HTTPGet != nil:
				line += fmt.Sprintf(" get %s %s %s", h.HTTPGet.Host, h.HTTPGet.Port.String(), h.HTTPGet.Path)
			case h.Exec != nil:
				line += " " + strings.Join(h.Exec.Command, " ")
			default:
				line += " another hook"
			}
		}
		for _, e := range c.Env {
			if e.ValueFrom != nil && e.ValueFrom.FieldRef != nil {
				line += " " + e.Name + "=" + e.ValueFrom.FieldRef.FieldPath
			}
		}
		for _, m := range c.VolumeMounts {
			line += " " + m.Name + "@" + m.MountPath
		}
		lines = append(lines, line)
	}
	return lines
}

const (
	waitArgs = "/lameduck/lameduck-wait --agent=$(LAMEDUCK_HOST_IP):9447 --id=THE-ID --container=web --bound=30s"
	hostEnv  = " LAMEDUCK_HOST_IP=status.hostIP"
	mounted  = " lameduck-wait@/lameduck"
)

func TestMutate(t *testing.T) {
	ours := []string{"barrier-id=THE-ID", "barrier-bound=30s", "barrier-grace=30", "grace 60"}
	withExec := func(args string) []string {
		return append(slices.Clone(ours), "init lameduck-wait", "web: "+waitArgs+args+hostEnv+mounted)
	}
	job := metav1.OwnerReference{APIVersion: "batch/v1", Kind: "Job", Name: "j"}
	for _, c := range []struct {
		name  string
		place Place
		pod   *corev1.Pod
		want  coverage
		lines []string // nil: the pod stays as it is
		warns string
	}{
		{"no level", in(""), webPod(), podCovered,
			append(slices.Clone(ours), "web: get 127.0.0.1 9447 /v1/wait/THE-ID?container=web"), ""},
		{"privileged", in("privileged"), webPod(), podCovered,
			append(slices.Clone(ours), "web: get 127.0.0.1 9447 /v1/wait/THE-ID?container=web"), ""},
		{"baseline", in("baseline"), webPod(), podCovered, withExec(""), ""},
		{"restricted", in("restricted"), webPod(), podCovered, withExec(""), ""},
		// It may be a level that comes after these.
		{"unknown level", in("fortress"), webPod(), podCovered, withExec(""), ""},
		{"namespace not heard of", Place{Name: "new"}, webPod(), podCovered, withExec(""), ""},
		// A container that hangs is restarted as soon as before.
		{"probes", in("baseline"), webPod(func(p *corev1.Pod) {
			p.Spec.TerminationGracePeriodSeconds = ptr.To(int64(5))
			p.Spec.Containers[0].LivenessProbe = &corev1.Probe{TerminationGracePeriodSeconds: ptr.To(int64(1))}
			p.Spec.Containers[0].StartupProbe = &corev1.Probe{}
			p.Spec.InitContainers = []corev1.Container{{Name: "first"},
				{Name: "sidecar", LivenessProbe: &corev1.Probe{}}}
		}), podCovered, []string{"barrier-id=THE-ID", "barrier-bound=30s", "barrier-grace=5", "grace 35",
			"probe web: grace 1", "probe web: grace 7", "probe sidecar: grace 7", "init lameduck-wait",
			"init first", "init sidecar", "web: " + waitArgs + hostEnv + mounted}, ""},
		{"postStart stays", in(""), webPod(func(p *corev1.Pod) {
			p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{
				PostStart: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"start"}}}}
		}), podCovered, append(slices.Clone(ours), "web: get 127.0.0.1 9447 /v1/wait/THE-ID?container=web"), ""},

		{"exec hook", in(""),
			webPod(preStop(corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"/bin/sh", "-c",
				"sleep 5 -- x"}}})),
			podCovered, withExec(" -- /bin/sh -c sleep 5 -- x"), ""},
		{"sleep hook", in(""), webPod(preStop(corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 5}})),
			podCovered, withExec(" --sleep=5s"), ""},
		{"sleep hook of 0 s", in(""), webPod(preStop(corev1.LifecycleHandler{Sleep: &corev1.SleepAction{}})),
			podCovered, withExec(""), ""},
		{"http hook", in(""), webPod(preStop(corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{
			Port: intstr.FromString("http"), Path: "/stop?x=y",
			Scheme: "HTTP", HTTPHeaders: []corev1.HTTPHeader{{Name: "X-Why", Value: "it stops"}},
		}})), podCovered, append(slices.Clone(ours), "init lameduck-wait",
			"web: "+waitArgs+" --http-get=http://$(LAMEDUCK_POD_IP):8080/stop?x=y --http-header=X-Why: it stops"+
				hostEnv+" LAMEDUCK_POD_IP=status.podIP"+mounted), ""},
		{"http hook to another host", in(""),
			webPod(preStop(corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt(81),
				Host: "10.0.0.1"}})),
			podCovered, withExec(" --http-get=http://10.0.0.1:81/"), ""},
		{"https hook", in(""),
			webPod(preStop(corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt(81),
				Scheme: "HTTPS"}})),
			podUncoverable, []string{"barrier-uncovered=web", "grace 30", "web: get  81 "},
			"web (its preStop hook speaks HTTPS)"},
		{"http hook to a port that is not there", in(""),
			webPod(preStop(corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromString("admin")}})),
			podUncoverable, []string{"barrier-uncovered=web", "grace 30", "web: get  admin "}, `names port "admin"`},
		{"http hook that no kubelet can send", in(""),
			webPod(preStop(corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromInt(81),
				HTTPHeaders: []corev1.HTTPHeader{{Name: "X-Why", Value: "it\nstops"}}}})),
			podUncoverable, []string{"barrier-uncovered=web", "grace 30", "web: get  81 "},
			`a line break in header "X-Why"`},
		{"tcp hook", in(""),
			webPod(preStop(corev1.LifecycleHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt(81)}})),
			podUncoverable, []string{"barrier-uncovered=web", "grace 30", "web: another hook"},
			"lameduck-wait cannot run"},
		{"one of two", in(""),
			webPod(preStop(corev1.LifecycleHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt(81)}}),
				func(p *corev1.Pod) {
					p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "proxy"})
				}), podPartly, []string{"barrier-id=THE-ID", "barrier-bound=30s", "barrier-grace=30",
				"barrier-uncovered=web", "grace 60", "web: another hook",
				"proxy: get 127.0.0.1 9447 /v1/wait/THE-ID?container=proxy"}, "web ("},
		{"mount in the way", in("baseline"), webPod(func(p *corev1.Pod) {
			p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/lameduck/data"}}
		}), podUncoverable, []string{"barrier-uncovered=web", "grace 30", "web: data@/lameduck/data"},
			"a mount of its own at /lameduck/data"},
		{"variable in the way", in("baseline"), webPod(func(p *corev1.Pod) {
			p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "LAMEDUCK_HOST_IP", Value: "x"}}
		}), podUncoverable, []string{"barrier-uncovered=web", "grace 30", "web:"},
			"a variable LAMEDUCK_HOST_IP of its own"},
		{"volume in the way", in("baseline"), webPod(func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "lameduck-wait",
				VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}}}}
		}), podUncoverable, []string{"barrier-uncovered=web", "grace 30", "web:"}, "a volume lameduck-wait of its own"},
		{"container in the way", in("baseline"),
			webPod(func(p *corev1.Pod) { p.Spec.Containers[0].Name = "lameduck-wait" }),
			podUncoverable, []string{"barrier-uncovered=lameduck-wait", "grace 30", "lameduck-wait:"},
			"a container lameduck-wait of its own"},

		{"native sidecar needs none", in("baseline"), webPod(func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "mesh",
				RestartPolicy: ptr.To(corev1.ContainerRestartPolicyAlways)}}
		}), podCovered, append(slices.Clone(ours), "init lameduck-wait", "init mesh", "web: "+waitArgs+hostEnv+mounted),
			""},
		{"long grace", in(""), webPod(func(p *corev1.Pod) {
			p.Spec.TerminationGracePeriodSeconds = ptr.To(int64(600))
		}), podCovered,
			[]string{"barrier-id=THE-ID", "barrier-bound=30s", "barrier-grace=600", "grace 630",
				"web: get 127.0.0.1 9447 /v1/wait/THE-ID?container=web"}, ""},

		// The API server accepts it, and kubelets take it for 1.
		{"negative grace", in(""), webPod(func(p *corev1.Pod) {
			p.Spec.TerminationGracePeriodSeconds = ptr.To(int64(-5))
			p.Spec.Containers[0].LivenessProbe = &corev1.Probe{}
		}), podCovered, []string{"barrier-id=THE-ID", "barrier-bound=30s", "barrier-grace=1", "grace 31",
			"probe web: grace 3", "web: get 127.0.0.1 9447 /v1/wait/THE-ID?container=web"}, ""},

		{"pod opts in", Place{Name: "a", Known: true},
			webPod(func(p *corev1.Pod) { p.Labels = map[string]string{keys.Mode: keys.Enforce} }), podCovered,
			append(slices.Clone(ours), "web: get 127.0.0.1 9447 /v1/wait/THE-ID?container=web"), ""},
		{"pod opts out", in(""), webPod(func(p *corev1.Pod) {
			p.Labels = map[string]string{keys.Mode: keys.Off}
		}), podNotEnforced, nil, ""},
		{"no label asks for it", Place{Name: "a", Known: true}, webPod(), podNotEnforced, nil, ""},
		{"excluded", Place{Name: "kube-system", Known: true, Labels: in("").Labels, Excluded: true}, webPod(),
			podExcluded, nil, ""},
		{"of a Job", in(""), webPod(func(p *corev1.Pod) { p.OwnerReferences = []metav1.OwnerReference{job} }), podJob,
			nil, ""},
		{"restarted on failure", in(""), webPod(func(p *corev1.Pod) {
			p.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
		}), podJob, nil, ""},
		{"host network", in(""), webPod(func(p *corev1.Pod) { p.Spec.HostNetwork = true }), podHostNetwork, nil,
			"host's network"},
		{"mirror", in(""), webPod(func(p *corev1.Pod) {
			p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
		}), podMirror, nil, ""},
		{"Windows by its field", in(""), webPod(func(p *corev1.Pod) {
			p.Spec.OS = &corev1.PodOS{Name: corev1.Windows}
		}), podWindows, nil, ""},
		{"Windows by its options", in(""), webPod(func(p *corev1.Pod) {
			p.Spec.SecurityContext = &corev1.PodSecurityContext{WindowsOptions: &corev1.WindowsSecurityContextOptions{}}
		}), podWindows, nil, ""},
		{"Windows by a container's options", in(""), webPod(func(p *corev1.Pod) {
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{
				WindowsOptions: &corev1.WindowsSecurityContextOptions{}}
		}), podWindows, nil, ""},
		{"Windows by its node", in(""), webPod(func(p *corev1.Pod) {
			p.Spec.NodeSelector = map[string]string{corev1.LabelOSStable: "windows"}
		}), podWindows, nil, ""},
		{"Windows by its build", in(""), webPod(func(p *corev1.Pod) {
			p.Spec.NodeSelector = map[string]string{corev1.LabelWindowsBuild: "10.0.20348"}
		}), podWindows, nil, ""},
		{"Windows by its affinity", in(""), webPod(onOS(corev1.NodeSelectorOpIn, "windows")), podWindows, nil, ""},
		{"not Linux by its affinity", in(""), webPod(onOS(corev1.NodeSelectorOpNotIn, "linux")), podWindows, nil, ""},
		{"Linux by its affinity", in(""), webPod(onOS(corev1.NodeSelectorOpIn, "linux", "windows")), podCovered,
			append(slices.Clone(ours), "web: get 127.0.0.1 9447 /v1/wait/THE-ID?container=web"), ""},
		{"grace 0", in(""), webPod(func(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = ptr.To(int64(0)) }),
			podZeroGrace, nil, "terminationGracePeriodSeconds is 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := mutate(c.pod, c.place, "THE-ID", testBarrier)
			if m.coverage != c.want {
				t.Errorf("coverage %s, want %s", m.coverage, c.want)
			}
			got := apply(t, c.pod, m)
			if c.lines == nil {
				if len(m.patch) > 0 {
					t.Errorf("patched: %+v", m.patch)
				}
			} else if diff := cmp.Diff(c.lines, summary(got)); diff != "" {
				t.Errorf("pod (-want +got):\n%s", diff)
			}
			if got.Spec.Containers[0].Lifecycle != nil && c.pod.Spec.Containers[0].Lifecycle != nil {
				if diff := cmp.Diff(c.pod.Spec.Containers[0].Lifecycle.PostStart,
					got.Spec.Containers[0].Lifecycle.PostStart); diff != "" {
					t.Errorf("postStart:\n%s", diff)
				}
			}
			if warns := strings.Join(m.warnings(), "\n"); !strings.Contains(warns, c.warns) ||
				(c.warns == "") != (warns == "") {
				t.Errorf("warns %q, want %q", warns, c.warns)
			}
			again := mutate(got, c.place, "THE-ID", testBarrier)
			if len(again.patch) > 0 || again.coverage != m.coverage {
				t.Errorf("asked again: %s and %+v, want %s and nothing", again.coverage, again.patch, m.coverage)
			}
		})
	}
}

// A pod that is asked about again, or is a copy of one that was mutated, gets an id of its own, in
// the hooks too, and what came meanwhile is covered. Its grace grows once.
func TestMutateAgain(t *testing.T) {
	for _, level := range []string{"", "restricted"} {
		t.Run("level "+level, func(t *testing.T) {
			pod := webPod(preStop(corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 5}}),
				func(p *corev1.Pod) {
					p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "second"})
				})
			first := apply(t, pod, mutate(pod, in(level), "FIRST", testBarrier))
			// Another webhook puts its container first, where patches by index would hit it.
			first.Spec.Containers = slices.Insert(first.Spec.Containers, 0,
				corev1.Container{Name: "envoy", Resources: corev1.ResourceRequirements{
					Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Mi")},
				}})
			got := apply(t, first, mutate(first, in(level), "SECOND", testBarrier))
			text, _ := json.Marshal(got)
			if strings.Contains(string(text), "FIRST") || strings.Count(string(text), "SECOND") != 4 {
				t.Errorf("want SECOND in an annotation and three hooks, and FIRST nowhere: %s", text)
			}
			if len(got.Spec.InitContainers) != 1 || len(got.Spec.Volumes) != 1 ||
				*got.Spec.TerminationGracePeriodSeconds != 60 || got.Annotations[keys.BarrierGrace] != "30" {
				t.Errorf("something was added twice: %s", strings.Join(summary(got), "\n"))
			}
			if !strings.Contains(strings.Join(got.Spec.Containers[1].Lifecycle.PreStop.Exec.Command, " "),
				"--sleep=5s") {
				t.Errorf("the own hook is lost: %v", got.Spec.Containers[1].Lifecycle.PreStop.Exec.Command)
			}
			if q := got.Spec.InitContainers[0].Resources.Limits[corev1.ResourceMemory]; q.String() != "64Mi" {
				t.Errorf("the init container has %s of memory, want what the first container has now", q.String())
			}
		})
	}
	// A copy whose grace period was changed keeps that.
	pod := apply(t, webPod(), mutate(webPod(), in(""), "FIRST", testBarrier))
	pod.Spec.TerminationGracePeriodSeconds = ptr.To(int64(90))
	if got := apply(t, pod, mutate(pod, in(""),
		"SECOND", testBarrier)); *got.Spec.TerminationGracePeriodSeconds != 120 {
		t.Errorf("grace %d, want 120", *got.Spec.TerminationGracePeriodSeconds)
	}
	// What is said of a former pod alone goes.
	pod = webPod(func(p *corev1.Pod) { p.Annotations = map[string]string{keys.BarrierUncovered: "old"} })
	if got := apply(t, pod, mutate(pod, in(""), "X", testBarrier)); got.Annotations[keys.BarrierUncovered] != "" {
		t.Errorf("annotations %v", got.Annotations)
	}
	// One that moves to a stricter namespace loses the hook that is forbidden there.
	pod = apply(t, webPod(), mutate(webPod(), in(""), "FIRST", testBarrier))
	if got := apply(t, pod, mutate(pod, in("restricted"),
		"SECOND", testBarrier)); got.Spec.Containers[0].Lifecycle.PreStop.Exec == nil {
		t.Errorf("in a restricted namespace the hook is %+v", got.Spec.Containers[0].Lifecycle.PreStop)
	}
	// One whose bound was another has grown by the new one alone.
	longer := testBarrier
	longer.Bound = time.Minute
	pod = apply(t, webPod(), mutate(webPod(), in(""), "FIRST", testBarrier))
	if got := apply(t, pod, mutate(pod, in(""), "SECOND", longer)); *got.Spec.TerminationGracePeriodSeconds != 90 ||
		got.Annotations[keys.BarrierBound] != "60s" {
		t.Errorf("with a longer bound: %v", summary(got))
	}
}

// The init container must never make the pod larger, nor change its class: it has what the first
// container has, devices apart.
func TestProgramTakesNothing(t *testing.T) {
	pod := webPod(func(p *corev1.Pod) {
		list := corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("1"), corev1.ResourceMemory: resource.MustParse("1Gi"),
			"nvidia.com/gpu": resource.MustParse("1"),
		}
		p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: list, Limits: list}
		p.Spec.InitContainers = []corev1.Container{{Name: "mesh",
			RestartPolicy: ptr.To(corev1.ContainerRestartPolicyAlways)}}
	})
	got := apply(t, pod, mutate(pod, in("restricted"), "X", testBarrier))
	want := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1"),
		corev1.ResourceMemory: resource.MustParse("1Gi")}
	first := got.Spec.InitContainers[0]
	if diff := cmp.Diff(corev1.ResourceRequirements{Requests: want, Limits: want},
		first.Resources); first.Name != waitName || diff != "" {
		t.Errorf("first init container %s, its resources:\n%s", first.Name, diff)
	}
	best := apply(t, webPod(), mutate(webPod(), in("restricted"), "X", testBarrier))
	if r := best.Spec.InitContainers[0].Resources; len(r.Requests)+len(r.Limits) > 0 {
		t.Errorf("a pod of class BestEffort gets %+v", r)
	}
	for _, c := range []struct{ user, want *int64 }{
		{nil, nil}, {ptr.To[int64](0), ptr.To[int64](65532)}, {ptr.To[int64](1000650000), nil},
	} {
		pod := webPod(func(p *corev1.Pod) { p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: c.user} })
		got := apply(t, pod, mutate(pod, in("restricted"), "X", testBarrier))
		if diff := cmp.Diff(c.want, got.Spec.InitContainers[0].SecurityContext.RunAsUser); diff != "" {
			t.Errorf("the init container's user in a pod of user %v: %s", c.user, diff)
		}
	}
}

// A pod that says nothing of seccomp may be admitted only by an SCC that refuses any profile. A
// profile of AppArmor on the pod's node is made for its application.
func TestProgramHasProfilesOnlyWhereThePodHas(t *testing.T) {
	seccomp := &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}
	for name, c := range map[string]struct {
		pod, container *corev1.SecurityContext
		armor          *corev1.AppArmorProfile
		want           corev1.SecurityContext
	}{
		"nothing": {want: corev1.SecurityContext{}},
		"seccomp of the pod": {pod: &corev1.SecurityContext{SeccompProfile: seccomp},
			want: corev1.SecurityContext{SeccompProfile: seccomp}},
		"seccomp of the container": {container: &corev1.SecurityContext{SeccompProfile: seccomp},
			want: corev1.SecurityContext{SeccompProfile: seccomp}},
		"AppArmor of the node": {armor: &corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeLocalhost},
			want: corev1.SecurityContext{
				AppArmorProfile: &corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeRuntimeDefault}}},
		"AppArmor of the runtime": {armor: &corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeRuntimeDefault}},
	} {
		pod := webPod(func(p *corev1.Pod) {
			p.Spec.SecurityContext = &corev1.PodSecurityContext{AppArmorProfile: c.armor}
			if c.pod != nil {
				p.Spec.SecurityContext.SeccompProfile = c.pod.SeccompProfile
			}
			p.Spec.Containers[0].SecurityContext = c.container
		})
		got := apply(t, pod, mutate(pod, in("restricted"), "X", testBarrier)).Spec.InitContainers[0].SecurityContext
		if diff := cmp.Diff(c.want.SeccompProfile, got.SeccompProfile); diff != "" {
			t.Errorf("%s: seccomp (-want +got)\n%s", name, diff)
		}
		if diff := cmp.Diff(c.want.AppArmorProfile, got.AppArmorProfile); diff != "" {
			t.Errorf("%s: AppArmor (-want +got)\n%s", name, diff)
		}
	}
}

// ExecOnly is for clusters where a label does not tell what hooks may be.
func TestExecOnly(t *testing.T) {
	b := testBarrier
	b.ExecOnly = true
	if got := apply(t, webPod(), mutate(webPod(), in(""),
		"X", b)); got.Spec.Containers[0].Lifecycle.PreStop.Exec == nil {
		t.Errorf("hook %+v", got.Spec.Containers[0].Lifecycle.PreStop)
	}
}

// The cluster autoscaler does not remove the node of a pod with an emptyDir, unless an annotation
// names the volume.
func TestTheProgramsVolumeDoesNotKeepTheNode(t *testing.T) {
	for had, want := range map[string]string{"": waitName, "cache": "cache," + waitName,
		waitName + ",b": waitName + ",b"} {
		pod := webPod(preStop(corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 5}}))
		if had != "" {
			pod.Annotations = map[string]string{safeVolumes: had}
		}
		for range 2 {
			pod = apply(t, pod, mutate(pod, in(""), "THE-ID", testBarrier))
		}
		if got := pod.Annotations[safeVolumes]; got != want {
			t.Errorf("the annotation was %q and is %q, want %q", had, got, want)
		}
	}
	if pod := apply(t, webPod(), mutate(webPod(), in(""), "X", testBarrier)); pod.Annotations[safeVolumes] != "" {
		t.Errorf("a pod without the program: %v", pod.Annotations)
	}
}

// A private image is pulled with the Secrets that the coordinator is told of, besides those that
// the pod has.
func TestPullSecrets(t *testing.T) {
	b := testBarrier
	b.PullSecrets = []string{"own", "mirror", "other"}
	for _, has := range [][]corev1.LocalObjectReference{nil, {{Name: "own"}}} {
		pod := webPod(func(p *corev1.Pod) { p.Spec.ImagePullSecrets = has })
		once := apply(t, pod, mutate(pod, in("restricted"), "X", b))
		if diff := cmp.Diff([]corev1.LocalObjectReference{{Name: "own"}, {Name: "mirror"}, {Name: "other"}},
			once.Spec.ImagePullSecrets); diff != "" {
			t.Errorf("a pod that has %v: %s", has, diff)
		}
		again := apply(t, once, mutate(once, in("restricted"), "X", b))
		if diff := cmp.Diff(once.Spec.ImagePullSecrets, again.Spec.ImagePullSecrets); diff != "" {
			t.Errorf("asked again: %s", diff)
		}
	}
	hooked := apply(t, webPod(), mutate(webPod(), in(""), "X", b))
	if len(hooked.Spec.InitContainers) == 0 && len(hooked.Spec.ImagePullSecrets) > 0 {
		t.Errorf("a pod without the init container gets %v", hooked.Spec.ImagePullSecrets)
	}
}
