package wire_test

import (
	"encoding/json"
	"os"

	"github.com/lameduck-io/lameduck/pkg/drain"
	"github.com/lameduck-io/lameduck/pkg/drain/wire"
)

// What an agent posts after it has opened a stream.
func ExampleDeclaration() {
	route := drain.Route{
		Service: drain.Service{Namespace: "shop", Name: "web"},
		Via:     drain.Endpoints, Kind: drain.Directed, Granularity: drain.PerRequest,
	}
	declaration := wire.Declaration{Session: 7, Gateway: "haproxy", Routes: []drain.Route{route}}
	_ = json.NewEncoder(os.Stdout).Encode(declaration.Routes)
	// Output:
	// [{"service":{"namespace":"shop","name":"web"},"via":"endpoints","kind":"directed","granularity":"request"}]
}
