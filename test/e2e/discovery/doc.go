// Package discovery has no code, only a test: a Prometheus with Kubernetes service discovery finds
// what docs/operations.md and the chart's PodMonitors scrape. make e2e-long PARTS=discovery runs
// it.
package discovery
