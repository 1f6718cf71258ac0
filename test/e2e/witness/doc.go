// Package witness tests several coordinators on a real API server, each an entry of the webhook
// configuration: no single failure allows a held deletion, and two evictions for one budget do not
// block each other.
package witness
