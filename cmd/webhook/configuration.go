package main

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/lameduck-io/lameduck/internal/config"
	"github.com/lameduck-io/lameduck/internal/coverage"
	"github.com/lameduck-io/lameduck/internal/dashboard/api"
	"github.com/lameduck-io/lameduck/internal/keys"
	"github.com/lameduck-io/lameduck/pkg/drain"
)

// kind is the kind of a configuration file. Its version is config.APIVersion.
const kind = "CoordinatorConfiguration"

// configuration is the configuration file. A flag with the same meaning wins over it. Its comments
// are the descriptions in schemas/coordinator.json too.
type configuration struct {
	// APIVersion is lameduck.io/v1alpha1.
	APIVersion string `json:"apiVersion"`
	// Kind is CoordinatorConfiguration.
	Kind string `json:"kind"`
	// Addresses are where this replica listens.
	Addresses addresses `json:"addresses"`
	// Times are the durations of the protocol that may be chosen. Those that do not fit together
	// are refused.
	Times times `json:"times"`
	// Holds bounds the calls that wait.
	Holds holds `json:"holds"`
	// Barrier is how new pods are made to wait before SIGTERM, where that is enabled.
	Barrier barrier `json:"barrier"`
	// Gateways are the data planes of the cluster whose pods have agents, so that a pod of one
	// without an agent is named.
	Gateways []coverage.Gateway `json:"gateways"`
	// Mode is that of namespaces without the label lameduck.io/mode: enforce or observe. Hooks are
	// added only where a label says enforce.
	Mode string `json:"mode"`
	// ExcludedNamespaces are those whose pods never wait, besides the own one. The webhook
	// configuration excludes them first.
	ExcludedNamespaces []string `json:"excludedNamespaces"`
	// Certificates says where the certificate and the secret in the webhook's path come from.
	Certificates credentials `json:"certificates"`
	// LogLevel is debug, info, warn or error.
	LogLevel slog.Level `json:"logLevel"`
}

type addresses struct {
	// Admission is host:port where the API server asks, with TLS.
	Admission string `json:"admission"`
	// Agents is host:port where agents connect, with TLS.
	Agents string `json:"agents"`
	// Metrics is host:port of /metrics, without TLS.
	Metrics string `json:"metrics"`
	// Probes is host:port of /livez and /readyz, without TLS. Only the kubelet needs to reach it.
	Probes string `json:"probes"`
	// Dashboard is host:port of the live page and its API: plain and open on a loopback address, as
	// behind kubectl port-forward, else with TLS and bearer tokens. Empty: not served.
	Dashboard string `json:"dashboard"`
}

// times are those of [drain.Times] that operators may choose.
type times struct {
	// Webhook is timeoutSeconds of the webhook configuration. More than hold + 1.5 s.
	Webhook config.Duration `json:"webhook"`
	// Hold is how long one call waits at most.
	Hold config.Duration `json:"hold"`
	// Deadline is how long a pod is kept at most. Past it the silent gateways are named and it
	// goes.
	Deadline config.Duration `json:"deadline"`
	// IdleBound is how long running requests are waited for once no new ones come.
	IdleBound config.Duration `json:"idleBound"`
	// ShutdownDelay is how long after SIGTERM reviews are still answered, because Services route
	// here until then. Held ones are told to come back at once.
	ShutdownDelay config.Duration `json:"shutdownDelay"`
}

// holds are bounds within one replica.
type holds struct {
	// Most is how many calls wait at one time. More are told to come back.
	Most int `json:"most"`
	// PerOwner is how many of these are for pods of one owner, such as a ReplicaSet, so that no
	// rollout keeps others from being held.
	PerOwner int `json:"perOwner"`
}

// barrier is what new pods are given, and who is asked for them.
type barrier struct {
	// Bound is how long a pod's barrier may keep it from SIGTERM, in whole seconds. Its grace
	// period grows by it.
	Bound config.Duration `json:"bound"`
	// Port is that of the node agents, on loopback and the node's address.
	Port int `json:"port"`
	// Image has /lameduck-wait, for pods whose hook cannot be an httpGet.
	Image string `json:"image"`
	// ImagePullSecrets are names of Secrets to pull that image with. They must be in each namespace
	// with such pods.
	ImagePullSecrets []string `json:"imagePullSecrets"`
	// Ask is which node agents are asked: all, quorum (a sample; the others by the time that they
	// were seen to take), local (the pod's own node), or auto: all, up to 200.
	Ask drain.Scope `json:"ask"`
	// Sampling is when auto and quorum ask a sample.
	Sampling sampling `json:"sampling"`
	// ExecOnly says never to use a hook of kind httpGet: for clusters where Pod Security is
	// enforced by other means than the namespace's label.
	ExecOnly bool `json:"execOnly"`
}

type sampling struct {
	// AllUpTo is how many node agents auto asks without a sample.
	AllUpTo int `json:"allUpTo"`
	// Size is how many are asked in a sample, the pod's own node's among them or one more.
	Size int `json:"size"`
	// LearnFrom is how many times a replica must have seen before it knows how long those take that
	// are not asked; until then it asks all.
	LearnFrom int `json:"learnFrom"`
}

// credentials are where the certificate and the secret come from.
type credentials struct {
	// Dir is a folder with tls.crt and tls.key, from cert-manager for example, read again when they
	// change. Empty: the replicas make certificates themselves, keep them in a Secret, and write
	// their CA into the webhook configurations.
	Dir string `json:"dir"`
	// AdmissionSecretFile holds the secret that ends the webhook's path, /v1/admit/SECRET, one a
	// line, each good; read again when it changes. Empty: the replicas make it and write the path
	// into the webhook configurations.
	AdmissionSecretFile string `json:"admissionSecretFile"`
	// Secret is the name of the Secret, in the own namespace, in which replicas keep what they
	// make. It must exist.
	Secret string `json:"secret"`
	// ConfigMap is the name of the ConfigMap, in the own namespace, in which replicas publish their
	// CA for agents, as ca.crt. It must exist.
	ConfigMap string `json:"configMap"`
	// WebhookConfiguration is the name of the ValidatingWebhookConfiguration, and of the
	// MutatingWebhookConfiguration if there is one.
	WebhookConfiguration string `json:"webhookConfiguration"`
	// Names are more names and addresses for the certificate, besides those of the two Services.
	Names []string `json:"names"`
	// RotateEvery is how old a certificate, its CA and the secret become before the next are made.
	// They are good for three times as long.
	RotateEvery config.Duration `json:"rotateEvery"`
	// Overlap is how long the next CA and secret are known everywhere before they are used, and the
	// former are still good afterwards. Longer than any replica or agent may be cut off from the
	// API server.
	Overlap config.Duration `json:"overlap"`
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
		Holds: holds{Most: 64, PerOwner: 8},
		Barrier: barrier{
			Bound: d(30 * time.Second), Port: 9447, Image: "lameduck/lameduck-wait:dev", ImagePullSecrets: []string{},
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

// checkRead validates the file before it is converted to options.
func (c configuration) checkRead(must func(ok bool, format string, args ...any)) {
	must(c.APIVersion == config.APIVersion, "apiVersion %q: must be %q", c.APIVersion, config.APIVersion)
	must(c.Kind == kind, "kind %q: must be %q", c.Kind, kind)
	for _, of := range []struct {
		key   string
		value config.Duration
	}{
		{"times.webhook", c.Times.Webhook}, {"times.hold", c.Times.Hold}, {"times.deadline", c.Times.Deadline},
		{"times.idleBound", c.Times.IdleBound},
		{"barrier.bound", c.Barrier.Bound},
		{"times.shutdownDelay", c.Times.ShutdownDelay}, {"certificates.rotateEvery", c.Certificates.RotateEvery},
		{"certificates.overlap", c.Certificates.Overlap},
	} {
		must(of.value.Err == nil, "%s: %w", of.key, of.value.Err)
	}
}
