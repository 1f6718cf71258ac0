package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/url"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// bomType is what a list of this kind is called in registries.
const bomType = "application/vnd.cyclonedx+json"

// purl is how others call a module: https://github.com/package-url/purl-spec, type golang.
func (m module) purl() string {
	var segments []string
	for _, s := range strings.Split(m.path, "/") {
		segments = append(segments, url.PathEscape(s))
	}
	return "pkg:golang/" + strings.Join(segments, "/") + "@" + strings.ReplaceAll(m.version, "+", "%2B")
}

// bom lists what is in a program, by what the linker has written into it, and the modules in more,
// which were put beside it. It says nothing of licences: their texts are with the program.
func bom(s source, p program, on platform, more ...module) ([]byte, error) {
	modules, err := p.modules()
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(p.content)
	self := cdx.Component{
		BOMRef: "program", Type: cdx.ComponentTypeApplication, Name: p.name, Version: s.version,
		PackageURL: module{path: p.info.Main.Path,
			version: s.version}.purl() + "?goarch=" + on.arch + "&goos=" + on.os + "#cmd/" + p.name,
		Hashes:     &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}},
		Licenses:   &cdx.Licenses{{License: &cdx.License{ID: license}}},
		Properties: &[]cdx.Property{{Name: "lameduck:commit", Value: s.commit}},
	}
	// As scanners for vulnerabilities call it.
	std := module{path: "stdlib", version: strings.TrimPrefix(p.info.GoVersion, "go")}
	var components []cdx.Component
	var refs []string
	for _, m := range append(append([]module{std}, modules...), more...) {
		c := cdx.Component{BOMRef: m.purl(), Type: cdx.ComponentTypeLibrary, Name: m.path, Version: m.version,
			PackageURL: m.purl()}
		if m.sum != "" {
			// Of the whole module, as in go.sum: no hash of any one file.
			c.Properties = &[]cdx.Property{{Name: "lameduck:go.sum", Value: m.sum}}
		}
		components, refs = append(components, c), append(refs, c.BOMRef)
	}
	b := cdx.NewBOM()
	b.Metadata = &cdx.Metadata{
		Timestamp: s.created.Format(time.RFC3339), Component: &self,
		Lifecycles: &[]cdx.Lifecycle{{Phase: cdx.LifecyclePhasePostBuild}},
	}
	b.Components = &components
	// What needs what among modules is not in a program; all are in it.
	b.Dependencies = &[]cdx.Dependency{{Ref: self.BOMRef, Dependencies: &refs}}
	var out bytes.Buffer
	encoder := cdx.NewBOMEncoder(&out, cdx.BOMFileFormatJSON).SetPretty(true)
	// What scanners read as well.
	if err := encoder.EncodeVersion(b, cdx.SpecVersion1_6); err != nil {
		return nil, fmt.Errorf("list what is in %s: %w", p.name, err)
	}
	return out.Bytes(), nil
}
