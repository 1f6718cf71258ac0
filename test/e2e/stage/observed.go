package stage

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
)

// ErrNoPacketFilter is returned by [Stage.InstallFollowing] where there is no nft.
var ErrNoPacketFilter = errors.New("nft is missing")

// InstallFollowing installs a real kube-proxy and the agent beside it, which sees in the kernel
// what that does: in the network that the test has of its own, which all pods of the stand-in of a
// node share. Connections to Services are not made there; that kube-proxy lets go is real. Pods
// that are created from then on in places with the barrier's label get its hook, and wait. An
// answer of nil does not say that kube-proxy is ready.
func (s *Stage) InstallFollowing(ctx context.Context) error {
	if _, err := exec.LookPath("nft"); err != nil {
		return fmt.Errorf("%w: %w", ErrNoPacketFilter, err)
	}
	objects, err := Objects(ctx, s.Cluster, "barrier", "Namespace", "ServiceAccount", "ClusterRole",
		"ClusterRoleBinding", "RoleBinding")
	if err != nil {
		return err
	}
	manifests, err := Join(objects)
	if err != nil {
		return err
	}
	if err := s.Apply(ctx, manifests); err != nil {
		return err
	}
	manifests, err = render("observed.yaml", struct{ Bin, KubeProxy, Kubeconfig string }{s.Bin,
		s.Cluster.Binaries().Path("kube-proxy"), s.Cluster.Kubeconfig()})
	if err != nil {
		return err
	}
	if err := s.Apply(ctx, manifests); err != nil {
		return err
	}
	if err := s.Await(ctx, "lameduck-node", "lameduck-node"); err != nil {
		return err
	}
	return s.InstallBarrier(ctx)
}
