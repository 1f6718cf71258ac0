// Package endpoints turns EndpointSlices into targets.
//
// A Service has several slices, a pod may be in several Services, an endpoint is in two slices at
// once while it moves between them, a dual-stack pod has a slice for each family, ports are named
// and each slice has its own numbers for them. The [Index] takes slices one by one as a watch
// delivers them and answers what they say together: of a Service, the usable pods ([Index.Usable]);
// of a pod, the Services that list it ([Index.Pod]); of a port that is followed ([Index.Follow]),
// what each event changes.
//
// What an event costs follows what it changes. A slice that arrives again costs a walk over it,
// beside the one before; only what differs there is counted in or out, and only what then differs
// for a port, all slices together, is told.
package endpoints
