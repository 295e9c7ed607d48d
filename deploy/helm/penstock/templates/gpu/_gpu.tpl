{{/* Lines of a container's resources.limits: the GPU. Call with the root. */}}
{{- define "penstock.gpu.resources" -}}
{{- end -}}

{{/* Items of the env of a container that computes on the GPU. */}}
{{- define "penstock.gpu.env" -}}
{{- end -}}

{{/* Items of such a pod's volumes. */}}
{{- define "penstock.gpu.volumes" -}}
{{- end -}}

{{/* Items of such a container's volumeMounts. */}}
{{- define "penstock.gpu.volumeMounts" -}}
{{- end -}}

{{/* Lines of such a pod's spec: runtimeClassName, nodeSelector, tolerations. */}}
{{- define "penstock.gpu.podSpec" -}}
{{- end -}}

{{/* Fails where gpu asks for what no card, plugin or daemon gives. */}}
{{- define "penstock.gpu.validate" -}}
{{- end -}}
