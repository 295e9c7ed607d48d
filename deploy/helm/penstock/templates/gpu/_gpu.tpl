{{/*
What a Triton's container and pod get of a GPU. Each is called with the root, and emits nothing where gpu.generation is
none. Three ways to a card: alone (or a MIG instance), by the device plugin; a share of it, by the device plugin, too;
and through this chart's own MPS daemon, where no resource is asked for: the plugin would hand the card to one pod only.
*/}}

{{- define "penstock.gpu.isUsed" -}}
{{- if ne .Values.gpu.generation "none" }}true{{ end -}}
{{- end -}}

{{- define "penstock.gpu.hasOwnMps" -}}
{{- $sharing := .Values.gpu.sharing -}}
{{- if and (include "penstock.gpu.isUsed" .) (eq $sharing.mode "mps") (eq $sharing.provider "own") }}true{{ end -}}
{{- end -}}

{{/* Shares that NVIDIA's device plugin hands out: by time or by its own MPS daemon. */}}
{{- define "penstock.gpu.hasPluginShares" -}}
{{- $isShared := and (include "penstock.gpu.isUsed" .) (ne .Values.gpu.sharing.mode "none") -}}
{{- if and $isShared (not (include "penstock.gpu.hasOwnMps" .)) }}true{{ end -}}
{{- end -}}

{{/*
"true" where the plugin mounts its own /dev/shm, a tmpfs of the node of 64 MiB, into the container that gets a share by
MPS: then nothing of the chart's may be mounted there, and gateway and Triton share no memory.
*/}}
{{- define "penstock.gpu.bringsShm" -}}
{{- if and (include "penstock.gpu.hasPluginShares" .) (eq .Values.gpu.sharing.mode "mps") }}true{{ end -}}
{{- end -}}

{{- define "penstock.gpu.resourceName" -}}
{{- with .Values.gpu.mig.profile }}nvidia.com/mig-{{ . }}{{ else }}{{ .Values.gpu.resourceName }}{{ end -}}
{{- end -}}

{{/* Lines of resources.limits, which Kubernetes takes for the requests as well. */}}
{{- define "penstock.gpu.resources" -}}
{{- if and (include "penstock.gpu.isUsed" .) (not (include "penstock.gpu.hasOwnMps" .)) -}}
{{ include "penstock.gpu.resourceName" . }}: {{ .Values.gpu.count }}
{{- end -}}
{{- end -}}

{{/* Lines of such a pod's spec: runtimeClassName, nodeSelector, tolerations. */}}
{{- define "penstock.gpu.podSpec" -}}
{{- if include "penstock.gpu.isUsed" . -}}
{{- $nodes := deepCopy (.Values.gpu.nodeSelector | default dict) -}}
{{- if and (include "penstock.gpu.hasPluginShares" .) .Values.gpu.sharing.devicePlugin.createConfig -}}
{{- $_ := set $nodes "nvidia.com/device-plugin.config" .Values.gpu.sharing.devicePlugin.configName -}}
{{- end -}}
{{- $lines := dict -}}
{{- with .Values.gpu.runtimeClassName }}{{ $_ := set $lines "runtimeClassName" . }}{{ end -}}
{{- with $nodes }}{{ $_ := set $lines "nodeSelector" . }}{{ end -}}
{{- with .Values.gpu.tolerations }}{{ $_ := set $lines "tolerations" . }}{{ end -}}
{{- if $lines }}{{ toYaml $lines }}{{ end -}}
{{- end -}}
{{- end -}}
