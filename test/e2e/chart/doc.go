// Package chart runs Helm on the chart, on a real node: install, test, upgrade, rollback and
// uninstall, by Helm 3 and Helm 4. Its test is too long for CI: build tag long.
package chart
