package admission

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/internal/keys"
)

const (
	enforceLabel = "pod-security.kubernetes.io/enforce"
	waitName     = keys.WaitContainer // and the name of the volume
	// safeVolumes is the annotation with the names of the volumes, separated by commas, that do not
	// keep the cluster autoscaler from removing a pod's node. Any other emptyDir does.
	safeVolumes   = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
	waitDir       = "/lameduck"
	waitProgram   = waitDir + "/lameduck-wait"
	hostVariable  = "LAMEDUCK_HOST_IP"
	podVariable   = "LAMEDUCK_POD_IP"
	hostField     = "status.hostIP"
	podField      = "status.podIP"
	loopback      = "127.0.0.1"
	nonRoot       = 65532 // the images' user
	defaultGrace  = int64(corev1.DefaultTerminationGracePeriodSeconds)
	waitVolumeMax = "16Mi"
)

// HookOptions configures the preStop hook that makes pods wait before SIGTERM.
type HookOptions struct {
	// Bound is how long a pod waits at most, in whole seconds, unless the annotation
	// lameduck.io/barrier-bound of a Service or its namespace states another bound.
	Bound time.Duration
	// Port is where agents answer, on loopback and on the node's address.
	Port int
	// Image has lameduck-wait as /lameduck-wait.
	Image string
	// PullSecrets are names of Secrets to pull Image with, in the namespace of each pod.
	PullSecrets []string
	// ExecOnly avoids hooks of kind httpGet. Set it in clusters that forbid a host in them by a
	// policy other than the Pod Security label of the namespace.
	ExecOnly bool
}

// Place is what is known of the namespace that a pod is created in.
type Place struct {
	Name                string
	Labels, Annotations map[string]string
	// Known is false if the namespace is too new for the cache. Its labels selected the pod for
	// this webhook at the API server, so the pod gets the barrier.
	Known bool
	// Excluded: pods there never wait.
	Excluded bool
}

// coverage is whether a new pod got the barrier, and if not, why: a label of the metric.
type coverage string

// All but the first two leave the pod without the barrier.
const (
	podCovered     coverage = "Covered"
	podPartly      coverage = "PartlyCovered" // at least one container stops without waiting
	podUncoverable coverage = "Uncoverable"   // no container could be given the hook
	podNotEnforced coverage = "NotEnforced"
	podExcluded    coverage = "Excluded"
	podJob         coverage = "Job" // it ends by itself: owned by a Job, or not restarted always
	// it shares its address with the node, so its traffic cannot be recognized
	podHostNetwork coverage = "HostNetwork"
	podMirror      coverage = "MirrorPod"
	podWindows     coverage = "Windows"
	podZeroGrace   coverage = "ZeroGrace" // its own grace period is 0
)

var coverages = []coverage{
	podCovered, podPartly, podUncoverable, podNotEnforced, podExcluded, podJob, podHostNetwork, podMirror, podWindows,
	podZeroGrace,
}

// uncovered is a container that cannot be given the hook.
type uncovered struct{ container, why string }

// operation is one operation of a JSON patch (RFC 6902). The patch leaves all other fields as they
// are, also fields that the types here do not have yet.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

// mutation is the patch for a pod, with the coverage that results from it.
type mutation struct {
	coverage  coverage
	patch     []operation
	uncovered []uncovered
}

// mutate returns the changes that add the barrier to a pod, with id as the pod's barrier ID. It is
// idempotent: the API server applies it again after other webhooks have changed the pod, and then
// it covers the containers that were added. It replaces an existing id. A pod that is submitted
// again cannot be distinguished from a copy of another pod, and two pods with one id would be
// treated as one.
func mutate(pod *corev1.Pod, place Place, id string, b HookOptions) mutation {
	if why := spared(pod, place); why != "" {
		return mutation{coverage: why}
	}
	m := &mutator{pod: pod, id: id, barrier: b, http: !b.ExecOnly && place.allowsHostInHooks()}
	covered := 0
	for i := range pod.Spec.Containers {
		c := &pod.Spec.Containers[i]
		if why := m.cover(i, c); why != "" {
			m.uncovered = append(m.uncovered, uncovered{c.Name, why})
			continue
		}
		covered++
	}
	switch {
	case covered == 0:
		m.coverage, m.patch, m.program = podUncoverable, nil, false
	case len(m.uncovered) > 0:
		m.coverage = podPartly
	default:
		m.coverage = podCovered
	}
	if covered > 0 {
		m.keepProbes() // before addProgram, by which the init containers have other indexes
		m.growGrace()
	}
	if m.program {
		m.addProgram()
	}
	m.annotate(covered > 0)
	return m.mutation
}

// spared returns why a pod does not get the barrier at all. Empty: it does.
func spared(pod *corev1.Pod, place Place) coverage {
	spec := &pod.Spec
	_, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	switch {
	case place.Excluded:
		return podExcluded
	case place.mode(pod) != keys.Enforce:
		return podNotEnforced
	case mirror:
		return podMirror
	case OnWindows(spec):
		return podWindows
	case spec.RestartPolicy != corev1.RestartPolicyAlways && spec.RestartPolicy != "", ofJob(pod):
		return podJob
	case spec.HostNetwork:
		return podHostNetwork
	case ownGrace(pod) == 0:
		return podZeroGrace
	}
	return ""
}

// OnWindows reports whether a pod is for Windows nodes, as far as it says so.
func OnWindows(spec *corev1.PodSpec) bool {
	_, build := spec.NodeSelector[corev1.LabelWindowsBuild]
	return spec.OS != nil && spec.OS.Name == corev1.Windows || build ||
		spec.NodeSelector[corev1.LabelOSStable] == string(corev1.Windows) ||
		spec.SecurityContext != nil && spec.SecurityContext.WindowsOptions != nil ||
		slices.ContainsFunc(spec.Containers, func(c corev1.Container) bool {
			return c.SecurityContext != nil && c.SecurityContext.WindowsOptions != nil
		}) || neverOnLinux(spec.Affinity)
}

// neverOnLinux reports whether a pod's affinity keeps it from all nodes that run Linux.
func neverOnLinux(a *corev1.Affinity) bool {
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return false
	}
	without := func(r corev1.NodeSelectorRequirement) bool {
		linux := slices.Contains(r.Values, string(corev1.Linux))
		return r.Key == corev1.LabelOSStable && (r.Operator == corev1.NodeSelectorOpIn && !linux ||
			r.Operator == corev1.NodeSelectorOpNotIn && linux)
	}
	for _, term := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		if !slices.ContainsFunc(term.MatchExpressions, without) {
			return false // one of the terms is enough
		}
	}
	return true
}

// mode returns the mode in the pod's label, else that in the namespace's. The cluster's default
// does not count, because a hook changes the pod. A namespace that is not known yet has been
// selected by the API server.
func (p Place) mode(pod *corev1.Pod) string {
	switch own := pod.Labels[keys.Mode]; {
	case keys.IsMode(own):
		return own
	case !p.Known:
		return keys.Enforce
	}
	return p.Labels[keys.Mode]
}

func ofJob(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.OwnerReferences, func(o metav1.OwnerReference) bool {
		return o.Kind == "Job" && strings.HasPrefix(o.APIVersion, batchv1.GroupName+"/")
	})
}

// allowsHostInHooks reports whether Pod Security lets hooks and probes name a host, loopback too.
// It forbids that from baseline on, since 1.34. A namespace that is not known may be of any kind.
func (p Place) allowsHostInHooks() bool {
	level := p.Labels[enforceLabel]
	return p.Known && (level == "" || level == "privileged")
}

// ownGrace returns the grace period that the application has for itself, in seconds. A negative one
// is 1 to kubelets. A pod that was mutated before, or copied from such a pod, has it in an
// annotation. The annotation counts unless the grace period was changed since.
func ownGrace(pod *corev1.Pod) int64 {
	grace := ptr.Deref(pod.Spec.TerminationGracePeriodSeconds, defaultGrace)
	own, err := strconv.ParseInt(pod.Annotations[keys.BarrierGrace], 10, 64)
	bound, err2 := time.ParseDuration(pod.Annotations[keys.BarrierBound])
	if err == nil && err2 == nil && own >= 0 && own+int64(bound.Seconds()) == grace {
		return own
	}
	if grace < 0 {
		return 1
	}
	return grace
}

// mutator collects the operations of the patch.
type mutator struct {
	mutation
	pod     *corev1.Pod
	id      string
	barrier HookOptions
	http    bool // hooks may name a host
	program bool // lameduck-wait is needed in the pod
}

func (m *mutator) do(op, path string, value any) {
	m.patch = append(m.patch, operation{op, path, value})
}

// cover gives container i the hook. If that is not possible it changes nothing and returns why.
func (m *mutator) cover(i int, c *corev1.Container) (why string) {
	var own *corev1.LifecycleHandler
	if c.Lifecycle != nil {
		own = c.Lifecycle.PreStop
	}
	if m.isOurHTTP(own) {
		own = nil // replaced
	}
	path := fmt.Sprintf("/spec/containers/%d", i)
	if own == nil && m.http {
		hook := &corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{
			Host: loopback, Port: intstr.FromInt(m.barrier.Port), Path: keys.WaitPath + m.id + "?container=" + c.Name,
			Scheme: corev1.URISchemeHTTP,
		}}
		m.setHook(path, c, hook)
		return ""
	}
	args := []string{
		waitProgram, fmt.Sprintf("--agent=$(%s):%d", hostVariable, m.barrier.Port), "--id=" + m.id,
		"--container=" + c.Name, "--bound=" + m.bound(),
	}
	var variables []corev1.EnvVar
	need := func(name, field string) {
		variables = append(variables, corev1.EnvVar{Name: name,
			ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: field}}})
	}
	need(hostVariable, hostField)
	wrapped, usesPod, why := wrap(own, c)
	if why != "" {
		return why
	}
	if usesPod {
		need(podVariable, podField)
	}
	if why = m.room(c, variables); why != "" {
		return why
	}
	m.program = true
	m.setHook(path, c, &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: append(args, wrapped...)}})
	m.addVariables(path, c, variables)
	m.mount(path, c)
	return ""
}

func (m *mutator) bound() string { return fmt.Sprintf("%ds", int64(m.barrier.Bound.Seconds())) }

// isOurHTTP reports whether a hook is one that mutate has made, of kind httpGet.
func (m *mutator) isOurHTTP(h *corev1.LifecycleHandler) bool {
	return h != nil && h.HTTPGet != nil && h.HTTPGet.Host == loopback && h.HTTPGet.Port.IntValue() == m.barrier.Port &&
		strings.HasPrefix(h.HTTPGet.Path, keys.WaitPath)
}

// wrap returns the arguments by which lameduck-wait runs the container's own hook, and whether they
// need the pod's address. why is the reason why lameduck-wait cannot run that hook. Empty: it can.
func wrap(own *corev1.LifecycleHandler, c *corev1.Container) (args []string, usesPod bool, why string) {
	switch {
	case own == nil:
		return nil, false, ""
	case own.Exec != nil && len(own.Exec.Command) > 0 && own.Exec.Command[0] == waitProgram:
		// mutate has made this hook, of kind exec. Keep its arguments about the container's own
		// hook, and flags of a later version.
		for i, arg := range own.Exec.Command[1:] {
			name, _, _ := strings.Cut(arg, "=")
			if arg == "--" {
				args = append(args, own.Exec.Command[1+i:]...)
				break
			}
			if !slices.Contains([]string{"--agent", "--id", "--container", "--bound"}, name) {
				args = append(args, arg)
			}
			usesPod = usesPod || strings.Contains(arg, "$("+podVariable+")")
		}
		return args, usesPod, ""
	case own.Exec != nil:
		return append([]string{"--"}, own.Exec.Command...), false, ""
	case own.Sleep != nil:
		if own.Sleep.Seconds <= 0 {
			return nil, false, ""
		}
		return []string{fmt.Sprintf("--sleep=%ds", own.Sleep.Seconds)}, false, ""
	case own.HTTPGet != nil:
		return wrapHTTP(own.HTTPGet, c)
	default:
		return nil, false, "its preStop hook is of a kind that lameduck-wait cannot run"
	}
}

func wrapHTTP(h *corev1.HTTPGetAction, c *corev1.Container) (args []string, usesPod bool, why string) {
	if h.Scheme == corev1.URISchemeHTTPS {
		return nil, false, "its preStop hook speaks HTTPS"
	}
	port := h.Port.IntValue()
	if h.Port.Type == intstr.String {
		i := slices.IndexFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.Name == h.Port.StrVal })
		if i >= 0 {
			port = int(c.Ports[i].ContainerPort)
		}
	}
	if port <= 0 {
		return nil, false, fmt.Sprintf("its preStop hook names port %q, which it does not have", h.Port.String())
	}
	host := h.Host
	switch {
	case host == "":
		host, usesPod = "$("+podVariable+")", true
	case strings.ContainsAny(host, "/?#@$ "):
		return nil, false, fmt.Sprintf("its preStop hook names host %q", host)
	}
	// Not JoinHostPort: lameduck-wait takes addresses without brackets.
	args = []string{"--http-get=http://" + host + ":" + strconv.Itoa(port) + "/" + strings.TrimPrefix(h.Path, "/")}
	for _, header := range h.HTTPHeaders {
		if strings.ContainsAny(header.Value, "\r\n") {
			return nil, false, fmt.Sprintf("its preStop hook has a line break in header %q", header.Name)
		}
		args = append(args, "--http-header="+header.Name+": "+header.Value)
	}
	return args, usesPod, ""
}

// room returns why the program or the variables cannot be added to the container. Empty: they can,
// or are there.
func (m *mutator) room(c *corev1.Container, variables []corev1.EnvVar) string {
	for _, v := range m.pod.Spec.Volumes {
		if v.Name == waitName && v.EmptyDir == nil {
			return "the pod has a volume " + waitName + " of its own"
		}
	}
	for _, other := range slices.Concat(m.pod.Spec.Containers, m.pod.Spec.InitContainers) {
		if other.Name == waitName && !slices.Contains(other.Command, "--install") {
			return "the pod has a container " + waitName + " of its own"
		}
	}
	for _, mount := range c.VolumeMounts {
		inside := mount.MountPath == waitDir || strings.HasPrefix(mount.MountPath, waitDir+"/")
		if inside != (mount.Name == waitName) {
			return "it has a mount of its own at " + mount.MountPath
		}
	}
	for _, v := range variables {
		for _, has := range c.Env {
			if has.Name == v.Name && (has.ValueFrom == nil || has.ValueFrom.FieldRef == nil ||
				has.ValueFrom.FieldRef.FieldPath != v.ValueFrom.FieldRef.FieldPath) {
				return "it has a variable " + v.Name + " of its own"
			}
		}
	}
	return ""
}

func (m *mutator) setHook(path string, c *corev1.Container, hook *corev1.LifecycleHandler) {
	if c.Lifecycle == nil {
		m.do("add", path+"/lifecycle", corev1.Lifecycle{PreStop: hook})
		return
	}
	if equality.Semantic.DeepEqual(c.Lifecycle.PreStop, hook) {
		return
	}
	m.do("add", path+"/lifecycle/preStop", hook)
}

func (m *mutator) addVariables(path string, c *corev1.Container, variables []corev1.EnvVar) {
	empty := len(c.Env) == 0
	for _, v := range variables {
		if slices.ContainsFunc(c.Env, func(has corev1.EnvVar) bool { return has.Name == v.Name }) {
			continue
		}
		m.appendTo(path+"/env", empty, v)
		empty = false
	}
}

func (m *mutator) mount(path string, c *corev1.Container) {
	if slices.ContainsFunc(c.VolumeMounts, func(has corev1.VolumeMount) bool { return has.Name == waitName }) {
		return
	}
	m.appendTo(path+"/volumeMounts", len(c.VolumeMounts) == 0,
		corev1.VolumeMount{Name: waitName, MountPath: waitDir, ReadOnly: true})
}

// appendTo appends to a list, which it creates if it is empty.
func (m *mutator) appendTo(path string, empty bool, value any) {
	if empty {
		m.do("add", path, []any{value})
		return
	}
	m.do("add", path+"/-", value)
}

// addProgram adds the init container that copies lameduck-wait into the pod. It is the first init
// container. After a native sidecar, its resources would add to the sidecar's. As the first, it
// never increases the pod's requests.
func (m *mutator) addProgram() {
	spec := &m.pod.Spec
	if !slices.ContainsFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == waitName }) {
		limit := resource.MustParse(waitVolumeMax)
		m.appendTo("/spec/volumes", len(spec.Volumes) == 0, corev1.Volume{
			Name:         waitName,
			VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{SizeLimit: &limit}},
		})
	}
	resources := likeFirst(spec)
	for i, c := range spec.InitContainers {
		if c.Name == waitName {
			if !equality.Semantic.DeepEqual(c.Resources, resources) {
				m.do("add", fmt.Sprintf("/spec/initContainers/%d/resources", i), resources)
			}
			return
		}
	}
	// The user is the pod's, that of the image, or one that the cluster assigns, as OpenShift does.
	// Only in a pod of root it must be set.
	var user *int64
	if s := spec.SecurityContext; s != nil && s.RunAsUser != nil && *s.RunAsUser == 0 {
		user = ptr.To[int64](nonRoot)
	}
	// Seccomp is as the pod has it, as Pod Security restricted demands: an SCC of OpenShift such as
	// anyuid refuses any profile. A profile of AppArmor that was made for the application need not
	// let this program write.
	var seccomp *corev1.SeccompProfile
	var armor *corev1.AppArmorProfile
	if s := spec.Containers[0].SecurityContext; s != nil && s.SeccompProfile != nil {
		seccomp = &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}
	}
	if s := spec.SecurityContext; s != nil {
		if s.SeccompProfile != nil {
			seccomp = &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}
		}
		if s.AppArmorProfile != nil && s.AppArmorProfile.Type == corev1.AppArmorProfileTypeLocalhost {
			armor = &corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeRuntimeDefault}
		}
	}
	c := corev1.Container{
		Name: waitName, Image: m.barrier.Image, ImagePullPolicy: corev1.PullIfNotPresent,
		Command:      []string{"/lameduck-wait", "--install", waitProgram},
		Resources:    resources,
		VolumeMounts: []corev1.VolumeMount{{Name: waitName, MountPath: waitDir}},
		SecurityContext: &corev1.SecurityContext{
			RunAsNonRoot: ptr.To(true), RunAsUser: user, AllowPrivilegeEscalation: ptr.To(false),
			ReadOnlyRootFilesystem: ptr.To(true),
			Capabilities:           &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			SeccompProfile:         seccomp,
			AppArmorProfile:        armor,
		},
	}
	empty := len(spec.ImagePullSecrets) == 0
	for _, name := range m.barrier.PullSecrets {
		if secret := (corev1.LocalObjectReference{Name: name}); !slices.Contains(spec.ImagePullSecrets, secret) {
			m.appendTo("/spec/imagePullSecrets", empty, secret)
			empty = false
		}
	}
	if len(spec.InitContainers) == 0 {
		m.do("add", "/spec/initContainers", []any{c})
		return
	}
	m.do("add", "/spec/initContainers/0", c)
}

// likeFirst returns the resources of the pod's first container, without devices. With these, the
// init container fits every quota and limit range that the pod fits, adds nothing to the pod's
// requests, and keeps its quality of service class.
func likeFirst(spec *corev1.PodSpec) corev1.ResourceRequirements {
	of := func(all corev1.ResourceList) corev1.ResourceList {
		some := maps.Clone(all)
		maps.DeleteFunc(some, func(name corev1.ResourceName, _ resource.Quantity) bool {
			return name != corev1.ResourceCPU && name != corev1.ResourceMemory &&
				name != corev1.ResourceEphemeralStorage
		})
		return some
	}
	first := spec.Containers[0].Resources
	return corev1.ResourceRequirements{Requests: of(first.Requests), Limits: of(first.Limits)}
}

// restartSeconds is how long the hook delays a container's restart, at most.
const restartSeconds = 2

// keepProbes gives the probes that have no grace period of their own that of the application:
// otherwise a container that hangs, and ignores SIGTERM, is killed later by the whole bound.
func (m *mutator) keepProbes() {
	spec := &m.pod.Spec
	for i, c := range slices.Concat(spec.Containers, spec.InitContainers) {
		path := fmt.Sprintf("/spec/containers/%d/", i)
		if i >= len(spec.Containers) {
			path = fmt.Sprintf("/spec/initContainers/%d/", i-len(spec.Containers))
		}
		for _, p := range []struct {
			name string
			*corev1.Probe
		}{{"livenessProbe", c.LivenessProbe}, {"startupProbe", c.StartupProbe}} {
			if p.Probe != nil && p.TerminationGracePeriodSeconds == nil {
				m.do("add", path+p.name+"/terminationGracePeriodSeconds", ownGrace(m.pod)+restartSeconds)
			}
		}
	}
}

func (m *mutator) growGrace() {
	grace := ownGrace(m.pod) + int64(m.barrier.Bound.Seconds())
	if has := m.pod.Spec.TerminationGracePeriodSeconds; has == nil || *has != grace {
		m.do("add", "/spec/terminationGracePeriodSeconds", grace)
	}
}

// annotate records the changes in annotations, for the agent and for operators.
func (m *mutator) annotate(covered bool) {
	want := map[string]string{}
	if covered {
		want[keys.BarrierID] = m.id
		want[keys.BarrierBound] = m.bound()
		want[keys.BarrierGrace] = strconv.FormatInt(ownGrace(m.pod), 10)
	}
	if len(m.uncovered) > 0 {
		var names []string
		for _, u := range m.uncovered {
			names = append(names, u.container)
		}
		want[keys.BarrierUncovered] = strings.Join(names, ",")
	}
	all := []string{keys.BarrierID, keys.BarrierBound, keys.BarrierGrace, keys.BarrierUncovered}
	if m.program {
		safe := m.pod.Annotations[safeVolumes]
		if !slices.Contains(strings.Split(safe, ","), waitName) {
			safe = strings.TrimPrefix(safe+","+waitName, ",")
		}
		want[safeVolumes], all = safe, append(all, safeVolumes)
	}
	if m.pod.Annotations == nil {
		if len(want) > 0 {
			m.do("add", "/metadata/annotations", want)
		}
		return
	}
	for _, key := range all {
		has, there := m.pod.Annotations[key]
		value, wanted := want[key]
		path := "/metadata/annotations/" + strings.ReplaceAll(key, "/", "~1")
		switch {
		case wanted && (!there || has != value):
			m.do("add", path, value)
		case !wanted && there:
			m.do("remove", path, nil)
		}
	}
}
