package wire

import "github.com/lameduck-io/lameduck/pkg/drain"

// The paths of the API between the replicas of the coordinator. The API server asks all replicas
// about every deletion. One of them, the opener, decides about capacity, so that all decide alike
// in whatever order the calls come in.
const (
	// ClaimsPath accepts a POST of Claim and answers Claimed.
	ClaimsPath = "/v1/claims"
	// ReplicaPath is read with GET and answers Replica.
	ReplicaPath = "/v1/replica"
	// ShownPath is read with GET and answers the view that the replica shows operators, ReportPath
	// its report. ExplainPath ends in /{namespace}/{pod}?operation=, and answers its explanation.
	ShownPath   = "/v1/shown"
	ReportPath  = "/v1/shown/report"
	ExplainPath = "/v1/shown/explain"
)

// Claim is a replica's question to the opener about a deletion that the API server asked it about.
type Claim struct {
	// Operation is "delete" or "evict".
	Operation string    `json:"operation"`
	Pod       drain.Pod `json:"pod"`
	// ElapsedMillis is how long the drain of the pod has run on the replica that asks, or has run
	// there before it was abandoned. 0: it has had none.
	ElapsedMillis int64 `json:"elapsedMillis,omitempty"`
	// Controller: a workload controller of Kubernetes deletes the pod.
	Controller bool `json:"controller,omitempty"`
	// OnlyAsked asks for Claimed.AskedMillis alone and changes nothing.
	OnlyAsked bool `json:"onlyAsked,omitempty"`
}

// The verdicts of a Claimed. With any other verdict, or none, the asked replica does not decide.
// The asking replica then asks the next one, or decides itself if there is no other.
const (
	VerdictDrain = "drain"
	VerdictDeny  = "deny"
)

// Claimed answers a Claim.
type Claimed struct {
	Verdict string `json:"verdict,omitempty"`
	// Reason, Message and Budget are those of the denial.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	Budget  string `json:"budget,omitempty"`
	// Queued: the drain waits for capacity. Hold: a call for it may wait.
	Queued bool `json:"queued,omitempty"`
	Hold   bool `json:"hold,omitempty"`
	// ElapsedMillis is how long the drain has run.
	ElapsedMillis int64 `json:"elapsedMillis,omitempty"`
	// AskedMillis is how long ago the API server last asked this replica about the pod. Negative:
	// not since its drain was opened.
	AskedMillis int64 `json:"askedMillis"`
}

// Replica is what a replica sends to the others about itself.
type Replica struct {
	// Ready: it can judge deletions, and the API server should ask it.
	Ready bool `json:"ready"`
	// Expected is how many agents it expects, Missing how many of these have no stream to it.
	Expected int `json:"expected"`
	Missing  int `json:"missing"`
	// Hooks are the pods whose hooks have asked this replica lately, with hashes of their
	// workloads.
	Hooks map[drain.UID]string `json:"hooks,omitempty"`
	drain.Shared
}
