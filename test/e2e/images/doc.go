// Package images lets a real containerd and a real kubelet run the images that `make images` makes.
// It takes root and the build tag e2e.
package images
