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

	"github.com/lameduck-io/lameduck/test/cluster"
	"github.com/lameduck-io/lameduck/test/cluster/machine"
)

func TestMain(m *testing.M) { cluster.MainAsRoot(m) }

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

// dist returns the folder with the images dev, which make images has made if LAMEDUCK_DIST says where.
func dist(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("LAMEDUCK_DIST"); dir != "" {
		return dir
	}
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "go", "run", ".", "images", "-out", dir, "-platforms", "linux/"+runtime.GOARCH)
	cmd.Dir = filepath.Join("..", "..", "..", "tools", "release")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make images: %v: %s", err, out)
	}
	return dir
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

// The images are what containerd takes for images and runs, as nobody and without a right, by their tag as in the manifests, and by tag and digest as in a release. A
// node that reaches no registry is given them as docs/releases.md says.
func TestContainerdRunsThem(t *testing.T) {
	cluster.Entered(t)
	dir := dist(t)
	var images []machine.Image
	for _, name := range programs {
		images = append(images, machine.Image{Name: "docker.io/lameduck/" + name + ":dev", Archive: filepath.Join(dir, name+"-dev.oci.tar")})
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
		if out, err := set.Machines[0].Run(t.Context(), "ctr", "--namespace=k8s.io", "images", "import", "--digests", "--base-name="+base, image.Archive); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		refs[name+"-by-digest"] = image.Name + "@" + all[image.Name]
	}
	for name, ref := range refs {
		if out, err := c.KubectlInput(t.Context(), fmt.Sprintf(pod, name, ref), "apply", "--validate=strict", "-f", "-"); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	for name, ref := range refs {
		program := strings.TrimSuffix(name, "-by-digest")
		if out, err := c.Kubectl(t.Context(), "wait", "-n", namespace, "pod/"+name, "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s"); err != nil {
			t.Errorf("%s: %v: %s\n%s", ref, err, out, kubectl("describe", "pod", "-n", namespace, name))
			continue
		}
		said := kubectl("logs", "-n", namespace, name)
		if want := regexp.MustCompile(`^` + program + ` dev, commit [0-9a-f]{40}(-dirty)?, go1\.\S+ linux/` + runtime.GOARCH + `\n$`); !want.MatchString(said) {
			t.Errorf("%s said %q", ref, said)
		}
	}
}
