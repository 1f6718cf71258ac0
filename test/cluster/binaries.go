package cluster

import (
	"context"
	"io"
	"path/filepath"
	"strings"

	"github.com/lameduck-io/lameduck/test/cluster/internal/programs"
)

// Binaries is a folder with the programs of a control plane, etcd, kube-apiserver,
// kube-controller-manager and kube-scheduler, and with kubectl. If it comes from [Build], it also
// has those of a node, kubelet and kube-proxy.
type Binaries struct {
	Dir     string
	Version string // of Kubernetes, for example v1.36.3
}

// Path is the path of one of the programs.
func (b Binaries) Path(program string) string { return filepath.Join(b.Dir, program) }

// Build returns the programs of a control plane and of a node. If this user's cache does not hold
// them, Build downloads them from the releases of etcd and Kubernetes, and checks them against
// pinned checksums. It builds a program that it cannot download from source, which takes a Go
// toolchain, the Go module proxy, some minutes and 2 GB. It reports to progress, a line at a time.
// Build must be called before [Enter], because there is no network inside.
//
// KUBERNETES_MIRROR and ETCD_MIRROR are URLs that take the place of https://dl.k8s.io/release and
// https://github.com/etcd-io/etcd/releases/download. If KUBERNETES_MIRROR is off, all programs are
// built from source, and those that were downloaded before are not used.
//
// The cache is $LAMEDUCK_CACHE, else lameduck in the user's cache folder, else in the folder for
// temporary files. Two processes do not download or build at once, and an interruption leaves
// nothing that is taken for a finished program; what was compiled stays in Go's own cache.
func Build(ctx context.Context, progress io.Writer) (Binaries, error) {
	return get(ctx, progress, programs.All)
}

// BuildControlPlane is [Build] without the programs of a node.
func BuildControlPlane(ctx context.Context, progress io.Writer) (Binaries, error) {
	return get(ctx, progress, programs.ControlPlane)
}

// BuildUpstream is [Build] for e2e.test, the end-to-end tests of Kubernetes, and agnhost, which
// their pods run. They are always built from source.
func BuildUpstream(ctx context.Context, progress io.Writer) (Binaries, error) {
	return get(ctx, progress, programs.Upstream)
}

func get(ctx context.Context, progress io.Writer, set programs.Set) (Binaries, error) {
	dir, version, err := programs.Get(ctx, progress, set, Inside())
	return Binaries{Dir: dir, Version: version}, err
}

// tail is the last lines of text.
func tail(text []byte, lines int) string {
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	return strings.Join(all, "\n")
}
