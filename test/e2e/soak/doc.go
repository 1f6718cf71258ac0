// Package soak has no code, only a test: many pods, one after the other, through hold and barrier,
// and what that leaves in the processes of Lameduck. make e2e-long PARTS=soak runs it.
package soak
