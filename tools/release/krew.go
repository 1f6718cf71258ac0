package main

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/mod/semver"
	"sigs.k8s.io/yaml"
)

// krewName is what kubectl calls the plugin, and so the name of its manifest.
const krewName = "lameduck"

type object = map[string]any

// krew returns the manifest by which krew installs kubectl lameduck from the archives of a folder.
// It needs a version as krew knows them, and where the archives will be.
func krew(o options) ([]byte, error) {
	if !semver.IsValid(o.version) || semver.Canonical(o.version) != o.version {
		return nil, fmt.Errorf("-download: krew wants a version such as v1.2.3, not %q", o.version)
	}
	var platforms []object
	for _, on := range plugins {
		name := pluginFile(o.version, on)
		content, err := os.ReadFile(filepath.Join(o.out, name))
		if err != nil {
			return nil, err
		}
		platforms = append(platforms, object{
			"selector": object{"matchLabels": object{"os": on.os, "arch": on.arch}},
			"uri":      o.download + "/" + name, "sha256": fmt.Sprintf("%x", sha256.Sum256(content)), "bin": plugin,
		})
	}
	return yaml.Marshal(object{
		"apiVersion": "krew.googlecontainertools.github.com/v1alpha2", "kind": "Plugin",
		"metadata": object{"name": krewName},
		"spec": object{
			"version":          o.version,
			"shortDescription": "Deletions of pods that wait for their gateways",
			"description": "Shows what Lameduck's coordinators know: whose deletion waits for which gateway, what " +
				"would happen if a pod were deleted now, and what is wrong with the installation.",
			"platforms": platforms,
		},
	})
}
