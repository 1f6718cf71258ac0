// Package quickstart runs the commands of the quick start literally, on three real nodes, and
// upgrades from the previous commit under load.
//
// The documents' commands are taken from their fenced blocks of kind sh and run as they stand, by
// bash, in the repository; the test brings only what the documents ask operators for: kubectl, the
// plugin, a kubeconfig, and images on the nodes. The tests themselves have the build tag e2e and
// take root.
package quickstart
