// Package images runs the images of `make images` with a real containerd and a real kubelet. Its
// tests need root and the build tag e2e.
package images
