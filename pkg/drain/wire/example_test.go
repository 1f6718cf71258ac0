package wire_test

import (
	"encoding/json"
	"fmt"

	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// A line of the stream tells the agent that a drain has ended.
func ExampleMessage() {
	line := `{"type":"releases","at":900,"releases":{"uids":["4d1c"],"terminating":true}}`
	var m wire.Message
	err := json.Unmarshal([]byte(line), &m)
	fmt.Println(m.Type, m.Releases.UIDs, m.Releases.Terminating, err)
	// Output: releases [4d1c] true <nil>
}
