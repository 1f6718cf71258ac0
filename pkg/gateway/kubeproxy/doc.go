// Package kubeproxy observes what kube-proxy made of a node's kernel.
package kubeproxy
