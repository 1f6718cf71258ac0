// Package scale has no code, only a test: what a thousand agents cost one coordinator. make
// e2e-long PARTS=scale runs it.
package scale
