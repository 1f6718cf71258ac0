// Package witness shows on a real API server what it means that each replica of the coordinator is
// an entry of the webhook configuration: no single failure lets a held deletion through, and two
// evictions of one budget do not lock each other out.
package witness
