package harness

// ValueSet is the chart's values as operators of one kind of cluster set them.
type ValueSet struct {
	// Name says whose they are.
	Name string
	// Values are YAML.
	Values string
	// Has is what the values make: parts of the JSON of an object, by its kind, namespace and name.
	Has map[string][]string
	// OnNode says that one node of the name node-1 runs it, with nothing but a Kubernetes.
	OnNode bool
}

// PriorityLimits has an API server refuse pods of the system's priority classes where no
// ResourceQuota allows them, as GKE does: an AdmissionConfiguration.
const PriorityLimits = `
apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
  - name: ResourceQuota
    configuration:
      apiVersion: apiserver.config.k8s.io/v1
      kind: ResourceQuotaConfiguration
      limitedResources:
        - resource: pods
          matchScopes:
            - {scopeName: PriorityClass, operator: In, values: [system-node-critical, system-cluster-critical]}
`

const (
	coordinator = "Deployment lameduck-system/lameduck-webhook-0"
	nodeAgents  = "DaemonSet lameduck-node/lameduck-node"
	file        = "ConfigMap lameduck-system/lameduck-coordinator"
	mutating    = "MutatingWebhookConfiguration <nil>/lameduck"
	validating  = "ValidatingWebhookConfiguration <nil>/lameduck"
	front       = `{"kind":"ServiceAccount","name":"front","namespace":"front"}`
	digest      = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
)

// ValueSets are of sixteen kinds of clusters. Together they set every value of the chart.
var ValueSets = []ValueSet{
	{Name: "nothing set", OnNode: true, Has: map[string][]string{
		coordinator: {`"image":"lameduck/webhook:dev"`, `"priorityClassName":"system-cluster-critical"`},
		"ResourceQuota lameduck-system/lameduck-priority": {`"values":["system-cluster-critical"]`},
	}},
	{Name: "one node: one replica and the barrier", OnNode: true,
		Values: `{webhook: {entries: 1}, barrier: {enabled: true}}`,
		Has: map[string][]string{
			nodeAgents: {`"priorityClassName":"system-node-critical"`},
			"ResourceQuota lameduck-node/lameduck-priority": {`"values":["system-node-critical"]`},
			mutating:                             {`"values":["kube-system","lameduck-system","lameduck-node"]`},
			validating:                           {`"name":"pods-0.lameduck.io"`},
			"Job lameduck-system/lameduck-check": {`"--entries=1"`},
			file:                                 {`lameduck/lameduck-wait:dev`},
		}},
	{Name: "a large cluster: nine replicas and other times",
		Values: `
webhook: {entries: 9}
config: {times: {webhook: 10s, hold: 8s, deadline: 20s}, holds: {most: 128}}
`,
		Has: map[string][]string{
			"Deployment lameduck-system/lameduck-webhook-8": {`"lameduck.io/ordinal":"8"`, `"--ordinal=8"`},
			"Service lameduck-system/lameduck-webhook-8":    {`"lameduck.io/ordinal":"8"`},
			validating: {`"name":"pods-8.lameduck.io"`, `"name":"lameduck-webhook-8"`, `"timeoutSeconds":10`,
				`['lameduck.io/entry'] == '8'`},
			file: {`deadline: 20s\n  hold: 8s`, `most: 128`},
		}},
	{Name: "nothing but a private registry, by digest",
		Values: `
image: {registry: "mirror.example:5000/x", tag: v1, digest: "` + digest + `", pullPolicy: Always, pullSecrets: [pull]}
barrier: {enabled: true, agentImage: "docker.io/lameduck/agent:v1@` + digest + `", waitImage: "ghcr.io/me/wait:v1"}
`,
		Has: map[string][]string{
			coordinator: {`"image":"mirror.example:5000/x/lameduck/webhook:v1@` + digest + `"`,
				`"imagePullPolicy":"Always"`, `"imagePullSecrets":[{"name":"pull"}]`},
			nodeAgents: {`"image":"mirror.example:5000/x/lameduck/agent:v1@` + digest + `"`,
				`"imagePullPolicy":"Always"`, `"imagePullSecrets":[{"name":"pull"}]`},
			"Job lameduck-system/lameduck-check": {`"image":"mirror.example:5000/x/lameduck/webhook:v1@` + digest + `"`,
				`"imagePullPolicy":"Always"`, `"imagePullSecrets":[{"name":"pull"}]`},
			file: {`image: mirror.example:5000/x/me/wait:v1\n  imagePullSecrets:\n  - pull`},
		}},
	{Name: "a fork, built by its users", Values: `image: {repository: registry.example/fork, tag: v1}`,
		Has: map[string][]string{coordinator: {`"image":"registry.example/fork:v1"`}}},
	{Name: "a pool of nodes for infrastructure", OnNode: true,
		Values: `
nodeSelector: {kubernetes.io/hostname: node-1}
tolerations: [{key: infra, operator: Exists, effect: NoSchedule}]
affinity: &affinity
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [node-1]}]}]
resources: {requests: {cpu: 10m, memory: 48Mi}, limits: {memory: 256Mi}}
labels: {team: network}
annotations: {example.com/owner: network}
podAnnotations: {example.com/scrape: "no"}
podLabels: {cost: network}
barrier:
  enabled: true
  nodeSelector: {kubernetes.io/hostname: node-1}
  tolerations: [{key: infra, operator: Exists}]
  affinity: *affinity
  resources: {requests: {cpu: 11m, memory: 49Mi}, limits: {memory: 257Mi}}
  annotations: {example.com/owner: node}
  podAnnotations: {example.com/scrape: node}
  podLabels: {cost: node}
`,
		Has: map[string][]string{
			coordinator: {`"nodeSelector":{"kubernetes.io/hostname":"node-1","kubernetes.io/os":"linux"}`,
				`"tolerations":[{"effect":"NoSchedule","key":"infra","operator":"Exists"}]`,
				`"affinity":{"nodeAffinity":`, `"requests":{"cpu":"10m","memory":"48Mi"}`,
				`"limits":{"memory":"256Mi"}`,
				`"team":"network"`, `"annotations":{"example.com/owner":"network"}`, `"example.com/scrape":"no"`,
				`"cost":"network"`},
			nodeAgents: {`"nodeSelector":{"kubernetes.io/hostname":"node-1","kubernetes.io/os":"linux"}`,
				`"tolerations":[{"key":"infra","operator":"Exists"}]`, `"affinity":{"nodeAffinity":`,
				`"requests":{"cpu":"11m","memory":"49Mi"}`, `"limits":{"memory":"257Mi"}`, `"team":"network"`,
				`"annotations":{"example.com/owner":"node"}`, `"example.com/scrape":"node"`,
				`"cost":"node"`},
			"Job lameduck-system/lameduck-check": {`"kubernetes.io/hostname":"node-1"`, `"key":"infra"`,
				`"affinity":{"nodeAffinity":`},
		}},
	{Name: "some teams alone", OnNode: true,
		Values: `
namespaceSelector:
  matchLabels: {lameduck.io/mode: enforce}
  matchExpressions: [{key: team, operator: In, values: [shop, search]}, {key: paid, operator: Exists},
    {key: legacy, operator: DoesNotExist}]
excludedNamespaces: [kube-system, ci]
`,
		Has: map[string][]string{
			validating: {`"values":["kube-system","ci","lameduck-system"]`,
				`"matchLabels":{"lameduck.io/mode":"enforce"}`,
				`{"key":"team","operator":"In","values":["shop","search"]}`, `{"key":"paid","operator":"Exists"}`},
			file: {`excludedNamespaces:\n- kube-system\n- ci\n`},
			// Or the check would not be asked about, and the install fail.
			"Namespace <nil>/lameduck-check": {`"lameduck.io/mode":"enforce"`, `"team":"shop"`, `"paid":""`},
		}},
	{Name: "a cluster whose operators look for a fault", OnNode: true,
		Values: `
config: {logLevel: debug}
barrier: {enabled: true, extraArgs: [--log-level=debug]}
`,
		Has: map[string][]string{file: {`logLevel: debug`}, nodeAgents: {`"--log-level=debug"`}}},
	{Name: "gateways of three kinds, two of them with agents by the chart", OnNode: true,
		Values: `
gateways:
  - {name: public, kind: traefik, namespace: edge, selector: app=traefik, services: [shop/web]}
  - name: inner
    kind: envoy
    namespace: edge
    selector: app=envoy
    classes: [inner]
    agent:
      serviceAccount: envoy
      healthTimeout: 2m
      gateway: {envoy: {population: edge/envoy, admin: "http://127.0.0.1:19000", services: [shop/web]}}
  - name: outer
    kind: apisix
    namespace: edge
    selector: app=apisix
    agent:
      serviceAccount: apisix
      gateway: {apisixObserved: {population: edge/apisix, admin: "http://127.0.0.1:9090", services: [shop/web]}}
  - name: front
    kind: kernel
    namespace: front
    selector: app=front
    services: [shop/web]
    agent:
      serviceAccount: front
      gateway:
        kernel:
          podUID: "${POD_UID}"
          cgroups: /host/cgroup
          pins: /host/bpf
          services: [{service: shop/web, port: http}, {service: shop/api}, {service: front/web}]
`,
		Has: map[string][]string{
			file: {`gateways:\n- kind: traefik\n  name: public\n  namespace: edge`,
				`- kind: kernel\n  name: front\n  namespace: front\n  selector: app=front\n  services:\n` +
					`  - shop/web\n`},
			"ConfigMap edge/lameduck-agent-inner": {`admin: http://127.0.0.1:19000`,
				`healthTimeout: 2m`},
			"ConfigMap front/lameduck-agent-front":                          {`podUID: ${POD_UID}`},
			"ClusterRoleBinding <nil>/lameduck-agent-inner":                 {`"name":"envoy","namespace":"edge"`},
			"RoleBinding lameduck-system/lameduck-agent-coordinators-inner": {`"name":"envoy","namespace":"edge"`},
			"ClusterRoleBinding <nil>/lameduck-agent-front":                 {front},
			"RoleBinding lameduck-system/lameduck-agent-coordinators-front": {front},
			"RoleBinding front/lameduck-agent-endpoints-front":              {front},
			"RoleBinding shop/lameduck-agent-endpoints-front":               {front},
			"-RoleBinding shop/lameduck-agent-endpoints-inner":              nil,
			"ConfigMap edge/lameduck-agent-outer":                           {`apisixObserved:`},
			"-RoleBinding shop/lameduck-agent-endpoints-outer":              nil,
			"-ConfigMap edge/lameduck-agent-public":                         nil,
		}},
	{Name: "the Prometheus operator and Grafana's sidecar",
		Values: `
monitoring:
  podMonitor: {enabled: true, namespace: edge, labels: {release: prometheus}, interval: 15s}
  prometheusRule: {enabled: true, namespace: edge, labels: {release: prometheus}}
  dashboard: {enabled: true, namespace: edge, labels: {grafana_dashboard: "yes"}}
barrier: {enabled: true, metricsPort: 19101}
`,
		Has: map[string][]string{
			"PodMonitor edge/lameduck-webhook":  {`"release":"prometheus"`, `"interval":"15s"`},
			"PodMonitor edge/lameduck-agent":    {`"interval":"15s"`},
			"PodMonitor edge/lameduck-node":     {`"replacement":"$1:19101"`},
			"PrometheusRule edge/lameduck":      {`"release":"prometheus"`},
			"ConfigMap edge/lameduck-dashboard": {`"grafana_dashboard":"yes"`},
			nodeAgents:                          {`"--metrics-address=[$(HOST_IP)]:19101"`, `"port":19101`},
		}},
	{Name: "policies of its own: no priority, no network policy, no check",
		Values: `
priorityClassName: ""
networkPolicy: {enabled: false}
check: false
barrier: {enabled: true, priorityClassName: ""}
runAsUser: 1000650000
`,
		Has: map[string][]string{coordinator: {`"runAsUser":1000650000`},
			"-NetworkPolicy lameduck-system/default-deny":      nil,
			"-NetworkPolicy lameduck-system/lameduck-webhook":  nil,
			"-Job lameduck-system/lameduck-check":              nil,
			"-ResourceQuota lameduck-system/lameduck-priority": nil,
			"-ResourceQuota lameduck-node/lameduck-priority":   nil}},
	{Name: "a first look: nothing waits", OnNode: true,
		Values: `config: {mode: observe, logLevel: debug, addresses: {dashboard: "127.0.0.1:8090"}}`,
		Has:    map[string][]string{file: {`mode: observe`, `logLevel: debug`, `dashboard: 127.0.0.1:8090`}}},
	{Name: "certificates by cert-manager, and the namespace by the chart",
		Values: `{certificates: certManager, createNamespace: true}`,
		Has: map[string][]string{file: {`certificates:\n  dir: /etc/lameduck-tls`},
			"Namespace <nil>/lameduck-system":          {`"pod-security.kubernetes.io/enforce":"restricted"`},
			"Certificate lameduck-system/lameduck-tls": {`"*.lameduck-system.svc"`}}},
	{Name: "certificates that are brought along", Values: `certificates: own`,
		Has: map[string][]string{coordinator: {`"secretName":"lameduck-tls"`},
			file: {`certificates:\n  admissionSecretFile: /etc/lameduck-admission/secret\n  dir: /etc/lameduck-tls`},
			"-ClusterRole <nil>/lameduck-certificates": nil, "-Secret lameduck-system/lameduck-certificates": nil}},
	{Name: "OpenShift, which assigns users", Values: `runAsUser: null`,
		Has: map[string][]string{coordinator: {`"runAsNonRoot":true,"seccompProfile"`},
			"Job lameduck-system/lameduck-check": {`"runAsNonRoot":true,"seccompProfile"`}}},
	{Name: "EKS with a CNI of its own, where ports are taken", OnNode: true,
		Values: `
webhook: {entries: 1, hostNetwork: true, ports: {admission: 19443, agents: 19444, metrics: 18080, probes: 18081}}
barrier: {enabled: true, metricsPort: 19101}
config: {barrier: {port: 19447}}
`,
		Has: map[string][]string{
			coordinator: {`"hostNetwork":true`, `"dnsPolicy":"ClusterFirstWithHostNet"`,
				`{"containerPort":19443,"name":"admission"}`, `{"containerPort":19444,"name":"agents"}`,
				`{"containerPort":18080,"name":"metrics"}`, `{"containerPort":18081,"name":"probes"}`},
			file: {`admission: :19443\n  agents: :19444\n  metrics: :18080\n  probes: :18081`,
				`port: 19447`},
			"ConfigMap lameduck-node/lameduck-node": {`127.0.0.1:19447`, `[${HOST_IP}]:19447`},
		}},
}
