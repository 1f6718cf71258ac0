// Package nodes has no code, only tests: Lameduck on three real nodes, installed from its
// manifests, with load through ClusterIP, NodePort and HAProxy at once. They need root and the
// build tag e2e; make e2e runs them.
//
// testTable measures each scenario unprotected, with preStop: sleep 5, and with Lameduck, asserts
// the documented guarantees, prints a table and writes e2e.json. testGateways adds rows for Envoy,
// which Contour configures, and for two replicas of Traefik, and stops one of their processes. The
// other tests kill pods in ways that no webhook sees, and take parts of Lameduck away.
//
// See package machine for the differences to real nodes. HAProxy runs in a container with its
// libraries, and its agent runs beside it as a native sidecar. Clients run outside the nodes. They
// reach ClusterIPs by a route to node-1, whose kube-proxy handles their connections like those of
// its pods.
package nodes
