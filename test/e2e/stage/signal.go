package stage

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	corev1 "k8s.io/api/core/v1"
)

// Signal sends a signal to the process of a pod that Process finds.
func (s *Stage) Signal(pod *corev1.Pod, program string, signal syscall.Signal) error {
	pid, err := s.Process(pod, program)
	if err != nil {
		return err
	}
	return syscall.Kill(pid, signal)
}

// Process returns the process id of a pod's process that runs a program of Bin and has the pod's
// address as POD_IP in its environment. It is an error if there is not exactly one.
func (s *Stage) Process(pod *corev1.Pod, program string) (int, error) {
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return 0, err
	}
	var found []int
	for _, path := range processes {
		text, err := os.ReadFile(path)
		name, _, _ := bytes.Cut(text, []byte{0})
		if err != nil || string(name) != filepath.Join(s.Bin, program) {
			continue
		}
		environment, err := os.ReadFile(filepath.Join(filepath.Dir(path), "environ"))
		if err != nil || !slices.Contains(strings.Split(string(environment), "\x00"), "POD_IP="+pod.Status.PodIP) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			return 0, err
		}
		found = append(found, pid)
	}
	if len(found) != 1 {
		return 0, fmt.Errorf("%d processes %s of pod %s, want one", len(found), program, pod.Name)
	}
	return found[0], nil
}
