//go:build long

package chart

import (
	"archive/tar"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/gatewaytest"
)

// On a node of a cluster with the quotas of GKE: each set of values that needs nothing else is
// installed as an upgrade of the one before. Its pods become ready, and the chart's check hears
// each entry. Then all images come from a registry that demands credentials.
func TestValueSets(t *testing.T) {
	cluster.Entered(t)
	bin := harness.StaticPrograms(t)
	images := harness.Images(bin, "dev")
	from := &registry{content: map[string][]byte{}, pulled: map[string]bool{}}
	digests := map[string]string{}
	for _, image := range images {
		digests[filepath.Base(image.Program)] = from.add(t, image)
	}
	limits := filepath.Join(t.TempDir(), "limits.yaml")
	if err := os.WriteFile(limits, []byte(harness.PriorityLimits), 0o600); err != nil {
		t.Fatal(err)
	}
	control := machine.ControlPlane()
	control.APIServer = append(control.APIServer, "--admission-control-config-file="+limits)
	l := &lab{harness.NewLab(t, control, 1, machine.Options{Images: images}, 30,
		[2]string{"lameduck-system", "app.kubernetes.io/component=webhook"}), gatewaytest.LookPath(t, "helm4")}
	for _, ns := range []string{"edge", "front", "shop"} {
		harness.Namespace(t, l.Kube, ns, nil)
	}
	harness.Namespace(t, l.Kube, "lameduck-system",
		map[string]string{"pod-security.kubernetes.io/enforce": "restricted"})
	file := filepath.Join(t.TempDir(), "values.yaml") // not in a folder of a set's name: Helm splits at commas
	upgrade := func(t *testing.T, values string, more ...string) (string, error) {
		t.Helper()
		if err := os.WriteFile(file, []byte(values), 0o600); err != nil {
			t.Fatal(err)
		}
		return l.run(t, "upgrade", append([]string{harness.ChartDir, "--install", "--reset-values", "--wait",
			"--values=" + file}, more...)...)
	}
	t.Run("a private registry", func(t *testing.T) { private(t, l, from, digests, upgrade) })
	for _, set := range harness.ValueSets {
		if !set.OnNode {
			continue
		}
		t.Run(set.Name, func(t *testing.T) {
			if strings.Contains(set.Values, "hostNetwork") {
				if out, err := l.Kubectl(t.Context(), "label", "--overwrite", "namespace", "lameduck-system",
					"pod-security.kubernetes.io/enforce=privileged"); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
			}
			var values struct{ Webhook struct{ Entries int } }
			if err := yaml.Unmarshal([]byte(set.Values), &values); err != nil {
				t.Fatal(err)
			}
			if out, err := upgrade(t, set.Values); err != nil {
				l.Explain(t)
				t.Fatalf("%v: %s", err, out)
			}
			l.entries(t, cmp.Or(values.Webhook.Entries, 2))
		})
	}
}

// private installs from the registry: without credentials not, with them all three images, that of
// the init container of a pod of users, too.
func private(t *testing.T, l *lab, from *registry, digests map[string]string,
	upgrade func(*testing.T, string, ...string) (string, error)) {
	const address = "127.0.0.1:5000" // of the node, where containerd asks by plain HTTP
	listener, err := l.Set.Machines[0].Listen(address)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: from, ReadHeaderTimeout: time.Minute}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
	values := fmt.Sprintf(`
image: {registry: "%s", digest: "%s", pullPolicy: Always, pullSecrets: [pull]}
barrier: {enabled: true, agentImage: "lameduck/agent:dev@%s", waitImage: "lameduck/lameduck-wait:dev@%s"}
`, address, digests["webhook"], digests["agent"], digests["lameduck-wait"])
	if out, err := upgrade(t, values, "--timeout=20s"); err == nil {
		t.Errorf("without credentials: %s", out)
	}
	if refused, pulled := from.state(); refused == 0 || len(pulled) > 0 {
		t.Errorf("without credentials: %d requests refused, %q pulled", refused, pulled)
	}
	login := fmt.Sprintf(`{"auths": {"%s": {"username": "me", "password": "secret"}}}`, address)
	// Where Pod Security forbids an httpGet to another host, the hook is a program.
	harness.Namespace(t, l.Kube, "private", map[string]string{"lameduck.io/mode": "enforce",
		"pod-security.kubernetes.io/enforce": "restricted"})
	for _, ns := range []string{"lameduck-system", "lameduck-node", "private"} {
		if _, err := l.Kube.CoreV1().Secrets(ns).Create(t.Context(), &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: "pull"}, Type: corev1.SecretTypeDockerConfigJson,
			Data: map[string][]byte{corev1.DockerConfigJsonKey: []byte(login)}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := upgrade(t, values); err != nil {
		l.Explain(t)
		t.Fatalf("%v: %s", err, out)
	}
	pod := harness.StrictPod("app")
	pod.Spec.NodeName, pod.Spec.Containers[0].Image = "", "lameduck.test/pause:1"
	if pod, err = l.Kube.CoreV1().Pods("private").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	l.Await(t, time.Minute, "the pod has run its init container", func() error {
		pod, err = l.Kube.CoreV1().Pods("private").Get(t.Context(), "app", metav1.GetOptions{})
		if err == nil && (len(pod.Spec.InitContainers) != 1 || !harness.Ready(pod)) {
			err = fmt.Errorf("%v: %v", pod.Spec.InitContainers, pod.Status.InitContainerStatuses)
		}
		return err
	})
	if _, pulled := from.state(); !slices.Equal(pulled, []string{"lameduck/agent", "lameduck/lameduck-wait",
		"lameduck/webhook"}) {
		t.Errorf("pulled %q", pulled)
	}
}

// registry is what containerd needs of one, for images of one program, to users who log in.
type registry struct {
	content map[string][]byte // by path

	mu      sync.Mutex
	refused int
	pulled  map[string]bool
}

func (r *registry) state() (refused int, pulled []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.refused, slices.Sorted(maps.Keys(r.pulled))
}

const manifestType = "application/vnd.oci.image.manifest.v1+json"

// add adds the image of a program, and returns its digest.
func (r *registry) add(t *testing.T, image machine.Image) string {
	t.Helper()
	program := filepath.Base(image.Program)
	content, err := os.ReadFile(image.Program)
	if err != nil {
		t.Fatal(err)
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	header := &tar.Header{Name: program, Mode: 0o755, Size: int64(len(content)), Typeflag: tar.TypeReg}
	if err := w.WriteHeader(header); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	put := func(kind, mediaType string, content []byte) map[string]any {
		digest := fmt.Sprintf("sha256:%x", sha256.Sum256(content))
		r.content["/v2/lameduck/"+program+"/"+kind+"/"+digest] = content
		return map[string]any{"mediaType": mediaType, "digest": digest, "size": len(content)}
	}
	encode := func(value any) []byte {
		text, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	of := put("blobs", "application/vnd.oci.image.layer.v1.tar", layer.Bytes())
	config := put("blobs", "application/vnd.oci.image.config.v1+json", encode(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Entrypoint": []string{"/" + program}, "User": image.User},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []any{of["digest"]}}}))
	return put("manifests", manifestType, encode(map[string]any{"schemaVersion": 2, "mediaType": manifestType,
		"config": config, "layers": []any{of}}))["digest"].(string)
}

func (r *registry) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if user, password, _ := request.BasicAuth(); user != "me" || password != "secret" {
		r.refused++
		w.Header().Set("WWW-Authenticate", `Basic realm="images"`)
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	content, found := r.content[request.URL.Path]
	if !found {
		http.NotFound(w, request)
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	if repository, digest, is := strings.Cut(request.URL.Path, "/manifests/"); is {
		r.pulled[strings.TrimPrefix(repository, "/v2/")] = true
		w.Header().Set("Content-Type", manifestType)
		w.Header().Set("Docker-Content-Digest", digest)
	}
	w.Header().Set("Content-Length", strconv.Itoa(len(content)))
	_, _ = w.Write(content) // the caller has gone, if anything
}
