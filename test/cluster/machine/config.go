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
		"cni/bin/pods":         networkPlugin(),
		"kubelet.yaml":         kubeletConfig(m, s.options.Kubelet),
	} {
		mode := os.FileMode(0o644)
		if filepath.Dir(name) == "cni/bin" {
			mode = 0o755
		}
		if err := os.WriteFile(filepath.Join(m.dir, name), []byte(text), mode); err != nil {
			return fmt.Errorf("configure machine %s: %w", m.Name, err)
		}
	}
	// containerd calls it by itself.
	if err := os.Symlink(filepath.Join(pluginDir(), "loopback"), filepath.Join(m.dir, "cni/bin/loopback")); err != nil {
		return fmt.Errorf("configure machine %s: %w", m.Name, err)
	}
	return nil
}

func containerdConfig() string {
	return fmt.Sprintf(`version = 2
root = %q
state = "/run/containerd"
# Those that are not there need not be looked for.
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.internal.v1.tracing"]

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
`, pid1.Dir+"/containerd", socket, pid1.Dir+"/opt", pauseImage, pid1.Dir+"/cni/bin", pid1.Dir+"/cni")
}

// networkPlugin is ptp without duplicate address detection, for which it waits a second and more
// with each pod. New network namespaces have it on, and no setting of the plugin's or of the
// machine's own changes that.
func networkPlugin() string {
	return fmt.Sprintf(`#!/bin/sh
export CNI_PATH=%[1]s
if [ "$CNI_COMMAND" = ADD ]; then
	nsenter --net="$CNI_NETNS" sh -c 'echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad' || exit 1
fi
exec %[1]s/ptp
`, pluginDir())
}

// networkConfig is a cable for each pod and a route to it. A bridge would let answers of a
// Service's pod to another pod of its node pass by the packet filter, unless br_netfilter is there.
func networkConfig(m *Machine) string {
	return fmt.Sprintf(`{
  "cniVersion": "0.4.0",
  "name": "pods",
  "plugins": [{
    "type": "pods",
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
cgroupsPerQOS: true
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
