// Package nodes has no code, only tests: Lameduck on three real nodes, installed from its
// manifests, with load through ClusterIP, NodePort and HAProxy at once. They need root and the
// build tag e2e; make e2e runs them.
//
// testTable measures each scenario unprotected, with preStop: sleep 5, and with Lameduck, asserts
// what is promised, prints a table and writes e2e.json. testGateways adds rows for Envoy, which
// Contour configures, and for two replicas of Traefik, and stops one of their processes. The other
// tests kill pods in ways that no webhook sees, and take parts of Lameduck away.
//
// What is real and what is not, package machine says. HAProxy runs in a container with its
// libraries, its agent beside it as a native sidecar. Clients are on none of the nodes: they reach
// ClusterIPs by a route to node-1, whose kube-proxy takes them as it takes those of its pods.
package nodes
