{{/* lameduck.labels are those of every object, by Release and component, and more for one object. Selectors have name and component alone, which never change. */}}
{{- define "lameduck.labels" -}}
{{- $top := index . 0 -}}
{{- $labels := dict
  "helm.sh/chart" (printf "%s-%s" $top.Chart.Name $top.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-")
  "app.kubernetes.io/name" "lameduck"
  "app.kubernetes.io/instance" $top.Release.Name
  "app.kubernetes.io/version" (regexReplaceAll "@.*" $top.Chart.AppVersion "")
  "app.kubernetes.io/component" (index . 1)
  "app.kubernetes.io/part-of" "lameduck"
  "app.kubernetes.io/managed-by" $top.Release.Service -}}
{{- $more := dict -}}
{{- if gt (len .) 2 }}{{ $more = index . 2 }}{{ end -}}
{{- mergeOverwrite (deepCopy $top.Values.labels) $labels (deepCopy $more) | toYaml }}
{{- end }}

{{/* lameduck.image is an image, in image.registry if there is one: that of the reference is left out then. */}}
{{- define "lameduck.image" -}}
{{- $values := index . 0 -}}
{{- $image := index . 1 -}}
{{- with $values.image.registry }}{{ . }}/{{ $image = regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $image "" }}{{ end }}{{ $image -}}
{{- end }}

{{/* lameduck.webhookImage is that of the coordinators and of the check. */}}
{{- define "lameduck.webhookImage" -}}
{{- $image := printf "%s:%s" .Values.image.repository .Values.image.tag -}}
{{- with .Values.image.digest }}{{ $image = printf "%s@%s" (regexReplaceAll "@.*" $image "") . }}{{ end -}}
{{- include "lameduck.image" (list .Values $image) -}}
{{- end }}

{{/* lameduck.pull is how the container of a pod gets its image. */}}
{{- define "lameduck.pull" -}}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* lameduck.pullSecrets are imagePullSecrets of a pod. */}}
{{- define "lameduck.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* lameduck.place is where a pod may run, from values that have nodeSelector, tolerations and affinity. */}}
{{- define "lameduck.place" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* lameduck.annotations are those of an object or pod, where there are any. */}}
{{- define "lameduck.annotations" -}}
{{- with . }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* lameduck.config is the coordinator's configuration: the values under config, and what other values say. */}}
{{- define "lameduck.config" -}}
{{- $barrier := dict "image" (include "lameduck.image" (list .Values .Values.barrier.waitImage)) -}}
{{- with .Values.image.pullSecrets }}{{ $_ := set $barrier "imagePullSecrets" . }}{{ end -}}
{{- $values := dict "barrier" $barrier "excludedNamespaces" .Values.excludedNamespaces -}}
{{- range .Values.gateways }}{{ $_ := set $values "gateways" (append (get $values "gateways" | default list) (omit . "agent")) }}{{ end -}}
{{- $addresses := dict -}}
{{- $defaults := dict "admission" 9443 "agents" 9444 "metrics" 8080 "probes" 8081 -}}
{{- range $name, $port := .Values.webhook.ports -}}
{{- if ne (int $port) (get $defaults $name) }}{{ $_ := set $addresses $name (printf ":%v" $port) }}{{ end -}}
{{- end -}}
{{- with $addresses }}{{ $_ := set $values "addresses" . }}{{ end -}}
{{- if ne .Values.certificates "managed" }}{{ $_ := set $values "certificates" (dict "dir" "/etc/lameduck-tls") }}{{ end -}}
{{- if eq .Values.certificates "own" }}{{ $_ := set $values.certificates "admissionSecretFile" "/etc/lameduck-admission/secret" }}{{ end -}}
{{- mergeOverwrite $values (deepCopy .Values.config) | toYaml }}
{{- end }}

{{/* lameduck.millis are the milliseconds of a Go duration. */}}
{{- define "lameduck.millis" -}}
{{- $zero := toDate "2006-01-02" "2000-01-01" -}}
{{- sub (mustDateModify . $zero).UnixMilli $zero.UnixMilli -}}
{{- end }}

{{/* lameduck.timeout is timeoutSeconds of the entries. */}}
{{- define "lameduck.timeout" -}}
{{- div (int (include "lameduck.millis" (dig "times" "webhook" "4s" .Values.config))) 1000 -}}
{{- end }}

{{/* lameduck.selected are labels that namespaceSelector selects. The API server sets kubernetes.io/metadata.name itself. */}}
{{- define "lameduck.selected" -}}
{{- $labels := dict -}}
{{- range dig "matchExpressions" list .Values.namespaceSelector -}}
{{- if has .operator (list "In" "Exists") }}{{ $_ := set $labels .key (dig "values" (list "") . | first) }}{{ end -}}
{{- end -}}
{{- omit (mergeOverwrite $labels (dig "matchLabels" dict .Values.namespaceSelector)) "kubernetes.io/metadata.name" | toYaml -}}
{{- end }}
