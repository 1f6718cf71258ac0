// Package scenarios tests Lameduck as a whole, as its users meet it: with kubectl, on a real
// control plane, with a real HAProxy. The programs run with the race detector.
package scenarios
