// Package endpoints turns EndpointSlices into targets.
//
// A Service has several slices, a pod may be in several Services, an endpoint is in two slices at
// once while it moves between them, a dual-stack pod has a slice for each family, ports are named
// and each slice has its own numbers for them. The [Index] takes slices one by one as a watch
// delivers them and answers what they say together: of a Service, the usable pods ([Index.Usable]);
// of a pod, the Services that list it ([Index.Pod]); of a port that is followed ([Index.Follow]),
// what each event changes.
//
// The cost of an event depends on its slice, not on the size of the index. A slice is compared with
// its former version, and only the endpoints that differ are counted. Of these, only targets whose
// merged state differs are returned.
package endpoints
