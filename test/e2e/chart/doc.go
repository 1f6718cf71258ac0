// Package chart runs Helm on the chart, on a real node: install, test, upgrade, rollback and
// uninstall, by Helm 3 and Helm 4, then the values of clusters of many kinds, and a registry that
// demands credentials. Its tests are too long for CI: build tag long.
package chart
