package health

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/lameduck-io/lameduck/pkg/target"
)

// UID is a pod's metadata.uid. It names one pod permanently: a new pod of the same name has another
// UID.
type UID = target.UID

// Target is one address of one pod. The same ip:port of another pod is another Target, so that
// neither health nor exclusions nor requests in flight of the one are ever attributed to the other.
type Target struct {
	UID  UID
	Addr netip.AddrPort
}

// String prints the target as ip:port@uid.
func (t Target) String() string { return fmt.Sprintf("%s@%s", t.Addr, t.UID) }

// Pool names the part of a gateway that one Service port feeds: a HAProxy backend, an nginx
// upstream, an Envoy cluster.
type Pool string

// Key is one target in one pool. A pod behind two Services is in two pools.
type Key struct {
	Pool   Pool
	Target Target
}

// String prints the key as pool/ip:port@uid.
func (k Key) String() string { return string(k.Pool) + "/" + k.Target.String() }

// Want is what the set asks of the gateway for one key.
type Want uint8

const (
	// WantUnknown is the zero value and asks for nothing.
	WantUnknown Want = iota
	// WantRouted asks the gateway to send requests to the target.
	WantRouted
	// WantRemoved asks the gateway to send nothing new to the target. Running requests continue.
	WantRemoved
	// WantAbsent asks the gateway to send nothing new to the target, and to delete it once no
	// request runs on it.
	WantAbsent
)

// String prints the want in lower case.
func (w Want) String() string {
	return target.Name(w, "unknown", "routed", "removed", "absent")
}

// Op is one operation on the gateway. Ops are idempotent: a repeated Op changes nothing.
type Op struct {
	Key
	Want Want
}

// String prints the op as "removed web/10.0.0.1:80@uid".
func (o Op) String() string { return o.Want.String() + " " + o.Key.String() }

// Seen is the state of one key, read back from all live processes of a gateway.
type Seen struct {
	// Present: at least one process has a server for the key.
	Present bool
	// Routed: at least one process may send a new request to it. Present without Routed means taken
	// out.
	Routed bool
	// Missing: a process that accepts new requests does not route to it, because it is absent or
	// taken out. A key can be Routed in one process and Missing in another.
	Missing bool
	// Active counts the requests (or connections: that depends on the gateway) queued for it,
	// retrying to it and in flight to it, over all processes, old ones that finish their work
	// included.
	Active int
	// Late: the gateway may still carry out an earlier operation that routes to it.
	Late bool
}

// Observation is one reading of a gateway.
type Observation struct {
	// Generation names the set of processes that was read. A reload or a restart makes a new one,
	// for which readings of the old one are no evidence. It is never empty.
	Generation string
	// At is when the reading began.
	At time.Time
	// Seen has one entry for each requested key, except those of unread pools.
	Seen map[Key]Seen
	// Unread are the pools that could not be read, each with the reason, such as that the gateway
	// has not loaded it.
	Unread map[Pool]error
}
