package machine

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/lameduck-io/lameduck/test/cluster/internal/pid1"
)

const socket = "/run/containerd/containerd.sock"

// configure writes the configuration and credentials of a machine's programs into its folder.
func (s *Set) configure(m *Machine) error {
	for name, who := range map[string][]string{
		"kubelet.kubeconfig":    {"system:node:" + m.Name, "system:nodes"},
		"kube-proxy.kubeconfig": {"system:kube-proxy"},
	} {
		if err := s.cluster.WriteKubeconfig(filepath.Join(m.dir, name), who[0], who[1:]...); err != nil {
			return err
		}
	}
	for name, text := range map[string]string{
		"containerd.toml":      containerdConfig(),
		"cni/10-pods.conflist": networkConfig(m),
		"kubelet.yaml":         kubeletConfig(m, s.options.Kubelet),
	} {
		if err := os.WriteFile(filepath.Join(m.dir, name), []byte(text), 0o644); err != nil {
			return fmt.Errorf("configure machine %s: %w", m.Name, err)
		}
	}
	return nil
}

func containerdConfig() string {
	return fmt.Sprintf(`version = 2
root = %q
state = "/run/containerd"
# Those that are not there need not be looked for.
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.internal.v1.tracing"]

[grpc]
  address = %q

[plugins."io.containerd.internal.v1.opt"]
  path = %q

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  # Root in a container that is itself confined may not lower the score.
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = %q
    conf_dir = %q
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
`, pid1.Dir+"/containerd", socket, pid1.Dir+"/opt", pauseImage, pluginDir(), pid1.Dir+"/cni")
}

// networkConfig is a cable for each pod and a route to it. A bridge would let answers of a Service's pod to another pod of its node
// pass by the packet filter, unless br_netfilter is there.
func networkConfig(m *Machine) string {
	return fmt.Sprintf(`{
  "cniVersion": "0.4.0",
  "name": "pods",
  "plugins": [{
    "type": "ptp",
    "mtu": 1500,
    "ipam": {
      "type": "host-local",
      "dataDir": %q,
      "ranges": [[{"subnet": %q}], [{"subnet": %q}]],
      "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
    }
  }]
}
`, pid1.Dir+"/addresses", m.Pods, m.Pods6)
}

func kubeletConfig(m *Machine, more []string) string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://%s
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: /%s
cgroupsPerQOS: false
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
# Disks and memory are the whole computer's: whatever else runs there is not to evict pods.
evictionHard: {memory.available: 1Mi}
imageGCHighThresholdPercent: 100
podLogsDir: %s/pods
volumePluginDir: %s/plugins
resolvConf: ""
oomScoreAdj: 0
nodeLeaseDurationSeconds: %d
# A node that is Ready is seen at once, not by the next report. The rest is as on any node.
nodeStatusUpdateFrequency: 2s
nodeStatusReportFrequency: 1m
registerNode: true
%s
`, socket, m.group, pid1.Dir, pid1.Dir, leaseSeconds, strings.Join(more, "\n"))
}
