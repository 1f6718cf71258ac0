// Package quickstart runs the commands of the quick start literally, on three real nodes, and
// upgrades from the previous commit under load. In the long form it installs the chart where
// network policies are enforced.
//
// The test takes the commands from the documents' fenced blocks of kind sh, and runs them
// unchanged, with bash, in the repository. It provides only the prerequisites that the documents
// name: kubectl, the plugin, a kubeconfig, and images on the nodes. The tests have the build tag
// e2e and need root.
package quickstart
