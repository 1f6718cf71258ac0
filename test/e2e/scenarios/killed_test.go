package scenarios

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/lameduck-io/lameduck/test/e2e/stage"
)

// unnoticed is how long after a coordinator's death deletions may still be sent to it, or were held by it: until Services no longer route to it and
// gateways have followed EndpointSlices.
const unnoticed = 4 * time.Second

// kill ends the process of a coordinator's pod as nothing else would, and waits until the pod is ready again.
func kill(t *testing.T, s *stage.Stage, pod *corev1.Pod) {
	t.Helper()
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	killed := 0
	for _, path := range processes {
		text, err := os.ReadFile(path)
		args := bytes.Split(text, []byte{0})
		if err != nil || string(args[0]) != filepath.Join(s.Bin, "webhook") || !bytes.Contains(text, []byte("--admission-address="+pod.Status.PodIP+":")) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		killed++
	}
	if killed != 1 {
		t.Fatalf("%d processes of %s were killed, want 1", killed, pod.Name)
	}
	for end := time.Now().Add(30 * time.Second); ; settle(t, 50*time.Millisecond) {
		p, err := s.Kube.CoreV1().Pods(stage.System).Get(t.Context(), pod.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if c := p.Status.ContainerStatuses[0]; c.RestartCount > pod.Status.ContainerStatuses[0].RestartCount && c.Ready {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s does not come back: %+v", pod.Name, p.Status.ContainerStatuses)
		}
	}
}

// One of two coordinators is killed, again and again, while the application is updated and pods are deleted. No deletion fails, and nothing is lost
// but by deletions that were with the one that died: those that it held, and those that were sent to it until its death was known. Those go on at
// once, as if nobody held them, and lose what the application would lose without Lameduck.
func TestOneOfTwoCoordinatorsIsKilled(t *testing.T) {
	// Not parallel: it changes the coordinators of all.
	s := open(t)
	scale(t, s, "2")
	defer scale(t, s, "1")
	ns := namespace(t, s, "killed")
	if err := s.InstallApp(t.Context(), stage.App{Namespace: ns, Replicas: 4, StartDelay: 300 * time.Millisecond, Work: 5 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	address, err := s.InstallGateway(t.Context(), stage.Gateway{Namespace: ns, Lag: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	requests := runClients(t, address, false)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var beside sync.WaitGroup
	kills, deletions := 0, 0
	beside.Go(func() {
		for ; ctx.Err() == nil; kills++ {
			pods, err := s.Pods(t.Context(), stage.System, "app.kubernetes.io/component=webhook")
			if err != nil || len(pods) != 2 {
				t.Errorf("%d coordinators: %v", len(pods), err)
				return
			}
			requests.Mark(fmt.Sprint("killed ", kills))
			began := time.Now()
			kill(t, s, &pods[kills%2])
			settle(t, unnoticed-time.Since(began))
			requests.Mark(fmt.Sprint("both ", kills))
			settle(t, 5*time.Second)
		}
	})
	beside.Go(func() {
		for ; ctx.Err() == nil; deletions++ {
			pods, err := s.Pods(t.Context(), ns, "app=web")
			if err != nil {
				t.Error(err)
				return
			}
			for _, p := range pods {
				if p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning {
					continue
				}
				deleteCtx, cancel := context.WithTimeout(t.Context(), 2*deadline)
				one := metav1.NewUIDPreconditions(string(p.UID))
				if err := s.Kube.CoreV1().Pods(ns).Delete(deleteCtx, p.Name, metav1.DeleteOptions{Preconditions: one}); err != nil && !strings.Contains(err.Error(), "not found") {
					t.Errorf("deletion of %s fails: %v", p.Name, err)
				}
				cancel()
				break
			}
			settle(t, 3*time.Second)
		}
	})
	for began := time.Now(); time.Since(began) < 30*time.Second; {
		if _, err := s.Restart(t.Context(), ns, "web"); err != nil {
			t.Error(err)
			break
		}
	}
	cancel()
	beside.Wait()
	got := requests.Stop()
	lost := 0
	for _, p := range got.Phases {
		if strings.HasPrefix(p.Name, "killed") {
			lost += p.Failed
		} else if p.Failed > 0 {
			t.Errorf("%s: %d of %d requests failed, and no coordinator had died: %v", p.Name, p.Failed, p.Total, p.FailedBy)
		}
	}
	if kills < 3 || deletions < 5 || got.Total == 0 {
		t.Errorf("%d kills, %d deletions, %d requests are too few to show anything", kills, deletions, got.Total)
	}
	t.Logf("%d kills, %d deletions beside the updates, %d requests, of which %d failed within %s of a kill", kills, deletions, got.Total, lost, unnoticed)
	acknowledged := map[string]bool{}
	for _, a := range answers(t, s, ns) {
		acknowledged[a.Pod] = acknowledged[a.Pod] || a.Reason == "Acknowledged"
	}
	for _, f := range got.Failures {
		if acknowledged[f.Pod] {
			t.Errorf("a request to %s failed, which every gateway had let go: %+v", f.Pod, f)
		} else {
			t.Logf("failed: %+v", f)
		}
	}
	noRaces(t, s, ns)
}
