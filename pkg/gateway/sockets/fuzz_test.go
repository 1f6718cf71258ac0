package sockets

import (
	"bytes"
	"encoding/binary"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func FuzzParse(f *testing.F) {
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		for _, info := range []int{0, 8, 104, 232, 300} {
			data := make([]byte, messageLen)
			data[0], data[1] = family, unix.BPF_TCP_ESTABLISHED
			data = binary.NativeEndian.AppendUint16(data, uint16(4+info))
			data = binary.NativeEndian.AppendUint16(data, diagInfo)
			f.Add(append(data, make([]byte, info)...))
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) < messageLen {
			return // List and Close do not parse it
		}
		s := parse(data)
		if !bytes.Equal(s.id[:], data[4:52]) {
			t.Error("it is closed by another ID")
		}
		if s.Quiet(time.Nanosecond) && (data[1] != unix.BPF_TCP_ESTABLISHED || len(data) <= messageLen) {
			t.Errorf("%+v is quiet, and nothing says so", s)
		}
	})
}
