// Package kubeproxy runs a real kube-proxy, in each of its modes, on a real kernel, and tests that
// [github.com/lameduck-io/lameduck/pkg/gateway/kubeproxy] sees the rules that it writes. Its tests
// need root and the build tag e2e.
package kubeproxy
