// Package callers tests what callers of deletions experience beside requests that take long, on a
// real control plane and a real HAProxy: the controllers of kube-controller-manager, kubectl,
// clients that delete a collection, and the clients of Python and Node.
package callers
