package planes

import (
	"net"
	"os/exec"
	"testing"
	"time"
)

// A process that is being started has copies of this one's listeners. No port that is given is kept
// by them.
func TestAFreeAddressStaysFree(t *testing.T) {
	for end := time.Now().Add(time.Second); time.Now().Before(end); {
		ended := make(chan error, 1)
		go func() { ended <- exec.Command("true").Run() }()
		for len(ended) == 0 {
			l, err := net.Listen("tcp", FreeAddress(t))
			if err != nil {
				t.Fatal(err)
			}
			l.Close()
		}
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
}
