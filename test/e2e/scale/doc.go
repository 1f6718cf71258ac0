// Package scale has no code, only a test: it measures the cost of a thousand agents for one
// coordinator. make e2e-long PARTS=scale runs it.
package scale
