// Package kubeproxy lets a real kube-proxy, in each of its modes, write a real kernel's rules, and
// looks whether [github.com/lameduck-io/lameduck/pkg/gateway/kubeproxy] sees what it did. It takes
// root and the build tag e2e.
package kubeproxy
