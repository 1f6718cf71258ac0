package process

import (
	"os"
	"os/exec"
	"testing"
)

// Without this, a kubelet that is started again may find the port of the one before it in use.
func TestKillChildWaitsUntilTheChildIsGone(t *testing.T) {
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", "sleep 1000 & echo; wait $!; exit 7")
	cmd.Stdout = in
	p, err := Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Kill()
	if _, err := out.Read(make([]byte, 1)); err != nil { // it has its child
		t.Fatal(err)
	}
	p.KillChild()
	if code, signal, _ := p.Exit(); code != 7 || signal != 0 {
		t.Errorf("exit code %d, signal %v, want 7: the process was killed and has not waited", code, signal)
	}
}
