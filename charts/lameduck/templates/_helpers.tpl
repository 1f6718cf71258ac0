{{/* lameduck.image is an image, in image.registry if there is one: that of the reference is left out then. */}}
{{- define "lameduck.image" -}}
{{- $values := index . 0 -}}
{{- $image := index . 1 -}}
{{- with $values.image.registry }}{{ . }}/{{ $image = regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $image "" }}{{ end }}{{ $image -}}
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

{{/* lameduck.config is the coordinator's configuration, which has the image and the pull secrets of what is put into pods. */}}
{{- define "lameduck.config" -}}
{{- $barrier := dict "image" (include "lameduck.image" (list .Values .Values.barrier.waitImage)) -}}
{{- with .Values.image.pullSecrets }}{{ $_ := set $barrier "imagePullSecrets" . }}{{ end -}}
{{- mergeOverwrite (dict "barrier" $barrier) (deepCopy .Values.config) | toYaml }}
{{- end }}
