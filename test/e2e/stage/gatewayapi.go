package stage

import "strings"

// GatewayAPI are the kinds of Gateway API that the coordinator reads, without their schemas.
var GatewayAPI = crd("HTTPRoute") + crd("GRPCRoute") + crd("Gateway")

func crd(kind string) string {
	return strings.NewReplacer("KIND", kind, "PLURAL", strings.ToLower(kind)+"s", "SINGULAR",
		strings.ToLower(kind)).Replace(`---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: PLURAL.gateway.networking.k8s.io
  annotations:
    api-approved.kubernetes.io: https://github.com/kubernetes-sigs/gateway-api/pull/2466
spec:
  group: gateway.networking.k8s.io
  scope: Namespaced
  names: {kind: KIND, plural: PLURAL, singular: SINGULAR, listKind: KINDList}
  versions:
    - name: v1
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`)
}
