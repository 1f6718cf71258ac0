// Package soak has no code, only a test: many pods pass the hold and the barrier one after the
// other. The test measures the resources that Lameduck's processes keep. make e2e-long PARTS=soak
// runs it.
package soak
