package health

import (
	"testing"
	"unsafe"
)

// A reader touches one cache line of a target, and a change two more.
func TestRecordsFillTheirCacheLines(t *testing.T) {
	if f, r := unsafe.Sizeof(face{}), unsafe.Sizeof(record{}); f != 64 || r != 128 {
		t.Fatalf("a face has %d bytes and a record %d", f, r)
	}
}
