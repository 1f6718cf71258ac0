//go:build e2e

package images

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
)

func TestMain(m *testing.M) { cluster.MainAsRoot(m) }

// namespace is one whose new pods get the barrier's hook, by lameduck-wait because Pod Security is
// restricted.
const namespace = "restricted"

// pod runs an image once as Pod Security wants it. Who it runs as is the image's to say.
const pod = `
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: ` + namespace + `}
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
  containers:
  - name: it
    image: %s
    args: [--version]
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
`

var programs = []string{"webhook", "agent", "lameduck-wait"}

// dist returns the folder with the images dev, which make images has made if LAMEDUCK_DIST says
// where.
func dist(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("LAMEDUCK_DIST"); dir != "" {
		return dir
	}
	dir := t.TempDir()
	release(t, "images", "-out", dir, "-platforms", "linux/"+runtime.GOARCH)
	return dir
}

// release runs tools/release.
func release(t *testing.T, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"run", "."}, args...)...)
	cmd.Dir = filepath.Join("..", "..", "..", "tools", "release")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("release %v: %v: %s", args, err, out)
	}
}

// digests are those of the images, by name, as the layout has them.
func digests(t *testing.T, dir string) map[string]string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(dir, "images", "index.json"))
	if err != nil {
		t.Fatal(err)
	}
	var index struct {
		Manifests []struct {
			Digest      string
			Annotations map[string]string
		}
	}
	if err := json.Unmarshal(content, &index); err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, m := range index.Manifests {
		if name := m.Annotations["io.containerd.image.name"]; name != "" {
			found[name] = m.Digest
		}
	}
	return found
}

// containerd imports the images and runs them, as an unnamed user without capabilities, by their
// tag as in the manifests, and by tag and digest as in a release. A node that reaches no registry
// is given them as docs/releases.md says, and then all that a release installs by runs there:
// coordinators, node agents, the check, and pods with the image that only the coordinator's
// configuration names.
func TestARelease(t *testing.T) {
	cluster.Entered(t)
	dir := dist(t)
	var images []machine.Image
	for _, name := range programs {
		images = append(images, machine.Image{Name: "docker.io/lameduck/" + name + ":dev",
			Archive: filepath.Join(dir, name+"-dev.oci.tar")})
	}
	c := cluster.New(t, machine.ControlPlane())
	set := machine.New(t, c, 1, machine.Options{Images: images})
	kubectl := func(args ...string) string {
		t.Helper()
		out, err := c.Kubectl(t.Context(), args...)
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return out
	}
	kubectl("create", "namespace", namespace)
	kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")

	all := digests(t, dir)
	refs := map[string]string{}
	for i, name := range programs {
		image := images[i]
		refs[name] = strings.TrimPrefix(image.Name, "docker.io/")
		base := strings.TrimSuffix(image.Name, ":dev")
		if out, err := set.Machines[0].Run(t.Context(), "ctr", "--namespace=k8s.io", "images", "import", "--digests",
			"--base-name="+base, image.Archive); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		refs[name+"-by-digest"] = image.Name + "@" + all[image.Name]
	}
	run := func(name, ref string) {
		t.Helper()
		if out, err := c.KubectlInput(t.Context(), fmt.Sprintf(pod, name, ref), "apply", "--validate=strict", "-f",
			"-"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	ended := func(name, ref string) {
		t.Helper()
		if out, err := c.Kubectl(t.Context(), "wait", "-n", namespace, "pod/"+name,
			"--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s"); err != nil {
			t.Errorf("%s: %v: %s\n%s", ref, err, out, kubectl("describe", "pod", "-n", namespace, name))
		}
	}
	for name, ref := range refs {
		run(name, ref)
	}
	for name, ref := range refs {
		ended(name, ref)
		program := strings.TrimSuffix(name, "-by-digest")
		said := kubectl("logs", "-n", namespace, name)
		if want := regexp.MustCompile(`^` + program +
			` dev, commit ([0-9a-f]{40}(-dirty)?|unknown), go1\.\S+ linux/` +
			runtime.GOARCH + `\n$`); !want.MatchString(said) {
			t.Errorf("%s said %q", ref, said)
		}
	}

	release(t, "manifests", "-out", dir)
	sameAsTheChart(t, c, dir)
	for _, file := range []string{"install.yaml", "barrier.yaml", "check.yaml"} {
		out := kubectl("apply", "--validate=strict", "-f", filepath.Join(dir, file))
		if strings.Contains(out, "Warning") {
			t.Errorf("%s: %s", file, out)
		}
	}
	for _, wait := range [][]string{
		{"rollout", "status", "-n", "lameduck-system", "deployment", "-l", "app.kubernetes.io/component=webhook",
			"--timeout=120s"},
		{"rollout", "status", "-n", "lameduck-node", "daemonset/lameduck-node", "--timeout=60s"},
		{"wait", "-n", "lameduck-system", "--for=condition=Complete", "--timeout=150s", "job/lameduck-check"},
	} {
		if out, err := c.Kubectl(t.Context(), wait...); err != nil {
			t.Fatalf("%v: %s\n%s", err, out, kubectl("describe", "pods", "-A"))
		}
	}
	kubectl("label", "namespace", namespace, "lameduck.io/mode=enforce")
	// Not one that is to end by itself, which is not for the barrier. A while later the API server
	// knows of the namespace's label.
	hooked := strings.Replace(fmt.Sprintf(pod, "hooked", refs["agent"]), "restartPolicy: Never",
		"restartPolicy: Always", 1)
	for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		init, err := c.KubectlInput(t.Context(), hooked, "create", "--dry-run=server", "-o",
			"jsonpath={.spec.initContainers[*].image}", "-f", "-")
		if err != nil {
			t.Fatalf("%v: %s", err, init)
		}
		if init == refs["lameduck-wait-by-digest"] {
			break
		}
		if init != "" || time.Since(began) > 30*time.Second {
			t.Fatalf("a new pod has %q before it, want %s", init, refs["lameduck-wait-by-digest"])
		}
	}
	if out, err := c.KubectlInput(t.Context(), hooked, "create", "-f", "-"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := c.Kubectl(t.Context(), "wait", "-n", namespace, "pod/hooked",
		"--for=jsonpath={.status.initContainerStatuses[0].state.terminated.reason}=Completed",
		"--timeout=60s"); err != nil {
		t.Errorf("lameduck-wait does not copy itself: %v: %s\n%s", err, out,
			kubectl("describe", "pod", "-n", namespace, "hooked"))
	}
}

type object = map[string]any

// objects are those of manifests, by kind, namespace and name.
func objects(t *testing.T, texts ...string) map[string]object {
	t.Helper()
	all := map[string]object{}
	for _, text := range texts {
		for _, document := range strings.Split("\n"+text, "\n---\n") {
			var o object
			if err := yaml.Unmarshal([]byte(document+"\n"), &o); err != nil {
				t.Fatalf("%v in %s", err, document)
			}
			if meta, ok := o["metadata"].(object); ok {
				all[fmt.Sprint(o["kind"], " ", meta["namespace"], "/", meta["name"])] = o
			}
		}
	}
	return all
}

// sameAsTheChart compares what the chart's archive makes with what operators apply otherwise, and
// that with what kubectl makes of the manifests' archive.
func sameAsTheChart(t *testing.T, c *cluster.Cluster, dir string) {
	t.Helper()
	charted, _, err := harness.Chart(t, filepath.Join(dir, "lameduck-0.0.0-dev.tgz"),
		object{"createNamespace": true, "barrier": object{"enabled": true}})
	if err != nil {
		t.Fatal(err)
	}
	got := objects(t, charted)
	file := func(name string) string {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(content)
	}
	want := objects(t, file("install.yaml"), file("barrier.yaml"))
	for _, all := range []map[string]object{want, got} {
		for _, o := range all {
			harness.Plain(o)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("install.yaml and barrier.yaml (-) and the chart (+): %s", diff)
	}
	unpacked := t.TempDir()
	archive := filepath.Join(dir, "manifests-dev.tar.gz")
	tar := exec.CommandContext(t.Context(), "tar", "-xzf", archive, "-C", unpacked)
	if out, err := tar.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name, folder := range map[string]string{
		"install.yaml": "base", "install-cert-manager.yaml": "overlays/cert-manager",
		"install-own-certificates.yaml": "overlays/own-certificates",
		"barrier.yaml":                  "barrier", "check.yaml": "check",
	} {
		out, err := c.Kubectl(t.Context(), "kustomize", filepath.Join(unpacked, "manifests", folder))
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if diff := cmp.Diff(objects(t, out), objects(t, file(name))); diff != "" {
			t.Errorf("what kubectl makes of manifests/%s (-) and %s (+): %s", folder, name, diff)
		}
	}
}
