package wire_test

import (
	"fmt"

	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// A line of the stream tells the agent that a drain has ended.
func ExampleParseMessage() {
	line := `{"type":"release","at":900,"release":{"uid":"4d1c","terminating":true}}`
	var m wire.Message
	err := wire.ParseMessage([]byte(line), &m)
	fmt.Println(m.Type, m.Release.UID, m.Release.Terminating, err)
	// Output: release 4d1c true <nil>
}
