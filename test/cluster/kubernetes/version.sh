#!/usr/bin/env bash
# Makes a module like the one beside this script for another version of Kubernetes, and prints its folder. The
# programs are built from it with LAMEDUCK_CLUSTER_SRC=FOLDER. It requires what that Kubernetes requires itself; Go's
# checksum database verifies the staging modules, which the go.sum of Kubernetes does not list.
#
#     version.sh v1.35.4
set -euo pipefail
version=$1
export GOWORK=off GOFLAGS=-mod=mod
dir=${LAMEDUCK_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lameduck}/source-$version
mkdir -p "$dir"
cd "$dir"
from=$(go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
# etcd's server is the only requirement that Kubernetes names for its tests alone, if at all.
etcd=$(sed -n 's/^\tgo\.etcd\.io\/etcd\/client\/v3 \(v[^ ]*\).*/\1/p' "$from/go.mod")
sed -e "s/^module .*/module kubernetes/" -e "s|=> \./staging/src/\(.*\)|=> \1 v0${version#v1}|" "$from/go.mod" > go.mod
cp "$from/go.sum" go.sum
go mod edit -require="k8s.io/kubernetes@$version" -require="go.etcd.io/etcd/server/v3@$etcd"
programs=(go.etcd.io/etcd/server/v3 k8s.io/kubernetes/cmd/kube{-apiserver,-controller-manager,-scheduler,ctl})
go list -deps "${programs[@]}" > /dev/null
echo "$dir"
