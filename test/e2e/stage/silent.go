package stage

// SilentAgent is the manifest, for a namespace, of a pod that has the label and the right of an
// agent, is ready, and never connects: every drain waits for it.
const SilentAgent = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: silent, namespace: %[1]s}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: %[1]s-silent}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: lameduck-agent}
subjects: [{kind: ServiceAccount, name: silent, namespace: %[1]s}]
---
apiVersion: v1
kind: Pod
metadata:
  name: silent
  namespace: %[1]s
  labels: {lameduck.io/agent: directed, lameduck.io/mode: "off"}
spec:
  serviceAccountName: silent
  containers: [{name: agent, image: none, command: [sleep, "3600"]}]
`
