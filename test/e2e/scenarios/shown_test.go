package scenarios

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/test/e2e/harness"
	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

const viewer = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: viewer}
rules: [{apiGroups: [lameduck.io], resources: [drains], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: viewer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: viewer}
subjects: [{kind: ServiceAccount, name: default, namespace: %s}]
`

// A deletion in mode observe is measured by one replica. Each of two shows it, if it is asked for
// what all know, and says of which other one that is.
func TestEachReplicaShowsAll(t *testing.T) {
	// Not parallel: it changes the coordinators of all.
	s := open(t)
	entries(t, s, 2)
	defer entries(t, s, 1)
	ns := harness.Namespace(t, s.Kube, "shown", map[string]string{"lameduck.io/mode": "observe"})
	if err := errors.Join(s.Apply(t.Context(), fmt.Sprintf(viewer, ns)),
		s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 2})); err != nil {
		t.Fatal(err)
	}
	if _, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns}); err != nil {
		t.Fatal(err)
	}
	token, err := s.Kube.CoreV1().ServiceAccounts(ns).CreateToken(t.Context(), "default",
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: []string{"lameduck.io"}}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Timeout: 5 * time.Second,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	get := func(from *corev1.Pod, path string, into any) error {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
			"https://"+from.Status.PodIP+":9445"+path, nil)
		if err != nil {
			return err
		}
		request.Header.Set("Authorization", "Bearer "+token.Status.Token)
		response, err := client.Do(request)
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", path, response.Status)
		}
		return json.NewDecoder(response.Body).Decode(into)
	}
	// measured is how many deletions of the namespace a replica has in a report.
	measured := func(from *corev1.Pod, path string) (n int, err error) {
		var report api.Report
		err = get(from, path, &report)
		for _, of := range report.Namespaces {
			if of.Namespace == ns {
				n += of.Deletions
			}
		}
		return n, err
	}
	if _, err := s.Restart(t.Context(), ns, "web"); err != nil {
		t.Fatal(err)
	}
	coordinators, err := s.Pods(t.Context(), stage.System, "app.kubernetes.io/component=webhook")
	if err != nil || len(coordinators) != 2 {
		t.Fatalf("%d coordinators: %v", len(coordinators), err)
	}
	harness.Await(t, 40*time.Second, "each replica shows both deletions, which one has measured", func() error {
		alone := 0
		for i := range coordinators {
			own, err := measured(&coordinators[i], api.ReportPath)
			all, errOfAll := measured(&coordinators[i], api.ReportPath+"?replicas=all")
			if err := errors.Join(err, errOfAll); err != nil || all != 2 {
				return fmt.Errorf("%s: %d of all: %w", coordinators[i].Name, all, err)
			}
			alone += own
		}
		if alone != 2 {
			return fmt.Errorf("%d are measured, each replica alone", alone)
		}
		return nil
	})
	for i := range coordinators {
		harness.Await(t, 10*time.Second, "each replica shows what the other has", func() error {
			var own, all api.View
			if err := errors.Join(get(&coordinators[i], api.ViewPath, &own),
				get(&coordinators[i], api.ViewPath+"?replicas=all", &all)); err != nil {
				return err
			}
			other := coordinators[1-i].Name
			if len(own.With) > 0 || len(all.With) != 1 || all.With[0] != other || len(all.Silent) > 0 {
				return fmt.Errorf("%s alone is with %v; of all it is with %v, not %v; want %s", coordinators[i].Name,
					own.With, all.With, all.Silent, other)
			}
			return nil
		})
	}
}
