{{/* Paragraphs of NOTES, or nothing. Called with the root. */}}
{{- define "penstock.autoscaling.notes" -}}
{{- $auto := .Values.autoscaling -}}
{{- if ne $auto.mode "none" -}}
{{- $gateway := include "penstock.componentName" (dict "root" . "component" "gateway") -}}
Autoscaling: {{ $gateway }} has {{ $auto.minReplicas }} to {{ $auto.maxReplicas }} replicas, by requests in flight and by time in the queue.
  {{- if eq .Values.topology "sidecar" }}
  A replica is a gateway with its Triton{{ if ne .Values.gpu.generation "none" }} and its share of a GPU: where none is free, the pod waits, and so should your cluster's autoscaler know those nodes{{ end }}.
  {{- else if eq .Values.topology "separate" }}
  Gateways only: Tritons are as many as triton.replicas says, and an upgrade that changes it tells the gateways their names.
  {{- end }}
  {{- if eq $auto.mode "hpa" }}
  It needs prometheus-adapter with deploy/monitoring/prometheus-adapter.yaml; until then the HPA says FailedGetPodsMetric.
  {{- if not .Values.monitoring.serviceMonitor.enabled }}
  monitoring.serviceMonitor.enabled is false: what scrapes the gateways has to give their series the labels namespace and pod.
  {{- end }}
  {{- else }}
  It needs KEDA; Prometheus has to scrape the gateways with the labels namespace and pod.
  {{- end }}
{{- end -}}
{{- end -}}
