package check

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/lameduck-io/lameduck/internal/entry"
	"github.com/lameduck-io/lameduck/internal/keys"
)

// creating returns a client whose API server answers with what admit makes of a pod that is created
// as a dry run. Other creations of pods fail the test.
func creating(t *testing.T, admit func(*corev1.Pod) error) *fake.Clientset {
	kube := fake.NewClientset(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "lameduck-system"}})
	kube.PrependReactor("create", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		create := a.(clienttesting.CreateActionImpl)
		if !slices.Equal(create.CreateOptions.DryRun, dryRun.DryRun) {
			t.Error("it is created")
		}
		pod := create.Object.(*corev1.Pod)
		return true, pod, admit(pod)
	})
	return kube
}

func TestHook(t *testing.T) {
	hook := func(p *corev1.Pod) {
		if l := p.Spec.Containers[0].Lifecycle; l != nil {
			l.PreStop.Exec.Command = []string{"/lameduck/lameduck-wait", "--", "true"}
		}
	}
	for name, c := range map[string]struct {
		admit func(*corev1.Pod) error
		image string
		want  error
	}{
		"the hook": {func(p *corev1.Pod) error {
			if p.Labels[keys.Mode] != keys.Enforce {
				t.Error("its mode is not enforce")
			}
			hook(p)
			p.Spec.InitContainers = []corev1.Container{{Name: "own", Image: "own"},
				{Name: keys.WaitContainer, Image: "wait"}}
			// As a mesh does that starts first.
			p.Spec.Containers = slices.Insert(p.Spec.Containers, 0, corev1.Container{Name: "proxy"})
			return nil
		}, "wait", nil},
		"no hook": {func(*corev1.Pod) error { return nil }, "", entry.ErrNotAsked},
		"its own hook is gone": {func(p *corev1.Pod) error { p.Spec.Containers[0].Lifecycle = nil; return nil }, "",
			entry.ErrNotAsked},
		"refused": {func(*corev1.Pod) error { return errRefused }, "", errRefused},
		"refused with the hook of kind httpGet": {func(p *corev1.Pod) error {
			if p.Spec.Containers[0].Lifecycle == nil {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "check", errRefused)
			}
			hook(p)
			return nil
		}, "", ErrHost},
		"an error with the hook of kind httpGet": {func(p *corev1.Pod) error {
			if p.Spec.Containers[0].Lifecycle == nil {
				return errRefused
			}
			hook(p)
			return nil
		}, "", errRefused},
	} {
		image, err := Hook(t.Context(), creating(t, c.admit), "shop")
		if image != c.image || !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
			t.Errorf("%s: %q, %v", name, image, err)
		}
	}
}

var errRefused = errors.New("exceeded quota")

// The pods that are tried have the priority classes of the manifests. A quota that the manifests
// bring is no obstacle, and does not hide another one.
func TestPriorityBeforeAnInstallation(t *testing.T) {
	for _, node := range []bool{false, true} {
		class := map[bool]string{false: "system-cluster-critical", true: "system-node-critical"}[node]
		for name, c := range map[string]struct {
			other error
			want  []string
		}{
			"the quota alone": {nil, []string{"note"}},
			"and another":     {errRefused, []string{"note", "error"}},
		} {
			var got []string
			prePods(t.Context(), creating(t, func(p *corev1.Pod) error {
				if p.Spec.PriorityClassName == "" {
					return c.other
				}
				if p.Spec.PriorityClassName != class || p.Spec.HostNetwork != node {
					t.Errorf("%+v", p.Spec)
				}
				return errors.New("insufficient quota to match these scopes: [{PriorityClass In [" + class + "]}]")
			}), "lameduck-system", node, func(l Level, _, fix, problem string, args ...any) {
				if text := fmt.Sprintf(problem, args...); l == Note && !strings.Contains(text, class) || fix == "" {
					t.Errorf("%s: %s, %s", name, text, fix)
				}
				got = append(got, string(l))
			})
			if !slices.Equal(got, c.want) {
				t.Errorf("%s: %v, want %v", name, got, c.want)
			}
		}
	}
}

func TestTag(t *testing.T) {
	for image, want := range map[string]string{"a": "", "a:v1": "v1", "localhost:5000/a": "",
		"localhost:5000/b/a:v1": "v1",
		"a@sha256:00":           "", "localhost:5000/a:v1@sha256:00": "v1"} {
		if got := tag(image); got != want {
			t.Errorf("%s: %q, want %q", image, got, want)
		}
	}
}
