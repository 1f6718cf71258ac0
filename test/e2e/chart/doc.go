// Package chart tests the Helm chart on a real node: install, test, upgrade, rollback and
// uninstall, with Helm 3 and Helm 4. It also tests the values of many kinds of clusters, and a
// registry that demands credentials. Its tests are too long for CI: build tag long.
package chart
