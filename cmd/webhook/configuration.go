package main

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/lameduck-io/lameduck/internal/config"
	"github.com/lameduck-io/lameduck/internal/coordinator"
	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// kind is the kind of a configuration file. Its version is config.APIVersion.
const kind = "CoordinatorConfiguration"

// configuration is the configuration file. The comments of its fields are also the descriptions in
// schemas/coordinator.json.
type configuration struct {
	// APIVersion is lameduck.io/v1alpha1.
	APIVersion string `json:"apiVersion"`
	// Kind is CoordinatorConfiguration.
	Kind string `json:"kind"`
	// Addresses are where this replica listens.
	Addresses addresses `json:"addresses"`
	// Times are the durations of the protocol that an operator may choose. Durations that
	// contradict each other are refused.
	Times times `json:"times"`
	// Holds bounds the admission calls that wait.
	Holds holds `json:"holds"`
	// Barrier configures the preStop barrier of new pods, in namespaces where it is enabled.
	Barrier barrier `json:"barrier"`
	// Gateways are the data planes of the cluster whose pods have agents. A pod of such a gateway
	// that has no agent is named as uncovered.
	Gateways []coverage.Gateway `json:"gateways"`
	// Mode is the mode of namespaces without the label lameduck.io/mode: enforce or observe. Hooks
	// are added only where a label is enforce.
	Mode string `json:"mode" jsonschema:"enum=enforce,enum=observe"`
	// ExcludedNamespaces are namespaces in which no deletion is held and no new pod gets a hook, in
	// addition to the coordinators' own. Pods there that have a hook still wait at the barrier.
	// Exclude them in the webhook configuration as well, so that the API server does not ask about
	// them.
	ExcludedNamespaces []string `json:"excludedNamespaces" jsonschema:"pattern=^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"`
	// Certificates configures the source of the certificate and of the secret in the webhook's
	// path.
	Certificates credentials `json:"certificates"`
	// LogLevel is debug, info, warn or error.
	LogLevel slog.Level `json:"logLevel" jsonschema:"pattern=^(debug|info|warn|error|DEBUG|INFO|WARN|ERROR)$"`
}

type addresses struct {
	// Admission is the host:port that the API server calls, with TLS.
	Admission string `json:"admission"`
	// Agents is host:port where agents connect, with TLS.
	Agents string `json:"agents"`
	// Metrics is host:port of /metrics, without TLS.
	Metrics string `json:"metrics"`
	// Probes is host:port of /livez and /readyz, without TLS. Only the kubelet needs to reach it.
	Probes string `json:"probes"`
	// Dashboard is host:port of the live page and its API: plain and open on a loopback address, as
	// behind kubectl port-forward, else with TLS and bearer tokens. Empty: not served.
	Dashboard string `json:"dashboard" jsonschema:"pattern=^(.*:[0-9]+)?$"`
}

// times are the fields of [drain.Times] that operators may choose.
type times struct {
	// Webhook is timeoutSeconds of the webhook configuration, in whole seconds. It must be more
	// than hold + 1.5 s.
	Webhook config.Duration `json:"webhook" range:"2s..30s"`
	// Hold is how long one call waits at most.
	Hold config.Duration `json:"hold" range:"100ms..28s"`
	// Deadline is the longest time that a deletion waits. When it is reached, the deletion
	// continues, and a warning names the gateways that have not acknowledged.
	Deadline config.Duration `json:"deadline" range:"100ms..10m"`
	// IdleBound is how long a drain waits for running requests once gateways send no new ones to
	// the pod.
	IdleBound config.Duration `json:"idleBound" range:"100ms..10m"`
	// ShutdownDelay is how long after SIGTERM this replica still answers admission reviews, because
	// Services route to it until then. Reviews that are held are left to another replica that was
	// asked as well, or else denied, so that the caller tries again.
	ShutdownDelay config.Duration `json:"shutdownDelay" range:"0s..1m"`
}

// holds are bounds within one replica.
type holds struct {
	// Most is how many calls may wait simultaneously. Further calls get a denial with a retry.
	Most int `json:"most" range:"1..10000"`
	// PerOwner is how many of these may be for pods of one owner, such as a ReplicaSet, so that one
	// rollout cannot use all holds.
	PerOwner int `json:"perOwner" range:"1..10000"`
}

// barrier configures the hook that new pods get, and which agents must acknowledge at the barrier.
type barrier struct {
	// Bound is how long a pod's barrier may keep it from SIGTERM, in whole seconds, unless the
	// annotation lameduck.io/barrier-bound of a Service or namespace states another bound. The
	// pod's grace period grows by it.
	Bound config.Duration `json:"bound" range:"1s..10m"`
	// Port is the port of the node agents, on the loopback address and on the node's address. 10248
	// to 10259 are those of the kubelet, kube-proxy and the control plane.
	Port int `json:"port" range:"1..65535"`
	// Image is a container image that contains /lameduck-wait, for pods whose hook cannot be an
	// httpGet. Its user must be a number other than 0.
	Image string `json:"image" jsonschema:"pattern=^([a-zA-Z0-9.:-]+/)?[a-z0-9][a-z0-9._/-]*(:[a-zA-Z0-9_][a-zA-Z0-9_.-]*)?(@sha256:[0-9a-f]{64})?$"` //nolint:lll // a tag is one line
	// ImagePullSecrets are names of Secrets to pull that image with. They must be in each namespace
	// with such pods.
	ImagePullSecrets []string `json:"imagePullSecrets" jsonschema:"pattern=^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"`
	// Ask selects the node agents that are asked: all, quorum, local (only the pod's own node), or
	// auto. quorum asks a sample, and waits for the other agents by the times that agents were seen
	// to take. auto asks all agents up to sampling.allUpTo of them, and above that a sample.
	Ask drain.Scope `json:"ask" jsonschema:"enum=auto,enum=all,enum=quorum,enum=local"`
	// Sampling configures the samples of auto and quorum.
	Sampling sampling `json:"sampling"`
	// ExecOnly: never use a hook of kind httpGet. Set it in clusters that enforce Pod Security by
	// other means than the namespace's label.
	ExecOnly bool `json:"execOnly"`
}

type sampling struct {
	// AllUpTo is the largest number of node agents for which auto asks all of them.
	AllUpTo int `json:"allUpTo" range:"1..100000"`
	// Size is how many agents a sample has. The agent of the pod's own node is one of these, or is
	// asked in addition.
	Size int `json:"size" range:"1..100000"`
	// LearnFrom is how many times a replica must have measured before it can estimate how long
	// agents take that it does not ask. Until then it asks all. A replica halves its recorded times
	// when it has 20,000, so with more than 9000 it would at times have too few.
	LearnFrom int `json:"learnFrom" range:"1..9000"`
}

// credentials configure the source of the certificate and of the secret.
type credentials struct {
	// Dir is a folder with tls.crt and tls.key, from cert-manager for example. The files are read
	// again when they change. Empty: the replicas make certificates, keep them in a Secret, and
	// write their CA into the webhook configurations.
	Dir string `json:"dir"`
	// AdmissionSecretFile is a file with the secret at the end of the webhook's path,
	// /v1/admit/SECRET. It may have several secrets, one on each line, and each is accepted. It is
	// read again when it changes. Empty: the replicas make the secret, and write the path into the
	// webhook configurations.
	AdmissionSecretFile string `json:"admissionSecretFile"`
	// Secret is the name of the Secret in which replicas keep the certificates and secrets that
	// they make. It must exist in their own namespace.
	Secret string `json:"secret"`
	// ConfigMap is the name of the ConfigMap in which replicas publish their CA for agents, with
	// the key ca.crt. It must exist in their own namespace.
	ConfigMap string `json:"configMap"`
	// WebhookConfiguration is the name of the ValidatingWebhookConfiguration, and of the
	// MutatingWebhookConfiguration if there is one.
	WebhookConfiguration string `json:"webhookConfiguration"`
	// Names are further DNS names and IP addresses for the certificate, in addition to the Services
	// of the namespace.
	Names []string `json:"names" jsonschema:"pattern=^[a-z0-9:.][-a-z0-9:.]*$"`
	// RotateEvery is the age at which a certificate, its CA and the secret are replaced. They are
	// valid for three times as long.
	RotateEvery config.Duration `json:"rotateEvery" range:"1h..87600h"`
	// Overlap is how long the next CA and secret are published before they are used, and how long
	// the former ones are still accepted afterwards. It must be longer than a replica or an agent
	// may be disconnected from the API server. An agent that reads the CA from a file (caFile)
	// needs 5m, because kubelets take up to 90 s to update it.
	Overlap config.Duration `json:"overlap" range:"3s..24h"`
}

// defaults returns the values for everything that neither file nor flags set.
func defaults() configuration {
	t := drain.DefaultTimes()
	d := func(d time.Duration) config.Duration { return config.Duration{Duration: d} }
	s := drain.DefaultSampling()
	return configuration{
		APIVersion: config.APIVersion, Kind: kind,
		Addresses: addresses{Admission: ":9443", Agents: ":9444", Metrics: ":8080", Probes: ":8081",
			Dashboard: fmt.Sprintf("127.0.0.1:%d", api.Port)},
		Times: times{
			Webhook: d(t.Webhook), Hold: d(t.Hold), Deadline: d(t.Deadline), IdleBound: d(t.IdleBound),
			ShutdownDelay: d(5 * time.Second),
		},
		Holds: holds{Most: coordinator.DefaultHolds, PerOwner: coordinator.DefaultHoldsPerOwner},
		Barrier: barrier{
			Bound: d(keys.DefaultBound), Port: 9447, Image: "lameduck/lameduck-wait:dev", ImagePullSecrets: []string{},
			Ask: drain.ScopeAuto, Sampling: sampling{s.AllUpTo, s.Size, s.Learn},
		},
		Gateways:           []coverage.Gateway{},
		Mode:               keys.Enforce,
		ExcludedNamespaces: []string{"kube-system"},
		Certificates: credentials{
			Secret: "lameduck-certificates", ConfigMap: "lameduck-ca", WebhookConfiguration: "lameduck",
			Names: []string{}, RotateEvery: d(30 * 24 * time.Hour), Overlap: d(time.Hour),
		},
	}
}
