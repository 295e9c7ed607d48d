{{/* Rules that the policies share. What the kubelet asks of a pod of its own node is never refused, so probes need none. */}}

{{/* dict root, component: an entry that names a component's pods of this release. */}}
{{- define "penstock.policy.pods" -}}
- podSelector:
    matchLabels:
      {{- include "penstock.selectorLabels" . | nindent 6 }}
{{- end -}}

{{/* Who may call the gateway. Those of this release always. */}}
{{- define "penstock.policy.callers" -}}
{{- if .Values.networkPolicy.gatewayFromNamespace -}}
- podSelector: {}
{{- else -}}
{{ include "penstock.policy.pods" (dict "root" . "component" "video") }}
{{ include "penstock.policy.pods" (dict "root" . "component" "test") }}
{{- if .Values.console.enabled }}
{{ include "penstock.policy.pods" (dict "root" . "component" "console") }}
{{- end }}
{{- end -}}
{{- with .Values.networkPolicy.gatewayFrom }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The same for NOTES. */}}
{{- define "penstock.policy.callersInWords" -}}
{{- $policy := .Values.networkPolicy -}}
{{- if not $policy.enabled -}}
whatever reaches its pods
{{- else -}}
{{- if not $policy.gatewayFromNamespace }}this release's {{ end -}}
pods of namespace {{ .Release.Namespace }}{{ if $policy.gatewayFrom }}, and from whom networkPolicy.gatewayFrom names{{ end }}
{{- end -}}
{{- end -}}

{{- define "penstock.policy.metricsReaders" -}}
{{ .Values.networkPolicy.metricsFrom | default (list (dict "namespaceSelector" (dict))) | toYaml }}
{{- end -}}

{{/* Names are asked of whatever serves them: a cluster's own, which on OpenShift listens on 5353, or a node's cache. */}}
{{- define "penstock.policy.dns" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
    - {port: 5353, protocol: UDP}
    - {port: 5353, protocol: TCP}
{{- end -}}

{{- define "penstock.policy.extraEgress" -}}
{{- with .Values.networkPolicy.egress }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{/* Where the engine is, where it is not in the gateway's pod. Of addresses elsewhere the ports are all that is known. */}}
{{- define "penstock.policy.engine" -}}
{{- if eq .Values.topology "separate" -}}
- to:
    {{- include "penstock.policy.pods" (dict "root" . "component" "triton") | nindent 4 }}
  ports:
    - {port: 8000}
    - {port: 8001}
    - {port: 8002}
{{- else if eq .Values.topology "external" -}}
- ports:
    {{- range include "penstock.policy.externalPorts" . | splitList " " | uniq }}
    - {port: {{ . }}}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Of each address its port and the two after it (gRPC, metrics), and of gRPC where that is said. */}}
{{- define "penstock.policy.externalPorts" -}}
{{- $ports := list -}}
{{- range .Values.external.urls -}}
{{- $first := regexFind `:[0-9]+(/|$)` . | trimAll ":/" | default (ternary "443" "80" (hasPrefix "https:" .)) | int -}}
{{- $ports = concat $ports (list $first (add $first 1) (add $first 2)) -}}
{{- end -}}
{{- range .Values.external.grpc -}}
{{- $ports = append $ports (splitList ":" . | last) -}}
{{- end -}}
{{- join " " $ports -}}
{{- end -}}
