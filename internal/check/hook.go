package check

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/lameduck-io/lameduck/internal/entry"
	"github.com/lameduck-io/lameduck/internal/keys"
)

// dryRun is how pods are created that must not exist.
var dryRun = metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}

// ErrHost means that the API server refuses pods with the barrier's hook of kind httpGet.
var ErrHost = errors.New("pods with the barrier's httpGet hook are refused")

// testPod returns a pod that Pod Security admits at its strictest level.
func testPod() *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "lameduck-check-"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "check", Image: "lameduck/check",
			// A ResourceQuota may require requests.
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceCPU: resource.MustParse("50m"), corev1.ResourceMemory: resource.MustParse("64Mi")}},
			SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false),
				ReadOnlyRootFilesystem: ptr.To(true), RunAsNonRoot: ptr.To(true),
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
				Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}},
		}}},
	}
}

// Hook creates a pod in mode enforce as a dry run, in a namespace where a mutating entry is called,
// and returns the image of lameduck-wait that the coordinator adds. The error wraps
// [entry.ErrNotAsked] if the API server admits the pod without the hook. With any other error it
// has refused the pod, so that the hook is not known. A second pod, without a hook of its own, gets
// the one of kind httpGet where the namespace's labels allow it. If it is refused, the error wraps
// [ErrHost]: the cluster forbids by other means what the labels allow.
func Hook(ctx context.Context, kube kubernetes.Interface, namespace string) (image string, err error) {
	asked := testPod()
	asked.Labels = map[string]string{keys.Mode: keys.Enforce}
	c := &asked.Spec.Containers[0]
	c.Resources.Limits = c.Resources.Requests // a ResourceQuota may require them, too
	// With a hook of its own, which lameduck-wait has to run, the pod gets the init container.
	own := []string{"true"}
	c.Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: own}}}
	made, err := kube.CoreV1().Pods(namespace).Create(ctx, asked, dryRun)
	if err != nil {
		return "", fmt.Errorf("create a pod in namespace %s, as a dry run: %w", namespace, err)
	}
	if !slices.ContainsFunc(made.Spec.Containers, func(of corev1.Container) bool {
		return of.Name == c.Name && of.Lifecycle != nil && of.Lifecycle.PreStop != nil &&
			of.Lifecycle.PreStop.Exec != nil && !slices.Equal(of.Lifecycle.PreStop.Exec.Command, own)
	}) {
		return "", fmt.Errorf("new pods in namespace %s do not get the hook: %w", namespace, entry.ErrNotAsked)
	}
	for _, c := range made.Spec.InitContainers {
		if c.Name == keys.WaitContainer {
			image = c.Image
		}
	}
	asked.Spec.Containers[0].Lifecycle = nil
	_, err = kube.CoreV1().Pods(namespace).Create(ctx, asked, dryRun)
	if apierrors.IsForbidden(err) {
		err = fmt.Errorf("%w in namespace %s: %w", ErrHost, namespace, err)
	}
	return image, err
}

// tag returns the tag of an image. Empty: it has none.
func tag(image string) string {
	image, _, _ = strings.Cut(image, "@")
	_, tag, _ := strings.Cut(image[strings.LastIndex(image, "/")+1:], ":")
	return tag
}
