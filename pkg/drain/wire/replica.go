package wire

import "github.com/lameduck-io/lameduck/pkg/drain"

// The paths of the API between the replicas of the coordinator. The API server asks all replicas
// about every deletion; who may take capacity is decided by one of them, the opener, so that all
// decide alike whatever order the calls come in.
const (
	// ClaimsPath takes a POST of Claim and answers Claimed.
	ClaimsPath = "/v1/claims"
	// ReplicaPath is read with GET and answers Replica.
	ReplicaPath = "/v1/replica"
)

// Claim is what a replica was asked by the API server, and asks the opener.
type Claim struct {
	// Operation is "delete" or "evict".
	Operation string    `json:"operation"`
	Pod       drain.Pod `json:"pod"`
	// ElapsedMillis is how long the drain of the pod has run on the replica that asks. 0: it has
	// none.
	ElapsedMillis int64 `json:"elapsedMillis,omitempty"`
	// OnlyAsked asks for Claimed.AskedMillis alone and changes nothing.
	OnlyAsked bool `json:"onlyAsked,omitempty"`
}

// The verdicts of a Claimed. Any other verdict, and none, means that the replica has no opinion:
// the replica that asks goes on to the next one, and decides for itself if there is none.
const (
	VerdictDrain = "drain"
	VerdictDeny  = "deny"
)

// Claimed answers a Claim.
type Claimed struct {
	Verdict string `json:"verdict,omitempty"`
	// Reason, Message and Budget are those of an answer that denies.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	Budget  string `json:"budget,omitempty"`
	// Queued says that the drain waits for capacity, Hold that a call for it may wait.
	Queued bool `json:"queued,omitempty"`
	Hold   bool `json:"hold,omitempty"`
	// ElapsedMillis is how long the drain has run.
	ElapsedMillis int64 `json:"elapsedMillis,omitempty"`
	// AskedMillis is how long ago the API server last asked this replica about the pod. Negative:
	// not since its drain was opened.
	AskedMillis int64 `json:"askedMillis"`
}

// Replica is what a replica tells the others of itself.
type Replica struct {
	// Ready says that it can judge deletions: the API server should ask it.
	Ready bool `json:"ready"`
	// Expected is how many agents it expects, Missing how many of these have no stream to it.
	Expected int `json:"expected"`
	Missing  int `json:"missing"`
	drain.Shared
}
